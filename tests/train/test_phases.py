"""What is decided from the devices of several ranks; what is checked before a run starts."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from coatlm import remote
from coatlm.config import ConfigError, make_config
from coatlm.data.dataset import open_datasets
from coatlm.data.tokenizer import ByteTokenizer
from coatlm.model import decide
from coatlm.model.memory import GIB
from coatlm.train.checkpoint import Checkpointer
from coatlm.train.manifest import step_name
from coatlm.train.phases import (
    Peers,
    begun_by,
    check_capability,
    check_heads,
    check_splits,
    earlier_config,
    upload_again,
    write_description,
)
from coatlm.train.resume import Origin
from coatlm.train.setup import Launch
from tests.data.test_dataset import write_foreign
from tests.distributed import run_ranks
from tests.train.layouts import pieces_of, tensors_of

ALONE = Peers(0, ("here",), None)  # type: ignore[arg-type]
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
    found = earlier_config(config, Launch(), ALONE)
    assert found is not None and found["parallel"]["tp"] == 2


def test_what_is_not_given_is_that_of_the_checkpoint_to_which_a_run_goes_back(
    tmp_path: Path,
) -> None:
    for step, masked in ((1, True), (2, False)):
        given = {"text": ["-"], "reset_attention_mask": masked}
        saved = make_config({"run": {"dir": str(tmp_path)}, "data": given})
        directory = tmp_path / "checkpoints" / step_name(step)
        directory.mkdir(parents=True)
        state = {"step": step, "tokens": 0, "updates": 0, "skipped": 0, "tokenizer": ""}
        saved_as = state | {"config": saved.model_dump(mode="json")}
        (directory / "state.json").write_text(json.dumps(saved_as))
        for resume, mask in (
            ("auto", masked),
            (str(tmp_path / "checkpoints" / step_name(1)), True),
        ):
            config = make_config(
                {
                    "run": {"dir": str(tmp_path)},
                    "data": {"text": ["-"]},
                    "checkpoint": {"resume": resume},
                }
            )
            found = earlier_config(config, Launch(), ALONE)
            assert found is not None and found["data"]["reset_attention_mask"] is mask


def saved(run: Path, **data: Any) -> None:
    """A checkpoint of step 1 in a run directory, as far as its configuration is concerned."""
    config = make_config({"run": {"dir": str(run)}, "data": {"text": ["-"], **data}})
    state = {"step": 1, "tokens": 0, "updates": 0, "skipped": 0, "tokenizer": ""}
    state["config"] = config.model_dump(mode="json")
    (run / "checkpoints" / step_name(1)).mkdir(parents=True, exist_ok=True)
    (run / "checkpoints" / step_name(1) / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("written", "restarted", "begun"),
    [
        ("42017 seven", ("seven",), True),
        ("42017 seven", ("42017",), True),
        ("42017", ("42017",), True),  # of an older version
        ("42017 seven", ("eight",), False),
        ("42017 seven", ("2017",), False),
        ("42017 seven", (), False),
        ("none", ("here:5:83002",), False),  # of an older version, which did not tell them apart
        (None, ("seven",), False),
    ],
)
def test_a_start_that_replaces_a_run_inherits_from_its_own_launch_alone(
    written: str | None, restarted: tuple[str, ...], begun: bool, tmp_path: Path
) -> None:
    saved(tmp_path, reset_attention_mask=False)
    (tmp_path / "env.json").write_text(json.dumps({"job": written}))
    none = {"checkpoint": {"resume": "none"}, "data": {"text": ["-"]}}
    config = make_config({"run": {"dir": str(tmp_path)}, **none})
    launch = Launch(job=("42017", "eight"), restarted=restarted)
    assert begun_by(config, launch, ALONE) is begun
    assert (earlier_config(config, launch, ALONE) is not None) is begun


def test_a_launch_recognizes_what_it_has_written(tmp_path: Path) -> None:
    config = make_config({"run": {"dir": str(tmp_path)}, "data": {"text": ["-"]}})
    first = Launch(job=("42017", "here:5:83002"))
    write_description(config, first, Origin(None))
    for name in first.job:
        assert begun_by(config, Launch(job=first.job, restarted=(name,)), ALONE)
    assert not begun_by(config, Launch(restarted=("here:5:83003",)), ALONE)


def begun_on_both(rank: int, size: int, root: str) -> bool:
    """A restart for rank 1, by the launcher that had rank 0 before; rank 0's node has joined."""
    from coatlm.train.setup import start_processes

    start_processes(Launch.from_environment())
    group: Any = torch.distributed.new_group(backend="gloo")
    launch = Launch(rank, size, job=("new",), restarted=(("old",) if rank else ()))
    config = make_config({"run": {"dir": root}, "data": {"text": ["-"]}})
    return begun_by(config, launch, Peers(rank, ("here", "there"), group))


