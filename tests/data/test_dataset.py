from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatlm import megatron_hook
from coatlm.config import Data, DataSource
from coatlm.data import checksums, indexed
from coatlm.data.batches import BatchIterator
from coatlm.data.checksums import BlockSums, CheckedFile, DatasetError
from coatlm.data.dataset import open_datasets
from coatlm.data.indexed import open_indexed
from coatlm.data.order import PERIOD, Blend, Stream, shuffled, split_bounds
from coatlm.data.tokenizer import ByteTokenizer

BYTE = ByteTokenizer()
SEQ_LEN = 16


@pytest.fixture
def copy(prefix: Path, tmp_path: Path) -> Path:
    """The dataset where a test may damage it."""
    for suffix in (".bin", ".idx", ".json", ".crc32"):
        (tmp_path / f"copy{suffix}").write_bytes((prefix.parent / f"letters{suffix}").read_bytes())
    return tmp_path / "copy"


def write_foreign(prefix: Path, documents: list[list[int]], dtype: type = np.int32) -> Path:
    """A dataset written with megatron's builder alone, without PREFIX.json."""
    megatron_hook.install()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.asarray(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def options(prefix: Path, **changes: object) -> Data:
    fields = dict(paths=(DataSource(path=prefix),), seq_len=SEQ_LEN, split=(80, 10, 10))
    return Data.model_validate(fields | changes)


def stream_of(documents: list[list[int]], seq_len: int, seed: int = 0) -> Stream:
    bounds = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    tokens = np.asarray([t for d in documents for t in d], dtype=np.uint16)
    return Stream(lambda a, b: tokens[a:b], bounds, seq_len=seq_len, key=(seed, 0, 0))


# ---- opening what users have


def test_tokens_and_bounds_are_those_megatron_reads(prefix: Path) -> None:
    megatron_hook.install()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    megatron = IndexedDataset(str(prefix))
    data = open_indexed(prefix, BYTE)
    assert len(data.bounds_D1) == len(megatron) + 1
    for d in range(len(megatron)):
        assert (data.tokens[data.bounds_D1[d] : data.bounds_D1[d + 1]] == megatron[d]).all()


def test_documents_of_several_sequences_are_kept_together(tmp_path: Path) -> None:
    megatron_hook.install()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16)
    builder.add_document(np.arange(5), [2, 3])
    builder.add_document(np.arange(4), [4])
    builder.finalize(str(tmp_path / "x.idx"))
    assert open_indexed(tmp_path / "x", BYTE).bounds_D1.tolist() == [0, 5, 9]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint16])
def test_foreign_datasets_of_every_integer_type_are_read(tmp_path: Path, dtype: type) -> None:
    data = open_indexed(write_foreign(tmp_path / "x", [[1, 2, 3], [100]], dtype), BYTE)
    assert data.tokens.tolist() == [1, 2, 3, 100]


@pytest.mark.parametrize("token", [257, -1])
def test_an_id_outside_the_vocabulary_is_an_error_that_names_it(tmp_path: Path, token: int) -> None:
    write_foreign(tmp_path / "x", [[1, 2], [3, token]])
    with pytest.raises(ValueError, match=rf"x\.bin: holds token id {token}, outside the 257 ids"):
        open_indexed(tmp_path / "x", BYTE)


@pytest.mark.parametrize("at", [0, 150, 333, 399])
def test_every_id_of_a_small_dataset_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(indexed, "SCANNED_BLOCK", 150)
    write_foreign(tmp_path / "x", [[1] * at + [999] + [1] * (399 - at)])
    with pytest.raises(ValueError, match="holds token id 999"):
        open_indexed(tmp_path / "x", BYTE)


def test_ids_of_a_large_dataset_are_sampled_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "SCANNED_TOKENS", 4000)
    monkeypatch.setattr(indexed, "SCANNED_BLOCK", 100)
    for at in (0, 19_999):
        document = [1] * 20_000
        document[at] = 999
        write_foreign(tmp_path / "x", [document])
        with pytest.raises(ValueError, match="holds token id 999"):
            open_indexed(tmp_path / "x", BYTE)


