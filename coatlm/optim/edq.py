"""Metrics of the information that storing an optimizer step loses. Measuring changes no state.

    EDQ = <D / |D|, Dhat>

is the effective descent quality of Collage (arXiv 2405.03637, section 3.2). D is the update that
AdamW computes, Dhat the change of the stored weight: of the model's weight w alone, or of w + dw
with its low half, remainder or master. EDQ / |D| is 1 if nothing is lost. EDQ does not see errors
of v, so these are reported too: the stored v is compared with the fp64 average of the stored v
before and the gradient, relative to that average and relative to the change that was due. The
latter is 1 if the stored v did not change at all. Both are errors of one step: there is no second
v in fp32 to accumulate the errors of all steps.

The measured step is that of the reference, `AdamW.propose`. All metrics follow from sums over
elements, which are all-reduced over ranks: `local_sums`, all-reduce, `to_metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from coatlm.fp8.formats import decode_table
from coatlm.optim.adamw import AdamW
from coatlm.optim.moment_formats import ExpandedFp8, named_state
from coatlm.optim.recipes import MASTER, Recipe

PIECE = 1 << 20  # elements measured at a time; 110 bytes of temporaries each, 0.12 GB in all
CODES = 256  # values of a byte: bins for codes, and for 16 k
SUMS = ("update", "inner", "inner_weight", "asked", "lost")
SUMS_OF_MOMENT = ("error", "size", "change", "nonzero", "zeroed")
Ranges = Sequence[Sequence[tuple[int, int]]]  # per shard: [start, stop), multiples of 128


def measure(
    optimizer: AdamW, *, lr: float, clip_coefficient: Tensor | None = None
) -> dict[str, float]:
    """The metrics of a step with these arguments, if one process holds all shards."""
    sums = local_sums(optimizer, lr=lr, clip_coefficient=clip_coefficient)
    return to_metrics(optimizer.recipe, sums)


@torch.no_grad()
def local_sums(
    optimizer: AdamW,
    *,
    lr: float,
    clip_coefficient: Tensor | None = None,
    counted: Ranges | None = None,
) -> dict[str, Tensor]:
    """The sums of this rank for the metrics of a step with these arguments, called before it.

    They are fp64 on the device, with the same names and shapes on every rank. `counted` are the
    ranges of each shard that count (default: all), so that elements which several ranks hold count
    once. `PIECE` elements are measured at a time; with tensor-wise scales a whole parameter.
    """
    clip = torch.ones(()) if clip_coefficient is None else clip_coefficient
    clip = clip.to(optimizer.step_count.device)
    sums = {
        name: torch.zeros(size, dtype=torch.float64, device=clip.device)
        for name, size in _sizes(optimizer.recipe).items()
    }
    scales = optimizer.cut_scales(lr=lr, clip_coefficient=clip)
    for i, start, stop in _pieces(optimizer, counted):
        for name, value in _sums(optimizer, i, start, stop, lr, clip, scales).items():
            sums[name] += value
    return sums


def to_metrics(recipe: Recipe, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics of a step from the sums of all ranks; waits for the device.

    "edq" and "edq_ratio" (EDQ / |D|) of w + dw; "edq_weight" and "edq_weight_ratio" of w alone;
    "update_lost", the share of non-zero updates that leave w + dw unchanged. For m ("exp_avg") and
    v ("exp_avg_sq"): the relative "_error"; "_stalled", the error relative to the change due;
    "_underflow", the share of non-zero values stored as zero.

    For moments in FP8 with expansion also the distribution of k over blocks, "_k_mean", "_k_p05",
    "_k_p50" and "_k_p95"; the shares of blocks with the smallest and the largest k, "_k_lowest"
    (wider than the format) and "_k_highest" (nearly equal elements); and the shares of codes
    "_zero" and "_saturated" (at MAX: at least one per block by construction, 0.8 %).
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
        if isinstance(moment, ExpandedFp8):
            shares = _k_statistics(known[name + ".k"], moment)
            shares |= _share_at_ends(known[name + ".codes"], moment)
            result |= {f"{name}_{key}": value for key, value in shares.items()}
    return result


def _sizes(recipe: Recipe) -> dict[str, int]:
    """The names of the sums and their lengths."""
    sizes = dict.fromkeys(SUMS, 1)
    for name, moment in recipe.moments.items():
        sizes |= {f"{name}.{part}": 1 for part in SUMS_OF_MOMENT}
        if isinstance(moment, ExpandedFp8):
            sizes |= {name + ".k": CODES, name + ".codes": CODES}
    return sizes


def _pieces(optimizer: AdamW, counted: Ranges | None) -> Iterator[tuple[int, int, int]]:
    """(shard, start, stop) of the elements that count, at most `PIECE` at a time."""
    for i, start, stop in optimizer.spans(PIECE):
        for first, last in ((start, stop),) if counted is None else counted[i]:
            if max(start, first) < min(stop, last):
                yield i, max(start, first), min(stop, last)


def _sums(
    optimizer: AdamW, i: int, start: int, stop: int, lr: float, clip: Tensor, scales: Tensor
) -> dict[str, Tensor]:
    """The sums over elements [start, stop) of shard i."""
    recipe, old = optimizer.recipe, optimizer.fetch(i, start, stop)
    new = optimizer.propose(i, start, stop, lr=lr, clip_coefficient=clip, scales=scales)
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
    g = optimizer.shards[i].grad[start:stop].float().double() * clip.double()
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
        if isinstance(moment, ExpandedFp8):
            sums[name + ".k"] = torch.bincount(state[".k"], minlength=CODES)
            sums[name + ".codes"] = torch.bincount(state[""], minlength=CODES)
    return sums


def _k_statistics(count: Tensor, moment: ExpandedFp8) -> dict[str, float]:
    """Statistics of k from count[k16], fp64[256], the number of blocks with each k."""
    blocks = count.sum().clamp(min=1)
    share = count / blocks
    reached = share.cumsum(0)
    result = {"k_mean": (share @ torch.arange(256.0, dtype=torch.float64)).item() / 16}
    for percent in (5, 50, 95):
        result[f"k_p{percent:02}"] = int((reached >= percent / 100).int().argmax()) / 16
    how = moment.how
    return result | {
        "k_lowest": share[how.k16_min].item(),
        "k_highest": share[how.k16_max].item(),
    }


def _share_at_ends(count: Tensor, moment: ExpandedFp8) -> dict[str, float]:
    """The shares of codes of zero and of +-MAX; count[code], fp64[256]."""
    fmt = moment.how.fmt
    value = decode_table(fmt)
    share = count / count.sum().clamp(min=1)
    return {
        "zero": share[value == 0].sum().item(),
        "saturated": share[value.abs() == fmt.max].sum().item(),
    }


def _ratio(part: float, whole: float) -> float:
    """part / whole, with 0 / 0 = 0: nothing was lost of nothing."""
    return part / whole if whole else 0.0
