"""A layer that fell back to BF16 is a BF16 layer, and stays one over checkpoints and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coatlm.config import Config, make_config
from coatlm.config.recipes import ATTENTION
from coatlm.train.guard import Finding
from coatlm.train.state import read_run_state
from tests.distributed import run_ranks
from tests.parallel.test_parity import batches
from tests.train.test_numerics_log import by_tensor, numerics_config
from tests.train.test_resume import LAYOUTS, metrics_of, train_all

pytestmark = pytest.mark.slow

RELATIVE = 5e-4  # of losses on two layouts: sums of BF16 in another order, as in test_fp8_parity
TURNS = ("fp8", "bf16", "bf16", "fp8", "bf16")  # what all layers compute in, step by step
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed": {"precision": {"scaling": "delayed"}},
    "saved FP8 weights": {"precision": {"keep_weights": True}},
    "recompute": {"train": {"recompute": "full"}},
    "selective": {"train": {"recompute": "selective"}},
    "qwen": {"model": {"qkv_bias": True, "qk_norm": True}},
    "bf16 gradients": {"parallel": {"main_grads": "bf16"}},
    "lean": {"precision": {"recipe": "coat-lean"}},
}
NAMED: dict[str, dict[str, Any]] = {  # runs with single saved tensors of attention in BF16
    name: {"precision": {"recipe": recipe, "bf16_operands": [f"saved.{x}" for x in names]}}
    for name, recipe, names in (
        *((x, "coat-lean", x) for x in ATTENTION),
        ("none", "coat-lean", ""),
        ("all", "coat-lean", "qkvo"),
        ("coat", "coat", ""),
    )
}
NAMED |= {
    f"{name}, recompute": NAMED[name] | {"train": {"recompute": "full"}} for name in ATTENTION
}
CASES: dict[int, dict[str, tuple[dict[str, Any], str]]] = {
    1: {name: ({}, name) for name in VARIANTS},
    2: {
        "tp2": ({"tp": 2}, "plain"),
        "tp2 sp": ({"tp": 2, "sequence_parallel": True}, "delayed"),
        "pp2 vpp2": ({"pp": 2, "vpp": 2}, "recompute"),
        "dp2 zero2": ({"zero": 2}, "plain"),
        "cp2": ({"cp": 2}, "lean"),
    },
}


def case(parallel: dict[str, Any], variant: str, recipe: str | None) -> Config:
    """A run of two microbatches per step; `recipe=None`: that of the variant."""
    extra = (VARIANTS | NAMED)[variant]
    precision = {"recipe": "coat"} | extra.get("precision", {})
    return make_config(
        {
            "model": {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96}
            | extra.get("model", {}),
            "data": {"text": ["unused"], "seq_len": 32},
            "parallel": {"bucket_size": 20000, "grad_comm": "fp32"}
            | parallel
            | extra.get("parallel", {}),
            "precision": precision if recipe is None else {"recipe": recipe},
            "train": {"micro_batch": 2, "global_batch": 8} | extra.get("train", {}),
        }
    )


def curve(config: Config, ways: Sequence[str], rate: float) -> list[tuple[float, float]]:
    """Losses and gradient norms of steps whose layers compute in what `ways` says."""
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.step import Trainer

    groups, found = make_groups(config.parallel), []
    trainer = Trainer(config, groups, vocab=128)
    for number, way in enumerate(ways):
        trainer.change_layers(range(1, 5) if way == "bf16" else ())
        placed = trainer.place(batches(config, groups, number))
        loss, norm = trainer.train_step(placed, rate)
        found.append((float(loss), float(norm)))
    del trainer, groups  # they hold the groups' threads
    release_groups()
    return found


def steps(
    rank: int, size: int, cases: dict[str, tuple[dict[str, Any], str]]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Losses and gradient norms of steps with BF16 layers, and with FP8 layers that fell back.

    In `still` runs the learning rate is 0, so that steps do not depend on those before. Two ranks
    also take two steps of each of NAMED, under tensor parallelism.
    """
    from coatlm.train.setup import Launch, start_processes

    start_processes(Launch.from_environment())
    runs = {
        "bf16": ("bf16", ("bf16",) * 3, 1e-3),
        "fallen": (None, ("bf16",) * 3, 1e-3),
        "bf16, still": ("bf16", TURNS, 0.0),
        "turns, still": (None, TURNS, 0.0),
    }
    found: dict[str, Any] = {}
    for name, (parallel, variant) in cases.items():
        found[name] = {
            run: curve(case(parallel, variant, recipe), ways, rate)
            for run, (recipe, ways, rate) in runs.items()
        }
    if size == 2:
        tp2 = {"tp": 2, "sequence_parallel": True}
        found["named"] = {name: curve(case(tp2, name, None), ("fp8",) * 2, 1e-3) for name in NAMED}
    return found