def _set(path: Path, at: int, value: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(value)] = value
    path.write_bytes(raw)


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # what is done to idx | bin | json, which file is named, what is said
    "no idx": (lambda p: p.with_suffix(".idx").unlink(), "idx", "no such file"),
    "no bin": (lambda p: p.with_suffix(".bin").unlink(), "bin", "no such file"),
    "empty idx": (lambda p: p.with_suffix(".idx").write_bytes(b""), "idx", "empty"),
    "empty bin": (lambda p: p.with_suffix(".bin").write_bytes(b""), "bin", "empty"),
    "foreign idx": (lambda p: p.with_suffix(".idx").write_bytes(b"PK" * 99), "idx", "wrong first"),
    "header": (
        lambda p: p.with_suffix(".idx").write_bytes(indexed.MAGIC),
        "idx",
        "inside its header",
    ),
    "cut idx": (
        lambda p: p.with_suffix(".idx").write_bytes(p.with_suffix(".idx").read_bytes()[:-4]),
        "idx",
        "cut off",
    ),
    "cut bin": (
        lambda p: p.with_suffix(".bin").write_bytes(p.with_suffix(".bin").read_bytes()[:-2]),
        "bin",
        "cut off",
    ),
    "version": (lambda p: _set(p.with_suffix(".idx"), 9, b"\x07"), "idx", "version 7"),
    "floats": (lambda p: _set(p.with_suffix(".idx"), 17, b"\x07"), "idx", "dtype code 7"),
    "counts": (
        lambda p: _set(p.with_suffix(".idx"), 18, struct.pack("<Q", 1 << 50)),
        "idx",
        "implies",
    ),
    "lengths": (
        lambda p: _set(p.with_suffix(".idx"), 34, struct.pack("<i", -5)),
        "idx",
        "its checksum differs",
    ),
    "bounds": (lambda p: _set(p.with_suffix(".idx"), 34 + 60 * 12, b"\x01"), "idx", "checksum"),
    "no sums": (lambda p: p.with_suffix(".crc32").unlink(), "crc32", "no such file"),
    "cut sums": (lambda p: p.with_suffix(".crc32").write_bytes(b""), "crc32", "checksum differs"),
    "sums": (lambda p: _set(p.with_suffix(".crc32"), 0, bytes(4)), "crc32", "checksum differs"),
    "bad json": (lambda p: p.with_suffix(".json").write_text("{"), "json", "not readable"),
    "deep json": (lambda p: p.with_suffix(".json").write_text("[" * 10**5), "json", "not readable"),
    "type json": (lambda p: _edit(p.with_suffix(".json"), tokens="5"), "json", "another type"),
    "foreign json": (
        lambda p: p.with_suffix(".json").write_text("[]"),
        "json",
        "does not describe",
    ),
    "newer json": (lambda p: _edit(p.with_suffix(".json"), version=4), "json", "version=4"),
    "odd json": (lambda p: _edit(p.with_suffix(".json"), colour=1), "json", "colour"),
    "counts json": (
        lambda p: _edit(p.with_suffix(".json"), tokens=5),
        "json",
        "describes 60 documents",
    ),
    "fingerprint": (
        lambda p: _edit(p.with_suffix(".json"), fingerprint="0" * 64),
        "json",
        "000000",
    ),
    "vocabulary": (lambda p: _edit(p.with_suffix(".json"), vocab_size=300), "json", "300 ids"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_dataset_is_a_one_line_error_that_names_the_file(case: str, copy: Path) -> None:
    damage, suffix, reason = DAMAGE[case]
    damage(copy)
    with pytest.raises(ValueError, match=reason) as error:
        open_datasets(options(copy), BYTE, seed=0)
    assert str(copy.with_suffix(f".{suffix}")) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", range(5))
def test_no_sample_is_read_from_a_damaged_byte(copy: Path, seed: int) -> None:
    """Bits are flipped while the dataset is open: samples are as written, or errors."""
    expected = open_datasets(options(copy), BYTE, seed=0).train
    rows = [expected[i] for i in range(expected.streams[0].windows)]
    train = open_datasets(options(copy), BYTE, seed=0).train
    path = copy.with_suffix(".bin")
    raw = bytearray(path.read_bytes())
    at = int(np.random.default_rng(seed).integers(len(raw)))
    raw[at] ^= 1 << seed
    path.write_bytes(raw)
    with pytest.raises(DatasetError, match=r"copy\.bin: damaged between bytes 0 and ") as error:
        for i, row in enumerate(rows):
            assert train[i].tolist() == row.tolist()
    assert "\n" not in str(error.value)


def test_a_file_that_is_cut_off_while_it_is_open_is_an_error(copy: Path) -> None:
    data = open_indexed(copy, BYTE)
    path = copy.with_suffix(".bin")
    os.truncate(path, 1000)
    with pytest.raises(DatasetError, match=r"copy\.bin: is cut off at byte 1000"):
        data.read(100, 120)


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 14])
def test_reads_that_cross_blocks_are_what_was_written(
    copy: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "SUM_BYTES", size)
    raw = copy.with_suffix(".bin").read_bytes()
    sums = BlockSums()
    for start in range(0, len(raw), 100):
        sums.update(memoryview(raw)[start : start + 100])
    assert sums.array().tolist() == [
        zlib.crc32(raw[at : at + size]) for at in range(0, len(raw), size)
    ]
    path = copy.with_suffix(".bin")
    file = CheckedFile(path, len(raw), sums.array(), io.FileIO(path))
    for begin, end in [(0, 0), (0, 1), (5, 200), (63, 65), (len(raw) - 3, len(raw)), (0, len(raw))]:
        assert file.read(begin, end) == raw[begin:end]
    assert sum(file.verify(workers=2)) == len(raw)


