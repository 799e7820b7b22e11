"""States are saved as they are stored, FP8 as FP8; runs continue bit by bit with each recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coatlm.config import Config, make_config
from coatlm.train.checkpoint import tensor_checksums
from coatlm.train.resume import begins_anew
from tests.distributed import run_ranks
from tests.train.test_resume import MODEL, metrics_of, run_config, start_jobs, step_five

pytestmark = pytest.mark.slow

RECIPES = ("adamw-bf16", "kahan", "collage-light", "collage-plus", "fp8lm", "coat", "coat-lean")
ONE_BYTE = "fp8lm, one-byte gradients"
LAYOUT = "tp2 dp2 zero1"
# all rows are multiples of 128, also on two tensor-parallel ranks: no block of 128 ever moves
SIZES = MODEL | {"hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 256, "layers": 2}
TARGETS = {1: "single", 2: "tp2", 4: "pp2 dp2"}


def recipe_config(directory: Path, layout: str, recipe: str, **changes: Any) -> Config:
    return run_config(
        directory,
        layout,
        model=SIZES,
        precision={"recipe": "bf16"},
        optim={"recipe": recipe},
        **changes,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each recipe ten straight steps, and a run resumed from step five of it."""
    root = tmp_path_factory.mktemp("recipes")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(6000)))
    jobs = []
    for recipe in RECIPES:
        jobs.append(recipe_config(root / recipe, LAYOUT, recipe))
        resume = {"resume": step_five(root / recipe)}
        jobs.append(recipe_config(root / f"{recipe} resumed", LAYOUT, recipe, checkpoint=resume))
    grads = {"parallel": {"main_grads": "fp8", "grad_comm": "fp8-a2a"}}
    jobs.append(recipe_config(root / ONE_BYTE, LAYOUT, "fp8lm", **grads))
    resume = {"resume": step_five(root / ONE_BYTE)}
    jobs.append(
        recipe_config(root / f"{ONE_BYTE} resumed", LAYOUT, "fp8lm", checkpoint=resume, **grads)
    )
    start_jobs(4, jobs)
    return root


@pytest.mark.parametrize("recipe", [*RECIPES, ONE_BYTE])
def test_five_steps_and_five_more_equal_ten_bit_by_bit(runs: Path, recipe: str) -> None:
    straight, resumed = runs / recipe, runs / f"{recipe} resumed"
    later = [line for line in metrics_of(straight) if line["step"] > 5]
    assert len(later) == 6 and metrics_of(resumed) == later
    final = Path("checkpoints") / "step_00000010"
    assert tensor_checksums(resumed / final) == tensor_checksums(straight / final)


def test_fp8_stays_fp8(runs: Path) -> None:
    from coatlm.train.checkpoint import read_tensors

    stored = {key: str(t.dtype) for key, t in read_tensors(Path(step_five(runs / "coat-lean")))}
    weight = "decoder.layers.0.mlp.linear_fc2.weight"
    assert stored[f"optimizer.state.exp_avg.{weight}"] == "torch.uint8"
    assert stored[f"optimizer.state.exp_avg.k.{weight}"] == "torch.uint8"
    assert stored[f"optimizer.state.exp_avg.scale.{weight}"] == "torch.float32"
    assert stored[f"optimizer.state.fp32_param.remainder.{weight}"] == "torch.int16"
    assert stored[weight] == "torch.bfloat16"


def reshard(rank: int, size: int, root: str) -> dict[str, dict[str, str]]:
    """Load each recipe's checkpoint on another layout, save it there; checksums of the result."""
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.checkpoint import Checkpointer, load
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    results: dict[str, dict[str, str]] = {}
    for recipe in RECIPES:
        config = recipe_config(Path(root) / "unused", TARGETS[size], recipe)
        groups = make_groups(config.parallel)
        zero = Trainer(config, groups, vocab=384).zero_checkpoint
        load(Path(step_five(Path(root) / recipe)), zero.tensors_to_load(), groups.checkpoint)
        directory = Path(root) / f"{recipe} on {size}" / "checkpoints"
        saver = Checkpointer(directory, keep=1, async_save=False, group=groups.checkpoint)
        saver.save(5, zero.tensors_to_save(), {})
        results[recipe] = tensor_checksums(directory / "step_00000005") if rank == 0 else {}
        release_groups()
    return results


@pytest.mark.parametrize("size", TARGETS)
def test_states_as_stored_move_to_another_layout_unchanged(runs: Path, size: int) -> None:
    found = run_ranks(size, "tests.train.test_resume_recipes:reshard", str(runs))[0]
    for recipe, checksums in found.items():
        assert checksums == tensor_checksums(Path(step_five(runs / recipe))), recipe


def test_losses_of_the_recipes_stay_together(runs: Path) -> None:
    finals = {}
    for recipe in (*RECIPES, ONE_BYTE):
        lines = [json.loads(x) for x in (runs / recipe / "metrics.jsonl").read_text().splitlines()]
        finals[recipe] = [line["loss"] for line in lines if "loss" in line][-1]
    assert finals[ONE_BYTE] != finals["fp8lm"]
    assert max(finals.values()) / min(finals.values()) < 1.02, finals  # ten steps apart little


def test_only_delayed_scales_of_transformer_engine_begin_anew() -> None:
    def reason(recipe: str, spec: str) -> str | None:
        sections = {"precision": {"recipe": recipe}, "model": {"spec": spec}}
        return begins_anew(make_config(sections | {"optim": {"recipe": "adamw-fp32"}}))

    assert "amax histories" in (reason("te-delayed", "te") or "")
    for recipe, spec in (("te-current", "te"), ("bf16", "local"), ("coat", "local")):
        assert reason(recipe, spec) is None
