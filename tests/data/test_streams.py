"""Hostile and unusual files: what reading them may take."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from coatlm.data import streams
from coatlm.data.documents import decode_utf8, expand_inputs, plan_segments, read_segment
from coatlm.data.streams import Limits

REPOSITORY = Path(__file__).parents[2]
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
LINES = st.lists(st.sampled_from([b"", b"a", b"word " * 3, "ü🦊".encode() * 9, b"\xff\xa4" * 7]))


def documents(path: Path, document_bytes: int, limits: Limits | None = None) -> list[str]:
    """The texts of plain text or of lines, joined from their parts."""
    found, parts = [], []
    for segment in plan_segments([path], document_bytes):
        for block in read_segment(
            segment, "text", "text", limits=limits or Limits(), document_bytes=document_bytes
        ):
            if ".txt" not in path.suffixes:
                found += block.items
            parts += block.items
            if block.ends:
                found.append("".join(parts))
                parts = []
    return [text for text in found if text]


# ---- plain text in pieces


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_the_bytes_read_from_a_plain_file_add_up_to_its_size(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"".join(b'{"text": "%s"}\n' % (b"a" * n) for n in range(60)))
    segments = plan_segments([path], 200)
    assert len(segments) > 5
    blocks = [
        block
        for segment in segments
        for block in read_segment(segment, "text", "text", limits=Limits(), document_bytes=200)
    ]
    assert sum(block.nbytes for block in blocks) == path.stat().st_size


@settings(max_examples=150, deadline=None)
@given(
    LINES, st.integers(1, 60), st.sampled_from([4, 16, 1 << 20]), st.sampled_from([".gz", ".zst"])
)
def test_compressed_text_gives_the_documents_of_its_plain_file(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    document_bytes: int,
    block_bytes: int,
    suffix: str,
) -> None:
    raw = b"\n".join(lines)
    home = tmp_path_factory.mktemp("text")
    (home / "x.txt").write_bytes(raw)
    (home / f"x.txt{suffix}").write_bytes(PACK[suffix](raw))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "BLOCK_BYTES", block_bytes)
        plain = documents(home / "x.txt", document_bytes)
        assert documents(home / f"x.txt{suffix}", document_bytes) == plain
    assert "".join(plain) == decode_utf8(raw)[0]


def test_text_without_a_line_end_is_cut_between_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BLOCK_BYTES", 7)
    text = "🦊ü" * 200
    (tmp_path / "x.txt").write_text(text)
    found = documents(tmp_path / "x.txt", 100)
    assert "".join(found) == text
    assert len(found) == 11 and max(len(d.encode()) for d in found) <= 203


MEMORY = """
import resource, sys
from pathlib import Path
from coatlm.data.documents import plan_segments, read_segment
from coatlm.data.streams import Limits

import pyarrow.compute, pyarrow.parquet, zstandard

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

limits = Limits(max_expansion=1e9, max_record=8 << 20)
before = peak()
for name in sys.argv[1:]:
    total, error = 0, ""
    try:
        for segment in plan_segments([Path(name)], 64 << 20):
            for block in read_segment(segment, "text", "text", limits=limits):
                total += sum(map(len, block.items))
    except ValueError as problem:
        error = str(problem)
    print(Path(name).name, total, peak() - before, "max_record" in error, flush=True)
