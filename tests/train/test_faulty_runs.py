"""Real runs on two ranks: bad batches are skipped, rolled back from and left out; a slow rank."""

from __future__ import annotations

import functools
import json
import platform
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from coatlm.config import make_config
from coatlm.train.stragglers import PhaseTimer
from tests.distributed import run_ranks
from tests.train.clocks import LOOK_S, Clock

pytestmark = pytest.mark.slow

STEPS, EVERY = 20, 5
NAN = [11, 12, 13]  # batches: the steps 12, 13 and 14
LEFT_OUT = [10, 14]  # from the checkpoint of step 10 on, to the batch after the last bad one
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {  # sections in which rollbacks are tried too
    "zero2": {"parallel": {"zero": 2}},
    "zero2 in bf16": {"parallel": {"zero": 2, "main_grads": "bf16", "grad_comm": "bf16"}},
    "fp8-nccl": {"parallel": {"grad_comm": "fp8-nccl", "grad_comm_scaling": "delayed"}},
    "fp8-nccl zero2": {"parallel": {"grad_comm": "fp8-nccl", "zero": 2}},
    "fp8-a2a whole-tensor": {"parallel": {"grad_comm": "fp8-a2a", "partition": "whole-tensor"}},
    "coat": {
        "parallel": {"weight_gather": "fp8", "zero": 2},
        "precision": {"recipe": "coat"},
        "optim": {"recipe": "coat-lean"},
    },
}
CASES: dict[str, dict[str, Any]] = {  # train options, bad batches, ...
    "rolled back": {"nan": NAN, "train": {"rollbacks": 1}},
    "logged seldom": {"nan": NAN, "train": {"rollbacks": 1}, "log": {"every": 20}},
    "without them": {"shift": LEFT_OUT},
    # the two newest checkpoints are of skipped steps when the run goes back
    "kept two": {"nan": NAN, "train": {"rollbacks": 1}, "checkpoint": {"every": 1, "keep": 2}},
    "resumed later": {"nan": NAN, "train": {"rollbacks": 1}, "resume": ("rolled back", 15)},
    "one too many": {"nan": [*NAN, 16, 17, 18], "train": {"rollbacks": 1}},
    "twice": {"nan": [*NAN, 16, 17, 18], "train": {"rollbacks": 2}},
    "spike": {"odd": [13], "train": {"spike_sigma": 6.0, "spike_window": 6}},
    "spike resumed": {
        "odd": [13],
        "train": {"spike_sigma": 6.0, "spike_window": 6},
        "resume": ("spike", 10),
    },
    "slow": {"slow": True, "log": {"every": 5}},
    "nan there": {"nan": [13], "train": {"spike_sigma": 6.0, "spike_window": 6}},
}
SPIKES = {"spike_sigma": 6.0, "spike_window": 6}
DELAYED: dict[str, dict[str, Any]] = {
    "parallel": {"grad_comm": "fp8-nccl", "grad_comm_scaling": "delayed"},
    "precision": {"recipe": "coat", "scaling": "delayed"},
    "checkpoint": {"every": 1, "keep": 30},
}
CASES["delayed"] = {"odd": [13], "train": SPIKES} | DELAYED
CASES["delayed, another batch"] = DELAYED | {
    "train": {"global_batch": 32},
    "resume": ("delayed", 15),
}
CASES["rolled back again"] = {  # a run that begins from a checkpoint of another one
    "nan": [20, 21, 22],
    "train": {"rollbacks": 1},
    "checkpoint": {"every": 1, "keep": 30},
    "resume": ("rolled back", 15),
}
CASES["slow at first"] = {"slow": "at first", "log": {"every": 5}, "resume": ("slow", 5)}
for layout, sections in LAYOUTS.items():
    CASES[f"{layout}, rolled back"] = CASES["rolled back"] | sections
    CASES[f"{layout}, without them"] = CASES["without them"] | sections


