"""Parameters whose parts are in the shards of several ranks: scales are those of the whole.

Two optimizers, each of one rank, take their steps in threads that meet in the all-reduce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.optim import edq
from coatlm.optim.adamw import AdamW
from coatlm.optim.recipes import RECIPES
from coatlm.optim.shards import FlatShard
from tests.optim.toy import FP32, optimizer, shard_of, weights

RANKS = 2
PARAMS = ((0, 256), (256, 1000), (1024, 1280))  # the second one is cut at 640
CUT = 640
SCALED = sorted(name for name, recipe in RECIPES.items() if recipe.tensor_scaled)


class Meeting:
    """An all-reduce to the maxima of what RANKS threads pass to `share`."""

    def __init__(self) -> None:
        self.barrier, self.tensors, self.calls = threading.Barrier(RANKS), list[Tensor](), 0

    def share(self, tensor: Tensor) -> Any:
        self.tensors.append(tensor)
        self.barrier.wait(timeout=60)
        largest = torch.stack(self.tensors).amax(0)
        if self.barrier.wait(timeout=60) == 0:
            self.tensors, self.calls = [], self.calls + 1
        self.barrier.wait(timeout=60)
        tensor.copy_(largest)
        return self

    def wait(self) -> None:
        """The result is there when `share` returns."""


def gradient(seed: int) -> Tensor:
    """The part of the cut parameter on the second rank has gradients a thousand times larger."""
    grad = torch.randn(1280, generator=torch.Generator().manual_seed(seed)) * 1e-3
    grad[CUT:1000] *= 1000
    grad[1000:1024] = 0
    return grad


def ranks_of(recipe: str, meeting: Meeting, *, device: str = "cpu", **options: Any) -> list[AdamW]:
    start = weights(1280).to(device)
    start[1000:1024] = 0
    halves = [
        (start[:CUT], ((0, 256), (256, CUT)), {256: 0}),
        (start[CUT:], ((0, 360), (384, 640)), {0: 0}),
    ]
    made = []
    for part, params, cut in halves:
        grad = torch.zeros(len(part), device=device)
        shard = FlatShard(part.clone(), grad, decay=params, params=params, cut=cut)
        made.append(optimizer([shard], recipe, cut=1, share=meeting.share, **options))
    return made


def whole_of(recipe: str) -> AdamW:
    start = weights(1280)
    start[1000:1024] = 0
    return optimizer([shard_of(start, grad=FP32, params=PARAMS, decay=PARAMS)], recipe)


def on_all(parts: list[AdamW], function: Callable[[AdamW], Any]) -> list[Any]:
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(function, parts))


def step(parts: list[AdamW], whole: AdamW, seed: int, clip: float = 0.7) -> None:
    grad = gradient(seed)
    whole.shards[0].grad.copy_(grad)
    for part, values in zip(parts, grad.split([CUT, 1280 - CUT]), strict=True):
        part.shards[0].grad.copy_(values)
    coefficient = torch.tensor(clip)
    on_all(
        parts,
        lambda opt: opt.step(lr=1e-3, clip_coefficient=coefficient.to(opt.step_count.device)),
    )
    whole.step(lr=1e-3, clip_coefficient=coefficient)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("recipe", SCALED)
def test_codes_and_scales_of_a_cut_parameter_are_those_of_the_whole(
    recipe: str, offload: bool
) -> None:
    meeting = Meeting()
    parts, whole = ranks_of(recipe, meeting, offload=offload, piece=256), whole_of(recipe)
    for seed in range(4):
        step(parts, whole, seed)
    assert meeting.calls == 4
    assert torch.equal(torch.cat([p.shards[0].weight for p in parts]), whole.shards[0].weight)
    for name, tensor in whole.states[0].items():
        assert torch.equal(torch.cat([p.states[0][name] for p in parts]), tensor), name


def test_without_sharing_each_part_would_have_a_scale_of_its_own() -> None:
    """Else the test above would pass without the all-reduce."""
    alone, whole = ranks_of("fp8lm", Meeting()), whole_of("fp8lm")
    for opt in alone:
        opt.share = None
    step(alone, whole, 0)
    scale = whole.states[0]["exp_avg.scale"]
    assert not torch.equal(torch.cat([p.states[0]["exp_avg.scale"] for p in alone]), scale)


def test_a_skipped_step_changes_no_part() -> None:
    parts, whole = ranks_of("fp8lm", Meeting()), whole_of("fp8lm")
    step(parts, whole, 0)
    before = [{name: t.clone() for name, t in p.states[0].items()} for p in parts]
    step(parts, whole, 1, clip=float("nan"))
    for part, states in zip(parts, before, strict=True):
        assert all(torch.equal(part.states[0][name], t) for name, t in states.items())
        assert part.step_count == 1


def test_recipes_without_tensor_wise_scales_share_nothing() -> None:
    meeting = Meeting()
    step(ranks_of("coat-lean", meeting), whole_of("coat-lean"), 0)
    assert meeting.calls == 0


def test_the_errors_of_a_step_are_those_of_the_whole_parameter() -> None:
    parts, whole = ranks_of("fp8lm", Meeting()), whole_of("fp8lm")
    step(parts, whole, 0)
    found = on_all(parts, lambda opt: edq.local_sums(opt, lr=1e-3))
    for name, expected in edq.local_sums(whole, lr=1e-3).items():
        # fp64 sums in another order
        torch.testing.assert_close(found[0][name] + found[1][name], expected, rtol=1e-12, atol=0)