"""


def test_memory_stays_bounded_whatever_a_file_expands_to(tmp_path: Path) -> None:
    """384 MiB of text, or 600 rows with one value of 1 MB, in files of less than 1 MB on disk."""
    size = 384 << 20
    line = zstandard.ZstdCompressor()
    (tmp_path / "line.txt.zst").write_bytes(line.compress(bytes(size)))
    (tmp_path / "line.jsonl.zst").write_bytes(line.compress(bytes(size)))
    (tmp_path / "line.txt.gz").write_bytes(gzip.compress(bytes(size >> 2), 1))
    for name in ("plain.txt", "plain.jsonl"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)  # sparse
    value = pa.DictionaryArray.from_arrays(pa.array([0] * 600, pa.int32()), pa.array(["x" * 10**6]))
    pq.write_table(pa.table({"text": value}), tmp_path / "value.parquet")
    names = [
        *("line.txt.zst", "line.txt.gz", "plain.txt", "line.jsonl.zst", "plain.jsonl"),
        "value.parquet",
    ]
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, *(str(tmp_path / name) for name in names)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert [int(found[name][0]) for name in names] == [size, size >> 2, size, 0, 0, 6 * 10**8]
    assert [found[name][2] for name in names] == [
        "False",
        "False",
        "False",
        "True",
        "True",
        "False",
    ]
    # MiB. zstandard hands out at most 32 at once, which exist three times while they are copied;
    # a batch of parquet has 64 rows of 1 MB, which exist three times in other types
    assert max(int(peak) for _, peak, _ in found.values()) < 300


# ---- limits


@pytest.fixture
def floor(monkeypatch: pytest.MonkeyPatch) -> int:
    """The expansion that every file is allowed, made small."""
    monkeypatch.setattr(streams, "EXPANSION_FLOOR", 1000)
    return 1000


@pytest.mark.parametrize("name", ["x.txt.gz", "x.txt.zst", "x.jsonl.gz", "x.jsonl.zst"])
def test_a_compressed_file_may_grow_to_its_limit_and_not_beyond(
    name: str, floor: int, tmp_path: Path
) -> None:
    path = tmp_path / name
    text = "a" * 50_000
    raw = json.dumps({"text": text}).encode() if "jsonl" in name else text.encode()
    path.write_bytes(PACK[path.suffix](raw))
    factor = len(raw) / path.stat().st_size
    with pytest.raises(ValueError, match=r"data\.max_expansion=.* \(--max-expansion\)") as error:
        documents(path, 1 << 20, Limits(max_expansion=0.9 * factor))
    assert str(path) in str(error.value) and len(str(error.value)) < 400
    assert documents(path, 1 << 20, Limits(max_expansion=1.1 * factor)) == [text]
    path.write_bytes(PACK[path.suffix](raw[: floor // 2] if "txt" in name else b"\n"))
    documents(path, 1 << 20, Limits(max_expansion=1.0))


def test_parquet_may_grow_to_its_limit_and_not_beyond(floor: int, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    texts = ["a" * 5000] * 100
    for options in ({"use_dictionary": True}, {"use_dictionary": False}):
        pq.write_table(pa.table({"text": texts}), path, compression="zstd", **options)
        factor = 500_000 / path.stat().st_size
        with pytest.raises(ValueError, match=r"x\.parquet.*data\.max_expansion="):
            documents(path, 1 << 20, Limits(max_expansion=0.9 * factor))
        assert documents(path, 1 << 20, Limits(max_expansion=1.1 * factor)) == texts


def test_a_json_line_may_be_as_long_as_max_record_and_not_longer(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"text": c * 2000}) + "\n" for c in "abc"]
    path.write_text("".join(lines))
    length = len(lines[0])
    for document_bytes in (300, 1 << 20):  # several segments in a line, and one
        assert len(documents(path, document_bytes, Limits(max_record=length))) == 3
        with pytest.raises(ValueError, match=r"x\.jsonl: at byte 0: a JSON line of more than"):
            documents(path, document_bytes, Limits(max_record=length - 1))
    segments = plan_segments([path], 300)
    with pytest.raises(ValueError, match=r"before byte .*data\.max_record.*\(--max-record-mb\)"):
        list(read_segment(segments[5], "text", "text", limits=Limits(max_record=100)))


def test_a_parquet_value_may_be_as_long_as_max_record_and_not_longer(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a", "b" * 5000]}), path)
    assert len(documents(path, 1, Limits(max_record=5000))) == 2
    with pytest.raises(ValueError, match=r"x\.parquet: column 'text': a value of more than"):
        documents(path, 1, Limits(max_record=4999))


def test_a_zstandard_window_is_bounded_by_max_record(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=24)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "x.txt.zst"
    path.write_bytes(packer.compress(b"text") + packer.flush())
    assert documents(path, 1 << 20, Limits(max_record=1 << 24)) == ["text"]
    with pytest.raises(ValueError, match=r"x\.txt\.zst: a zstandard window .*data\.max_record"):
        documents(path, 1 << 20, Limits(max_record=(1 << 24) - 1))


def test_a_message_does_not_repeat_thousands_of_names(tmp_path: Path) -> None:
    keys = {f"key number {i}": i for i in range(5000)}
    (tmp_path / "x.jsonl").write_text(json.dumps(keys))
    pq.write_table(pa.table({key: [0] for key in keys}), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        with pytest.raises(ValueError, match=r"'text'; there are key number 0, ") as error:
            documents(tmp_path / name, 1 << 20)
        assert len(str(error.value)) < 400


# ---- what is not a file


def test_pipes_sockets_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket.txt"))
    (tmp_path / "link.txt").symlink_to("pipe.txt")
    cases = {"pipe.txt": "a pipe", "socket.txt": "a socket", "link.txt": "a pipe"}
    for name, what in {str(tmp_path / n): w for n, w in cases.items()}.items():
        with pytest.raises(ValueError, match=f"{re.escape(name)}: is {what}, not a regular file"):
            expand_inputs([name])
    with pytest.raises(ValueError, match="/dev/zero: is a device, not a regular file"):
        expand_inputs(["/dev/zero"])
    listener.close()