def config(root: Path, name: str) -> Any:
    case = CASES[name]
    resume = "auto"
    if "resume" in case:
        other, step = case["resume"]
        resume = str(root / other / "checkpoints" / f"step_{step:08d}")
    return make_config(
        {
            "run": {"dir": str(root / name)},
            "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96},
            "data": {
                "text": [str(root / "text.txt")],
                "seq_len": 32,
                "cache_dir": str(root / "cache"),
                "workers": 1,
            },
            "parallel": {"bucket_size": 10000, **case.get("parallel", {})},
            "precision": {"recipe": "fp32", **case.get("precision", {})},
            "optim": {"lr": 1e-2, "warmup_steps": 2, **case.get("optim", {})},
            "train": {
                "steps": STEPS,
                "micro_batch": 4,
                "global_batch": 16,
                "eval_every": 0,
                "max_skipped": 3,
                **case.get("train", {}),
            },
            "checkpoint": {
                "every": EVERY,
                "keep": 10,
                "resume": resume,
                **case.get("checkpoint", {}),
            },
            "log": {"every": 1, **case.get("log", {})},
        }
    )


class Shifted:
    """A dataset without the samples of some global batches."""

    remote = False

    def __init__(self, dataset: Any, first: int, stop: int, size: int) -> None:
        self.dataset, self.first, self.more = dataset, first * size, (stop - first) * size
        self.eod, self.reset_attention_mask = dataset.eod, dataset.reset_attention_mask
        self.eod_mask_loss = dataset.eod_mask_loss

    def __getitem__(self, sample: int) -> Any:
        return self.dataset[sample + (self.more if sample >= self.first else 0)]

    def counted(self, sample: int) -> None:
        """All tokens count."""


def spoil(session: Any, case: dict[str, Any]) -> None:
    """Make batches bad: a NaN in the loss, labels that no text has, or (all or the first of a
    start) 300 ms late on rank 1."""
    place, clock, first = session.trainer.place, Clock(), session.run.step
    if "slow" in case:
        session.trainer.timer = PhaseTimer(clock=clock)

    def spoilt(batches: Any) -> Any:
        placed = place(batches)
        late = case.get("slow") is True or session.run.step == first
        if session.groups.world.rank() == 1 and late:
            clock.seconds += 0.3
        for batch in placed:
            if session.run.batch in case.get("nan", ()):
                batch["loss_mask"] = batch["loss_mask"] * float("nan")
            if session.run.batch in case.get("odd", ()):
                batch["labels"] = batch["labels"].new_full(batch["labels"].shape, 255)
        return placed

    session.trainer.place = spoilt


def train_all(rank: int, size: int, root: str) -> dict[str, str]:
    """Run every case in one group of processes; how each of them ended."""
    from dataclasses import replace

    from coatlm.parallel.groups import release_groups
    from coatlm.train import phases, start
    from coatlm.train.faults import NonFiniteError
    from coatlm.train.setup import Launch

    phases.start_processes = functools.cache(phases.start_processes)  # joined once for all
    ends = {}
    for name, case in CASES.items():
        with ExitStack() as stack:
            session = start.set_up(config(Path(root), name), Launch.from_environment(), stack)
            spoil(session, case)
            if "shift" in case:
                shifted: Any = Shifted(session.data.train, *case["shift"], size=16)
                session.data = replace(session.data, train=shifted)
            try:
                ends[name] = str(int(session.run_steps()))
            except NonFiniteError as error:
                ends[name] = str(error)
        release_groups()
    return ends


def killed(rank: int, size: int, root: str) -> list[list[int]]:
    """A run that is killed two steps after a rollback, before it has saved; the same command again,
    once with the batches that were bad and once without; the steps that each start took."""
    from coatlm.parallel.groups import release_groups
    from coatlm.train import phases, start
    from coatlm.train.setup import Launch

    phases.start_processes = functools.cache(phases.start_processes)  # joined once for all
    case = {"nan": NAN}
    taken: list[list[int]] = []
    for name, starts in (("bad again", [case, case]), ("good again", [case, {}]), ("good", [{}])):
        sections = config(Path(root), "rolled back").model_dump(mode="json")
        sections["run"] = {"dir": f"{root}/{name}"}
        sections["checkpoint"] |= {"every": 2}
        for number, spoilt in enumerate(starts, 1):
            with ExitStack() as stack:
                session = start.set_up(make_config(sections), Launch.from_environment(), stack)
                assert session is not None
                spoil(session, spoilt)
                dies = number < len(starts)
                taken.append(steps_of(session, until=12 if dies else None))
            release_groups()
    return taken