def test_a_launch_is_recognized_by_any_of_its_nodes(tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text(json.dumps({"job": "old"}))
    assert run_ranks(2, f"{__name__}:begun_on_both", str(tmp_path)) == [True, True]


def upload_on_both(rank: int, size: int, root: str) -> None:
    """Upload the checkpoint of a finished run, twice."""
    from coatlm.train.run_directory import start_logging
    from coatlm.train.setup import start_processes

    start_processes(Launch.from_environment())
    peers = Peers(rank, ("here", "there"), torch.distributed.new_group(backend="gloo"))
    start_logging(Path(root) / "run", rank)
    for _ in range(2):
        upload_again(f"file://{root}/url", Path(root) / step_name(4), peers)


@pytest.mark.parametrize("there", [None, "cut off", "older"])
def test_the_last_checkpoint_of_a_finished_run_is_uploaded_if_it_is_missing(
    there: str | None, tmp_path: Path
) -> None:
    """Once, whether the upload was cut off, or another checkpoint of that step is there."""
    saver = Checkpointer(tmp_path, keep=1, async_save=False)
    saver.save(4, pieces_of(tensors_of(1), "copies"), {"step": 4})
    mine = {path.name: path.read_bytes() for path in (tmp_path / step_name(4)).iterdir()}
    target = tmp_path / "url" / step_name(4)
    if there is not None:
        shutil.copytree(tmp_path / step_name(4), target)
        older = mine["manifest.json"].replace(b'"serial": 1', b'"serial": 0')
        assert older != mine["manifest.json"]
        (target / "manifest.json").write_bytes(older)
    if there == "cut off":
        (target / "manifest.json").unlink()
    run_ranks(2, f"{__name__}:upload_on_both", str(tmp_path))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == mine
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count(f"url/{step_name(4)} is missing: uploading") == 1
    assert log.count("INFO uploaded file://") == 1


def test_an_upload_that_fails_again_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Checkpointer(tmp_path, keep=1, async_save=False)
    saver.save(4, pieces_of(tensors_of(1), "copies"), {"step": 4})
    monkeypatch.setattr(remote, "PAUSES", ())
    (tmp_path / "url").write_text("a file, in which there can be no objects")
    upload_again(f"file://{tmp_path}/url", tmp_path / step_name(4), ALONE)
    assert f"url/{step_name(4)} was not uploaded: " in caplog.text


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
    ("precision", "named"),
    [
        ({"recipe": "coat-int8"}, "precision.recipe=coat-int8"),
        ({"recipe": "bf16", "output_layer": "int8"}, "precision.output_layer=int8"),
        (
            {"recipe": "coat-lean-int8", "output_layer": "int8"},
            "precision.recipe=coat-lean-int8, precision.output_layer=int8",
        ),
    ],
)
def test_int8_is_refused_on_gpus_that_are_not_of_hopper(
    precision: dict[str, str], named: str
) -> None:
    config = make_config({"data": {"text": ["text.txt"]}, "precision": precision})
    check_capability(config, 1, "H100", (9, 0))
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        have = ".".join(map(str, capability))
        match = rf"^{named}: GEMMs of INT8 need .* 9\.0, and a GPU has {have};"
        with pytest.raises(ConfigError, match=match):
            check_capability(config, 1, "a GPU", capability)


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
