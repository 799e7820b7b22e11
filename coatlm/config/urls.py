"""URLs in a configuration: which text is one, and which URLs are refused.

    SCHEME://PLACE      s3, gs, hf, https, http, file, memory

A configuration is written to run directories, checkpoints and trackers, so a URL never holds a
secret: one with a password, or over http(s) with a user or a query (where signatures stand), is
refused. Credentials come from the place where fsspec's back end of a protocol looks for them.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

BACK_ENDS = {  # protocol -> the module that fsspec needs for it, "" for none
    "s3": "s3fs",
    "gs": "gcsfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
    "file": "",
    "memory": "",
}
READ_HERE = "a path on this machine; a URL is not read here"  # where only a path is allowed
WRITTEN_HERE = "a path on this machine; write there, then copy the result to the URL"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_USER = re.compile(r"(\w+://)[^\s/@'\"]*@")
_QUERY = re.compile(r"(\w+://[^\s?'\"]*)\?[^\s'\"]*")


def is_url(text: str) -> bool:
    """Whether a path is a URL, that is, begins with `SCHEME://`."""
    return _URL.match(text) is not None


def checked_url(url: str) -> str:
    """`url` without a slash at its end. Raises ValueError unless its protocol is known and it
    holds no secret; the message does not repeat the secret."""
    protocol = url.split("://")[0]
    if protocol not in BACK_ENDS:
        raise ValueError(f"{protocol}:// is not supported; {', '.join(BACK_ENDS)} are")
    try:
        parts = urlsplit(url)
        over_http = protocol in ("https", "http")
        secret = parts.password is not None or (over_http and parts.username is not None)
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from None
    if secret:
        raise ValueError("a URL with a user or password; give credentials as fsspec expects them")
    if over_http and parts.query:
        raise ValueError("a URL with a query, which may hold a signature or a token")
    if not url.split("://", 1)[1].strip("/"):
        raise ValueError(f"{protocol}:// names nothing")
    return url.rstrip("/")


def without_secrets(message: str) -> str:
    """A message with `...` in place of user, password and query of each URL in it."""
    return _QUERY.sub(r"\1?...", _USER.sub(r"\1...@", message))
