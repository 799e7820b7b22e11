"""How much of a step survives being stored: measured for metrics, changing nothing.

    EDQ = <D / |D|, Dhat>

is the effective descent quality of Collage (arXiv 2405.03637, section 3.2): D is the update that
AdamW asks for, Dhat what the stored weight changes by: the model's weight w alone, or w + dw with
its low half, remainder or master. EDQ / |D| is 1 where nothing is lost. It says nothing about v, so
that is reported too: stored v against the fp64 average of what was stored before and the gradient,
relative to that average and relative to the change that was due. The latter is 1 for an average
that stands still. Both are the errors of one step; no second v in fp32 is kept to compare with.

The step is that of the reference, `AdamW.propose`. All of it follows from sums over elements, so
ranks add theirs: `collect`, all-reduce, `report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from coatlm.fp8.formats import Fp8Format, decode_table
from coatlm.optim.adamw import MASTER, AdamW, Recipe, named_state
from coatlm.optim.formats import Expanded

PIECE = 1 << 20  # elements at a time; 110 bytes of temporaries for each, 0.12 GB
CODES = 256
SUMS = ("update", "inner", "inner_weight", "asked", "lost")
SUMS_OF_MOMENT = ("error", "size", "change", "nonzero", "zeroed")
Runs = Sequence[Sequence[tuple[int, int]]]  # for each shard [start, stop), multiples of 128


def measure(
    optimizer: AdamW, *, lr: float, clip_coefficient: Tensor | None = None
) -> dict[str, float]:
    """`report` of a step with these arguments, where one process has all shards."""
    return report(optimizer.recipe, collect(optimizer, lr=lr, clip_coefficient=clip_coefficient))


@torch.no_grad()
def collect(
    optimizer: AdamW,
    *,
    lr: float,
    clip_coefficient: Tensor | None = None,
    owned: Runs | None = None,
) -> dict[str, Tensor]:
    """Sums that tell what a step with these arguments would lose; to be called before that step.

    fp64 on the device, with the same names and shapes on every rank. `owned` are the runs of each
    shard that count, everything by default. Takes `PIECE` elements at a time; with tensor scales a
    parameter of the shard, which may be many more.
    """
    clip = torch.ones(()) if clip_coefficient is None else clip_coefficient
    clip = clip.to(optimizer.step_count.device)
    sums = {
        name: torch.zeros(size, dtype=torch.float64, device=clip.device)
        for name, size in _sizes(optimizer.recipe).items()
    }
    for i, start, stop in _runs(optimizer, owned):
        for name, value in _sums(optimizer, i, start, stop, lr, clip).items():
            sums[name] += value
    return sums


def report(recipe: Recipe, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """What the sums of all ranks say; waits for the device.

    "edq" and "edq_ratio" (EDQ / |D|) of w + dw, "edq_weight" and "edq_weight_ratio" of w alone,
    "update_lost" (share of the non-zero updates that leave their weight, w + dw, as it is). For m
    ("exp_avg") and v ("exp_avg_sq") the relative "_error", the "_stalled" error relative to the
    change due, and "_underflow" (share of non-zero values stored as zero).

    Of moments in FP8 with expansion also k over the groups, "_k_mean", "_k_p05", "_k_p50" and
    "_k_p95"; "_k_lowest" and "_k_highest", the shares of groups whose k is at its bounds (wider
    than the format; nearly equal elements); the shares of codes "_zero" and "_saturated", at MAX.
    By construction one code a group is at MAX: 0.8% at least.
    """
    known = {name: value.cpu() for name, value in sums.items()}
    total = {name: value.item() for name, value in known.items() if value.numel() == 1}
    size = total["update"] ** 0.5
    result = {
        "edq": _ratio(total["inner"], size),
        "edq_ratio": _ratio(total["inner"], total["update"]),
        "edq_weight": _ratio(total["inner_weight"], size),
        "edq_weight_ratio": _ratio(total["inner_weight"], total["update"]),
        "update_lost": _ratio(total["lost"], total["asked"]),
    }
    for name, moment in recipe.moments.items():
        error = total[name + ".error"]
        result[name + "_error"] = _ratio(error, total[name + ".size"]) ** 0.5
        result[name + "_stalled"] = _ratio(error, total[name + ".change"]) ** 0.5
        result[name + "_underflow"] = _ratio(total[name + ".zeroed"], total[name + ".nonzero"])
        if isinstance(moment, Expanded):
            shares = _k_statistics(known[name + ".k"], moment)
            shares |= _share_at_ends(known[name + ".codes"], moment)
            result |= {f"{name}_{key}": value for key, value in shares.items()}
    return result


def _sizes(recipe: Recipe) -> dict[str, int]:
    """Names and lengths of the sums."""
    sizes = dict.fromkeys(SUMS, 1)
    for name, moment in recipe.moments.items():
        sizes |= {f"{name}.{part}": 1 for part in SUMS_OF_MOMENT}
        if isinstance(moment, Expanded):
            sizes |= {name + ".k": CODES, name + ".codes": CODES}
    return sizes


def _runs(optimizer: AdamW, owned: Runs | None) -> Iterator[tuple[int, int, int]]:
    for i, start, stop in optimizer.spans(PIECE):
        for first, last in ((start, stop),) if owned is None else owned[i]:
            if max(start, first) < min(stop, last):
                yield i, max(start, first), min(stop, last)


def _sums(
    optimizer: AdamW, i: int, start: int, stop: int, lr: float, clip: Tensor
) -> dict[str, Tensor]:
    """The sums of one run of elements."""
    recipe, old = optimizer.recipe, optimizer.state_of(i, start, stop)
    new = optimizer.propose(i, start, stop, lr=lr, clip_coefficient=clip)
    weight = optimizer.shards[i].weight[start:stop]
    before = recipe.weight.decode(weight, named_state(old, MASTER))
    after = recipe.weight.decode(new.weight, named_state(new.states, MASTER))
    change, update = after.double() - before.double(), new.update.double()
    sums = {
        "update": update @ update,
        "inner": update @ change,
        "inner_weight": update @ (new.weight.double() - weight.double()),
        "asked": (update != 0).sum(),
        "lost": ((update != 0) & (change == 0)).sum(),
    }
    g = optimizer.shards[i].grad[start:stop].double() * clip.double()
    for (name, moment), beta, x in zip(
        recipe.moments.items(), optimizer.betas, (g, g * g), strict=True
    ):
        was = moment.decode(named_state(old, name)).double()
        due = beta * was + (1 - beta) * x
        state = named_state(new.states, name)
        stored = moment.decode(state).double()
        sums |= {
            name + ".error": (stored - due).square().sum(),
            name + ".size": due.square().sum(),
            name + ".change": (due - was).square().sum(),
            name + ".nonzero": (due != 0).sum(),
            name + ".zeroed": ((due != 0) & (stored == 0)).sum(),
        }
        if isinstance(moment, Expanded):
            sums[name + ".k"] = torch.bincount(state[".k"], minlength=CODES)
            sums[name + ".codes"] = torch.bincount(state[""], minlength=CODES)
    return sums


def _k_statistics(count: Tensor, moment: Expanded) -> dict[str, float]:
    """count[k16], fp64[256]: groups with that k. k16 = 0 is a group nothing was stored in yet."""
    count[0] = 0
    groups = count.sum().clamp(min=1)
    share = count / groups
    reached = share.cumsum(0)
    result = {"k_mean": (share @ torch.arange(256.0, dtype=torch.float64)).item() / 16}
    for percent in (5, 50, 95):
        result[f"k_p{percent:02}"] = int((reached >= percent / 100).int().argmax()) / 16
    how = moment.how
    return result | {
        "k_lowest": share[how.k16_min].item(),
        "k_highest": share[how.k16_max].item(),
    }


def _share_at_ends(count: Tensor, moment: Expanded) -> dict[str, float]:
    """count[code], fp64[256] -> shares of the codes of zero and of the largest magnitude."""
    fmt = moment.how.fmt
    value = decode_table(fmt) if isinstance(fmt, Fp8Format) else fmt.table()
    share = count / count.sum().clamp(min=1)
    return {
        "zero": share[value == 0].sum().item(),
        "saturated": share[value.abs() == fmt.max].sum().item(),
    }


def _ratio(part: float, whole: float) -> float:
    """part / whole; where there was nothing to lose, nothing is lost: 0 / 0 = 0."""
    return part / whole if whole else 0.0
