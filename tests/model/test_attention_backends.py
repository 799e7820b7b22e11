"""The choice of an attention backend by time: a fake clock, fake backends, and what ranks run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.kernels import cpu_gemms
from coatlm.model import attention_backends
from coatlm.model.attention import CoreAttention
from coatlm.model.attention_backends import (
    BACKENDS,
    Measured,
    Shape,
    causal_attention,
    choose,
    choose_backends,
    forward_and_backward,
    measure_backends,
    random_inputs,
    torch_attention,
)
from tests.distributed import run_ranks
from tests.kernels.test_cpu_attention import BackwardDtypes

CPU = torch.device("cpu")
SHAPE = Shape(samples=2, tokens=24, heads=4, kv_heads=2, head_dim=8, scale=None)
SPARE = 100  # bytes


def measured(*times: float, **changed: Any) -> dict[str, Measured]:
    """The times of all backends in their order; `changed` replaces what is said of one."""
    plain = {name: Measured(ms, True, 1000) for name, ms in zip(BACKENDS, times, strict=False)}
    return plain | {name: plain[name]._replace(**new) for name, new in changed.items()}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (measured(1.0, 1.5, 3.0), "cudnn"),
        (measured(1.0, 0.98, 3.0), "cudnn"),  # noise
        (measured(1.0, 0.9701, 3.0), "cudnn"),
        (measured(1.0, 0.9699, 3.0), "flash"),
        (measured(1.0, 0.9, 0.8), "efficient"),
        (measured(1.0, 0.8, 0.9), "flash"),
        (measured(1.0, 0.9, 0.8, efficient={"repeats": False}), "flash"),
        (measured(1.0, 0.5, 3.0, flash={"repeats": False}), "cudnn"),
        # the default stays, whatever its bits do
        (measured(1.0, 1.5, 3.0, cudnn={"repeats": False}), "cudnn"),
        (measured(1.0, 0.5, 3.0, cudnn={"repeats": False}), "flash"),
        (measured(1.0, 0.5, 3.0, flash={"peak": 1000 + SPARE}), "flash"),
        (measured(1.0, 0.5, 3.0, flash={"peak": 1001 + SPARE}), "cudnn"),
        (measured(1.0, 0.5, 3.0, cudnn={"peak": 5000}, flash={"peak": 5050}), "flash"),
        # without cuDNN, flash is the default
        ({"flash": Measured(1.0, True, 0), "efficient": Measured(0.98, True, 0)}, "flash"),
        ({"efficient": Measured(5.0, False, 0)}, "efficient"),
    ],
)
def test_the_default_is_left_for_a_repeatable_backend_that_is_3_percent_faster(
    found: dict[str, Measured], expected: str
) -> None:
    assert choose(found, SPARE) == expected


class Clock:
    """Times by the name of the backend that the work is of; `asked` lists (name, repeats)."""

    def __init__(self, *times: dict[str, float]) -> None:
        self.rounds, self.asked = list(times), list[tuple[str, int]]()

    def __call__(self, work: Any, *, repeats: int = 8) -> float:
        name = work.args[0].keywords["name"]
        count = sum(asked == (name, 1) for asked in self.asked)
        self.asked.append((name, repeats))
        return self.rounds[min(count - (repeats > 1), len(self.rounds) - 1)][name]


def fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, name: str, calls: list[str]
) -> Tensor:
    calls.append(name)
    if name == "refuses":
        raise RuntimeError("No available kernel. Aborting execution.")
    out = torch_attention(q, k, v, scale)
    if name == "varies":  # in its gradients only
        out.register_hook(lambda do: do * (1 + len(calls) / 64))
    return out


def fakes(*names: str) -> tuple[dict[str, Callable[..., Tensor]], list[str]]:
    calls: list[str] = []
    return {name: partial(fake, name=name, calls=calls) for name in names}, calls


def test_backends_that_refuse_are_left_out_and_those_that_vary_are_found() -> None:
    backends, _ = fakes("varies", "refuses", "plain")
    clock = Clock({"varies": 1.0, "plain": 2.0})
    found = measure_backends(SHAPE, CPU, backends=backends, clock=clock)
    assert found == {"varies": Measured(1.0, False, 0), "plain": Measured(2.0, True, 0)}


def test_a_time_is_the_smallest_of_the_rounds_which_take_turns() -> None:
    backends, _ = fakes("one", "two")
    clock = Clock({"one": 3.0, "two": 9.0}, {"one": 7.0, "two": 4.0}, {"one": 5.0, "two": 6.0})
    found = measure_backends(SHAPE, CPU, backends=backends, clock=clock)
    assert (found["one"].ms, found["two"].ms) == (3.0, 4.0)
    turns = [("one", 1), ("one", 8), ("two", 1), ("two", 8)]
    assert clock.asked == 3 * turns


@pytest.mark.parametrize(
    ("ms", "repeats"), [(0.0, 8), (25.0, 8), (26.0, 7), (100.0, 2), (101.0, None), (5000.0, None)]
)
def test_longer_work_is_repeated_less(ms: float, repeats: int | None) -> None:
    backends, _ = fakes("one")
    clock = Clock({"one": ms})
    found = measure_backends(SHAPE, CPU, backends=backends, clock=clock)
    assert found["one"].ms == ms
    assert {count for _, count in clock.asked} == {1} | ({repeats} if repeats else set())


def test_random_inputs_have_a_layer_s_layout_and_draw_nothing_from_the_run_s_generator() -> None:
    before = torch.get_rng_state()
    *qkv, do = random_inputs(SHAPE, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert [x.shape for x in qkv] == [(24, 2, 4, 8), (24, 2, 2, 8), (24, 2, 2, 8)]
    assert do.shape == qkv[0].shape and all(x.is_contiguous() for x in (*qkv, do))
    assert all(x.requires_grad and x.dtype == torch.bfloat16 for x in qkv)
    with torch.no_grad():  # as at the start of a run that only evaluates
        results = forward_and_backward(torch_attention, [*qkv, do], None)
    assert [x.shape for x in results] == [do.shape, *(x.shape for x in qkv)]


def test_a_shape_is_measured_once_and_an_unknown_name_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[Shape] = []

    def measure(shape: Shape, device: torch.device) -> dict[str, Measured]:
        asked.append(shape)
        return measured(2.0, 1.0, 3.0, cudnn={"repeats": False}) if shape.tokens < 99 else {}

    other, refused = SHAPE._replace(tokens=48), SHAPE._replace(tokens=99)
    choices = {SHAPE.name: "cudnn", "samples=1": "flash", other.name: "from a later version"}
    with caplog.at_level(logging.INFO, "coatlm"):
        chosen = choose_backends((SHAPE, other, refused), choices, CPU, measure=measure)
    assert asked == [other, refused] and chosen == {SHAPE: "cudnn", other: "flash"}
    assert choices == {SHAPE.name: "cudnn", "samples=1": "flash", other.name: "flash"}
    assert caplog.messages == [
        "timed attention over 2 x 48 tokens, 4 heads of 8, 2 for keys: "
        "cudnn 2 ms (not repeatable), flash 1 ms, efficient 3 ms"
    ]
    assert choose_backends((other,), choices, CPU, measure=measure) == {other: "flash"}
    assert len(asked) == 2


def test_the_name_of_a_shape_has_all_that_a_backend_is_given() -> None:
    name = "samples=2 tokens=24 heads=4 kv_heads=2 head_dim=8 scale=None"
    assert SHAPE.name == name
    changed = [SHAPE._replace(**{key: 3}) for key in Shape._fields]
    assert len({shape.name for shape in (SHAPE, *changed)}) == 7


def test_a_chosen_backend_runs_its_shape_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    backends, calls = fakes("flash")
    monkeypatch.setitem(attention_backends.BACKENDS, "flash", backends["flash"])
    own = SHAPE._replace(scale=0.25)
    q, k, v, _ = random_inputs(own, CPU)
    expected = torch_attention(q, k, v, 0.25)
    for shape, runs in [(own, 1)] + [(own._replace(**{key: 3}), 0) for key in Shape._fields]:
        calls.clear()
        assert torch.equal(causal_attention(q, k, v, 0.25, {shape: "flash"}), expected)
        assert len(calls) == runs
    assert torch.equal(causal_attention(q, k, v, 0.25, {}), expected)


@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_without_bf16_has_the_output_of_torch_in_the_layout_of_q_and_gradients_in_fp32(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_gemms, "multiplies_bf16", lambda: native)
    *qkv, dout = random_inputs(SHAPE, CPU)
    assert {x.dtype for x in (*qkv, dout)} == {torch.bfloat16}
    with BackwardDtypes() as dtypes:
        out = causal_attention(*qkv, 0.25, {})
        found = torch.autograd.grad(out, qkv, dout)
    assert dtypes.found == {torch.bfloat16 if native else torch.float32}
    plain = torch_attention(*qkv, 0.25)
    assert torch.equal(out, plain) and out.stride() == plain.stride() == qkv[0].stride()
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected = torch.autograd.grad(torch_attention(*exact, 0.25), exact, dout.double())
    for gradient, wanted in zip(found, expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient - wanted).norm() <= (2**-7 if native else 2**-8) * wanted.norm()


@pytest.mark.parametrize("options", [{"window": 8}, {"softcap": 30.0}])
def test_layers_with_a_window_or_a_soft_cap_have_no_choice(options: dict[str, Any]) -> None:
    alone = SimpleNamespace(cp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8}
    core = CoreAttention(None, 1, pg_collection=alone, **options)
    assert core.shapes(2, 24, **sizes) == []
    assert CoreAttention(None, 1, pg_collection=alone).shapes(2, 24, **sizes) == [SHAPE]


class Asked(dict[Shape, str]):
    """Records the shapes that attention looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Shape] = []

    def get(self, shape: Shape, default: Any = None) -> Any:
        self.shapes.append(shape)
        return default


