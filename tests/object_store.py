"""Object stores on loopback that fail when they are told to: S3, Google Cloud Storage, the Hub.

    s3()       moto
    gs()       gcp-storage-emulator
    hub(root)  files of a directory behind the HTTP API that huggingface_hub asks

`Faults` breaks the requests for one object, `times` times:

    drop       the connection is closed without an answer
    503        SlowDown, as S3 answers to too many requests
    truncate   the header promises the body, and its second half never comes
    flip       one bit of the body is another
    403        the permission is refused (gs and the Hub)
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import pytest

FAULTS = ("drop", "503", "truncate", "flip")
KEYS = {  # of the environment of clients
    "AWS_ACCESS_KEY_ID": "public",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class Faults:
    """Which requests fail, and what was requested."""

    def __init__(self) -> None:
        self._left: dict[str, list[Any]] = {}  # end of the path -> [fault, times]
        self._lock = threading.Lock()
        self.requests: Counter[tuple[str, str]] = Counter()  # by method and path
        self.ranges: list[str] = []  # the Range headers, in order

    def inject(self, name: str, fault: str, times: int = 1) -> None:
        """Let the next `times` GETs of an object whose path ends with `name` fail, or commits to
        the Hub if it is COMMIT.
        """
        assert fault in (*FAULTS, "403")
        self._left[name] = [fault, times]

    def clear(self) -> None:
        self._left.clear()
        self.requests.clear()
        self.ranges.clear()

    def take(self, method: str, path: str, asked: str | None) -> str | None:
        """Note a request for a content, with its Range header; returns the fault it meets."""
        fault = None
        with self._lock:
            self.requests[method, path] += 1
            self.ranges += [] if asked is None else [asked]
            for name, left in self._left.items():
                meant = "POST" if name == COMMIT else "GET"
                if method == meant and path.endswith(name) and left[1]:
                    left[1] -= 1
                    fault = left[0]
        return fault


def broken(content: bytes, fault: str) -> bytes:
    """A body with the fault `flip` or `truncate`."""
    if fault == "truncate":
        return content[: len(content) // 2]
    flipped = bytearray(content)
    flipped[len(content) // 3] ^= 16
    return bytes(flipped)


REPOSITORY = "org/corpus"  # the data set of `hub`
COMMIT = "/commit/main"  # how the path of a commit to it ends


class FaultyApplication(Faults):
    """A WSGI application around moto's."""

    def __init__(self, application: Any) -> None:
        super().__init__()
        self._application = application

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        fault = self.take(method, environ["PATH_INFO"], environ.get("HTTP_RANGE"))
        if fault == "drop":
            start_response("200 OK", [])
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        if fault == "503":
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>"]
        body: Iterable[bytes] = self._application(environ, start_response)
        return body if fault is None else [broken(b"".join(body), fault)]


class FaultyHandler(BaseHTTPRequestHandler):
    """A handler of http.server whose answers to requests for contents may fail.

    It stands before another handler among the bases of a class, which sets `faults` and `contents`,
    a part of the paths of contents.
    """

    faults: Faults
    contents: str

    def do_GET(self) -> None:
        path, fault = unquote(urlsplit(self.path).path), None
        if self.contents in path:
            fault = self.faults.take("GET", path, self.headers.get("Range"))
        if fault == "drop":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault in ("503", "403"):
            self.send_error(int(fault))
        else:
            answer, self.wfile = self.wfile, io.BytesIO()
            super().do_GET()  # type: ignore[misc]
            head, end, body = self.wfile.getvalue().partition(b"\r\n\r\n")
            self.wfile = answer
            with suppress(BrokenPipeError):  # a client that wanted the header alone
                answer.write(head + end + (broken(body, fault) if fault else body))

    def do_HEAD(self) -> None:
        answer, self.wfile = self.wfile, io.BytesIO()
        super().do_GET()  # type: ignore[misc]
        head, end, _ = self.wfile.getvalue().partition(b"\r\n\r\n")
        self.wfile = answer
        answer.write(head + end)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on loopback; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def object_store() -> Iterator[tuple[str, Faults]]:
    """A server with the bucket `data`; yields its address, for AWS_ENDPOINT_URL, and its faults."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *_: object) -> None:
            pass

        log_error = log_request  # of connections that were dropped on purpose

    faults = FaultyApplication(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def s3() -> Iterator[Faults]:
    """An `object_store` to which the s3:// URLs of this process and its children lead."""
    from s3fs import S3FileSystem

    with object_store() as (address, faults), pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": address}.items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()  # it has clients of an earlier store's address
        reset = Request(
            f"{address}/moto-api/reset", method="POST"
        )  # moto's objects outlive a server
        urlopen(reset).close()
        S3FileSystem().mkdir("data")
        yield faults