@pytest.fixture(scope="module")
def stepped() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size, cases in CASES.items():
        found |= run_ranks(size, "tests.train.test_fallback:steps", cases)[0]
    return found


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_layers_that_fell_back_train_as_those_of_the_recipe_bf16_bit_by_bit(
    stepped: dict[str, Any], name: str
) -> None:
    assert stepped[name]["fallen"] == stepped[name]["bf16"]


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_no_step_depends_on_what_the_layers_computed_in_before(
    stepped: dict[str, Any], name: str
) -> None:
    """FP8 steps leave gradients behind that their own wgrad GEMMs would overwrite."""
    pairs = zip(stepped[name]["turns, still"], stepped[name]["bf16, still"], strict=True)
    assert [a == b for a, b in pairs] == [way == "bf16" for way in TURNS]


@pytest.mark.parametrize("name", ATTENTION)
def test_one_saved_tensor_in_bf16_changes_only_gradients_with_and_without_recomputation(
    stepped: dict[str, Any], name: str
) -> None:
    found = stepped["named"]
    (loss, norm), (before, norm_before) = found[name][0], found["none"][0]
    assert loss == before and norm != norm_before
    assert found[f"{name}, recompute"] == found[name]
    others = [found[other][0][1] for other in ATTENTION if other != name]
    assert norm not in others  # each is another tensor


def test_under_tensor_parallelism_all_names_together_are_coat_bit_by_bit(
    stepped: dict[str, Any],
) -> None:
    assert stepped["named"]["all"] == stepped["named"]["coat"] != stepped["named"]["none"]


# checkpoints


def hurt(records: Any, limits: Any) -> Iterator[Finding]:
    """FP8 hurts layer 2 from the start, and layer 3 once that of layer 2 has fallen back."""
    measured = {record["layer"] for record in records if record["tensor"] == "fc2_input"}
    if measured:
        yield Finding(2 if 2 in measured else 3, "fc2_input", "underflow", 0.5, 0.1)


def train_hurt(rank: int, size: int, jobs: list[dict[str, Any]]) -> None:
    from coatlm.train import guard

    guard.find = hurt
    train_all(rank, size, jobs)


def guarded(
    directory: Path, layout: str, *, saves: int = 7, steps: int = 10, **changes: Any
) -> Config:
    """Measurements at steps 2, 4, 6, 8; a checkpoint, at step 7 between the two of layer 3."""
    precision = {"recipe": "coat", "guard": "fallback", "guard_every": 2}
    sections: dict[str, Any] = {
        "precision": precision | changes.pop("precision", {}),
        "train": {"steps": steps, "eval_every": steps},
        "checkpoint": {"every": saves} | changes.pop("checkpoint", {}),
    }
    return numerics_config(directory, layout, **sections, **changes)


