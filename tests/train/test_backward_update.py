"""Updates in backward: the bits of plain steps, clipped by the norm of the step before.

tests/gpu/test_backward_update.py runs the same cases on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.model.grad_memory import arena_bytes
from coatlm.train.checkpoint import tensor_checksums
from coatlm.train.state import read_run_state
from tests.distributed import run_ranks
from tests.graphs import checksum
from tests.train.test_resume import metrics_of, run_config, start_jobs, step_five

pytestmark = pytest.mark.slow

STEPS = 4
HUGE = 1e9  # a norm that no gradient reaches: nothing is clipped
CLIP = 0.05  # below every norm of these runs: each step is clipped
NAN, POISONED = 1, 2  # steps whose loss, or whose gradient of the embedding alone, is NaN
MODEL = (
    {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "tie_embeddings": False},
    {"layers": 2, "hidden": 256, "heads": 2, "ffn": 704, "tie_embeddings": False},  # on a GPU
)
COAT: dict[str, Any] = {
    "precision": {"recipe": "coat", "tune_gemms": False, "tune_attention": False}
}
BF16: dict[str, Any] = {"precision": {"recipe": "bf16", "tune_attention": False}}
TIED = {"model": {"tie_embeddings": True}}
LEAN = {"optim": {"recipe": "coat-lean"}}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        **{recipe: {"optim": {"recipe": recipe}} for recipe in ("adamw-fp32", "coat", "coat-lean")},
        "kahan": BF16 | {"optim": {"recipe": "kahan"}},
        "tied": TIED | LEAN,
        "one parameter per bucket": BF16 | TIED | {"parallel": {"bucket_size": 1}},
        "one bucket": {"parallel": {"bucket_size": 10**9}},
        "recompute": LEAN | {"train": {"recompute": "full"}, "parallel": {"main_grads": "bf16"}},
        "saved FP8 weights": LEAN | {"precision": COAT["precision"] | {"keep_weights": True}},
        "delayed": LEAN | {"precision": COAT["precision"] | {"scaling": "delayed"}},
        "rounding": LEAN | {"precision": COAT["precision"] | {"grad_rounding": "stochastic"}},
        "offload": {"optim": {"recipe": "coat-lean", "offload": "states"}},
        "fp8lm": BF16 | {"optim": {"recipe": "fp8lm"}},
    },
    2: {
        "zero 0": {"parallel": {"zero": 0}},
        "zero 1": LEAN,
        "zero 2": LEAN | {"parallel": {"zero": 2}},
        "zero 3": LEAN | {"parallel": {"zero": 3}},
        "zero 3, tied": TIED | LEAN | {"parallel": {"zero": 3}},
        "zero 1, tied": TIED | LEAN | {"parallel": {"grad_comm": "fp32"}},
        "fp8lm": BF16 | {"optim": {"recipe": "fp8lm"}},
        "fp8lm, offload": BF16 | {"optim": {"recipe": "fp8lm", "offload": "states"}},
        "whole tensors": {"parallel": {"partition": "whole-tensor"}},
        "fp8-nccl": {"parallel": {"grad_comm": "fp8-nccl"}},
        "fp8-nccl, delayed": {
            "parallel": {"grad_comm": "fp8-nccl", "grad_comm_scaling": "delayed"}
        },
        "fp8 weights": LEAN | {"parallel": {"weight_gather": "fp8"}},
        "tp": LEAN | {"parallel": {"tp": 2}},
        "sp": LEAN | {"parallel": {"tp": 2, "sequence_parallel": True}},
        "cp": LEAN | {"parallel": {"cp": 2}},
    },
}
ALL = [(size, name) for size, cases in CASES.items() for name in cases]
# bit by bit the same, for which the first step of fp8-nccl must not count its pass twice
WAYS = ("plain", "backward", "plain, clipped by the last norm", "backward, clipped")


def make_run(name: str, size: int, clip: float, update: str) -> Any:
    """The configuration of a case on `size` ranks, with one microbatch per step."""
    from coatlm.config import make_config

    sections = CASES[size][name]
    parallel = {"bucket_size": 8000} | sections.get("parallel", {})
    ranks = size // (parallel.get("tp", 1) * parallel.get("cp", 1))
    train = {"micro_batch": 2, "global_batch": 2 * ranks, "update": update, "cuda_graphs": False}
    return make_config(
        {
            "precision": COAT["precision"],
            **sections,
            "model": MODEL[torch.cuda.is_available()] | sections.get("model", {}),
            "data": {"text": ["unused"], "seq_len": 64},
            "parallel": parallel,
            "optim": {"clip_grad": clip} | sections.get("optim", {}),
            "train": train | sections.get("train", {}),
        }
    )


class LastNorm:
    """`clip_coefficient` by the last finite norm; the first is its own."""

    def __init__(self, original: Callable[[Tensor, float], Tensor]) -> None:
        self.original, self.norm = original, None

    def __call__(self, norm: Tensor, max_norm: float) -> Tensor:
        coefficient = self.original(norm if self.norm is None else self.norm, max_norm)
        if norm.isfinite():
            self.norm = norm
        return torch.where(norm.isfinite(), coefficient, torch.nan)


def train(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    """Losses, norms and the bits at the end of every case, in each of WAYS."""
    from coatlm.parallel import zero
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import batches

    start_processes(Launch.from_environment())
    original = zero.clip_coefficient
    found: dict[str, Any] = {}
    for name in names:
        for way in WAYS:
            backward = way.startswith("backward")
            clip = CLIP if "clipped" in way else HUGE
            config = make_run(name, size, clip, "backward" if backward else "step")
            by_last = "clipped" in way and not backward
            zero.clip_coefficient = LastNorm(original) if by_last else original
            groups = make_groups(config.parallel)
            trainer = Trainer(config, groups, vocab=128)
            steps = []
            for number in range(STEPS):
                placed = trainer.place(batches(config, groups, number))
                result = trainer.train_step(placed, 1e-3 / (1 + number))
                steps.append([float(x).hex() for x in result])
            found[f"{name}, {way}"] = [*steps, checksum(trainer)]
            if way == "backward":
                found[f"{name}, bytes"] = gradient_bytes(trainer)
            elif way == "plain":
                found[f"{name}, all bytes"] = gradient_bytes(trainer)[0]
            trainer.close()
            release_groups()
    zero.clip_coefficient = original
    return found


def gradient_bytes(trainer: Any) -> tuple[int, int]:
    """The bytes of all storages of main gradients, and the sum of the gradients' own bytes."""
    grads = [
        bucket.grads for chunk in trainer.chunks for bucket in chunk.buckets for _ in bucket.params
    ]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads}
    each = {id(b): b.grads.nbytes for chunk in trainer.chunks for b in chunk.buckets}
    return sum(storages.values()), sum(each.values())


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    return {size: run_ranks(size, f"{__name__}:train", list(CASES[size])) for size in CASES}


