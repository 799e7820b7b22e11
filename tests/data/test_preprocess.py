from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from coatlm import megatron_hook
from coatlm.config import Data
from coatlm.data import preprocess as preprocess_module
from coatlm.data import shards as shards_module
from coatlm.data.cache import prepare_text
from coatlm.data.documents import (
    STDLIB_BYTES,
    decode_utf8,
    expand_inputs,
    plan_segments,
    read_segment,
    stdlib_sources,
)
from coatlm.data.indexed import Indexed, open_indexed
from coatlm.data.manifest import SUFFIXES, token_dtype
from coatlm.data.preprocess import _join, preprocess, write_index
from coatlm.data.token_shard import Options, TokenShard
from coatlm.data.tokenizer import make_tokenizer

REPOSITORY = Path(__file__).parents[2]
TOOL = REPOSITORY / "tools" / "preprocess_data.py"
DOCUMENTS = ["one", "zwei Füchse\n", '"three"\t🦊', "x" * 5000, "five\r\n", "\ufeffsix"]


def write_jsonl(path: Path, texts: list[str | None], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: t, "n": 1}) + "\n" for t in texts), "utf-8")
    return path


def write_parquet(path: Path, texts: list[str | None], kind: pa.DataType | None = None) -> Path:
    column = pa.array(texts, pa.string()).cast(kind or pa.string())
    pq.write_table(pa.table({"text": column, "n": range(len(texts))}), path, row_group_size=4)
    return path


def documents(prefix: Path, spec: str = "byte") -> list[str]:
    """The texts of a dataset, each of which must end with eod."""
    tokenizer = make_tokenizer(spec)
    data: Indexed = open_indexed(prefix, tokenizer)
    parts = [data.tokens[a:b] for a, b in zip(data.bounds_D1[:-1], data.bounds_D1[1:], strict=True)]
    assert all(part[-1] == tokenizer.eod for part in parts)
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


def contents(prefix: Path) -> list[bytes]:
    return [prefix.with_name(prefix.name + s).read_bytes() for s in SUFFIXES]


def texts_of(path: Path, segment_bytes: int) -> list[str]:
    """All texts of a file, read in segments."""
    segments = plan_segments([path], segment_bytes)
    return [t for s in segments for block in read_segment(s, "text", "text") for t in block.items]


@pytest.fixture
def mixture(tmp_path: Path) -> list[str]:
    """Files of every kind, cut into about 50 shards of 2 kB."""
    home = tmp_path / "in"
    home.mkdir()
    rng = random.Random(0)
    words = [rng.choice(DOCUMENTS[:3]) * rng.randint(1, 30) for _ in range(300)]
    (home / "a.txt").write_text("\n".join(words[:100]))
    write_jsonl(home / "b.jsonl", [*words[100:200]])
    (home / "c.jsonl.gz").write_bytes(gzip.compress((home / "b.jsonl").read_bytes()))
    write_parquet(home / "d.parquet", [*words[200:]])
    return [str(home / "*.[tjp]*")]


# ---- what is written


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "gz", "zst", "zst-frames", "parquet"])
def test_every_format_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    plain = write_jsonl(tmp_path / "plain", [*DOCUMENTS]).read_bytes()
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        write_parquet(path, [*DOCUMENTS])
    elif kind == "gz":
        path = tmp_path / "x.jsonl.gz"
        path.write_bytes(gzip.compress(plain[:100]) + gzip.compress(plain[100:]))
    elif kind.startswith("zst"):
        path = tmp_path / "x.jsonl.zst"
        pack = zstandard.ZstdCompressor().compress
        cut = 100 if kind == "zst-frames" else len(plain)
        path.write_bytes(pack(plain[:cut]) + (pack(plain[cut:]) if plain[cut:] else b""))
    else:
        path.write_bytes(plain)
    manifest = preprocess([str(path)], tmp_path / "out", Options())
    assert documents(tmp_path / "out") == DOCUMENTS
    assert manifest.documents == len(DOCUMENTS)
    assert manifest.tokens == sum(len(t.encode()) + 1 for t in DOCUMENTS)


@pytest.mark.parametrize("name", ["x.txt", "x.py", "no-suffix", "x.txt.gz", "x.zst"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    text = "".join(DOCUMENTS)
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    (tmp_path / name).write_bytes(pack.get(Path(name).suffix, bytes)(text.encode()))
    preprocess([str(tmp_path / name)], tmp_path / "out", Options())
    assert documents(tmp_path / "out") == [text]


def test_every_tokenizer_gives_back_the_text(tmp_path: Path, spec: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [*DOCUMENTS])
    manifest = preprocess([str(path)], tmp_path / "out", Options(tokenizer=spec), workers=1)
    assert documents(tmp_path / "out", spec) == DOCUMENTS
    tokenizer = make_tokenizer(spec)
    assert manifest.fingerprint == tokenizer.fingerprint
    assert (manifest.vocab_size, manifest.eod) == (tokenizer.vocab_size, tokenizer.eod)


def test_megatron_reads_what_was_written(tmp_path: Path) -> None:
    megatron_hook.install()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    path = write_jsonl(tmp_path / "x.jsonl", [*DOCUMENTS])
    preprocess([str(path)], tmp_path / "out", Options())
    megatron = IndexedDataset(str(tmp_path / "out"))
    assert [bytes(megatron[i][:-1].tolist()).decode() for i in range(len(megatron))] == DOCUMENTS
    assert megatron.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))


