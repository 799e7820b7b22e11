"""The loss mask lies beside the tokens, is checked like them, and decides what counts."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coatlm.commands import prepare as preprocess_data
from coatlm.config import ConfigError, Data, make_config
from coatlm.data import shards as shards_module
from coatlm.data.batches import microbatches
from coatlm.data.chat import ChatFormat
from coatlm.data.checksums import DatasetError
from coatlm.data.dataset import Dataset, open_datasets
from coatlm.data.identity import content_hash
from coatlm.data.indexed import open_checked, open_indexed
from coatlm.data.manifest import MASK_SUFFIXES, SUFFIXES, read_dataset_manifest
from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from coatlm.data.tokenizer import ByteTokenizer
from tests.data.templates import write_tokenizer

BYTE = ByteTokenizer()
CHAT = Options(chat=ChatFormat(""))
SEQ_LEN = 16
ALL = SUFFIXES + MASK_SUFFIXES


def write_pairs(path: Path, count: int = 80, seed: int = 0) -> Path:
    """JSON lines of capital prompts and small completions."""
    rng = np.random.default_rng(seed)

    def word(n: int, first: int) -> str:
        return "".join(map(chr, rng.integers(first, first + 26, n)))

    pairs = [
        {"prompt": word(rng.integers(0, 12), 65), "completion": word(rng.integers(1, 12), 97)}
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    preprocess([str(write_pairs(tmp_path / "pairs.jsonl"))], tmp_path / "x", CHAT, workers=1)
    return tmp_path / "x"


def part(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def learned_by_definition(ids: np.ndarray) -> np.ndarray:
    """Small letters, and end-of-document."""
    return ((ids >= 97) & (ids < 123)) | (ids == BYTE.eod)


def test_every_token_has_the_mask_of_its_text(prefix: Path) -> None:
    data = open_indexed(prefix, BYTE)
    mask = data.read_mask(0, len(data.tokens))
    assert mask.tolist() == learned_by_definition(data.tokens).astype(int).tolist()
    for begin, end in ((0, 1), (7, 7), (3, 500), (len(mask) - 1, len(mask))):
        assert data.read_mask(begin, end).tolist() == mask[begin:end].tolist()
    manifest = read_dataset_manifest(prefix)
    assert manifest is not None
    assert (manifest.version, manifest.documents) == (3, 80)
    assert manifest.learned_tokens == int(mask.sum())


def test_the_files_do_not_depend_on_shards_workers_or_interruptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = [str(write_pairs(tmp_path / "pairs.jsonl", count=400))]
    straight, small = tmp_path / "straight", Options(chat=CHAT.chat, shard_bytes=2048)
    preprocess(source, straight, small, workers=1)
    write, written = shards_module.write_shard, []

    def interrupted(shard: Any, *rest: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(shard.base)
        write(shard, *rest)

    monkeypatch.setattr(shards_module, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preprocess(source, tmp_path / "resumed", small, workers=1)
    monkeypatch.setattr(shards_module, "write_shard", write)
    mask = written[1].with_name(written[1].name + ".mask")
    mask.write_bytes(mask.read_bytes()[:-1] + b"\2")  # damaged between two calls
    with pytest.raises(ValueError, match="damaged: it differs from its record"):
        preprocess(source, tmp_path / "resumed", small, workers=1)
    preprocess(source, tmp_path / "resumed", small, workers=1)
    preprocess(source, tmp_path / "parallel", small, workers=2)
    preprocess(source, tmp_path / "whole", CHAT, workers=1)
    for name, suffix in itertools.product(("resumed", "parallel", "whole"), ALL):
        if suffix != ".json" or name != "whole":  # names the options
            assert part(tmp_path / name, suffix).read_bytes() == part(straight, suffix).read_bytes()


def test_text_in_the_place_of_conversations_takes_the_mask_away(prefix: Path) -> None:
    text = prefix.with_name("text.txt")
    text.write_text("no conversation")
    preprocess([str(text)], prefix, Options(), workers=1, overwrite=True)
    assert [part(prefix, suffix).exists() for suffix in ALL] == [True] * 4 + [False] * 2
    content = json.loads(part(prefix, ".json").read_text())
    assert content["version"] == 2 and "learned_tokens" not in content
    assert open_indexed(prefix, BYTE).mask is None


def test_a_file_named_mask_that_is_of_no_dataset_is_neither_removed_nor_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text("no conversation")
    (tmp_path / "x.mask").write_text("mine")
    preprocess([str(tmp_path / "text.txt")], tmp_path / "x", Options(), workers=1)
    source = [str(write_pairs(tmp_path / "pairs.jsonl"))]
    (tmp_path / "y.mask").write_text("mine")
    with pytest.raises(ValueError, match=r"y\.mask: exists, made from other inputs"):
        preprocess(source, tmp_path / "y", CHAT, workers=1)
    assert [(tmp_path / name).read_text() for name in ("x.mask", "y.mask")] == ["mine"] * 2
    preprocess(source, tmp_path / "y", CHAT, workers=1, overwrite=True)
    assert open_indexed(tmp_path / "y", BYTE).mask is not None


def test_no_conversation_is_read_if_a_later_input_holds_none(tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "pairs.jsonl")
    (tmp_path / "text.txt").write_text("no conversation")
    with pytest.raises(ValueError, match=r"text\.txt: holds no JSON lines"):
        preprocess([str(source), str(tmp_path / "text.txt")], tmp_path / "x", CHAT, workers=1)
    assert not part(tmp_path / "x", ".shards").exists()


def _flip(path: Path, at: int = 70) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # what is done, which file is named, what is said
    "no mask": (lambda p: part(p, ".mask").unlink(), ".mask", "no such file; it holds the loss"),
    "no sums": (
        lambda p: part(p, ".mask.crc32").unlink(),
        ".mask.crc32",
        "no such file; it holds the checksums of x.mask",
    ),
    "cut": (
        lambda p: part(p, ".mask").write_bytes(b"\1" * 10),
        ".mask",
        "10 bytes, must be",
    ),
    "sums": (lambda p: _flip(part(p, ".mask.crc32"), 0), ".mask.crc32", "damaged: its checksum"),
    "bit": (lambda p: _flip(part(p, ".mask")), ".mask", "damaged between bytes 0 and"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_mask_is_a_one_line_error_that_names_the_file(case: str, prefix: Path) -> None:
    damage, suffix, reason = DAMAGE[case]
    damage(prefix)
    with pytest.raises(DatasetError, match=reason) as error:
        open_indexed(prefix, BYTE).read_mask(0, 100)
    assert str(error.value).startswith(f"{part(prefix, suffix)}: ")
    with pytest.raises(DatasetError, match=reason):
        for file in open_checked(prefix):
            list(file.verify())


def test_another_mask_is_other_data(prefix: Path, tmp_path: Path) -> None:
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    moved = [{"prompt": "", "completion": pair["prompt"] + pair["completion"]} for pair in pairs]
    (tmp_path / "moved.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in moved))
    preprocess([str(tmp_path / "moved.jsonl")], tmp_path / "y", CHAT, workers=1)
    a, b = open_indexed(prefix, BYTE), open_indexed(tmp_path / "y", BYTE)
    assert a.tokens.tolist() == b.tokens.tolist()
    assert content_hash(a) != content_hash(b)


# ---- what counts in a batch


def options(*prefixes: Path, **more: Any) -> Data:
    return Data.model_validate({"paths": prefixes, "seq_len": SEQ_LEN, "split": [1, 0, 0], **more})


def loss_masks(train: Dataset, samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, labels and masks of the first samples."""
    shape = dict(global_batch=samples, micro_batch=2, dp_rank=0, dp_size=1)
    batches = list(microbatches(train, 0, **shape))
    assert all(b["loss_mask"].dtype == torch.float32 for b in batches)
    return tuple(
        torch.cat([b[key] for b in batches]).numpy()  # type: ignore[literal-required]
        for key in ("tokens", "labels", "loss_mask")
    )