@pytest.mark.parametrize(("size", "name"), ALL)
def test_unclipped_steps_have_the_bits_of_plain_ones(found: Any, size: int, name: str) -> None:
    for rank in found[size]:
        assert rank[f"{name}, backward"] == rank[f"{name}, plain"]


@pytest.mark.parametrize(("size", "name"), ALL)
def test_clipped_steps_have_the_bits_of_plain_ones_that_take_the_last_norm(
    found: Any, size: int, name: str
) -> None:
    for rank in found[size]:
        backward, plain = rank[f"{name}, backward, clipped"], rank[f"{name}, {WAYS[2]}"]
        assert backward == plain
        assert all(float.fromhex(norm) > CLIP for _, norm in plain[:-1])
        assert backward[-1] != rank[f"{name}, backward"][-1]


@pytest.mark.parametrize(("size", "name"), ALL)
def test_gradients_of_the_whole_model_never_have_memory(found: Any, size: int, name: str) -> None:
    for rank in found[size]:
        arena, whole = rank[f"{name}, bytes"]
        if name == "one bucket":
            assert arena == whole
        else:
            assert arena < 0.75 * whole
        if "zero 2" not in name and "zero 3" not in name:  # which release theirs after a step
            assert rank[f"{name}, all bytes"] == whole


@pytest.mark.parametrize(
    ("size", "name"),
    [case for case in ALL if case[1] != "whole tensors"],  # whose shards have other sizes
)
def test_the_estimate_has_the_bytes_of_the_arena(found: Any, size: int, name: str) -> None:
    config = make_run(name, size, HUGE, "backward")
    estimate = arena_bytes(config, 128, config.data_parallel_size(size))
    for rank in found[size]:
        assert rank[f"{name}, bytes"][0] == pytest.approx(estimate, rel=0.01)


def spoil(rank: int, size: int, _: None) -> dict[str, Any]:
    """What steps with NaNs change, and how many bytes of gradients are held in backward."""
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import batches

    start_processes(Launch.from_environment())
    name = {1: "coat-lean", 2: "zero 1"}[size]
    config = make_run(name, size, CLIP, "backward")
    groups = make_groups(config.parallel)
    trainer = Trainer(config, groups, vocab=128)
    zero, release = trainer.optimizer, trainer.chunks[0].grads
    changed, norms, kept, waits = [], [], [], []
    zero.before_update = lambda: waits.append(checksum(trainer))
    held: list[int] = []
    use = release.use

    def watch(bucket: Any) -> None:
        held.append(sum(each.grads.nbytes for each in (*release.held, bucket)))
        use(bucket)

    release.use = watch
    for number in range(STEPS):
        placed = trainer.place(batches(config, groups, number))
        if number == NAN and rank == 0:
            placed[0]["loss_mask"][0, 0] = torch.nan
        handle = None
        if number == POISONED and rank == size - 1:
            handle = trainer.chunks[0].module.embedding.register_forward_hook(poison)
        before, start = [b.shard.clone() for b in zero.owned], checksum(trainer)
        _, norm = trainer.train_step(placed, 1e-3)
        if handle is not None:
            handle.remove()
        norms.append(float(norm).hex())
        changed.append(
            [not torch.equal(b.shard, x) for b, x in zip(zero.owned, before, strict=True)]
        )
        kept.append((zero.norm_to_save(), int(zero.optimizer.step_count)))
        assert waits.pop() == start and not waits
    arena = zero.buckets[0].grads.untyped_storage().nbytes()
    biggest = max(held)
    release_groups()
    return {"changed": changed, "norms": norms, "kept": kept, "held": biggest, "arena": arena}