LENGTHS: dict[str, list[list[int]]] = {  # tokens of the documents of each shard
    "no document": [[]],
    "a shard without documents": [[3, 1], [], [4, 1, 5, 9, 2]],
    "documents of 8 GB": [[2**31 - 1, 2**31 - 1], [2**31 - 1, 7]],
}


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("case", LENGTHS)
def test_the_index_is_that_of_megatrons_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, dtype: type[np.number]
) -> None:
    megatron_hook.install()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    monkeypatch.setattr(preprocess_module, "INDEXED", 2)  # documents at once
    lengths = [np.array(shard, np.int32) for shard in LENGTHS[case]]
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype)
    builder.sequence_lengths = [n for shard in LENGTHS[case] for n in shard]
    builder.document_indices = [*range(len(builder.sequence_lengths) + 1)]
    builder.finalize(str(tmp_path / "x.idx"))
    write_index(tmp_path / "y.idx", dtype, lengths)
    assert (tmp_path / "y.idx").read_bytes() == (tmp_path / "x.idx").read_bytes()


def test_the_tokens_and_the_index_are_those_of_megatrons_builder(
    tmp_path: Path, mixture: list[str]
) -> None:
    megatron_hook.install()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    preprocess(mixture, tmp_path / "out", Options(shard_bytes=2000), workers=1)
    data = open_indexed(tmp_path / "out", make_tokenizer("byte"))
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16)
    for begin, end in zip(data.bounds_D1[:-1], data.bounds_D1[1:], strict=True):
        builder.add_document(data.tokens[begin:end], [int(end - begin)])
    builder.finalize(str(tmp_path / "x.idx"))
    for suffix in (".bin", ".idx"):
        pair = [(tmp_path / f"{name}{suffix}").read_bytes() for name in ("out", "x")]
        assert pair[0] == pair[1]