def test_a_dataset_of_version_1_is_read_and_says_once_that_it_has_no_checksums(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = json.loads(copy.with_suffix(".json").read_text()) | {"version": 1}
    del record["index_crc32"], record["sums_crc32"]
    copy.with_suffix(".json").write_text(json.dumps(record))
    copy.with_suffix(".crc32").unlink()
    with caplog.at_level(logging.INFO, logger="coatlm"):
        train = open_datasets(options(copy), BYTE, seed=0).train
    assert train[0].tolist()
    assert [r.getMessage() for r in caplog.records] == [
        f"{copy}: has no checksums, so damage cannot be detected"
    ]


def test_an_unknown_id_is_an_error_before_the_model_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "SCANNED_TOKENS", 0)  # as if it were beyond what is looked at
    write_foreign(tmp_path / "x", [[1] * 300, [2] * 50 + [999] + [2] * 300])
    train = open_datasets(options(tmp_path / "x", split=(1, 0, 0)), BYTE, seed=0).train
    reason = r"x\.bin: holds token id 999, outside the 257 ids .* as token 50 of document 1$"
    shape = {"global_batch": 40, "micro_batch": 40, "dp_rank": 0, "dp_size": 1}
    with BatchIterator(train, **shape) as batches, pytest.raises(DatasetError, match=reason):
        next(batches)


def test_a_foreign_index_that_contradicts_itself_is_an_error(tmp_path: Path) -> None:
    write_foreign(tmp_path / "x", [[1, 2, 3], [4]])
    _set(tmp_path / "x.idx", 34, struct.pack("<i", -5))
    with pytest.raises(DatasetError, match=r"x\.idx: .* contradict"):
        open_indexed(tmp_path / "x", BYTE)


def test_a_dataset_without_tokens_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"ab")
    (tmp_path / "x.idx").write_bytes(indexed.MAGIC + struct.pack("<QBQQ", 1, 8, 0, 1) + bytes(8))
    with pytest.raises(ValueError, match=r"x\.bin: 2 bytes.*implies 0 tokens"):
        open_indexed(tmp_path / "x", BYTE)


@pytest.mark.parametrize(("split", "name"), [((1, 0, 0), "train"), ((98, 2, 0), "validation")])
def test_a_split_shorter_than_a_sample_is_an_error_that_names_it(
    split: tuple[int, int, int], name: str, prefix: Path
) -> None:
    tokens = int(open_indexed(prefix, BYTE).bounds_D1[-1])
    seq_len = tokens if name == "train" else tokens // 2
    with pytest.raises(ValueError, match=rf"letters: the {name} split .* {seq_len + 1}"):
        open_datasets(options(prefix, split=split, seq_len=seq_len), BYTE, seed=0)


def test_text_shorter_than_a_sample_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("short")
    data = Data(text=(str(tmp_path / "x.txt"),), cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"data.text=.*x\.txt: the train split .* 6 tokens"):
        open_datasets(data, BYTE, seed=0)