@pytest.mark.parametrize("eod_mask_loss", [False, True])
@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_completions_count_and_prompts_and_padding_do_not(
    prefix: Path, tmp_path: Path, packing: str, eod_mask_loss: bool
) -> None:
    """The data is a blend whose documents all fit a sample: an eod after an eod is padding."""
    source = write_pairs(tmp_path / "other.jsonl", seed=1)
    preprocess([str(source)], tmp_path / "other", CHAT, workers=1)
    more = {"packing": packing, "loss_mask": "completion", "eod_mask_loss": eod_mask_loss}
    data = options(prefix, tmp_path / "other", **more, reset_attention_mask=True)
    if packing == "best-fit":
        data = data.model_copy(update={"seq_len": 24})
    train = open_datasets(data, BYTE, seed=1).train
    tokens, labels, mask = loss_masks(train, 200)
    after = tokens == BYTE.eod
    expected = learned_by_definition(labels)
    if packing == "best-fit":
        expected &= ~((labels == BYTE.eod) & after)
    if eod_mask_loss:
        expected &= ~after
    assert mask.tolist() == expected.astype(float).tolist()
    assert 0.2 < mask.mean() < 0.9
    if packing == "best-fit":
        assert ((labels == BYTE.eod) & after).any()


def test_all_tokens_count_unless_completions_are_asked_for(prefix: Path) -> None:
    train = open_datasets(options(prefix), BYTE, seed=1).train
    assert loss_masks(train, 20)[2].all()