def test_joining_shards_takes_less_than_20_bytes_per_document(tmp_path: Path) -> None:
    count = 400_000
    shard = TokenShard(tmp_path / "shard", (), 1)
    raw = bytes(2 * count)  # a token per document
    (tmp_path / "shard.bin").write_bytes(raw)
    np.save(tmp_path / "shard.lengths.npy", np.ones(count, np.int32))
    counts = dict.fromkeys(("empty_documents", "replaced_utf8"), 0)
    record = {"bytes": len(raw), "crc32": zlib.crc32(raw), "documents": count, "tokens": count}
    (tmp_path / "shard.json").write_text(json.dumps(record | counts))
    tracemalloc.start()
    try:
        _join([shard], tmp_path / "out", np.uint16, masked=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out.idx").stat().st_size == 34 + 20 * count + 8
    assert peak < 20 * count


@pytest.mark.parametrize("vocab_size", [257, 65499, 65500, 65536, 200_000])
def test_dtype_is_that_of_megatron(vocab_size: int) -> None:
    megatron_hook.install()
    from megatron.core.datasets.indexed_dataset import DType

    assert token_dtype(vocab_size) is DType.optimal_dtype(vocab_size)


def test_field_column_and_eod_are_options(tmp_path: Path) -> None:
    json_file = write_jsonl(tmp_path / "x.jsonl", ["a", "b"], field="body")
    pq.write_table(pa.table({"story": ["c"]}), tmp_path / "y.parquet")
    options = Options(field="body", column="story", append_eod=False)
    manifest = preprocess([str(json_file), str(tmp_path / "y.parquet")], tmp_path / "out", options)
    assert (manifest.documents, manifest.tokens, manifest.append_eod) == (3, 3, False)
    assert np.fromfile(tmp_path / "out.bin", np.uint16).tolist() == list(b"abc")


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_parquet_strings_of_every_type_are_read(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["a", None, "b", "a", "", "ü"]
    write_parquet(tmp_path / "x.parquet", [*texts], kind)
    manifest = preprocess([str(tmp_path / "x.parquet")], tmp_path / "out", Options())
    assert documents(tmp_path / "out") == ["a", "b", "a", "ü"]
    assert manifest.empty_documents == 2


def test_documents_without_text_are_skipped_and_counted(tmp_path: Path) -> None:
    lines = '{"text": "a"}\n\n{"text": ""}\n  \n{"text": null}\n{"text": "b"}'
    (tmp_path / "x.jsonl").write_text(lines)
    (tmp_path / "y.txt").write_text("")
    manifest = preprocess([str(tmp_path / "?.*")], tmp_path / "out", Options())
    assert documents(tmp_path / "out") == ["a", "b"]
    assert manifest.empty_documents == 3


def test_what_is_not_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("ok \ufffd ".encode() + b"bad \xff\xc3( \xf0\x9f")
    (tmp_path / "y.jsonl").write_bytes(
        b'{"text": "\\ud800 half, \xe9"}\n{"text": "\\ud83e\\udd8a"}\n'
    )
    binary = pa.array([b"z\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": binary}), tmp_path / "z.parquet")
    manifest = preprocess([str(tmp_path / "?.*")], tmp_path / "out", Options())
    found = documents(tmp_path / "out")
    assert found == ["ok \ufffd bad \ufffd\ufffd( \ufffd", "\ufffd half, \ufffd", "🦊", "z\ufffd"]
    assert manifest.replaced_utf8 == 3 + 2 + 1


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_decode_counts_exactly_what_it_replaced(raw: bytes) -> None:
    text, replaced = decode_utf8(raw)
    assert replaced >= 0
    assert (replaced == 0) == (text.encode() == raw)


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfplain")
    (tmp_path / "y.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "json"}\n')
    preprocess([str(tmp_path / "?.*")], tmp_path / "out", Options())
    assert documents(tmp_path / "out") == ["plain", "json"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab\n", max_size=9), min_size=1, max_size=9), st.integers(1, 30))
def test_segments_together_give_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], segment_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    write_jsonl(path, [*texts])
    assert texts_of(path, segment_bytes) == [text for text in texts if text]
    path = path.with_suffix(".txt")
    path.write_bytes("\n".join(texts).encode())
    assert "".join(texts_of(path, segment_bytes)) == "\n".join(texts)


def test_a_text_file_beyond_a_shard_becomes_documents_cut_at_line_ends(tmp_path: Path) -> None:
    lines = [f"line {i:04}\n" for i in range(400)]
    (tmp_path / "x.txt").write_text("".join(lines))
    preprocess([str(tmp_path / "x.txt")], tmp_path / "out", Options(shard_bytes=1024), workers=1)
    found = documents(tmp_path / "out")
    assert len(found) == 4
    assert "".join(found) == "".join(lines)
    assert all(document.endswith("\n") for document in found)


def test_lines_longer_than_a_block_are_whole(tmp_path: Path) -> None:
    text = "0123456789" * 300_000  # 3 MB, blocks are 1 MiB
    write_jsonl(tmp_path / "x.jsonl", [text, "short"])
    (tmp_path / "y.txt").write_text(text)
    preprocess([str(tmp_path / "?.*")], tmp_path / "out", Options())
    assert documents(tmp_path / "out") == [text, "short", text]


# ---- which files


def test_inputs_are_sorted_within_a_glob_and_taken_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "[x].txt"):
        (tmp_path / name).write_text(name)
    names = [str(tmp_path / n) for n in ("b.txt", "**/?.txt", "[x].txt")]
    found = [path.relative_to(tmp_path).as_posix() for path in expand_inputs(names)]
    assert found == ["b.txt", "a.txt", "sub/c.txt", "[x].txt"]


def test_python_stdlib_is_sorted_capped_and_without_tests() -> None:
    paths = stdlib_sources()
    assert paths == stdlib_sources()
    assert 1_000_000 < sum(path.stat().st_size for path in paths) <= STDLIB_BYTES
    assert "abc.py" in {path.name for path in paths}
    assert not {"test", "tests", "site-packages"} & {
        part for path in paths for part in path.parts[4:]
    }


# ---- the same result in any circumstance


def test_result_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, mixture: list[str]
) -> None:
    options = Options(shard_bytes=2048)
    for workers in (1, 2, 3):
        preprocess(mixture, tmp_path / f"out{workers}", options, workers=workers)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2") == contents(tmp_path / "out3")


def test_small_inputs_are_divided_among_many_processes(tmp_path: Path) -> None:
    """40 files of 256 KiB are ten shards of 1 MiB; of 64 MiB they would be one."""
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("x" * (1 << 18))
    options, tokenizer = Options(), make_tokenizer("byte")
    segments = plan_segments([tmp_path / f"{number:02}.txt" for number in range(40)], 1 << 26)
    shards = shards_module.plan_shards(segments, options, tokenizer, tmp_path)
    assert [shard.nbytes for shard in shards] == [1 << 20] * 10
    assert [segment for shard in shards for segment in shard.segments] == segments


