"""The cache of data.text: what is damaged, abandoned, in use or unwritable."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coatlm.config import Data
from coatlm.data import cache
from coatlm.data import shards as shards_module
from coatlm.data.cache import DAMAGED, open_text_dataset, prepare_text
from coatlm.data.checksums import CacheFullError, DatasetError
from coatlm.data.token_shard import Options
from coatlm.data.tokenizer import ByteTokenizer

REPOSITORY = Path(__file__).parents[2]
BYTE = ByteTokenizer()
TEXT = "".join(f"line {i}\n" for i in range(5000))


@pytest.fixture
def data(tmp_path: Path) -> Data:
    (tmp_path / "x.txt").write_text(TEXT)
    return Data(text=(str(tmp_path / "x.txt"),), cache_dir=tmp_path / "cache", workers=1)


def text_of(data: Data) -> str:
    opened = open_text_dataset(data, BYTE)
    return BYTE.decode(opened.read(0, len(opened.tokens)).tolist())


def entries(data: Data) -> list[str]:
    return sorted(path.name for path in data.cache_dir.iterdir())


def flip(path: Path, at: int = 20_000) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def old_version(path: Path) -> None:
    """Make a manifest one of version 1."""
    record = json.loads(path.read_text()) | {"version": 1}
    del record["index_crc32"], record["sums_crc32"]
    path.write_text(json.dumps(record))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda home: flip(home / "text.bin"),
    "cut tokens": lambda home: cut(home / "text.bin"),
    "no tokens": lambda home: (home / "text.bin").unlink(),
    "no index": lambda home: (home / "text.idx").unlink(),
    "a flipped bit of the index": lambda home: flip(home / "text.idx", 40),
    "no checksums": lambda home: (home / "text.crc32").unlink(),
    "a flipped bit of the checksums": lambda home: flip(home / "text.crc32", 2),
    "bad JSON": lambda home: (home / "text.json").write_text("{"),
    "an empty manifest": lambda home: (home / "text.json").write_text(""),
    "a manifest without checksums": lambda home: old_version(home / "text.json"),
    "a directory as manifest": lambda home: (
        (home / "text.json").unlink(),
        (home / "text.json").mkdir(),
    ),
    "an empty folder": lambda home: [path.unlink() for path in home.iterdir()],
    "a file as folder": lambda home: (home.rename(home.parent / "moved"), home.write_text("")),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_entry_is_rebuilt_with_one_warning(
    case: str, data: Data, caplog: pytest.LogCaptureFixture
) -> None:
    home = prepare_text(data).parent
    DAMAGE[case](home)
    with caplog.at_level(logging.INFO, logger="coatlm"):
        assert text_of(data) == TEXT
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    assert str(home) in warnings[0] and "tokenized again" in warnings[0]
    assert "\n" not in warnings[0] and len(warnings[0]) < 400
    made = (home / "text.idx").stat().st_mtime_ns
    assert text_of(data) == TEXT
    assert (home / "text.idx").stat().st_mtime_ns == made
    assert set(entries(data)) <= {home.name, "moved"}


def test_a_repair_that_ends_second_keeps_the_dataset_of_the_first(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepare_text(data).parent
    (home / DAMAGED).touch()
    tokenize, inodes = cache.preprocess, []

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        made = tokenize(*arguments, **options)
        monkeypatch.undo()
        prepare_text(data)  # by another process, which began and ended meanwhile
        inodes.append((home / "text.bin").stat().st_ino)
        return made

    monkeypatch.setattr(cache, "preprocess", meanwhile)
    assert text_of(data) == TEXT
    assert inodes == [(home / "text.bin").stat().st_ino]
    assert entries(data) == [home.name]


def test_a_damaged_dataset_that_a_killed_process_put_away_is_removed(data: Data) -> None:
    home = prepare_text(data).parent
    away = home.with_name(f"{home.name}.{DAMAGED}.0123abcd")
    away.mkdir()
    home.rename(away / "text")
    assert text_of(data) == TEXT
    assert entries(data) == [home.name]


def test_damage_that_a_run_meets_is_repaired_by_the_next_start(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatlm.data.preprocess.VERIFIED_BYTES", 0)  # as if it were too large
    opened = open_text_dataset(data, BYTE)
    home = prepare_text(data).parent
    flip(home / "text.bin")
    assert BYTE.decode(opened.read(100, 200).tolist()) == TEXT[100:200]  # not of that block
    with pytest.raises(DatasetError, match=r"text\.bin: damaged between bytes 16384 and 32768"):
        opened.read(9_900, 10_100)
    assert text_of(data) == TEXT


def test_text_that_is_not_utf8_is_one_warning_with_its_share_when_it_is_tokenized(
    data: Data, caplog: pytest.LogCaptureFixture
) -> None:
    open_text_dataset(data, BYTE)
    assert caplog.records == []
    path = Path(data.text[0])
    path.write_bytes(b"a" * 1990 + b"\xff\xfe" + b"\n")  # each becomes 3 bytes of U+FFFD; 1 is eod
    for _ in range(2):  # the second start finds the dataset
        open_text_dataset(data, BYTE)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning == (
        f"data.text={path}: 2 characters were not UTF-8 and became U+FFFD, 1 per 1,000 tokens"
    )


# ---- killed and living processes

HOLD = """
import sys, time
from pathlib import Path
from typing import Any
from coatlm.data import cache

