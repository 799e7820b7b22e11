"""What is decided from the devices of several ranks; what is checked before a run starts."""

from __future__ import annotations

import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from coatlm.config import ConfigError, make_config
from coatlm.data.dataset import open_datasets
from coatlm.data.tokenizer import ByteTokenizer
from coatlm.model import decide
from coatlm.model.memory import GIB
from coatlm.train.manifest import step_name
from coatlm.train.phases import check_capability, check_heads, check_splits, earlier_config
from coatlm.train.setup import Launch
from tests.data.test_dataset import write_foreign
from tests.distributed import run_ranks

H100 = "NVIDIA H100 80GB HBM3"


def decide_together(rank: int, size: int, root: str) -> dict[str, Any]:
    """A run on GPUs that differ, and layouts on nodes that differ, as a CPU can pretend them."""
    from coatlm.train import phases, start
    from coatlm.train.step import Trainer

    launch = Launch.from_environment()
    small = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 48}
    config = make_config(
        {
            "run": {"dir": f"{root}/run"},
            "model": small,
            "data": {"text": [f"{root}/text.txt"], "seq_len": 32, "cache_dir": f"{root}/cache"},
            "precision": {"recipe": "coat", "guard": "fallback"},
            "train": {"steps": 1, "micro_batch": 2, "global_batch": 4, "eval_every": 0},
        }
    )
    found: dict[str, Any] = {"decided with": []}
    memories = iter([[64 * GIB, 48 * GIB][rank]] * 9)
    phases.device_memory = lambda *_: (next(memories), "GPU 0")
    phases.device_name = lambda: ["A", "B"][rank]
    chosen, built = start.with_fitting, Trainer.__init__

    def with_fitting(*arguments: Any) -> Any:
        found["decided with"].append(arguments[-1])
        return chosen(*arguments)

    def build(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        found["built with"] = config.train.logits
        built(self, config, *arguments, **options)

    start.with_fitting, Trainer.__init__ = with_fitting, build  # type: ignore[method-assign]
    with ExitStack() as stack:
        loop = start.set_up(config, launch, stack)
        assert loop is not None
        found["used"] = loop.trainer.config.train.logits
        found["saved"] = loop.config.train.logits
        found["guarded by"] = loop.trainer.guard.fits.args[-1]
        nodes = Launch(rank=rank, world_size=size, local_size=[8, 4][rank])
        auto = make_config(config.model_dump(mode="json") | {"parallel": {"layout": "auto"}})
        seen: list[int] = []

        def note(config: Any, vocab: int, **options: Any) -> tuple[Any, str]:
            seen.append(options["per_node"])
            return config, ""

        phases.decide = note
        peers = phases.Peers(rank, ("here", "there"), loop.groups.control)
        phases.decide_layout(auto, 128, nodes, decide.Gpu(H100, 80 * GIB), peers)
        found["per node"] = seen
    return found


def test_ranks_whose_gpus_or_nodes_differ_decide_alike(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(500)))
    first, second = run_ranks(2, f"{__name__}:decide_together", str(tmp_path))
    assert first == second
    assert first == {
        "decided with": [48 * GIB],  # once, by the smallest memory
        "built with": "save",
        "used": "save",
        "saved": "auto",  # another start may have other GPUs
        "guarded by": 48 * GIB,
        "per node": [4],
    }


def test_a_layout_is_not_continued_from_a_state_that_is_no_configuration(tmp_path: Path) -> None:
    config = make_config({"run": {"dir": str(tmp_path)}, "data": {"text": ["-"]}})
    saved = config.model_dump(mode="json")
    for step, tp in ((1, 2), (2, "two"), (3, 0)):
        parallel = saved["parallel"] | {"tp": tp, "layout": "given"}
        state = {"step": step, "tokens": 0, "updates": 0, "skipped": 0, "tokenizer": ""}
        directory = tmp_path / "checkpoints" / step_name(step)
        directory.mkdir(parents=True)
        (directory / "state.json").write_text(
            json.dumps(state | {"config": saved | {"parallel": parallel}})
        )
    found = earlier_config(config, Launch())
    assert found is not None and found["parallel"]["tp"] == 2


