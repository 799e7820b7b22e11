"""Errors of summing gradients in FP8, as in figure 7 of FP8-LM (arXiv 2310.18313, section 3.1).

    python tools/study_reduction.py configs/llama-125m.yaml preset=null train.steps=500 --out study

One process trains the run of CONFIG (with overrides as for pretrain.py, in its run directory), then
computes the gradients of the next microbatches, as many as the largest of --ranks; each stands for
the gradients of one data-parallel rank. gradients.pt stores --elements of each, in equal
numbers of blocks of 128 per matrix, and the amax of each whole matrix. --gradients FILE starts from
such a file.

The gradients g_1 .. g_N of N virtual ranks are summed in each of these ways, for each N of --ranks:

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

Prints a table in Markdown; writes reduction.json and reduction.png to --out. Exit code: 0, or 2 for
an error, which one line explains.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from coatlm.config import Config, load_config
from coatlm.console import Parser, fail
from coatlm.data.dataset import microbatches
from coatlm.files import check_output, whole_file
from coatlm.fp8.accumulate import BlockFp8
from coatlm.fp8.formats import E3M4, E4M3, E5M2, SCALE_BLOCK, Coding, Fp8Format, cast
from coatlm.fp8.payload import Layout, pack, unpack
from coatlm.fp8.scaling import scale_ref
from coatlm.parallel.fp8lm_scaling import SATURATED, SMALLEST_MU
from coatlm.parallel.pipeline import run_microbatches
from coatlm.platform import device
from coatlm.train import start
from coatlm.train.checkpoint import CheckpointError
from coatlm.train.faults import NonFiniteError
from coatlm.train.setup import Launch

RANKS = (8, 32, 128)
ELEMENTS = 1 << 22


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
class Found:
    """The errors of one summation over N ranks."""

    how: str
    ranks: int
    snr: float  # dB
    relative_error: float
    underflow: float
    overflow: float | None  # None for fp32 sums
    mu: float | None  # the smallest mu of auto-scaling


def capture(config: Config, *, ranks: int, elements: int) -> RankGradients:
    """Train, then compute the gradients of `ranks` microbatches. Raises ValueError."""
    with ExitStack() as stack:
        session = start.set_up(config, Launch(), stack)
        session.run_steps()
        trainer, t = session.trainer, config.train
        names = {p: n for c in trainer.chunks for n, p in c.module.named_parameters()}
        matrices = [p for p in names if p.dim() == 2 and p.numel() >= SCALE_BLOCK]
        share = max(elements // (SCALE_BLOCK * len(matrices)), 1)
        chosen = {p: _spread(p.numel() // SCALE_BLOCK, share) for p in matrices}
        batches = microbatches(
            session.data.train,
            session.run.samples,  # the first sample after those of training
            global_batch=ranks * t.micro_batch,
            micro_batch=t.micro_batch,
            dp_rank=0,
            dp_size=1,
            device=device(),
        )
        values, amax = [], []
        for batch in batches:
            for chunk in trainer.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            placed = trainer.place([batch])
            run_microbatches(trainer.chunks, placed, trainer.groups, seq_len=config.data.seq_len)
            grads: list[Tensor] = [p.main_grad.float().view(-1) for p in matrices]
            amax.append(torch.stack([g.abs().amax() for g in grads]))
            parts = [
                g[: g.numel() // SCALE_BLOCK * SCALE_BLOCK]
                .view(-1, SCALE_BLOCK)[chosen[p]]
                .flatten()
                for p, g in zip(matrices, grads, strict=True)
            ]
            values.append(torch.cat(parts))
    owner = torch.cat([torch.full((len(chosen[p]),), i) for i, p in enumerate(matrices)])
    stacked = torch.stack(values)
    return RankGradients(
        stacked,
        torch.stack(amax),
        owner.int().to(stacked.device),
        [names[p] for p in matrices],
    )


def _spread(groups: int, most: int) -> Tensor:
    """At most `most` indices, evenly spaced in range(groups)."""
    count = min(groups, most)
    return (torch.arange(count, device=device()) * groups) // count


def study(gradients: RankGradients, ranks: Sequence[int]) -> Iterator[Found]:
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


def _judge(how: str, g: RankGradients, total: Total, *, mu: float | None = None) -> Found:
    exact = g.values.double().sum(0)
    error = (exact - total.value.double()).square().sum() / exact.square().sum()
    return Found(
        how,
        len(g.values),
        snr=float(-10 * error.log10()),
        relative_error=float(error.sqrt()),
        underflow=total.lost / int((g.values != 0).sum()),
        overflow=None if total.full is None else float(total.full.float().mean()),
        mu=mu,
    )


def markdown(found: Sequence[Found]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| sum | ranks | SNR dB | relative error | underflow | overflow | smallest mu |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for f in found:
        overflow = "" if f.overflow is None else f"{f.overflow:.2e}"
        mu = "" if f.mu is None else f"{f.mu:.3g}"
        yield (
            f"| {f.how} | {f.ranks} | {f.snr:.1f} | {f.relative_error:.4f} | {f.underflow:.2e} "
            f"| {overflow} | {mu} |"
        )


def draw(found: Sequence[Found], path: Path) -> None:
    """Plot SNR, underflow and overflow over the number of ranks."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for how in dict.fromkeys(f.how for f in found):
        rows = [f for f in found if f.how == how]
        ranks = [f.ranks for f in rows]
        axes[0].plot(ranks, [f.snr for f in rows], "o-", label=how)
        axes[1].plot(ranks, [100 * f.underflow for f in rows], "o-", label=how)
        if rows[0].overflow is not None:
            axes[2].plot(ranks, [100 * (f.overflow or 0.0) for f in rows], "o-", label=how)
    for axis, title in zip(axes, ("SNR, dB", "underflow, %", "overflow, %"), strict=True):
        axis.set(title=title, xlabel="ranks")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({f.ranks for f in found}))
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path, format="png", dpi=130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("config", nargs="?", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--gradients", type=Path, help="of an earlier call, instead of CONFIG")
    parser.add_argument("--out", type=Path, default=Path("study"), help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="(default: %(default)s)")
    options = parser.parse_intermixed_args(arguments)
    try:
        check_output(options.out / "reduction.json")
        gradients = read_or_capture(options)
        found = list(study(gradients, options.ranks))
        text = json.dumps([vars(f) for f in found], indent=1) + "\n"
        with whole_file(options.out / "reduction.json") as file:
            file.write_text(text, encoding="utf-8")
        with whole_file(options.out / "reduction.png") as file:
            draw(found, file)
    except (ValueError, OSError, CheckpointError, NonFiniteError) as error:
        return fail(error)
    print("\n".join(markdown(found)))
    return 0


def read_or_capture(options: Any) -> RankGradients:
    """Read --gradients, or train and save gradients.pt. Raises ValueError."""
    if (options.gradients is None) == (options.config is None):
        raise ValueError("give either CONFIG or --gradients")
    if options.gradients is not None:
        return RankGradients.load(options.gradients)
    if min(options.ranks) < 2 or options.elements < SCALE_BLOCK:
        raise ValueError(
            f"--ranks {min(options.ranks)} --elements {options.elements}: "
            f"at least 2 and {SCALE_BLOCK}"
        )
    config = load_config(options.config, options.overrides)
    gradients = capture(config, ranks=max(options.ranks), elements=options.elements)
    gradients.save(options.out / "gradients.pt")
    return gradients


if __name__ == "__main__":
    process.run(main)