@contextmanager
def gs() -> Iterator[Faults]:
    """A server with the bucket `data`, to which the gs:// URLs of this process and its children
    lead.
    """
    from gcp_storage_emulator.handlers import buckets
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage
    from gcsfs import GCSFileSystem

    class Handler(FaultyHandler, RequestHandler):  # type: ignore[misc]
        faults = Faults()
        contents = "/download/"

    storage = Storage(use_memory_fs=True)
    buckets.create_bucket("data", storage)
    handler = functools.partial(Handler, storage)
    with served(handler) as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", address)
        patch.setenv("NO_GCE_CHECK", "true")  # ask no metadata server for credentials
        GCSFileSystem.clear_instance_cache()
        yield Handler.faults


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's API that reads a data set: its revision, its tree, its files; and that
    commits files to it, whose contents travel in the commit.
    """

    def __init__(self, root: Path, *more: Any) -> None:
        self.root = root
        super().__init__(*more)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api, resolve = f"/api/datasets/{REPOSITORY}", f"/datasets/{REPOSITORY}/resolve/main/"
        path, tree = f"{path}/" if path.endswith("/tree/main") else path, f"{api}/tree/main/"
        if path in (api, f"{api}/revision/main"):
            self._json({"id": REPOSITORY, "sha": "0" * 40, "siblings": [], "private": False})
        elif path.startswith(tree) and (folder := self.root / path.removeprefix(tree)).is_dir():
            self._tree(folder)
        elif path.startswith(resolve) and (self.root / path.removeprefix(resolve)).is_file():
            self._content((self.root / path.removeprefix(resolve)).read_bytes())
        else:
            known = path.startswith((api, resolve))
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def do_POST(self) -> None:
        """Refuses requests without a token, and commits as `faults` say."""
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        api = f"/api/datasets/{REPOSITORY}"
        fault = self.faults.take("POST", path, None) if path.endswith(COMMIT) else None
        if self.headers.get("Authorization") != "Bearer secret":
            self.send_error(401)
        elif fault == "503":
            self.send_error(503)
        elif path == f"{api}/preupload/main":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif path == api + COMMIT:
            for line in map(json.loads, body.splitlines()):
                self._commit(line["key"], line["value"])
            commit = f"http://{self.headers['Host']}/datasets/{REPOSITORY}/commit/{'0' * 40}"
            self._json({"success": True, "commitOid": "0" * 40, "commitUrl": commit})
        else:
            self.send_error(404)

    def _commit(self, key: str, value: dict[str, Any]) -> None:
        if key == "file":
            assert value["encoding"] == "base64"
            target = self.root / value["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(base64.b64decode(value["content"]))
        elif key == "deletedFile":
            (self.root / value["path"]).unlink()
        else:
            assert key == "header", key

    def _tree(self, folder: Path) -> None:
        recursive = "recursive=true" in self.path.lower()
        found = folder.rglob("*") if recursive else folder.iterdir()
        rows = []
        for path in sorted(found):
            row = {"path": str(path.relative_to(self.root)), "oid": "", "size": 0}
            if path.is_file():
                content = path.read_bytes()
                row |= {"oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
            rows.append(row | {"type": "file" if path.is_file() else "directory"})
        self._json(rows)

    def _content(self, content: bytes) -> None:
        asked, etag = self.headers.get("Range"), hashlib.sha1(content).hexdigest()
        if asked is not None:
            begin, end = asked.removeprefix("bytes=").split("-")
            whole, content = len(content), content[int(begin) : int(end) + 1]
        self.send_response(200 if asked is None else 206)
        if asked is not None:
            self.send_header("Content-Range", f"bytes {begin}-{end}/{whole}")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        self.wfile.write(content)

    def _json(self, value: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        text = json.dumps(value).encode()
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def hub(root: Path) -> Iterator[Faults]:
    """A server with the files of `root`, to which hf://datasets/org/corpus leads in this process
    and its children, and $HF_ENDPOINT/datasets/org/corpus/resolve/main. The former can write, too.
    """
    from huggingface_hub import HfFileSystem, constants

    class Handler(FaultyHandler, Hub):
        faults = Faults()
        contents = "/resolve/"

    handler = functools.partial(Handler, root)
    with served(handler) as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", address)  # for children; this process has read it already
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", address)
        patch.setenv("HF_TOKEN", "secret")
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        HfFileSystem.clear_instance_cache()
        yield Handler.faults
