"""States in the default format of Megatron's distributed optimizer have the bits of the other."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.config import load_config
from coatlm.convert.from_megatron import from_megatron
from coatlm.train.checkpoint import read_state, tensor_checksums
from coatlm.train.shards import StoredTensors
from tests.convert.megatron_writer import STEPS
from tests.convert.test_megatron import save_objects
from tests.distributed import run_ranks
from tests.train.test_resume import metrics_of, start_jobs

TIED = {"bias": False, "norm": True, "tied": True}
SOURCES: dict[str, dict[str, Any]] = {  # what megatron-core trains and writes in one process
    "bf16": {},
    "tied": TIED,
    "fp32": {**TIED, "bf16": False},
}
BUCKETED: dict[str, tuple[str, dict[str, Any]]] = {  # what four processes load from it and write
    "tp2 pp2": ("bf16", {"tp": 2, "pp": 2}),
    "tp2 dp2": ("bf16", {"tp": 2, "bucket": 20_000}),
    "pp2 vpp2 dp2": ("bf16", {"pp": 2, "vpp": 2, "bucket": 20_000}),
    "tied, dp4": ("tied", {**TIED, "bucket": 30_000}),
    "tied, tp2 pp2": ("tied", {**TIED, "tp": 2, "pp": 2}),
    "fp32, pp4": ("fp32", {**TIED, "bf16": False, "pp": 4}),
}
RANK_0 = "optimizer.distributed.dp_group_idx_0"
STEP = f"{RANK_0}.optimizer/shard_0_1"  # the optimizer's groups
STATES = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # -> coatlm's
COMMON = "common_state/shard_0_1"  # in place of common.pt, from megatron-core 0.19 on
BUCKET_0 = ".dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
WRITER = "tests.convert.megatron_writer:run_all"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of megatron-core, and their conversions `NAME converted`."""
    root = tmp_path_factory.mktemp("buckets")
    start = [
        job | {"optimizer": "fully_reshardable", "save": str(root / name)}
        for name, job in SOURCES.items()
    ]
    run_ranks(1, WRITER, start)
    again = [
        job | {"optimizer": "dp_reshardable", "load": str(root / source), "save": str(root / name)}
        for name, (source, job) in BUCKETED.items()
    ]
    run_ranks(4, WRITER, again)
    for name in (*SOURCES, *BUCKETED):
        from_megatron(root / name, root / f"{name} converted", tokenizer="byte")
    return root


def keys_of(stored: StoredTensors) -> list[str]:
    return [key for key in stored.described if key.startswith("optimizer.distributed.")]


def opened(directory: Path) -> StoredTensors:
    return StoredTensors(directory, {path.name for path in directory.glob("*.distcp")})


@pytest.mark.parametrize("name", list(BUCKETED))
def test_states_in_buckets_are_those_of_the_fully_reshardable_format_bit_by_bit(
    root: Path, name: str
) -> None:
    stored = opened(root / name).described
    assert not [key for key in stored if key.startswith("optimizer.state.")]
    expected = tensor_checksums(root / f"{BUCKETED[name][0]} converted")
    assert len([key for key in expected if "exp_avg_sq" in key]) > 20
    assert tensor_checksums(root / f"{name} converted") == expected
    state = read_state(root / f"{name} converted")
    assert (state["step"], state["updates"]) == (STEPS, STEPS)


@pytest.mark.parametrize("name", [name for name, (_, job) in BUCKETED.items() if "bucket" in job])
def test_small_buckets_are_several_per_rank(root: Path, name: str) -> None:
    numbers = {re.sub(r".*bucket_idx_(\d+).*", r"\1", key) for key in keys_of(opened(root / name))}
    assert len(numbers) > 1


def test_fp32_weights_without_states_come_from_the_buckets(root: Path, tmp_path: Path) -> None:
    from_megatron(
        root / "tp2 pp2", tmp_path / "new", tokenizer="byte", dtype="fp32", weights_only=True
    )
    found, whole = StoredTensors(tmp_path / "new"), StoredTensors(root / "bf16 converted")
    for key in found.described:
        assert torch.equal(found.read(key), whole.read(f"optimizer.state.fp32_param.{key}"))


