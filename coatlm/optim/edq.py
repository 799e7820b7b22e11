"""How much of a step survives being stored: measured for metrics, changing nothing.

    EDQ = <D / |D|, Dhat>

is the effective descent quality of Collage (arXiv 2405.03637, section 3.2): D is the update that
AdamW asks for, Dhat what the stored weight (with its low half or remainder) changes by. EDQ / |D|
is 1 where nothing is lost. It says nothing about v, so that is reported too: stored v against the
fp64 average of what was stored before and the gradient, relative to that average and relative to
the change that was due. The latter is 1 for an average that stands still.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coatlm.fp8.formats import Fp8Format, decode_table
from coatlm.optim.adamw import MASTER, AdamW, named_state
from coatlm.optim.formats import Expanded

SAMPLE = 1 << 20  # elements of each shard


@torch.no_grad()
def measure(
    optimizer: AdamW, *, lr: float, clip_coefficient: Tensor | None = None, sample: int = SAMPLE
) -> dict[str, float]:
    """What a step with these arguments would lose; to be called before that step.

    From the first `sample` elements of each shard (with tensor scales its first parameter, whole):
    "edq", "edq_ratio" (EDQ / |D|), "update_lost" (share of the non-zero updates that leave their
    weight as it is), and for m ("exp_avg") and v ("exp_avg_sq") the relative "_error", the
    "_stalled" error relative to the change due, and "_underflow" (share of non-zero values stored
    as zero). Waits for the device.
    """
    clip = torch.ones(()) if clip_coefficient is None else clip_coefficient
    clip = clip.to(optimizer.step_count.device)
    sums: dict[str, Tensor] = {}
    seen: set[int] = set()
    for i, start, stop in optimizer.spans(sample):
        if i not in seen:
            for key, value in _sums(optimizer, i, start, stop, lr, clip).items():
                sums[key] = sums[key] + value if key in sums else value
        seen.add(i)
    total = {key: value.item() for key, value in sums.items()}
    result = {
        "edq": _ratio(total["inner"], total["update"] ** 0.5),
        "edq_ratio": _ratio(total["inner"], total["update"]),
        "update_lost": _ratio(total["lost"], total["asked"]),
    }
    for name in optimizer.recipe.moments:
        error = total[name + ".error"]
        result[name + "_error"] = _ratio(error, total[name + ".size"]) ** 0.5
        result[name + "_stalled"] = _ratio(error, total[name + ".change"]) ** 0.5
        result[name + "_underflow"] = _ratio(total[name + ".zeroed"], total[name + ".nonzero"])
    return result


@torch.no_grad()
def code_statistics(optimizer: AdamW) -> dict[str, float]:
    """Of m and v in FP8, as stored: k over the groups, and the shares of codes at zero and at MAX.

    "_k_mean", "_k_p05", "_k_p50", "_k_p95"; "_k_lowest" and "_k_highest" are the shares of groups
    whose k is at its bounds: wider than the format, nearly equal elements. By construction one code
    a group is at MAX ("_saturated" is 0.8% at least). Empty for other formats. Waits for the
    device.
    """
    result: dict[str, float] = {}
    for name, moment in optimizer.recipe.moments.items():
        if isinstance(moment, Expanded):
            states = [named_state(states, name) for states in optimizer.states]
            k = sum(torch.bincount(state[".k"], minlength=256).double() for state in states)
            codes = sum(torch.bincount(state[""], minlength=256).double() for state in states)
            assert isinstance(k, Tensor) and isinstance(codes, Tensor)
            shares = _k_statistics(k.cpu(), moment) | _share_at_ends(codes.cpu(), moment)
            result |= {f"{name}_{key}": value for key, value in shares.items()}
    return result


def _sums(
    optimizer: AdamW, i: int, start: int, stop: int, lr: float, clip: Tensor
) -> dict[str, Tensor]:
    """fp64 sums over one run of elements."""
    recipe, old = optimizer.recipe, optimizer.state_of(i, start, stop)
    new = optimizer.propose(i, start, stop, lr=lr, clip_coefficient=clip)
    before = recipe.weight.decode(optimizer.shards[i].weight[start:stop], named_state(old, MASTER))
    after = recipe.weight.decode(new.weight, named_state(new.states, MASTER))
    change, update = after.double() - before.double(), new.update.double()
    sums = {
        "inner": update @ change,
        "update": update @ update,
        "asked": (update != 0).sum(),
        "lost": ((update != 0) & (change == 0)).sum(),
    }
    g = optimizer.shards[i].grad[start:stop].double() * clip.double()
    for (name, moment), beta, x in zip(
        recipe.moments.items(), optimizer.betas, (g, g * g), strict=True
    ):
        was = moment.decode(named_state(old, name)).double()
        due = beta * was + (1 - beta) * x
        stored = moment.decode(named_state(new.states, name)).double()
        sums |= {
            name + ".error": (stored - due).square().sum(),
            name + ".size": due.square().sum(),
            name + ".change": (due - was).square().sum(),
            name + ".nonzero": (due != 0).sum(),
            name + ".zeroed": ((due != 0) & (stored == 0)).sum(),
        }
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