def test_the_samples_are_those_without_a_mask(prefix: Path) -> None:
    masked = open_datasets(options(prefix, loss_mask="completion"), BYTE, seed=1).train
    plain = open_datasets(options(prefix), BYTE, seed=1).train
    assert all((masked[i] == plain[i]).all() for i in range(100))


def test_a_dataset_without_a_mask_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text('{"text": "a long enough text for one sample"}')
    preprocess([str(source)], tmp_path / "plain", Options(), workers=1)
    with pytest.raises(ValueError, match=r"plain\.mask: no such file; data\.loss_mask=completion"):
        open_datasets(options(tmp_path / "plain", loss_mask="completion"), BYTE, seed=1)


def test_a_dataset_without_its_manifest_is_an_error_that_names_the_manifest(
    prefix: Path, tmp_path: Path
) -> None:
    for suffix in (*SUFFIXES, *MASK_SUFFIXES):
        if suffix != ".json":
            shutil.copy(part(prefix, suffix), tmp_path / f"u{suffix}")
    with pytest.raises(ValueError, match=r"u\.json: no such file; it describes the loss mask"):
        open_datasets(options(tmp_path / "u", loss_mask="completion"), BYTE, seed=1)


def test_text_has_no_loss_mask() -> None:
    with pytest.raises(ConfigError, match="loss_mask=completion needs paths"):
        make_config({"data": {"text": "a.txt", "loss_mask": "completion"}})


# ---- the tool


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["preprocess_data.py", *words])
    return preprocess_data.main()


def test_the_tool_prepares_conversations_and_verifies_their_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_tokenizer(tmp_path / "model", "qwen2.5")
    talk = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "talks.jsonl").write_text((json.dumps(talk) + "\n") * 3)
    monkeypatch.chdir(tmp_path)
    words = ["--chat", "--input", "talks.jsonl", "--output-prefix", "talks", "--tokenizer", spec]
    assert run(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert "talks: 3 documents, " in said and "tokens, of which 6 are learned, (uint16," in said
    assert run(monkeypatch, "--verify", "talks") == 0
    assert "talks: intact, " in capsys.readouterr().out
    _flip(tmp_path / "talks.mask", 3)
    assert run(monkeypatch, "--verify", "talks") == 2
    assert "talks.mask: damaged between bytes 0 and" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--chat"], "--tokenizer byte: chat templates need hf:tokenizer.json"),
        (["--chat", "--chat-template", "none", "--input", "a.txt"], "a.txt: holds no JSON lines"),
        (["--chat-template", "none"], "--chat-template is an option of --chat"),
        (["--chat", "--chat-template", "none"], "pairs.jsonl: at byte 0: no field 'completion'"),
    ],
)
def test_the_tool_refuses_what_it_cannot_mask(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "pairs.jsonl").write_text('{"messages": []}\n')
    monkeypatch.chdir(tmp_path)
    given = [] if "--input" in words else ["--input", "pairs.jsonl"]
    try:
        code = run(monkeypatch, *given, *words, "--output-prefix", "out", "--workers", "1")
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    assert code == 2 and reason in captured.err.splitlines()[-1] and captured.out == ""
    assert not (tmp_path / "out.idx").exists()