def test_documents_do_not_depend_on_the_size_of_shards(tmp_path: Path, mixture: list[str]) -> None:
    lines_only = [mixture[0].replace("[tjp]", "[jp]")]
    for shard_bytes in (777, 1 << 20):
        options = Options(shard_bytes=shard_bytes)
        preprocess(lines_only, tmp_path / f"out{shard_bytes}", options, workers=1)
    assert contents(tmp_path / "out777")[:2] == contents(tmp_path / "out1048576")[:2]


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, mixture: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(shard_bytes=2048)
    preprocess(mixture, tmp_path / "straight", options, workers=1)
    write, written = shards_module.write_shard, []

    def interrupted(shard: shards_module.TokenShard, *rest: object) -> None:
        if len(written) == 7:
            raise KeyboardInterrupt
        written.append(shard.base.name)
        write(shard, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(shards_module, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preprocess(mixture, tmp_path / "out", options, workers=1)
    assert len(list((tmp_path / "out.shards").glob("*.json"))) == 7
    assert not (tmp_path / "out.idx").exists()

    first = set(written)
    (tmp_path / "out.shards" / f"{written[3]}.bin").write_bytes(b"cut")  # not whole: written again
    written.clear()
    monkeypatch.setattr(
        shards_module, "write_shard", lambda s, *r: (written.append(s.base.name), write(s, *r))
    )
    preprocess(mixture, tmp_path / "out", options, workers=1)
    assert len(first & set(written)) == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")
    assert not (tmp_path / "out.shards").exists()


@pytest.mark.parametrize("files", [1, 1000])
def test_workers_that_die_before_they_receive_their_shards_are_reported(
    tmp_path: Path, files: int
) -> None:
    """1000 names exceed the 64 KiB of a pipe: the parent still writes when the workers end."""
    for number in range(files):
        (tmp_path / f"{number:03}-{'x' * 100}.txt").write_text("line\n" * (5000 // files))
    start = "import os, sys\nif '--multiprocessing-fork' in sys.argv: os._exit(9)"
    (tmp_path / "sitecustomize.py").write_text(start)  # each Python process imports it
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    found = subprocess.run(
        [sys.executable, "-", f"{tmp_path}/*.txt", str(tmp_path / "out"), "2"],
        input=SCRIPT,
        capture_output=True,
        text=True,
        env=environment() | {"PYTHONPATH": path},
        timeout=60,
    )
    assert "LostWorkerError: a tokenizing process ended with exit code 9" in found.stderr


def test_workers_do_not_import_the_script_that_starts_them(tmp_path: Path) -> None:
    imported = "import os, sys\nprint('imported', flush=True)"
    (tmp_path / "run.py").write_text(SCRIPT.replace("import sys", imported))
    (tmp_path / "x.txt").write_text("line\n" * 5000)
    command = [sys.executable, "run.py", "x.txt", "out", "2"]
    found = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert found.stdout == "imported\n" and (tmp_path / "out.idx").exists()


def test_a_killed_run_goes_on_with_other_workers_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [f"document {i} " * 40 for i in range(1000)])
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(source), str(tmp_path / "out"), "2"]
    process = subprocess.Popen(command, env=environment())
    shards = tmp_path / "out.shards"
    wait_until(lambda: len(list(shards.glob("*.json"))) >= 3)
    children = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(children) >= 2
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert not (shards / "joined.bin").exists(), "the run was over before it was killed"

    finished = {path.stem for path in shards.glob("*.json")}
    write, written = shards_module.write_shard, set()
    monkeypatch.setattr(
        shards_module, "write_shard", lambda s, *r: (written.add(s.base.name), write(s, *r))
    )
    preprocess([str(source)], tmp_path / "out", Options(shard_bytes=4096), workers=1)
    assert finished and written and not finished & written
    preprocess([str(source)], tmp_path / "straight", Options(shard_bytes=4096), workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


SCRIPT = """
import sys
from pathlib import Path
from coatlm.data.preprocess import _join, preprocess, write_index
from coatlm.data.token_shard import Options

if __name__ == "__main__":
    source, prefix, workers = sys.argv[1:]
    preprocess([source], Path(prefix), Options(shard_bytes=4096), workers=int(workers))
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_run_ended_while_naming_its_files_is_completed(
    tmp_path: Path, mixture: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(mixture, tmp_path / "straight", Options())
    replace = os.replace

    def ended(source: Path, target: Path) -> None:
        if str(target).endswith("out.idx"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", ended)
    with pytest.raises(KeyboardInterrupt):
        preprocess(mixture, tmp_path / "out", Options())
    assert (tmp_path / "out.bin").exists()
    monkeypatch.undo()
    preprocess(mixture, tmp_path / "out", Options())
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_run_ended_twice_while_naming_its_files_is_completed(
    tmp_path: Path, mixture: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(mixture, tmp_path / "straight", Options())
    replace = os.replace

    def ended(source: Path, target: Path) -> None:
        if str(target).endswith("out.idx"):
            raise KeyboardInterrupt
        replace(source, target)

    def ended_again(*_: object, **__: object) -> NoReturn:  # while the shards are joined again
        raise KeyboardInterrupt

    for owner, name, replacement in ((os, "replace", ended), (TokenShard, "read", ended_again)):
        monkeypatch.setattr(owner, name, replacement)
        with pytest.raises(KeyboardInterrupt):
            preprocess(mixture, tmp_path / "out", Options())
        monkeypatch.undo()
    with pytest.raises(ValueError, match="--overwrite"):
        preprocess(mixture, tmp_path / "out", Options(append_eod=False))  # other content
    preprocess(mixture, tmp_path / "out", Options())
    assert documents(tmp_path / "out") == documents(tmp_path / "straight")


def test_a_file_that_changed_is_tokenised_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["before"])
    preprocess([str(path)], tmp_path / "out", Options())
    write_jsonl(path, ["after!"])  # of the same size
    os.utime(path, ns=(0, 0))
    preprocess([str(path)], tmp_path / "out", Options(), overwrite=True)
    assert documents(tmp_path / "out") == ["after!"]


def test_a_finished_run_is_not_repeated(tmp_path: Path, mixture: list[str]) -> None:
    first = preprocess(mixture, tmp_path / "out", Options())
    before = (tmp_path / "out.idx").stat().st_mtime_ns
    assert preprocess(mixture, tmp_path / "out", Options()) == first
    assert (tmp_path / "out.idx").stat().st_mtime_ns == before


@pytest.mark.parametrize("bit", ["PREFIX.bin", "PREFIX.json"])
def test_overwrite_prepares_unchanged_inputs_again(tmp_path: Path, bit: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [*DOCUMENTS])
    preprocess([str(path)], tmp_path / "out", Options(), workers=1)
    whole = contents(tmp_path / "out")
    damaged = tmp_path / bit.replace("PREFIX", "out")
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    preprocess([str(path)], tmp_path / "out", Options(), workers=1, overwrite=True)
    assert contents(tmp_path / "out") == whole
    before = (tmp_path / "out.idx").stat().st_ino
    preprocess([str(path)], tmp_path / "out", Options(), workers=1, overwrite=True)
    assert (tmp_path / "out.idx").stat().st_ino != before
    assert contents(tmp_path / "out") == whole and not (tmp_path / "out.shards").exists()


DATASET_DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    # which file, what becomes of its content, what is said
    "cut tokens": (".bin", lambda raw: raw[:-2], "bytes, but out.idx implies"),
    "a bit of the tokens": (".bin", lambda raw: b"\1" + raw[1:], "damaged between bytes 0 and"),
    "no tokens": (".bin", lambda raw: None, "no such file"),
    "a bit of the index": (".idx", lambda raw: raw[:-1] + b"\1", "damaged: its checksum"),
    "a cut index": (".idx", lambda raw: raw[:-1], "cut off"),
    "a bit of the checksums": (".crc32", lambda raw: b"!" + raw[1:], "damaged: its checksum"),
    "no checksums": (".crc32", lambda raw: None, "no such file"),
}


@pytest.mark.parametrize("case", DATASET_DAMAGE)
def test_a_damaged_dataset_of_the_same_inputs_is_an_error_that_asks_for_overwrite(
    tmp_path: Path, case: str
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [*DOCUMENTS])
    preprocess([str(path)], tmp_path / "out", Options(), workers=1)
    whole = contents(tmp_path / "out")
    suffix, damage, reason = DATASET_DAMAGE[case]
    file = tmp_path / f"out{suffix}"
    content = damage(file.read_bytes())
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as error:
        preprocess([str(path)], tmp_path / "out", Options(), workers=1)
    assert str(error.value).startswith(f"{file}: ")
    assert str(error.value).endswith("; --overwrite prepares it again")
    preprocess([str(path)], tmp_path / "out", Options(), workers=1, overwrite=True)
    assert contents(tmp_path / "out") == whole


# ---- what must not be overwritten


def test_another_dataset_is_replaced_only_if_asked(tmp_path: Path, mixture: list[str]) -> None:
    preprocess(mixture, tmp_path / "out", Options())
    with pytest.raises(ValueError, match=r"out\.bin: exists.*--overwrite"):
        preprocess(mixture, tmp_path / "out", Options(append_eod=False))
    manifest = preprocess(mixture, tmp_path / "out", Options(append_eod=False), overwrite=True)
    assert not manifest.append_eod


@pytest.mark.parametrize("done", [False, True])
def test_a_foreign_directory_is_not_removed(tmp_path: Path, done: bool) -> None:
    path, prefix = write_jsonl(tmp_path / "corpus.jsonl", ["a"]), tmp_path / "out"
    if done:
        preprocess([str(path)], prefix, Options())
    (tmp_path / "out.shards").mkdir()
    inside = write_jsonl(tmp_path / "out.shards" / "notes.jsonl", ["b"])
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"out\.shards: .* files that prepare did not write"):
            preprocess([str(path)], prefix, Options(), overwrite=overwrite)
        with pytest.raises(ValueError, match=r"out\.shards: .* holds an input"):
            preprocess([str(inside)], prefix, Options(), overwrite=overwrite)
    assert inside.exists()
    inside.unlink()
    preprocess([str(path)], prefix, Options())  # an empty one is as good as none
    assert not (tmp_path / "out.shards").exists()


@pytest.mark.parametrize("suffix", [".crc32", ".bin", ".idx"])
def test_a_foreign_file_of_a_datasets_name_is_kept(tmp_path: Path, suffix: str) -> None:
    path, prefix = write_jsonl(tmp_path / "corpus.jsonl", ["a"]), tmp_path / "out"
    (tmp_path / f"out{suffix}").write_text("precious")
    with pytest.raises(ValueError, match=rf"out\{suffix}: exists"):
        preprocess([str(path)], prefix, Options())
    assert (tmp_path / f"out{suffix}").read_text() == "precious"
    (tmp_path / f"out{suffix}").unlink()
    (tmp_path / f"out{suffix}").mkdir()
    with pytest.raises(ValueError, match=rf"out\{suffix}: is a directory"):
        preprocess([str(path)], prefix, Options())
    assert not (tmp_path / "out.shards").exists()


def test_inputs_and_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "corpus.json", ["a"])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="would overwrite an input"):
        preprocess([str(path)], tmp_path / "corpus", Options(), overwrite=True)
    (tmp_path / "other.json").write_text('{"mine": 1}')
    with pytest.raises(ValueError, match=r"other\.json: does not describe a dataset"):
        preprocess([str(path)], tmp_path / "other", Options(), overwrite=True)
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(ValueError, match=r"model\.bin: exists"):
        preprocess([str(path)], tmp_path / "model", Options())
    assert path.read_bytes() == before


def test_two_runs_do_not_write_one_prefix(tmp_path: Path, mixture: list[str]) -> None:
    from coatlm.data.preprocess import _locked

    (tmp_path / "out.shards").mkdir()
    with (
        _locked(tmp_path / "out.shards"),
        pytest.raises(ValueError, match="another run is writing here"),
    ):
        preprocess(mixture, tmp_path / "out", Options())


def test_a_finished_run_leaves_the_files_of_a_run_that_goes_on(
    tmp_path: Path, mixture: list[str]
) -> None:
    from coatlm.data.preprocess import _locked

    first = preprocess(mixture, tmp_path / "out", Options())
    (tmp_path / "out.shards").mkdir()
    (tmp_path / "out.shards/shard").write_text("of preprocess(..., overwrite=True)")
    with _locked(tmp_path / "out.shards"):
        assert preprocess(mixture, tmp_path / "out", Options()) == first
        assert (tmp_path / "out.shards/shard").exists()
    assert preprocess(mixture, tmp_path / "out", Options()) == first
    assert not (tmp_path / "out.shards").exists()  # of a run that ended before it removed them


def test_a_call_that_begins_while_another_cleans_up_finds_its_dataset(
    tmp_path: Path, mixture: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the directory of shards is removed; and between a look at the dataset and the lock."""
    remove, found = shutil.rmtree, []

    def and_begin(path: Path, **options: bool) -> None:
        monkeypatch.undo()
        found.append(preprocess(mixture, tmp_path / "out", Options()))
        remove(path, **options)

    monkeypatch.setattr("coatlm.data.preprocess.shutil.rmtree", and_begin)
    first = preprocess(mixture, tmp_path / "out", Options())
    assert found == [first]

    before, looked = (tmp_path / "out.idx").read_bytes(), []

    def not_yet(*arguments: object, **options: object) -> object:
        """As if the other call ended, and removed the directory, right after the first look."""
        looked.append(None)
        return None if len(looked) == 1 else unchanged(*arguments, **options)

    unchanged = preprocess_module._unchanged
    monkeypatch.setattr(preprocess_module, "_unchanged", not_yet)
    monkeypatch.setattr(preprocess_module, "tokenize", None)  # not called again
    assert preprocess(mixture, tmp_path / "out", Options()) == first
    assert (tmp_path / "out.idx").read_bytes() == before
    names = {path.name for path in tmp_path.iterdir() if path.name.startswith("out")}
    assert names == {"out.bin", "out.idx", "out.json", "out.crc32"}


def test_a_directory_of_shards_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, mixture: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = preprocess_module.open_locked

    def too_late(path: Path, **options: bool) -> IO[str]:
        monkeypatch.undo()
        shutil.rmtree(path.parent)
        return opened(path, **options)

    monkeypatch.setattr(preprocess_module, "open_locked", too_late)
    made = preprocess(mixture, tmp_path / "out", Options())
    assert made == preprocess(mixture, tmp_path / "other", Options())


def test_a_file_with_several_names_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    names = ["a.txt", "./a.txt", "folder/../a.txt", "link.txt", "*.txt"]
    found = expand_inputs(os.path.join(tmp_path, name) for name in names)
    assert found == [tmp_path / "a.txt"]


# ---- what users get wrong


def _bad_input(name: str, directory: Path) -> Path:
    """Make one bad input."""
    path = directory / name
    whole = b'{"text": "' + random.Random(0).randbytes(3000).hex().encode() + b'"}\n'
    content = {
        "empty.txt": b"",
        "empty.jsonl.gz": b"",
        "blank.jsonl": b"\n\n",
        "syntax.jsonl": b'{"text": "a"}\n{"text": \n',
        "list.jsonl": b"[1, 2]\n",
        "field.jsonl": b'{"body": "a", "id": 1}\n',
        "number.jsonl": b'{"text": 5}\n',
        "deep.jsonl": b"[" * 100_000 + b"\n",
        "garbage.jsonl.gz": b"not gzip",
        "cut.jsonl.gz": gzip.compress(whole)[:-900],
        "garbage.jsonl.zst": b"not zstandard",
        "cut.jsonl.zst": zstandard.ZstdCompressor().compress(whole)[:-900],
        "garbage.parquet": b"not parquet",
        "empty.parquet": b"",
        "packed.parquet.gz": gzip.compress(b"any"),
    }
    if name in content:
        path.write_bytes(content[name])
    elif name == "column.parquet":
        pq.write_table(pa.table({"body": ["a"], "id": [1]}), path)
    elif name == "twice.parquet":
        pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
    elif name == "type.parquet":
        pq.write_table(pa.table({"text": [1]}), path)
    elif name == "broken.parquet":
        write_parquet(path, ["some text" * 50] * 50)
        raw = bytearray(path.read_bytes())
        raw[20:400] = bytes(380)
        path.write_bytes(raw)
    elif name == "directory.txt":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.txt", "no such file"),
        ("no-match-*.txt", "no such file, and no file matches"),
        ("directory.txt", "is a directory"),
        ("empty.txt", "holds no text"),
        ("empty.jsonl.gz", "the file is empty"),
        ("blank.jsonl", "holds no text"),
        ("syntax.jsonl", "at byte 14: not a JSON line"),
        ("list.jsonl", "a list, not a JSON object"),
        ("field.jsonl", "no field 'text'; there are body, id"),
        ("number.jsonl", "is a int, not a string"),
        ("deep.jsonl", "not a JSON line"),
        ("garbage.jsonl.gz", "broken .gz"),
        ("cut.jsonl.gz", "broken .gz"),
        ("garbage.jsonl.zst", "broken .zst"),
        ("cut.jsonl.zst", "broken .zst"),
        ("garbage.parquet", "not a parquet file"),
        ("empty.parquet", "not a parquet file"),
        ("packed.parquet.gz", "parquet is compressed internally"),
        ("column.parquet", "no column 'text'; there are body, id"),
        ("twice.parquet", "2 columns have the name 'text'"),
        ("type.parquet", "column 'text' is int64, not string"),
        ("broken.parquet", "broken.parquet: "),
    ],
)
def test_a_bad_input_is_a_one_line_error_that_names_it(
    name: str, reason: str, tmp_path: Path
) -> None:
    path = _bad_input(name, tmp_path)
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        preprocess([str(path)], tmp_path / "out", Options(), workers=1)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.idx").exists()


@pytest.mark.parametrize("name", ["syntax.jsonl", "cut.jsonl.zst", "broken.parquet"])
def test_a_worker_that_meets_a_bad_input_reports_it_like_one_process(
    name: str, tmp_path: Path
) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ["good " * 300] * 3)
    inputs = [str(good), str(_bad_input(name, tmp_path))]
    messages = []
    for workers in (1, 2):
        with pytest.raises(ValueError, match=name) as error:
            preprocess(
                inputs, tmp_path / f"out{workers}", Options(shard_bytes=1024), workers=workers
            )
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["a"])
    (segment,) = plan_segments([path], 1 << 20)
    stale = dataclasses.replace(segment, size=segment.size + 1)
    with pytest.raises(ValueError, match=r"x\.jsonl: was changed"):
        list(read_segment(stale, "text", "text"))


