"""Sums of the gradients of virtual ranks in FP8, and their errors.

The gradients g_1 .. g_N of N virtual ranks are summed in each of these ways:

    pre-scaling      codes = cast(s g_i / N), added in FP8
    post-scaling     codes = cast(s g_i), added in FP8, then divided by N
    auto-scaling     codes = cast(mu s g_i), added in FP8; mu starts at 1, and the sum is repeated
                     with mu / 2 while more than 1e-5 of a matrix's sums are +-MAX
    fp8-a2a, tensor  codes = cast(s g_i), added in fp32 to the unrounded values of the summing rank
    fp8-a2a, block   the same with one scale per rank and block of 128 elements
    fp8-a2a, e3m4    the same in E3M4
    fp8-a2a, e5m2    the same in E5M2
    accumulated, F   the N are microbatches of one rank, added one after the other to a sum in F:
                     BF16, or as parallel.main_grads=fp8 does in E4M3 and E5M2; "nearest" rounds
                     these sums to nearest

s is MAX / amax, with the amax of the matrix over all ranks. Sums in FP8 are rounded after each
rank. For the exact sum g and the computed sum g', SNR = 10 log10 (sum g^2 / sum (g - g')^2) in dB.
Underflow is the share of values g_i != 0 whose code is 0, overflow the share of FP8 sums that are
+-MAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coatlm.files import whole_file
from coatlm.fp8.accumulate import BlockFp8
from coatlm.fp8.formats import E3M4, E4M3, E5M2, SCALE_BLOCK, Coding, Fp8Format, cast
from coatlm.fp8.payload import pack, unpack
from coatlm.fp8.payload_layout import Layout
from coatlm.fp8.scaling import scale_ref
from coatlm.parallel.fp8lm_scaling import SATURATED, SMALLEST_MU
from coatlm.platform import device


@dataclass(frozen=True)
class RankGradients:
    """Gradients of E elements in T matrices on R ranks."""

    values: Tensor  # fp32 [R, E], E a multiple of 128
    amax: Tensor  # fp32 [R, T] of the whole matrices
    owner: Tensor  # int32 [E / 128]: the matrix of each block
    names: list[str]

    def save(self, path: Path) -> None:
        with whole_file(path) as temporary, temporary.open("wb") as file:
            try:
                torch.save({**vars(self)}, file)
            except RuntimeError as error:  # torch's zip writer hides the OSError of the disk
                raise error.__context__ or error from error

    @classmethod
    def load(cls, path: Path) -> RankGradients:
        """Read what `save` wrote. Raises ValueError for any other file."""
        try:
            found = cls(**torch.load(path, weights_only=True, map_location=device()))
            ranks, elements = found.values.shape
            whole = found.amax.shape == (ranks, len(found.names))
            whole &= found.owner.shape == (elements // SCALE_BLOCK,) and elements % SCALE_BLOCK == 0
            whole &= bool(((found.owner >= 0) & (found.owner < len(found.names))).all())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from error
        except Exception as error:  # of any type; torch's message suggests trusting the file
            raise ValueError(f"{path}: not gradients.pt of this tool") from error
        if not whole:
            raise ValueError(f"{path}: gradients.pt with shapes that do not fit each other")
        return found


@dataclass(frozen=True)
class SumErrors:
    """The errors of one summation over N ranks."""

    how: str
    ranks: int
    snr: float  # dB
    relative_error: float
    underflow: float
    overflow: float | None  # None for fp32 sums
    mu: float | None  # the smallest mu of auto-scaling


def study(gradients: RankGradients, ranks: Sequence[int]) -> Iterator[SumErrors]:
    """Yield the errors of every way of summing, for each number of ranks. Raises ValueError."""
    most = len(gradients.values)
    if not ranks or max(ranks) > most or min(ranks) < 2:
        raise ValueError(f"ranks={list(ranks)}: from 2 to the {most} stored gradients")
    for n in ranks:
        g = RankGradients(
            gradients.values[:n], gradients.amax[:n], gradients.owner, gradients.names
        )
        ones = torch.ones(len(g.names), device=g.values.device)
        yield _judge("pre-scaling", g, fp8_sum(g, ones / n))
        yield _judge("post-scaling", g, fp8_sum(g, ones))
        mu, total = auto_scaled(g)
        yield _judge("auto-scaling", g, total, mu=float(mu.min()))
        yield _judge("fp8-a2a, tensor", g, exchanged(g, E4M3, shared=True))
        yield _judge("fp8-a2a, block", g, exchanged(g, E4M3, shared=False))
        yield _judge("fp8-a2a, e3m4", g, exchanged(g, E3M4, shared=False))
        yield _judge("fp8-a2a, e5m2", g, exchanged(g, E5M2, shared=False))
        bf16 = torch.zeros_like(g.values[0], dtype=torch.bfloat16)
        for values in g.values:
            bf16 += values.bfloat16()
        yield _judge("accumulated, bf16", g, Total(bf16.float()))
        yield _judge("accumulated, e4m3", g, accumulated(g, E4M3))
        yield _judge("accumulated, e5m2", g, accumulated(g, E5M2))
        yield _judge("accumulated, e4m3 nearest", g, accumulated(g, E4M3, nearest=True))


@dataclass(eq=False)
class Total:
    """A sum over ranks; if it is in FP8, a mask of saturated elements; and underflows so far."""

    value: Tensor
    full: Tensor | None = None
    lost: int = 0

    def add(self, values: Tensor, decoded: Tensor) -> None:
        """Add `decoded`, one rank's `values` after rounding; if `full` is set, round to FP8."""
        self.lost += int(((decoded == 0) & (values != 0)).sum())
        self.value = self.value + decoded
        if self.full is not None:
            self.value = cast(self.value, E4M3).float()
            self.full = self.value.abs() == E4M3.max