with cache._own_folder(Path(sys.argv[1]), sys.argv[2]) as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(data: Data) -> Callable[[str], tuple[subprocess.Popen[str], Path]]:
    """Start a process that makes the dataset of a key, for ever; its folder."""

    def start(key: str) -> tuple[subprocess.Popen[str], Path]:
        data.cache_dir.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(data.cache_dir), key],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    return start


def test_a_folder_is_removed_when_its_process_is_gone_and_not_before(
    data: Data, holder: Callable[[str], tuple[subprocess.Popen[str], Path]]
) -> None:
    process, folder = holder("0" * 32)
    with process:
        (data.cache_dir / "mine.txt").write_text("not of coatlm")
        text_of(data)
        assert folder.name in entries(data)
        process.send_signal(signal.SIGKILL)
    (data.cache_dir / prepare_text(data).parent.name / "damaged").touch()  # something to make
    assert text_of(data) == TEXT
    assert entries(data) == sorted([prepare_text(data).parent.name, "mine.txt"])


def test_a_folder_of_another_machine_is_removed_when_it_is_old(data: Data) -> None:
    folder = data.cache_dir / ("0" * 32 + ".abcdefgh")
    folder.mkdir(parents=True)
    (folder / "owner").write_text(json.dumps({"host": "node7", "pid": 1, "boot": "another"}))
    text_of(data)
    assert folder.exists()
    hours_ago = time.time() - 2 * cache.ABANDONED_SECONDS
    os.utime(folder / "owner", (hours_ago, hours_ago))
    (prepare_text(data).parent / "damaged").touch()
    text_of(data)
    assert not folder.exists()


def test_the_owner_renews_its_folder(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "RENEWED_SECONDS", 0.01)
    data.cache_dir.mkdir()
    with cache._own_folder(data.cache_dir, "0" * 32) as folder:
        os.utime(folder / "owner", (0, 0))
        end = time.monotonic() + 60
        while (folder / "owner").stat().st_mtime == 0:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_killed_start_is_continued_by_the_next(
    data: Data, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "Options", functools.partial(Options, shard_bytes=4096))
    write, written = shards_module.write_shard, []

    def counted(shard: shards_module.TokenShard, *rest: object) -> None:
        if len(written) == 5:
            raise KeyboardInterrupt  # leaves what SIGKILL leaves: nothing is cleared up
        written.append(shard.base.name)
        write(shard, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(shards_module, "write_shard", counted)
    with pytest.raises(KeyboardInterrupt):
        text_of(data)
    (folder,) = entries(data)
    first = list(written)
    written.clear()
    monkeypatch.setattr(
        shards_module, "write_shard", lambda s, *r: (written.append(s.base.name), write(s, *r))
    )
    with caplog.at_level(logging.INFO, logger="coatlm"):
        opened = open_text_dataset(data, BYTE)
    assert BYTE.decode(opened.tokens.tolist()) == TEXT
    assert len(first) == 5 and written and not set(first) & set(written)
    assert entries(data) == [folder.partition(".")[0]]
    assert any("continuing in" in record.getMessage() for record in caplog.records)


def null_in_header(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"}", b"\0", 1))


@pytest.mark.parametrize(("suffix", "damage"), [(".bin", flip), (".lengths.npy", null_in_header)])
def test_a_shard_damaged_between_two_starts_is_an_error_and_is_rebuilt(
    data: Data, monkeypatch: pytest.MonkeyPatch, suffix: str, damage: Callable[[Path], None]
) -> None:
    tokenize = shards_module.tokenize

    def and_damage(shards: list[shards_module.TokenShard], *rest: object) -> None:
        tokenize(shards, *rest)  # type: ignore[arg-type]
        damage(shards[0].base.with_name(shards[0].base.name + suffix))

    monkeypatch.setattr("coatlm.data.preprocess.tokenize", and_damage)
    with pytest.raises(ValueError, match=r"\.bin: damaged: it differs from its record; run again"):
        text_of(data)
    monkeypatch.undo()
    assert text_of(data) == TEXT


# ---- what cannot be written


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/coatlm"])
def test_a_cache_that_cannot_be_written_is_a_one_line_error_that_names_the_option(
    name: str, data: Data, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / name
    with pytest.raises(ValueError, match=f"data.cache_dir={place}: .* must be a directory") as e:
        prepare_text(data.model_copy(update={"cache_dir": place}))
    assert "\n" not in str(e.value)


def test_a_full_disk_is_that_of_the_cache_and_its_shards_stay(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "preprocess", full)
    with pytest.raises(CacheFullError, match=f"data.cache_dir={data.cache_dir}: No space") as error:
        prepare_text(data)
    assert error.value.errno == errno.ENOSPC and len(str(error.value)) < 400
    assert len(entries(data)) == 1
    monkeypatch.undo()
    assert text_of(data) == TEXT
    assert len(entries(data)) == 1


def test_a_whole_cache_is_read_without_writing(data: Data) -> None:
    home = prepare_text(data).parent
    before = {path: path.stat().st_mtime_ns for path in (data.cache_dir, home, *home.iterdir())}
    assert text_of(data) == TEXT
    assert before == {path: path.stat().st_mtime_ns for path in before}