# ---- text of a configuration


def test_prepared_text_is_made_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("first")
    data = Data(text=(str(path),), cache_dir=tmp_path / "cache")
    prefix = prepare_text(data)
    made = prefix.with_name("text.idx").stat().st_mtime_ns
    assert prepare_text(data) == prefix
    assert prefix.with_name("text.idx").stat().st_mtime_ns == made
    path.write_text("second!")
    assert prepare_text(data) != prefix
    assert documents(prepare_text(data)) == ["second!"]
    assert documents(prefix) == ["first"]


def test_text_prepared_by_several_at_once_is_whole(tmp_path: Path, mixture: list[str]) -> None:
    data = Data(text=tuple(mixture), cache_dir=tmp_path / "cache", workers=1)
    with ThreadPoolExecutor(4) as pool:
        prefixes = list(pool.map(lambda _: prepare_text(data), range(4)))
    assert len(set(prefixes)) == 1
    assert len(documents(prefixes[0])) > 200
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [prefixes[0].parent.name]


def test_text_that_cannot_be_prepared_leaves_no_cache(tmp_path: Path) -> None:
    data = Data(text=(str(_bad_input("syntax.jsonl", tmp_path)),), cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="not a JSON line"):
        prepare_text(data)
    assert list((tmp_path / "cache").iterdir()) == []