def poison(_: Any, __: Any, output: Tensor) -> None:
    """Make the gradient of the embedding's output NaN, which nothing but the embedding sees."""
    if output.requires_grad:
        output.register_hook(lambda grad: grad * torch.nan)


@pytest.mark.parametrize("size", CASES)
def test_a_nan_skips_its_bucket_and_those_after_it_on_all_ranks(size: int) -> None:
    for rank in run_ranks(size, f"{__name__}:spoil"):
        norms = [float.fromhex(norm) for norm in rank["norms"]]
        assert [n for n, norm in enumerate(norms) if norm != norm] == [NAN, POISONED]
        changed = rank["changed"]
        assert all(changed[0]) and all(changed[3])
        assert not any(changed[NAN])
        assert all(changed[POISONED][:-1]) and not changed[POISONED][-1]
        # neither step is counted, and the norm before them clips the next step
        assert rank["kept"] == [[norms[0], 1], [norms[0], 1], [norms[0], 1], [norms[3], 2]]
        assert rank["held"] <= rank["arena"]


def first_step_is_nan(rank: int, size: int, _: None) -> list[Any]:
    """The bits before and after a first step with a NaN, and of the step after it."""
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import batches

    start_processes(Launch.from_environment())
    found = []
    for update in ("step", "backward"):
        config = make_run("coat-lean", size, CLIP, update)
        groups = make_groups(config.parallel)
        trainer = Trainer(config, groups, vocab=128)
        sums = [checksum(trainer)]
        for number in range(2):
            placed = trainer.place(batches(config, groups, number))
            if number == 0:
                placed[0]["loss_mask"][0, 0] = torch.nan
            trainer.train_step(placed, 1e-3)
            sums.append(checksum(trainer))
        found.append(sums)
        release_groups()
    return found


def test_the_first_finite_step_is_clipped_by_its_own_norm_as_a_plain_one_is() -> None:
    ((plain, backward),) = run_ranks(1, f"{__name__}:first_step_is_nan")
    assert backward == plain
    assert plain[0] == plain[1] != plain[2]


def first_bytes(rank: int, size: int, _: None) -> list[dict[str, int]]:
    """The bytes that tensor-parallel ranks send in the first two steps."""
    from coatlm.parallel.groups import make_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import batches

    start_processes(Launch.from_environment())
    config = make_run("tp", size, CLIP, "backward")
    groups = make_groups(config.parallel)
    trainer, found = Trainer(config, groups, vocab=128), []
    for number in range(2):
        trainer.train_step(trainer.place(batches(config, groups, number)), 1e-3)
        found.append(trainer.comm_bytes)
    return found


def test_a_first_step_that_runs_twice_counts_the_bytes_of_both_passes() -> None:
    for first, second in run_ranks(2, f"{__name__}:first_bytes"):
        assert first["comm_bytes_tp"] == 2 * second["comm_bytes_tp"] > 0


LAYOUTS = ("dp2", "dp2 zero1", "dp2 zero3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps, five more from step five of them, and five more of a run with plain updates."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(6000)))
    jobs = []
    for layout in LAYOUTS:
        for kind, update, source in (
            ("straight", "backward", None),
            ("plain", "step", None),
            ("resumed", "backward", "straight"),
            ("changed", "backward", "plain"),
        ):
            resume = "auto" if source is None else step_five(root / f"{layout} {source}")
            jobs.append(
                run_config(
                    root / f"{layout} {kind}",
                    layout,
                    optim={"clip_grad": CLIP},
                    train={"global_batch": 8, "update": update},
                    checkpoint={"resume": resume},
                )
            )
    start_jobs(2, jobs)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_clips_by_the_norm_of_the_step_before(runs: Path, layout: str) -> None:
    straight, resumed = (runs / f"{layout} {kind}" for kind in ("straight", "resumed"))
    later = [line for line in metrics_of(straight) if line["step"] > 5]
    assert len(later) == 6 and metrics_of(resumed) == later
    final = Path("checkpoints") / "step_00000010"
    assert tensor_checksums(resumed / final) == tensor_checksums(straight / final)
    fifth = next(x for x in metrics_of(straight) if x["step"] == 5 and "grad_norm" in x)
    saved = read_run_state(Path(step_five(straight)))["clip_norm"]
    assert saved == pytest.approx(fifth["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_changes_to_updates_in_backward_begins_as_a_plain_step(
    runs: Path, layout: str
) -> None:
    plain, changed = (
        [line for line in metrics_of(runs / f"{layout} {kind}") if "grad_norm" in line]
        for kind in ("plain", "changed")
    )
    first, second = (line for line in changed if line["step"] in (6, 7))
    results = ("loss", "grad_norm")
    for line in (first, second):
        (same,) = (x for x in plain if x["step"] == line["step"])
        assert [line[key] for key in results] == [same[key] for key in results]