LONG = 4 + 16 + 1  # steps: after the 16th in BF16 the history of layer 2 has zeros only
RESUMED = ("tp2", "tp2 sp", "pp2", "pp2 vpp2", "dp2 zero1", "cp2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fallback")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(6000)))

    def at(name: str, step: int = 7) -> dict[str, Any]:
        return {"resume": str(root / name / "checkpoints" / f"step_{step:08}")}

    jobs: dict[int, list[Config]] = {1: [], 2: []}
    for name, precision in (("single", {}), ("delayed", {"scaling": "delayed"})):
        jobs[1].append(guarded(root / name, "single", precision=precision))
        again = {"precision": precision, "checkpoint": at(name)}
        jobs[1].append(guarded(root / f"{name} resumed", "single", **again))
    scaling = {"scaling": "delayed"}
    for name, checkpoint in (("long", {}), ("long resumed", at("long", LONG))):
        lengths = {"saves": LONG, "steps": LONG + 2}
        changes = {"precision": scaling, "checkpoint": checkpoint}
        jobs[1].append(guarded(root / name, "single", **lengths, **changes))
    operand = {"guard": "operand", "scaling": "delayed"}
    jobs[1].append(guarded(root / "operand", "single", precision=operand))
    again = {"precision": operand, "checkpoint": at("operand")}
    jobs[1].append(guarded(root / "operand resumed", "single", **again))
    for layout in ("tp2 sp", "pp2"):
        jobs[2].append(guarded(root / f"operand to {layout}", layout, **again))
    off = {"guard": "off", "guard_every": 500}
    jobs[1].append(guarded(root / "off", "single", precision=off, checkpoint=at("delayed")))
    for layout in RESUMED:
        resumed = root / f"single to {layout}"
        jobs[2].append(guarded(resumed, layout, checkpoint=at("single")))
    for size, configs in jobs.items():
        dumped = [config.model_dump(mode="json") for config in configs]
        run_ranks(size, "tests.train.test_fallback:train_hurt", dumped)
    return root


def lines_of(directory: Path, after: int = 0) -> list[dict[str, Any]]:
    return [line for line in metrics_of(directory) if line["step"] > after]


def test_layers_fall_back_at_the_second_measurement_and_are_counted(runs: Path) -> None:
    lines = [line for line in lines_of(runs / "single") if "loss" in line]
    assert [line["guard_bf16_layers"] for line in lines] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    found = [line for line in lines_of(runs / "single") if "action" in line]
    assert [(line["step"], line["layer"], line["action"]) for line in found] == [
        *((4, 2, "bf16"), (8, 3, "bf16")),
    ]
    assert "FP8 hurts layer 2, fc2_input" in (runs / "single" / "train.log").read_text()


def test_a_layer_that_fell_back_has_only_its_residual_stream_in_numerics(runs: Path) -> None:
    for step, fallen in ((4, set()), (6, {2}), (10, {2, 3})):
        lines = by_tensor(runs / "single", step)
        assert {layer for layer, tensor in lines if tensor == "residual"} == {1, 2, 3, 4}
        assert {1, 2, 3, 4} - {layer for layer, t in lines if t != "residual"} == fallen


def test_a_layer_in_bf16_without_a_history_does_not_make_the_others_calibrate(runs: Path) -> None:
    amaxes = read_run_state(runs / "long" / "checkpoints" / f"step_{LONG:08}")["gradient_amaxes"]
    assert [layer for layer in amaxes if not any(map(any, amaxes[layer].values()))] == ["2"]
    assert lines_of(runs / "long resumed") == lines_of(runs / "long", after=LONG)


@pytest.mark.parametrize("name", ["single", "delayed"])
def test_a_run_with_layers_that_fell_back_resumes_bit_by_bit(runs: Path, name: str) -> None:
    from coatlm.train.checkpoint import tensor_checksums

    state = read_run_state(runs / name / "checkpoints" / "step_00000007")
    assert state["guard"]["in_bf16"] == [2] and state["guard"]["suspected"] == ["3/fc2_input"]
    straight, resumed = runs / name, runs / f"{name} resumed"
    assert lines_of(resumed) == lines_of(straight, after=7)
    final = Path("checkpoints") / "step_00000010"
    assert tensor_checksums(resumed / final) == tensor_checksums(straight / final)