# ---- the tool


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_tool_writes_a_dataset_and_says_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"text \xff")
    result = run_tool("--input", tmp_path / "x.txt", "--output-prefix", tmp_path / "new" / "v1.0")
    assert result.returncode == 0, result.stderr
    assert "1 documents, 9 tokens" in result.stdout
    assert "1 characters were not UTF-8" in result.stdout
    assert "docs/s" in result.stderr
    assert documents(tmp_path / "new" / "v1.0") == ["text \ufffd"]


def test_the_tool_reports_a_mistake_in_one_line_with_exit_code_2(tmp_path: Path) -> None:
    result = run_tool("--input", tmp_path / "none.txt", "--output-prefix", tmp_path / "out")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "none.txt: no such file" in result.stderr


def test_the_tool_verifies_datasets_and_names_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text " * 20_000)
    for name in ("good", "bad"):
        preprocess([str(tmp_path / "x.txt")], tmp_path / name, Options(), workers=1)
    with open(tmp_path / "bad.bin", "r+b") as file:
        file.seek(50_000)
        file.write(b"!")
    for name in ("foreign", "lost"):  # without PREFIX.json, as of other tools, and by mistake
        for suffix in (".bin", ".idx", *([".crc32"] if name == "lost" else [])):
            shutil.copy(tmp_path / f"good{suffix}", tmp_path / f"{name}{suffix}")
    prefixes = (tmp_path / name for name in ("good", "bad", "none", "foreign", "lost"))
    result = run_tool("--verify", *prefixes)
    assert result.returncode == 2
    assert result.stdout == f"{tmp_path}/good: intact, 200,002 bytes of tokens\n"
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 4
    assert "bad.bin: damaged between bytes 49152 and 65536" in errors[0]
    assert "none: no prepared dataset is here" in errors[1]
    assert "foreign: has no checksums" in errors[2]
    assert "lost.json: no such file; it describes lost.bin" in errors[3]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_tool_that_cannot_write_names_its_output(tmp_path: Path, workers: str) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("text\n" * 300_000)
    shell = f"ulimit -f 1024; exec {sys.executable} {TOOL} --input {tmp_path}/?.txt"
    result = subprocess.run(
        ["bash", "-c", f"{shell} --output-prefix {tmp_path}/out --shard-mb 1 --workers {workers}"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert f"error: {tmp_path}/out: File too large" in result.stderr
    assert "Traceback" not in result.stderr


def test_overwrite_adds_checksums_to_a_dataset_of_version_1(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["a"])
    preprocess([str(path)], tmp_path / "out", Options())
    whole = contents(tmp_path / "out")
    record = json.loads((tmp_path / "out.json").read_text()) | {"version": 1}
    del record["index_crc32"], record["sums_crc32"]
    (tmp_path / "out.json").write_text(json.dumps(record))
    (tmp_path / "out.crc32").unlink()
    assert preprocess([str(path)], tmp_path / "out", Options()).version == 1  # is what is asked for
    preprocess([str(path)], tmp_path / "out", Options(), overwrite=True)
    assert contents(tmp_path / "out") == whole


def test_the_help_of_the_tool_names_every_format_and_option() -> None:
    text = run_tool("--help").stdout
    options = (
        "input output-prefix tokenizer field column append-eod workers shard-mb overwrite verify"
    )
    options += " max-expansion max-record-mb pack"
    formats = "*.jsonl *.parquet *.gz *.zst hf: sentencepiece: tiktoken: data.paths"
    for word in [*(f"--{option}" for option in options.split()), *formats.split()]:
        assert word in text