CASES = [  # context-parallel ranks, what they exchange, kv_heads of a rank
    *((1, "a2a", 2), (2, "a2a", 2), (2, "a2a", 4), (2, "all_gather", 2), (2, "p2p", 2)),
]


def attended(rank: int, size: int, cases: list[Any]) -> list[Any]:
    """For each case the shapes that this rank attends with, and those that are timed for it."""
    import torch.distributed as dist

    from coatlm.train.setup import Launch, start_processes

    start_processes(Launch.from_environment())
    own = [dist.new_group([number]) for number in range(size)][rank]
    found = []
    for ranks, comm, kv_heads in cases:
        group = dist.group.WORLD if ranks == size else own
        core = CoreAttention(
            None, 1, pg_collection=SimpleNamespace(cp=group), comm=comm, multiplier=0.3
        )
        core.backends = asked = Asked()
        q, k, v = (torch.randn(16, 3, heads, 8) for heads in (8, kv_heads, kv_heads))
        core(q, k, v)
        sizes = {"heads": 8, "kv_heads": kv_heads, "head_dim": 8}
        found.append([sorted(set(asked.shapes)), core.shapes(3, 16, **sizes)])
    dist.destroy_process_group()
    return found


def test_the_shapes_that_are_timed_are_those_that_ranks_attend_with() -> None:
    first, second = run_ranks(2, f"{__name__}:attended", CASES)
    for rank in (first, second):
        assert all(looked_up == timed for looked_up, timed in rank)
    whole = [3, 16, 8, 2, 8, 0.3]
    # half of the heads; with four key heads, in two parts
    exchanged = [[3, 32, 4, 1, 8, 0.3]], [[3, 32, 2, 1, 8, 0.3]]
    # the first of four chunks, which rank 0 has; other chunks follow a prefix
    chunk = [3, 8, 8, 2, 8, 0.3]
    # where keys go from rank to rank, both chunks attend to those of their own rank at once
    assert [timed for _, timed in first] == [[whole], *exchanged, [chunk], [whole]]
    assert [timed for _, timed in second] == [[whole], *exchanged, [], [whole]]
