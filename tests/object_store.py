"""An S3 server on loopback that fails when it is told to.

moto answers the requests; before it, `Faults` breaks those for one object, `times` times:

    drop       the connection is closed without an answer
    503        SlowDown, as S3 answers to too many requests
    truncate   the header promises the body, and its second half never comes
    flip       one bit of the body is another
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import pytest

FAULTS = ("drop", "503", "truncate", "flip")
KEYS = {  # of the environment of clients
    "AWS_ACCESS_KEY_ID": "public",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class Faults:
    """A WSGI application around moto's."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._left: dict[str, list[Any]] = {}  # end of the path -> [fault, times]
        self._lock = threading.Lock()
        self.requests: Counter[tuple[str, str]] = Counter()  # by method and path
        self.ranges: list[str] = []  # the Range headers, in order

    def inject(self, name: str, fault: str, times: int = 1) -> None:
        """Let the next `times` GETs of an object whose path ends with `name` fail."""
        assert fault in FAULTS
        self._left[name] = [fault, times]

    def clear(self) -> None:
        self._left.clear()
        self.requests.clear()
        self.ranges.clear()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        fault = None
        with self._lock:
            self.requests[method, path] += 1
            self.ranges += [environ["HTTP_RANGE"]] if "HTTP_RANGE" in environ else []
            for name, left in self._left.items():
                if method == "GET" and path.endswith(name) and left[1]:
                    left[1] -= 1
                    fault = left[0]
        if fault == "drop":
            start_response("200 OK", [])
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        if fault == "503":
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>"]
        body: Iterable[bytes] = self._application(environ, start_response)
        if fault is None:
            return body
        content = bytearray(b"".join(body))
        if fault == "flip":
            content[len(content) // 3] ^= 16
            return [bytes(content)]
        return [bytes(content[: len(content) // 2])]


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

    faults = Faults(DomainDispatcherApplication(create_backend_app))
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