def test_a_run_continues_from_states_in_buckets(root: Path) -> None:
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(3000)))
    overrides = [f"run.dir={root}/run", f"data.text={root}/text.txt", "train.eval_every=0"]
    overrides += [f"data.cache_dir={root}/cache", "log.every=1", "train.steps=5"]
    start_jobs(1, [load_config(root / "tp2 pp2 converted/config.yaml", overrides)])
    assert [line["step"] for line in metrics_of(root / "run")] == [4, 5]
    assert read_state(root / "run/checkpoints/step_00000005")["updates"] == STEPS + 2


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint of megatron-core whose tensors and objects are changed."""
    stored = opened(source)
    content: dict[str, Any] = {key: stored.read(key) for key in stored.described}
    for key in (STEP, COMMON):
        if (value := stored.read_object(key)) is not None:
            content[key] = torch.load(io.BytesIO(value), weights_only=False)
    change(content)
    target.mkdir()
    save_objects(content, target)
    for name in ("metadata.json", "common.pt"):
        if (source / name).is_file():
            shutil.copy(source / name, target)
    return target


def note_of(source: Path, target: Path) -> str:
    """The note about optimizer states of a conversion."""
    report = from_megatron(source, target, tokenizer="byte")
    return next(note for note in report.notes if "optimizer states" in note)


def spoil(content: dict[str, Any], key: str, index: int) -> None:
    content[key][index] *= 1.1


@pytest.mark.parametrize("rank", [0, 3])
def test_one_fp32_weight_that_does_not_round_to_its_weight_leaves_only_the_weights(
    root: Path, tmp_path: Path, rank: int
) -> None:
    key = f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0{BUCKET_0}.param"
    same = rewritten(root / "tp2 pp2", tmp_path / "same", lambda content: None)
    assert note_of(same, tmp_path / "whole").startswith(f"optimizer states of {STEPS} steps")
    source = rewritten(root / "tp2 pp2", tmp_path / "new", lambda c: spoil(c, key, 5000))
    assert note_of(source, tmp_path / "converted") == (
        "weights only: no optimizer states were taken over (in flat buckets for which no layout, "
        "or more than one, has fp32 weights that round to the weights)"
    )
    expected = tensor_checksums(root / "bf16 converted")
    weights = {key: value for key, value in expected.items() if not key.startswith("optimizer.")}
    assert tensor_checksums(tmp_path / "converted") == weights
    assert read_state(tmp_path / "converted")["step"] == 0


def drop_step(content: dict[str, Any]) -> None:
    del content[STEP]


def shorten(content: dict[str, Any]) -> None:
    key = f"optimizer.distributed.dp_group_idx_1.gbuf_idx_0{BUCKET_0}.exp_avg"
    content[key] = content[key][:-64]


def round_moments(content: dict[str, Any]) -> None:
    for key in content:
        if key.endswith("exp_avg_sq"):
            content[key] = content[key].bfloat16()


def drop_rank(content: dict[str, Any]) -> None:
    for key in [key for key in content if "dp_group_idx_2." in key]:
        del content[key]


def double_weights(content: dict[str, Any]) -> None:
    content["decoder.final_layernorm.weight"] *= 2


@pytest.mark.parametrize(
    "change",
    [drop_step, shorten, round_moments, drop_rank, double_weights],
    ids=lambda c: c.__name__,
)
def test_states_that_are_incomplete_or_of_other_weights_leave_only_the_weights(
    root: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    source = rewritten(root / "tp2 pp2", tmp_path / "new", change)
    note = note_of(source, tmp_path / "converted")
    assert note.startswith("weights only: no optimizer states were taken over (in flat buckets")
    assert ("number of steps" in note) == (change is drop_step)


TE_LAYER = (  # the order in which TransformerEngine's layers register their parameters
    *("self_attention.linear_proj.weight", "self_attention.linear_qkv.layer_norm_weight"),
    *("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"),
    *("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
)
TE_ORDER = [
    "embedding.word_embeddings.weight",
    *(f"decoder.layers.{layer}.{name}" for layer in range(4) for name in TE_LAYER),
    *("decoder.final_layernorm.weight", "output_layer.weight"),
]


def flat(tensors: list[Tensor]) -> Tensor:
    """Tensors from the last to the first, each from a multiple of 64 on, with gaps of NaN."""
    bucket = torch.empty(0)
    for tensor in reversed(tensors):
        gap = torch.full((-len(bucket) % 64,), torch.nan)
        bucket = torch.cat([bucket, gap, tensor.flatten()])
    return bucket


def in_te_order(root: Path, target: Path, *, ones: bool = False) -> Path:
    """`bf16` as a layer of TransformerEngine would store it; `ones`: all weights are 1."""
    source = StoredTensors(root / "bf16 converted")

    def replace(content: dict[str, Any]) -> None:
        for key in [key for key in content if key.startswith("optimizer.")]:
            del content[key]
        for name, state in STATES.items():
            tensors = [source.read(f"optimizer.state.{state}.{key}") for key in TE_ORDER]
            if ones and name == "param":
                tensors = [torch.ones_like(tensor) for tensor in tensors]
            content[f"{RANK_0}.gbuf_idx_0{BUCKET_0}.{name}"] = flat(tensors)
        for key in TE_ORDER if ones else []:
            content[key] = torch.ones_like(content[key])
        content[STEP] = [{"param_groups": [{"step": STEPS}, {"step": STEPS}]}]

    return rewritten(root / "bf16", target, replace)


def test_layers_of_transformer_engine_are_found_in_their_own_order(
    root: Path, tmp_path: Path
) -> None:
    source = in_te_order(root, tmp_path / "source")
    assert note_of(source, tmp_path / "new").startswith(f"optimizer states of {STEPS} steps")
    assert tensor_checksums(tmp_path / "new") == tensor_checksums(root / "bf16 converted")


def test_weights_that_fit_in_several_orders_leave_only_the_weights(
    root: Path, tmp_path: Path
) -> None:
    source = in_te_order(root, tmp_path / "source", ones=True)
    assert note_of(source, tmp_path / "new").startswith("weights only")