def test_an_evaluation_of_more_samples_than_the_validation_split_has_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text("x" * 999)
    data = {
        "text": [f"{tmp_path}/text.txt"],
        "seq_len": 32,
        "cache_dir": f"{tmp_path}/cache",
        "split": [0.8, 0.2, 0.0],
    }
    for batches, said in ((3, False), (4, True)):  # of two samples; 200 tokens make six
        train = {"micro_batch": 2, "global_batch": 2, "eval_batches": batches, "eval_every": 5}
        config = make_config({"data": data, "train": train})
        check_splits(config, open_datasets(config.data, ByteTokenizer(), seed=1))
        expected = "reads 8 samples, but the validation split has 6"
        assert (expected in caplog.text) is said
        caplog.clear()


def test_each_source_of_a_validation_blend_is_counted_for_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = write_foreign(tmp_path / "small", [[1] * 33] * 4)
    large = write_foreign(tmp_path / "large", [[1] * 33] * 400)
    paths = [{"path": str(path), "weight": 1.0} for path in (large, small)]
    data = {"paths": paths, "seq_len": 32, "split": [0.5, 0.5, 0.0]}
    for batches, said in ((2, False), (3, True)):  # of two samples, half of them of two there
        train = {"micro_batch": 2, "global_batch": 2, "eval_batches": batches, "eval_every": 5}
        config = make_config({"data": data, "train": train})
        check_splits(config, open_datasets(config.data, ByteTokenizer(), seed=1))
        expected = "reads 3 samples of source 2, but the validation split has 2"
        assert (expected in caplog.text) is said


@pytest.mark.parametrize(
    ("sections", "ranks", "named"),
    [
        ({}, 1, []),
        ({}, 2, ["parallel.grad_comm=fp8-a2a"]),
        ({"parallel": {"grad_comm": "bf16"}}, 2, []),
        ({"parallel": {"tp": 2}}, 2, []),
        ({"parallel": {"tp": 2}}, 4, ["parallel.grad_comm=fp8-a2a"]),
        ({"parallel": {"main_grads": "fp8"}}, 1, ["parallel.main_grads=fp8"]),
        ({"precision": {"recipe": "coat"}}, 1, ["precision.recipe=coat"]),
        ({"precision": {"recipe": "fp32"}}, 1, []),
        ({"optim": {"recipe": "coat-24"}}, 1, ["optim.recipe=coat-24"]),
        ({"optim": {"recipe": "collage-plus"}}, 1, []),
        (
            {"precision": {"output_layer": "fp8"}, "optim": {"recipe": "fp8lm"}},
            1,
            ["precision.output_layer=fp8", "optim.recipe=fp8lm"],
        ),
    ],
)
def test_a_gpu_without_fp8_is_refused_where_the_run_needs_it(
    sections: dict[str, Any], ranks: int, named: list[str]
) -> None:
    base: dict[str, Any] = {
        "model": {"layers": 1, "hidden": 32, "heads": 2, "ffn": 48, "vocab": 256},
        "data": {"text": ["text.txt"]},
        "precision": {"recipe": "bf16"},
        "train": {"micro_batch": 2, "global_batch": 4},
    }
    config = make_config(base | {name: base.get(name, {}) | s for name, s in sections.items()})
    for capability in ((8, 9), (9, 0), (10, 0)):
        check_capability(config, ranks, "a GPU", capability)
    if named:
        with pytest.raises(ConfigError, match=rf"^{', '.join(named)}: FP8 needs .* A100 has 8\.0;"):
            check_capability(config, ranks, "A100", (8, 0))
    else:
        check_capability(config, ranks, "A100", (8, 0))


@pytest.mark.parametrize(
    ("recipe", "head_dim", "qk_norm", "refused"),
    [
        ("coat", 12, False, True),
        ("fp8-linear", 4, False, True),
        ("coat", 8, False, False),
        ("coat", 12, True, False),
        ("rowwise", 12, False, False),  # its gradients are cast by another kernel
        ("bf16", 12, False, False),
    ],
)
def test_heads_that_a_kernel_does_not_take_are_refused_before_the_first_step(
    recipe: str, head_dim: int, qk_norm: bool, refused: bool
) -> None:
    model = {"hidden": 192, "heads": 16, "head_dim": head_dim, "qk_norm": qk_norm, "ffn": 256}
    config = make_config({"model": model, "precision": {"recipe": recipe}})
    with (
        pytest.raises(ConfigError, match=rf"model.head_dim={head_dim} .*must be a multiple of 8")
        if refused
        else nullcontext()
    ):
        check_heads(config)
