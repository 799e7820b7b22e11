"""Errors of summing gradients in FP8, as in figure 7 of FP8-LM (arXiv 2310.18313, section 3.1).

    python tools/study_reduction.py configs/llama-125m.yaml preset=null train.steps=500 --out study

One process trains the run of CONFIG (with overrides as for pretrain.py, in its run directory), then
computes the gradients of the next microbatches, as many as the largest of --ranks; each stands for
the gradients of one data-parallel rank. gradients.pt stores --elements of each, in equal
numbers of blocks of 128 per matrix, and the amax of each whole matrix. --gradients FILE starts from
such a file.

The gradients of N virtual ranks are summed in every way of tools/studies/gradient_sums.py, for each
N of --ranks, and compared with their exact sum.

Prints a table in Markdown; writes reduction.json and reduction.png to --out. Exit code: 0, 2 for an
error, which one line explains, or that of a run which a signal stops before its last step.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from coatlm.config import Config, load_config
from coatlm.console import Parser, fail, local_path, local_text, output_path
from coatlm.data.batches import microbatches
from coatlm.files import check_output, whole_file
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.parallel.pipeline import run_microbatches
from coatlm.platform import device
from coatlm.train import start
from coatlm.train.checkpoint import CheckpointError
from coatlm.train.faults import ExitCode, NonFiniteError
from coatlm.train.setup import Launch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # the repository

from tools.studies.gradient_sums import RankGradients, SumErrors, study  # noqa: E402

RANKS = (8, 32, 128)
ELEMENTS = 1 << 22


def capture(config: Config, *, ranks: int, elements: int) -> RankGradients:
    """Train, then compute the gradients of `ranks` microbatches. Raises ValueError.

    A signal that stops the run ends the process, with the exit code of training.
    """
    if config.parallel.main_grads == "fp8":
        raise ValueError("parallel.main_grads=fp8: the study takes gradients in fp32 or bf16")
    with ExitStack() as stack:
        session = start.set_up(config, Launch(), stack)
        if session is None:
            raise ValueError(
                f"run.dir={config.run.dir}: the run is finished; use another run.dir, or "
                "--gradients with the file that it has written"
            )
        if (code := session.run_steps()) != ExitCode.OK:
            raise SystemExit(int(code))
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


def _spread(blocks: int, most: int) -> Tensor:
    """At most `most` indices, evenly spaced in range(blocks)."""
    count = min(blocks, most)
    return (torch.arange(count, device=device()) * blocks) // count


def markdown(found: Sequence[SumErrors]) -> Iterator[str]:
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


def draw(found: Sequence[SumErrors], path: Path) -> None:
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
    parser.add_argument("config", type=local_text, nargs="?", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument(
        "--gradients", type=local_path, help="gradients.pt of an earlier call, in place of CONFIG"
    )
    parser.add_argument(
        "--out", type=output_path, default=Path("study"), help="(default: %(default)s)"
    )
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