def test_text_is_prepared_and_opened(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("abcdefgh" * 100)
    data = Data(text=(str(tmp_path / "x.txt"),), cache_dir=tmp_path / "cache", seq_len=8)
    datasets = open_datasets(data, BYTE, seed=0)
    assert datasets.validation is not None and datasets.test is not None
    assert sorted(BYTE.decode(datasets.train[5])[:8]) == list("abcdefgh")


# ---- splitting


def test_boundaries_lie_between_documents() -> None:
    bounds = np.arange(0, 10_001, 100)
    splits = split_bounds(bounds, (96, 2, 2))
    assert [(p[0], p[-1]) for p in splits] == [(0, 9600), (9600, 9800), (9800, 10_000)]
    assert np.isin(np.concatenate(splits), bounds).all()


@pytest.mark.parametrize("lengths", [[100_000], [99_990, 10], [10, 99_980, 10], [50_000, 50_000]])
def test_few_documents_are_cut_so_that_every_split_gets_its_tokens(lengths: list[int]) -> None:
    bounds = np.cumsum([0, *lengths])
    splits = split_bounds(bounds, (96, 2, 2))
    assert [int(p[-1] - p[0]) for p in splits] == [96_000, 2000, 2000]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(lambda x: sum(x) > 0),
    st.tuples(st.integers(1, 99), st.integers(0, 99), st.integers(0, 99)),
)
def test_splits_are_disjoint_complete_and_at_least_half_of_their_share(
    lengths: list[int], ratios: tuple[int, int, int]
) -> None:
    bounds = np.cumsum([0, *lengths]).astype(np.int64)
    splits = split_bounds(bounds, ratios)
    assert splits[0][0] == 0 and splits[-1][-1] == bounds[-1]
    for before, after in itertools.pairwise(splits):
        assert before[-1] == after[0]
    for split, ratio in zip(splits, ratios, strict=True):
        assert (np.diff(split) >= 0).all()
        size, share = int(split[-1] - split[0]), bounds[-1] * ratio / sum(ratios)
        assert size >= share / 2 - 1  # 1: a cut lies on a whole token
        assert ratio or size == 0


def test_a_part_of_ratio_zero_does_not_exist(prefix: Path) -> None:
    datasets = open_datasets(options(prefix, split=(90, 10, 0)), BYTE, seed=0)
    assert datasets.validation is not None and datasets.test is None


# ---- the order of one source


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**63))
def test_shuffled_is_a_permutation(count: int, key: int) -> None:
    assert sorted(shuffled(count, key).tolist()) == list(range(count))


def test_shuffled_is_its_definition_in_whole_numbers() -> None:
    base = int.from_bytes(hashlib.sha256(b"windows 1234 0").digest()[:8], "little")

    def mix(i: int) -> int:
        x = (base + i * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    assert shuffled(1000, "windows", 1234, 0).tolist() == sorted(range(1000), key=mix)


def test_shuffled_spreads_every_number_over_every_place() -> None:
    """Each of 16 x 16 counts is binomial(4000, 1/16): mean 250, sigma 15.3; 5 sigma is 77."""
    counts = np.zeros((16, 16))
    for key in range(4000):
        counts[np.arange(16), shuffled(16, "place", key)] += 1
    assert np.abs(counts - 250).max() < 77


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(lambda x: sum(x) > 7),
    st.integers(1, 6),
    st.integers(0, 5),
)
def test_the_windows_of_an_epoch_are_whole_documents_end_to_end(
    lengths: list[int], seq_len: int, epoch: int
) -> None:
    """Windows overlap in one token, so they chain uniquely where ids are unique."""
    ids = iter(range(10_000))
    documents = [[next(ids) for _ in range(n)] for n in lengths]
    stream = stream_of(documents, seq_len)
    total = sum(lengths)
    assert stream.windows == (total - 1) // seq_len
    samples = [stream[epoch * stream.windows + j].tolist() for j in range(stream.windows)]
    by_first = {sample[0]: sample for sample in samples}
    assert len(by_first) == stream.windows
    lasts = {sample[-1] for sample in samples}
    (current,) = (sample for sample in samples if sample[0] not in lasts)
    joined = current
    while joined[-1] in by_first:
        joined = joined + by_first[joined[-1]][1:]
    assert len(joined) == stream.windows * seq_len + 1  # the rest of the epoch is dropped
    order = list(
        dict.fromkeys(next(d for d, ts in enumerate(documents) if t in ts) for t in joined)
    )
    whole = [t for d in order for t in documents[d]]
    assert joined == whole[: len(joined)]