def fp8_sum(g: RankGradients, mu: Tensor) -> Total:
    """Sum over ranks in E4M3, with mu [T] per matrix."""
    scale = (scale_ref(g.amax.amax(0), E4M3) / mu)[g.owner.long()].repeat_interleave(SCALE_BLOCK)
    total = Total(torch.zeros_like(scale), torch.zeros_like(scale, dtype=torch.bool))
    for values in g.values:
        total.add(values, cast(values / scale, E4M3).float())
    total.value = total.value * scale
    return total


def auto_scaled(g: RankGradients) -> tuple[Tensor, Total]:
    """Halve mu until no matrix saturates by FP8-LM's rule; returns mu and the sum."""
    mu = torch.ones(len(g.names), device=g.values.device)
    groups = torch.zeros_like(mu).index_add_(0, g.owner, torch.ones_like(g.owner, dtype=mu.dtype))
    while True:
        total = fp8_sum(g, mu)
        assert total.full is not None
        counts = torch.zeros_like(mu)
        counts.index_add_(0, g.owner, total.full.view(-1, SCALE_BLOCK).sum(1).to(mu.dtype))
        too_many = counts / (groups * SCALE_BLOCK) > SATURATED
        if not too_many.any() or float(mu.min()) < 2 * SMALLEST_MU:
            return mu, total
        mu = torch.where(too_many, mu / 2, mu)


def exchanged(g: RankGradients, fmt: Coding, *, shared: bool) -> Total:
    """Sum as fp8-a2a does: values are rounded once, sums are fp32."""
    total = Total(torch.zeros_like(g.values[0]))
    scale = scale_ref(g.amax.amax(0), fmt)[g.owner.long()].repeat_interleave(SCALE_BLOCK)
    layout = Layout(len(total.value), fmt, scaled=True)
    payload = layout.empty(1, 1, device=scale.device)
    part = -(-len(scale) // len(g.values))
    for rank, values in enumerate(g.values):
        if shared:
            decoded = fmt.decode(fmt.encode(values / scale)) * scale
        else:
            decoded = torch.empty_like(values)
            pack(values[None, None], payload, layout=layout)
            unpack(payload[None], decoded[None, None], layout=layout)
        own = slice(rank * part, (rank + 1) * part)
        decoded[own] = values[own]
        total.add(values, decoded)
    return total


def accumulated(g: RankGradients, fmt: Fp8Format, *, nearest: bool = False) -> Total:
    """Sum microbatches as one-byte main gradients do."""
    noise = torch.zeros(4, dtype=torch.int32, device=g.values.device)
    sums = BlockFp8.zeros(g.values.shape[1], noise, fmt)
    for number, values in enumerate(g.values.bfloat16()):
        if nearest:
            sums.copy_(sums.float() + values)
        else:
            (sums.add_ if number else sums.copy_)(values)
    return Total(sums.float())


def _judge(how: str, g: RankGradients, total: Total, *, mu: float | None = None) -> SumErrors:
    exact = g.values.double().sum(0)
    error = (exact - total.value.double()).square().sum() / exact.square().sum()
    return SumErrors(
        how,
        len(g.values),
        snr=float(-10 * error.log10()),
        relative_error=float(error.sqrt()),
        underflow=total.lost / int((g.values != 0).sum()),
        overflow=None if total.full is None else float(total.full.float().mean()),
        mu=mu,
    )