def steps_of(session: Any, until: int | None) -> list[int]:
    """The steps that a run takes to its end, or as if killed `until` that step after a rollback."""
    taken: list[int] = []
    step = session._step

    def watched(batches: Any) -> None:
        if session.run.left_out and session.run.step + 1 == until:
            raise KeyboardInterrupt  # nothing is saved
        taken.append(session.run.step + 1)
        step(batches)

    session._step = watched
    with suppress(KeyboardInterrupt):
        session.run_steps()
    return taken


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    text = "".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(2000))
    (directory / "text.txt").write_text(text)
    return directory


@pytest.fixture(scope="module")
def ends(root: Path) -> dict[str, str]:
    first, second = run_ranks(2, "tests.train.test_faulty_runs:train_all", str(root))
    assert first == second
    return first


def state_of(root: Path, name: str, step: int) -> dict[str, Any]:
    """What a checkpoint holds besides tensors."""
    path = root / name / "checkpoints" / f"step_{step:08d}" / "state.json"
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def lines(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / name / "metrics.jsonl").open()]


def losses(root: Path, name: str, after: int = 0) -> list[Any]:
    found = [line for line in lines(root, name) if "loss" in line and line["step"] > after]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in found]


def test_a_rollback_trains_as_if_the_batches_since_the_checkpoint_were_not_there(
    root: Path, ends: dict[str, str]
) -> None:
    assert ends["rolled back"] == ends["without them"] == "0"
    assert losses(root, "rolled back") == losses(root, "without them")
    assert [step for step, _, _ in losses(root, "rolled back")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rollback_restores_what_every_layout_keeps(
    root: Path, ends: dict[str, str], layout: str
) -> None:
    assert ends[f"{layout}, rolled back"] == ends[f"{layout}, without them"] == "0"
    found = losses(root, f"{layout}, rolled back")
    assert found == losses(root, f"{layout}, without them")
    assert [step for step, _, _ in found] == list(range(1, STEPS + 1))
    log = (root / f"{layout}, rolled back" / "train.log").read_text()
    assert "back to step 10; batches 10 to 13 are left out" in log


def test_a_rollback_is_on_record(root: Path, ends: dict[str, str]) -> None:
    events = [line for line in lines(root, "rolled back") if "left_out" in line]
    assert events == [{"step": 11, "rolled_back_from": 14, "left_out": LEFT_OUT}]
    log = (root / "rolled back" / "train.log").read_text()
    assert "step 14: train.max_skipped=3" in log
    assert "back to step 10; batches 10 to 13 are left out" in log
    state = state_of(root, "rolled back", 15)
    assert state["left_out"] == [LEFT_OUT]


def test_the_checkpoint_from_before_skipped_steps_stays(root: Path, ends: dict[str, str]) -> None:
    assert ends["kept two"] == "0"
    log = (root / "kept two" / "train.log").read_text()
    assert "back to step 11; batches 11 to 13 are left out" in log
    names = [path.name for path in sorted((root / "kept two/checkpoints").glob("step_*"))]
    assert names == ["step_00000019", "step_00000020"]


def test_a_later_resume_leaves_out_the_same_batches(root: Path, ends: dict[str, str]) -> None:
    assert losses(root, "resumed later") == losses(root, "rolled back", after=15)


def test_a_run_that_is_killed_after_a_rollback_continues_from_where_it_went_back_to(
    root: Path,
) -> None:
    """It reads the batches again, and leaves them out if they still are bad."""
    first, second = run_ranks(2, f"{__name__}:killed", str(root))
    assert first == second
    to_14, from_11 = list(range(1, 15)), list(range(11, STEPS + 1))
    dies = [*to_14, 11]  # step 12 was skipped and saved before the rollback
    again = [11, 12, 13, 14, *from_11]
    assert first == [dies, again, dies, from_11, list(range(1, STEPS + 1))]
    assert losses(root, "good again") == losses(root, "good")
    assert [step for step, _, _ in losses(root, "bad again")] == list(range(1, STEPS + 1))
    for name, left_out in (("bad again", [LEFT_OUT]), ("good again", [])):
        assert [line["left_out"] for line in lines(root, name) if "left_out" in line] == left_out
        state = state_of(root, name, STEPS)
        assert state["left_out"] == left_out


def test_how_often_is_logged_does_not_matter(root: Path, ends: dict[str, str]) -> None:
    assert ends["logged seldom"] == "0"
    assert losses(root, "logged seldom")[-1] == losses(root, "rolled back")[-1]


def test_more_rollbacks_than_allowed_end_the_run(root: Path, ends: dict[str, str]) -> None:
    # batch 16 is read by step 13 now, as four are left out
    assert "step 15: train.max_skipped=3" in ends["one too many"]


def test_a_second_rollback_to_the_same_checkpoint_leaves_out_more(
    root: Path, ends: dict[str, str]
) -> None:
    assert ends["twice"] == "0"
    state = state_of(root, "twice", STEPS)
    assert state["left_out"] == [[10, 14], [14, 19]]
    events = [line for line in lines(root, "twice") if "left_out" in line]
    assert events == [
        {"step": 11, "rolled_back_from": 14, "left_out": [10, 14]},
        {"step": 11, "rolled_back_from": 15, "left_out": [14, 19]},
    ]
    losses_of = losses(root, "twice", after=10)
    assert [step for step, _, _ in losses_of] == list(range(11, STEPS + 1))


def test_a_spike_is_skipped_as_a_nan_is(root: Path, ends: dict[str, str]) -> None:
    assert ends["spike"] == ends["nan there"] == "0"
    skipped = {line["step"]: line["skipped"] for line in lines(root, "spike")}
    assert skipped[13] == 0 and skipped[14] == skipped[STEPS] == 1
    assert losses(root, "spike", after=14) == losses(root, "nan there", after=14)
    log = (root / "spike" / "train.log").read_text()
    assert "step 14 skipped: a spike, gradient norm" in log


def histories(state: dict[str, Any]) -> list[list[float]]:
    """All amaxes of delayed scales, of gradients in layers and of those that are summed."""
    layers = state["gradient_amaxes"].values()
    return [*(h for layer in layers for h in layer.values()), *state["reduction_amaxes"].values()]


def test_a_spike_that_is_skipped_changes_no_delayed_scale(root: Path, ends: dict[str, str]) -> None:
    assert ends["delayed"] == "0"
    before, skipped, after = (histories(state_of(root, "delayed", step)) for step in (13, 14, 15))
    assert state_of(root, "delayed", 14)["skipped"] == 1
    assert skipped == before
    assert all(new[1:] == old[:-1] for new, old in zip(after, skipped, strict=True))
    assert all(new[0] > 0 for new in after)


def test_amaxes_of_another_batch_size_are_not_continued(root: Path, ends: dict[str, str]) -> None:
    """Gradients of a mean over twice the tokens are half as large: the first step calibrates."""
    assert ends["delayed, another batch"] == "0"
    assert all(all(history[:14]) for history in histories(state_of(root, "delayed", 15)))
    found = histories(state_of(root, "delayed, another batch", 16))
    assert found and all(first > 0 and not any(rest) for first, *rest in found)


def test_a_run_has_its_own_rollbacks(root: Path, ends: dict[str, str]) -> None:
    assert ends["rolled back again"] == "0"
    state = state_of(root, "rolled back again", STEPS)
    assert state["left_out"] == [LEFT_OUT, [20, 23]] and state["inherited"] == 1


def test_a_resumed_run_knows_the_window_of_spikes(root: Path, ends: dict[str, str]) -> None:
    assert losses(root, "spike resumed") == losses(root, "spike", after=10)
    assert lines(root, "spike resumed")[-1]["skipped"] == 1


def test_the_first_step_of_a_start_names_no_slow_rank(root: Path, ends: dict[str, str]) -> None:
    assert ends["slow at first"] == "0"
    assert "is slow in" not in (root / "slow at first" / "train.log").read_text()


def test_a_slow_rank_is_reported_with_its_phase(root: Path, ends: dict[str, str]) -> None:
    found = [line.get("slowest") for line in lines(root, "slow") if "loss" in line]
    assert found[0] is None and len(found) == 5  # the first step is not compared
    phases_ms = 1000 * 4 * LOOK_S  # data, two microbatches, and the update
    for report in found[1:]:
        assert report == {
            "rank": 1,
            "phase": "data",
            "ms": pytest.approx(phases_ms + 300),
            "median_ms": pytest.approx(phases_ms),
        }
    log = (root / "slow" / "train.log").read_text()
    assert log.count(f"rank 1 ({platform.node()}) is slow in data: 340.0 ms") == len(found[1:])