def test_epochs_and_seeds_differ() -> None:
    documents = [[10 * d + i for i in range(10)] for d in range(50)]
    stream, other = stream_of(documents, 7), stream_of(documents, 7, seed=1)
    n = stream.windows
    epochs = [[stream[e * n + j].tolist() for j in range(n)] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert [other[j].tolist() for j in range(n)] != epochs[0]


def test_a_sample_does_not_depend_on_what_was_read_before() -> None:
    documents = [[10 * d + i for i in range(10)] for d in range(50)]
    stream = stream_of(documents, 7)
    straight = [stream[i].tolist() for i in range(400)]
    for i in np.random.default_rng(0).permutation(400).tolist():
        assert stream_of(documents, 7)[i].tolist() == straight[i] == stream[i].tolist()


# ---- blends


@pytest.mark.parametrize("weights", [(1, 1), (0.7, 0.2, 0.1), (5, 1, 1, 1, 1), tuple(range(1, 30))])
def test_after_n_samples_every_source_is_within_one_of_its_share(
    weights: tuple[float, ...],
) -> None:
    blend = Blend(weights)
    places = np.arange(1, 3001)
    sources = np.asarray([blend.locate(i)[0] for i in range(3000)])
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        ahead = np.cumsum(sources == source) - share * places
        assert np.abs(ahead).max() <= 1 + 3000 / PERIOD  # weights are rounded to 1 / PERIOD


def test_a_blend_takes_the_samples_of_each_source_in_turn_also_across_periods() -> None:
    blend = Blend([0.5, 0.3, 0.2])
    first = PERIOD - 1000
    taken: dict[int, int] = {}
    for i in range(first, PERIOD + 1000):
        source, number = blend.locate(i)
        assert number == taken.get(source, number)
        taken[source] = number + 1
    for source, weight in enumerate([0.5, 0.3, 0.2]):  # 1: its share; 1: rounded weight
        assert abs(taken[source] - weight * (PERIOD + 1000)) <= 2


def test_a_weight_that_would_never_be_drawn_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data.paths: weight=1e-09"):
        Blend([1.0, 1e-9])


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [3.0, 1.0, 0.01]])
def test_samples_of_each_source_are_counted(weights: list[float]) -> None:
    blend = Blend(weights)
    sources = [blend.locate(sample)[0] for sample in range(1000)]
    for samples in (0, 1, 7, 999):
        counted = [sources[:samples].count(source) for source in range(len(weights))]
        assert blend.counts(samples) == counted
        later = [n - old for n, old in zip(blend.counts(PERIOD + samples), counted, strict=True)]
        assert later == blend.counts(PERIOD)


def test_a_blend_of_datasets_mixes_their_tokens(prefix: Path, tmp_path: Path) -> None:
    digits = write_foreign(tmp_path / "digits", [[48 + d] * 40 for d in range(10)] * 5)
    paths = ({"path": prefix, "weight": 3}, {"path": digits, "weight": 1})
    train = open_datasets(options(prefix, paths=paths), BYTE, seed=0).train
    kinds = Counter(bool(train[i].max() < 58) for i in range(400))
    assert kinds == {False: 300, True: 100}


def test_no_sample_of_one_part_is_in_another(tmp_path: Path) -> None:
    foreign = write_foreign(tmp_path / "x", [[d] * 30 for d in range(200)])
    datasets = open_datasets(options(foreign), BYTE, seed=0)
    seen = []
    for part in (datasets.train, datasets.validation, datasets.test):
        assert part is not None
        seen.append({t for i in range(500) for t in part[i].tolist()})
    assert seen[0] == set(range(160)) and seen[1] == set(range(160, 180))
    assert seen[2] == set(range(180, 200))


def test_the_order_of_samples_is_the_same_in_every_version(tmp_path: Path) -> None:
    """If this changes, runs that were begun before it cannot be resumed."""
    paths = [
        write_foreign(tmp_path / "a", [[d] * (d % 7 + 1) for d in range(250)]),
        write_foreign(tmp_path / "b", [[d, d + 1] for d in range(200)]),
    ]
    data = options(paths[0], paths=({"path": paths[0], "weight": 2}, {"path": paths[1]}))
    datasets = open_datasets(data, BYTE, seed=1234)
    digest = hashlib.sha256()
    for part in (datasets.train, datasets.validation, datasets.test):
        assert part is not None
        for i in range(300):
            digest.update(part[i].astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "543f7107548554f2"
