"""Which files are read as documents: regular ones that hold what their names say.

    name = STEM [suffix] [compression]

A file of another compression or of a binary format would become text of U+FFFD. So it is refused,
by its suffix or by its first bytes. The case of suffixes does not matter. Names other than those of
JSON lines and parquet, also without a suffix, are text.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

COMPRESSIONS = {".gz": ".gz", ".zst": ".zst", ".zstd": ".zst"}  # suffix -> its usual spelling
ARCHIVES = "7z bz2 br lz lz4 lzma rar sz tar tbz2 tgz txz tzst xz z zip"
BINARY = "arrow avro bin ckpt feather h5 hdf5 idx ipc npy npz orc pdf pickle pkl pt pth safetensors"
REFUSED = {f".{suffix}" for suffix in f"{ARCHIVES} {BINARY}".split()}
START_BYTES = 512  # of a file: enough for every signature below
SIGNATURES = {  # format -> the first bytes of its files
    "gzip": rb"\x1f\x8b",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # a frame, or a skippable frame
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",  # with blocks, or empty
    "xz": rb"\xfd7zXZ\x00",
    "lz4": rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18",  # a frame, or one of the oldest format
    "zip": rb"PK(\x03\x04|\x05\x06|\x07\x08)",  # with files, empty, in several parts
    "7z": rb"7z\xbc\xaf\x27\x1c",
    "tar": rb".{257}ustar[\x00 ]",
    "parquet": rb"PAR1[\x00-\x08\x0e-\x1f]",  # text about the protein PAR1 has no control character
    "arrow": rb"ARROW1\x00\x00|\xff\xff\xff\xff",  # a file, or a stream
}
NAMED = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet"}  # formats that are read
READ = "text, JSON lines and parquet are read, the first two also as *.gz and *.zst"


def require_regular(path: Path) -> None:
    """Raise ValueError unless `path` is a regular file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"{path}: is a directory; name its files, for example {path}/*.txt")
    if not stat.S_ISREG(mode):
        names = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        what = names.get(stat.S_IFMT(mode), "a device")
        raise ValueError(f"{path}: is {what}, not a regular file; write its content to a file")


def suffixes(path: str) -> tuple[str, str]:
    """The suffix and the compression ("", ".gz" or ".zst") of a file's name, in lower case.

    Raises ValueError if files with this suffix are not read.
    """
    name = Path(path)
    compression = COMPRESSIONS.get(name.suffix.lower(), "")
    suffix = (name.with_suffix("") if compression else name).suffix.lower()
    if suffix in REFUSED:
        raise ValueError(f"{path}: *{suffix} is not read; {READ}")
    return suffix, compression


def require_content(path: str, start: bytes, suffix: str = "") -> None:
    """Raise ValueError if `start`, the first bytes, are those of another format.

    `suffix` is ".gz", ".zst", ".parquet" or, for text and JSON lines, empty.
    """
    found = next((name for name, of in SIGNATURES.items() if re.match(of, start, re.DOTALL)), None)
    if found is None or found == NAMED.get(suffix):
        return
    advice = next((f"name it *{known}" for known in NAMED if NAMED[known] == found), READ)
    raise ValueError(f"{path}: begins as a {found} file, which its name does not say; {advice}")