@pytest.mark.parametrize("layout", RESUMED)
def test_another_layout_continues_with_the_same_layers_in_bf16(runs: Path, layout: str) -> None:
    assert LAYOUTS[layout][0] == 2
    expected = {line["step"]: line for line in lines_of(runs / "single") if "loss" in line}
    lines = [line for line in lines_of(runs / f"single to {layout}") if "loss" in line]
    assert [line["guard_bf16_layers"] for line in lines] == [2, 2, 2]
    for line in lines:
        assert line["loss"] == pytest.approx(expected[line["step"]]["loss"], rel=RELATIVE)
    fallen = {2, 3} & {
        layer for layer, t in by_tensor(runs / f"single to {layout}", 10) if t != "residual"
    }
    assert not fallen


def test_a_run_with_an_operand_that_fell_back_resumes_bit_by_bit(runs: Path) -> None:
    from coatlm.train.checkpoint import tensor_checksums

    state = read_run_state(runs / "operand" / "checkpoints" / "step_00000007")
    assert state["guard"]["tensors"] == ["2/fc2_input"] and state["guard"]["in_bf16"] == []
    straight, resumed = runs / "operand", runs / "operand resumed"
    assert lines_of(resumed) == lines_of(straight, after=7)
    final = Path("checkpoints") / "step_00000010"
    assert tensor_checksums(resumed / final) == tensor_checksums(straight / final)
    lines = [line for line in lines_of(straight) if "loss" in line]
    assert [line["guard_bf16_tensors"] for line in lines] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert {line["guard_bf16_layers"] for line in lines} == {0}
    found = [line for line in lines_of(straight) if "action" in line]
    assert [(line["step"], line["layer"], line["action"]) for line in found] == [
        *((4, 2, "operand"), (8, 3, "operand")),
    ]
    # the FP8 run to which delayed scaling adds nothing but its scales is equal until step 4
    delayed = [line["loss"] for line in lines_of(runs / "delayed") if "loss" in line]
    assert [line["loss"] == loss for line, loss in zip(lines, delayed, strict=True)] == [
        number <= 4 for number in range(1, 11)
    ]


def test_the_operand_that_fell_back_is_no_more_measured_and_others_are(runs: Path) -> None:
    usual = {tensor for layer, tensor in by_tensor(runs / "operand", 10) if layer == 1}
    for step, fallen in ((4, set()), (6, {2}), (10, {2, 3})):
        for layer in (2, 3):
            found = {tensor for at, tensor in by_tensor(runs / "operand", step) if at == layer}
            assert usual - found == ({"fc2_input"} if layer in fallen else set())


def test_another_layout_has_the_same_operand_in_bf16_or_its_layer(runs: Path) -> None:
    expected = {line["step"]: line for line in lines_of(runs / "operand") if "loss" in line}
    counts = {}
    for layout in ("tp2 sp", "pp2"):
        lines = [line for line in lines_of(runs / f"operand to {layout}") if "loss" in line]
        names = ("guard_bf16_layers", "guard_bf16_tensors")
        counts[layout] = [[line[name] for line in lines] for name in names]
        if layout == "pp2":
            for line in lines:
                at = expected[line["step"]]["loss"]
                assert line["loss"] == pytest.approx(at, rel=RELATIVE)
    assert counts == {"tp2 sp": [[2, 2, 2], [0, 0, 0]], "pp2": [[0, 0, 0], [2, 2, 2]]}
    log = (runs / "operand to tp2 sp" / "train.log").read_text()
    (whole,) = [line for line in log.splitlines() if "compute in BF16 as a whole" in line]
    assert "parallel.tp=2" in whole and whole.endswith(": 2")


def test_with_the_guard_off_the_layers_compute_in_fp8_again_and_a_line_says_so(runs: Path) -> None:
    log = (runs / "off" / "train.log").read_text()
    assert "compute in FP8 again with precision.guard=off: 2" in log
    tensors = by_tensor(runs / "off", 10)
    assert {layer for layer, t in tensors if t not in ("residual", "lse")} == {1, 2, 3, 4}
    (last,) = [line for line in lines_of(runs / "off", after=9) if "loss" in line]
    assert "guard_bf16_layers" not in last
