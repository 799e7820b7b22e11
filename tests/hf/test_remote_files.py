"""Hugging Face directories at URLs: the same bits as from the disk, whatever fails on the way."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from s3fs import S3FileSystem

from coatlm import remote
from coatlm.config import ConfigError, make_config
from coatlm.hf.download import MODELS
from coatlm.hf.remote_files import RemoteWeightFiles, read_header
from coatlm.hf.run_config import completed, hf_directory
from coatlm.hf.source import HfSource, opened
from coatlm.megatron import ShardedTensor
from coatlm.remote import Location, RemoteError
from tests.bpe import train_bpe
from tests.hf.models import make_model
from tests.object_store import REPOSITORY, Faults, hub, s3

RANGE = 40_000  # bytes
SHARD = "model-00001-of-00006"  # of the name of the first file


@pytest.fixture(scope="module")
def store() -> Iterator[Faults]:
    with s3() as faults:
        yield faults


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.01))
    monkeypatch.setattr("coatlm.hf.remote_files.RANGE_BYTES", RANGE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, with a tokenizer."""
    root = tmp_path_factory.mktemp("remote model") / "hf"
    make_model("qwen2 head_dim").save_pretrained(root, max_shard_size="100KB")
    train_bpe(["one two"], vocab_size=260).save(str(root / "tokenizer.json"))
    assert len(list(root.glob("*.safetensors"))) > 2
    return root


@pytest.fixture(scope="module")
def url(store: Faults, directory: Path) -> str:
    return upload(directory, "data/model")


def upload(directory: Path, path: str) -> str:
    S3FileSystem().put(f"{directory}/", f"{path}/", recursive=True)
    return f"s3://{path}"


