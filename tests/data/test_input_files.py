"""Files of other compressions and binary formats do not become text, whatever their names."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from coatlm import remote
from coatlm.config import Data
from coatlm.data.cache import prepare_text
from coatlm.data.documents import file_kind
from coatlm.data.indexed import open_indexed
from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from coatlm.data.tokenizer import make_tokenizer
from coatlm.remote import Location

BYTE = make_tokenizer("byte")
TEXT = json.dumps({"text": "a document"}).encode() + b"\n"
TABLE = pa.table({"text": ["a document"]})


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.txt", TEXT)
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x.txt"), io.BytesIO(b""))
    return file.getvalue()


def _lz4() -> bytes:
    file = pa.BufferOutputStream()
    with pa.CompressedOutputStream(file, "lz4") as stream:
        stream.write(TEXT)
    return bytes(file.getvalue())


def _arrow(make: Callable[..., pa.ipc.RecordBatchStreamWriter]) -> bytes:
    file = io.BytesIO()
    with make(file, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return file.getvalue()


def _parquet() -> bytes:
    file = io.BytesIO()
    pa.parquet.write_table(TABLE, file)
    return file.getvalue()


CONTENTS: dict[str, tuple[str, bytes]] = {  # the format that is named, and a file
    "gzip": ("gzip", gzip.compress(TEXT)),
    "zstd": ("zstd", zstandard.ZstdCompressor().compress(TEXT)),
    "zstd, skipped frame": ("zstd", b"\x50\x2a\x4d\x18\x01\x00\x00\x00!"),
    "bzip2": ("bzip2", bz2.compress(TEXT)),
    "empty bzip2": ("bzip2", bz2.compress(b"")),
    "xz": ("xz", lzma.compress(TEXT)),
    "lz4": ("lz4", _lz4()),
    "zip": ("zip", _zip()),
    "7z": ("7z", b"7z\xbc\xaf\x27\x1c\x00\x04"),
    "tar": ("tar", _tar()),
    "parquet": ("parquet", _parquet()),
    "arrow file": ("arrow", _arrow(pa.ipc.new_file)),
    "arrow stream": ("arrow", _arrow(pa.ipc.new_stream)),
}


def refused(path: Path | str, home: Path) -> str:
    """What `coatlm prepare` and `data.text` both say of an input, which they refuse at once."""
    reasons = []
    with pytest.raises(ValueError) as error:
        preprocess([str(path)], home / "out", Options(), workers=1)
    reasons.append(str(error.value))
    with pytest.raises(ValueError) as error:
        prepare_text(Data(text=(str(path),), cache_dir=home / "cache", workers=1))
    reasons.append(str(error.value))
    assert reasons[0] == reasons[1] and reasons[0].startswith(f"{path}: ")
    assert "\n" not in reasons[0]
    return reasons[0]


def text_of(path: Path | str, prefix: Path) -> str:
    preprocess([str(path)], prefix, Options(append_eod=False), workers=1)
    return BYTE.decode(open_indexed(prefix, BYTE).tokens.tolist())


@pytest.mark.parametrize("name", ["x", "x.txt", "x.jsonl"])
@pytest.mark.parametrize("case", CONTENTS)
def test_a_file_is_refused_before_work_if_its_first_bytes_are_of_another_format(
    tmp_path: Path, case: str, name: str
) -> None:
    found, content = CONTENTS[case]
    (tmp_path / name).write_bytes(content)
    reason = refused(tmp_path / name, tmp_path)
    assert f": begins as a {found} file, which its name does not say; " in reason
    if found in ("gzip", "zstd", "parquet"):
        assert reason.endswith(
            f"name it *{({'gzip': '.gz', 'zstd': '.zst'}).get(found, '.parquet')}"
        )
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "case"),
    [("x.txt.gz", "zstd"), ("x.zst", "gzip"), ("x.parquet", "gzip"), ("x.gz", "parquet")],
)
def test_a_name_of_one_format_on_a_file_of_another_is_refused(
    tmp_path: Path, name: str, case: str
) -> None:
    found, content = CONTENTS[case]
    (tmp_path / name).write_bytes(content)
    assert f": begins as a {found} file" in refused(tmp_path / name, tmp_path)


@pytest.mark.parametrize("case", ["zip", "tar", "gzip", "parquet"])
def test_what_a_compressed_file_holds_is_compared_too(tmp_path: Path, case: str) -> None:
    found, content = CONTENTS[case]
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    assert f": begins as a {found} file" in refused(tmp_path / "x.gz", tmp_path)


@pytest.mark.parametrize("case", ["gzip", "parquet", "arrow stream"])
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_an_object_at_a_url_is_refused_as_a_file(tmp_path: Path, case: str, name: str) -> None:
    found, content = CONTENTS[case]
    (tmp_path / name).write_bytes(content)
    assert f": begins as a {found} file" in refused(f"file://{tmp_path}/{name}", tmp_path)
    assert not (tmp_path / "out.idx").exists()


def test_an_object_at_a_url_is_downloaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RANGE_BYTES", 1000)
    ranges, read = [], Location.read

    def counted(self: Location, begin: int, end: int) -> bytes:
        ranges.append((begin, end))
        return read(self, begin, end)

    monkeypatch.setattr(Location, "read", counted)
    (tmp_path / "x.txt").write_text("text\n" * 500)
    assert text_of(f"file://{tmp_path}/x.txt", tmp_path / "out") == "text\n" * 500
    assert sorted(ranges) == [(0, 1000), (1000, 2000), (2000, 2500)]


@pytest.mark.parametrize(
    "name",
    [
        *("x.jsonl.bz2", "x.jsonl.xz", "x.txt.lz4", "x.txt.lzma", "x.zip", "x.7z", "x.tar"),
        *("x.tgz", "x.arrow", "x.feather", "x.bin", "x.npy", "x.pt", "x.safetensors"),
        *("x.tar.gz", "x.bin.zst", "x.JSONL.BZ2", "x.Arrow"),
    ],
)
def test_a_suffix_of_another_format_is_refused_before_the_file_is_read(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(TEXT)
    suffix = Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix
    reason = refused(tmp_path / name, tmp_path)
    assert f": *{suffix} is not read; text, JSON lines and parquet are read" in reason
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (
        reason.partition(name)[2]
        == refused(f"file://{tmp_path}/{name}", tmp_path).partition(name)[2]
    )


@pytest.mark.parametrize(
    "name", ["X.JSONL", "x.Json", "x.jsonl.GZ", "X.NDJSON.Zst", "x.jsonl.zstd"]
)
def test_suffixes_may_be_in_either_case(tmp_path: Path, name: str) -> None:
    suffix = Path(name).suffix.lower()
    pack = zstandard.ZstdCompressor().compress if suffix.startswith(".zst") else bytes
    (tmp_path / name).write_bytes((gzip.compress if suffix == ".gz" else pack)(TEXT))
    assert text_of(tmp_path / name, tmp_path / "out") == "a document"


def test_the_kind_of_a_file_does_not_depend_on_the_case_of_its_name() -> None:
    assert file_kind("a/X.PARQUET") == ("parquet", "")
    assert file_kind("a/X.TXT.GZ") == ("text", ".gz")
    assert file_kind("s3://A/X.ZSTD") == ("text", ".zst")
    with pytest.raises(ValueError, match=r"X\.Parquet\.GZ: parquet is compressed internally"):
        file_kind("X.Parquet.GZ")


@pytest.mark.parametrize(
    "text",
    ["PAR1 is a receptor", "BZh9 and BZh91AY", "PK\n", "7z is an archiver", "P*M", "ARROW1\n", ""],
)
@pytest.mark.parametrize("name", ["x", "x.txt", "x.log", "x.v2"])
def test_text_that_is_like_a_signature_stays_text(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(f"{text}\nand more")
    assert text_of(tmp_path / name, tmp_path / "out") == f"{text}\nand more"