def filled(source: HfSource, part: int) -> tuple[int, list[torch.Tensor]]:
    """The bytes read, and the tensors: all of each, or with `part` the middle of its rows."""
    tensors = []
    for key, entry in source.plan.items():
        size = [n // 2 if part else n for n in entry.shape]
        corner = [n // 4 if part else 0 for n in entry.shape]  # of columns as well
        data = torch.full(size, 7.0)
        tensors.append(
            ShardedTensor(key, data, data.dtype, tuple(size), entry.shape, tuple(corner), None)
        )
    return source.fill(tensors), [tensor.data for tensor in tensors]


@pytest.mark.parametrize("fault", [None, "drop", "truncate"])
def test_weights_have_the_bits_of_the_files_whatever_fails_on_the_way(
    fault: str | None, store: Faults, directory: Path, url: str, tmp_path: Path
) -> None:
    store.clear()
    for name in ("config.json", "index.json", f"{SHARD}.safetensors") if fault else ():
        store.inject(name, str(fault))
    local = HfSource.open(directory)
    with opened(url, tmp_path) as source:
        for part in (0, 1):
            nbytes, found = filled(source, part)
            expected_bytes, expected = filled(local, part)
            assert nbytes == expected_bytes
            assert all(map(torch.equal, found, expected))
        assert source.weights.versions().keys() == set(local.weights.files.values())
        for name in ("model.norm.weight", "model.embed_tokens.weight"):
            assert torch.equal(source.weights.read(name), local.weights.read(name))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_rank_requests_the_rows_of_its_slices_and_no_others(
    store: Faults, url: str, tmp_path: Path
) -> None:
    with opened(url, tmp_path) as source:
        store.clear()
        part = source.weights.read_part("model.embed_tokens.weight", (slice(4, 8), slice(8, 16)))
    assert part.shape == (4, 8)
    (_, shape), begin = source.weights.headers[  # type: ignore[attr-defined]
        source.weights.files["model.embed_tokens.weight"]
    ].tensors["model.embed_tokens.weight"]
    first, nbytes = begin + 4 * shape[1] * 4, 4 * shape[1] * 4
    assert store.ranges == [f"bytes={first}-{first + nbytes - 1}"]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors.index.json", SHARD])
def test_a_missing_file_is_named(
    store: Faults, directory: Path, tmp_path: Path, missing: str
) -> None:
    place = upload(directory, f"data/without-{missing}")
    (name,) = [path.name for path in directory.iterdir() if path.name.startswith(missing)]
    S3FileSystem().rm(f"{place}/{name}")
    says = {
        "config.json": f"{place}/config.json: no such object",
        SHARD: f"{place}/{name}: no such object",
    }
    expected = says.get(missing, f"{place}: has neither model.safetensors nor {missing}")
    with pytest.raises(ValueError, match=f"^{expected}"), opened(place, tmp_path):
        pytest.fail("opened")


def test_keys_and_the_tokenizer_come_from_the_url_and_errors_name_it(
    store: Faults, directory: Path, url: str, tmp_path: Path
) -> None:
    resume, data = {"resume": f"hf:{url}/"}, {"cache_dir": str(tmp_path), "text": "a"}
    config = make_config(completed({"checkpoint": resume, "data": data}))
    assert config.model == HfSource.open(directory).model
    (folder,) = (tmp_path / MODELS).iterdir()
    assert config.data.tokenizer.startswith(f"hf:{folder / 'tokenizer.json'}")
    assert hf_directory(config.checkpoint.resume) == url
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before == {name: (directory / name).read_bytes() for name in before}
    store.clear()
    completed({"checkpoint": resume, "data": data})  # the files are there already
    assert not any(method == "GET" for method, path in store.requests if path.endswith(".json"))
    broken = upload(directory, "data/broken")
    S3FileSystem().pipe(f"{broken}/config.json", b'{"model_type": "llama", "magic": 1}')
    with pytest.raises(ConfigError, match=rf"^checkpoint.resume=hf:{broken}: config.json: magic=1"):
        completed({"checkpoint": {"resume": f"hf:{broken}"}, "data": data})
    S3FileSystem().pipe(f"{broken}/config.json", b"{")
    with pytest.raises(ConfigError, match=rf"hf:{broken}: {broken}/config.json: not JSON"):
        completed({"checkpoint": {"resume": f"hf:{broken}"}, "data": data})


def test_a_file_that_changes_while_it_is_read_is_an_error(
    store: Faults, directory: Path, tmp_path: Path
) -> None:
    place = upload(directory, "data/changing")
    with opened(place, tmp_path) as source:
        name = sorted(source.weights.versions())[0]
        content = bytearray((directory / name).read_bytes())
        content[-1] ^= 1
        S3FileSystem().pipe(f"{place}/{name}", bytes(content))
        with pytest.raises(RemoteError, match=f"^{place}/{name}: has changed while it was read"):
            source.weights.versions()


def test_a_repository_of_the_hub_and_a_web_server_give_the_same_bits(
    directory: Path, tmp_path: Path
) -> None:
    _, expected = filled(HfSource.open(directory), 1)
    with hub(directory.parent) as faults:
        from huggingface_hub import constants

        web = f"{constants.ENDPOINT}/datasets/{REPOSITORY}/resolve/main/hf"
        for place in (f"hf://datasets/{REPOSITORY}/hf", web):
            faults.inject(f"{SHARD}.safetensors", "drop")
            with opened(place, tmp_path) as source:
                assert all(map(torch.equal, filled(source, 1)[1], expected))
        faults.inject("config.json", "503", 99)
        failing = rf"^checkpoint.resume=hf:{web}: {web}/config.json: .*503.* \(3 attempts\)$"
        given = {"checkpoint": {"resume": f"hf:{web}"}, "data": {"cache_dir": str(tmp_path / "b")}}
        with pytest.raises(ConfigError, match=failing):
            completed(given)


def header(change: Callable[[dict[str, Any]], object]) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    change(entry)
    text = json.dumps({"__metadata__": {}, "w": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(24)


DAMAGED = {
    "short": (b"1234567", "its header does not end"),
    "long": (struct.pack("<Q", 1 << 60) + bytes(9), "its header does not end"),
    "cut": (header(dict)[:-25], "its header does not end"),
    "text": (struct.pack("<Q", 4) + b"{[}]", "its header is damaged"),
    "list": (struct.pack("<Q", 2) + b"[]", "its header is damaged"),
    "negative": (header(lambda e: e.update(shape=[-2, -3])), "its header is damaged"),
    "no shape": (header(lambda e: e.pop("shape")), "its header is damaged"),
    "shape": (header(lambda e: e.update(shape=[2, 4])), "w does not fit it"),
    "end": (header(lambda e: e.update(data_offsets=[1, 25])), "w does not fit it"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_an_error(case: str, tmp_path: Path) -> None:
    content, reason = DAMAGED[case]
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^file://.*/a: not a safetensors file: {reason}$"):
        read_header(Location.of(f"file://{tmp_path / 'a'}"))


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(header(lambda e: e.update(dtype="I64")))
    with pytest.raises(ValueError, match=r"/a: w is I64: one of F32, BF16, F16, F8_E4M3"):
        read_header(Location.of(f"file://{tmp_path / 'a'}"))


def test_one_file_without_an_index_is_read(tmp_path: Path) -> None:
    make_model("qwen2 head_dim").save_pretrained(tmp_path / "hf")
    source = RemoteWeightFiles.open_at(Location.of(f"file://{tmp_path / 'hf'}"), tmp_path / "none")
    local = HfSource.open(tmp_path / "hf").weights
    assert source.describe() == local.describe()
