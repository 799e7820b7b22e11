"""COAT's Tables 1 and 8 and its figures 2 and 3, on the moments of a run (arXiv 2410.19313, s. 4).

    python tools/study_states.py runs/baseline/checkpoints/step_00010000 --out study

CHECKPOINT is a checkpoint of a run with optim.recipe=adamw-fp32, or the directory of such a run,
whose newest checkpoint is read. The study covers all matrices, each in blocks of 128 consecutive
elements; it leaves out norms, and the last elements of a matrix that do not fill a block.
--elements N takes an equal share of every matrix, in evenly spaced blocks: at most N elements
together, but at least one block per matrix.

m is encoded and decoded in the format of the row, v in the format of the column. With the run's
eps, and c = 1 - beta^t after its t updates,

    u = (m / c1) / (sqrt(v / c2) + eps)      u' = the same of the decoded m and v
    MSE = mean (u' - u)^2, in units of 1e-5   error = ||u' - u|| / ||u||

The paper names no unit, so only ratios of cells compare with its tables. Where v is rounded to zero
and m is not, u' is m / (c1 eps), and a few such elements dominate a mean. If there are any, each
table is also printed without the elements whose v is rounded to zero by some format. The share of
those is printed for each format of v.

    E4M3, E5M2, DE8   the largest |x| of a block becomes the largest number of the format; k = 1
    + Expand          as in coatlm.fp8.expand: M_E4M3 for m, V_E4M3 for v, and the same rules for
                      the other formats
    paper's rule      E4M3 with R = 448 * 512 and k >= 1 for both moments; v may become zero
    published kernel  E4M3 with R = 448 * 448 / 2 and any k for both moments; v may become zero.
                      That kernel rounds k down to a multiple of 1/16, here k is the nearest one

Prints the tables in Markdown; writes states.json and states.png to --out. Exit code: 0, or 2 with
one line that says what is wrong.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from coatlm.console import Parser, fail, local_path, output_path
from coatlm.files import STATE_PREFIX, check_output, whole_file
from coatlm.fp8.expand import K_STEPS, M_E4M3, V_E4M3, Expansion, expand_quantize
from coatlm.fp8.formats import E4M3, SCALE_BLOCK, SMALLEST
from coatlm.train.checkpoint import CheckpointError, named_checkpoint, read_tensors, saved_config
from coatlm.train.state import read_run_state

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # the repository

from tools.studies.state_formats import (  # noqa: E402
    M_FORMATS,
    RULES,
    TABLE_1,
    TABLE_8,
    V_FORMATS,
    plain,
    round_trip,
)

RECIPE = "adamw-fp32"
M_KEY, V_KEY = f"{STATE_PREFIX}exp_avg.", f"{STATE_PREFIX}exp_avg_sq."
PIECE = SCALE_BLOCK << 15  # elements studied at a time
DRAWN = 2048 * SCALE_BLOCK  # elements drawn
UNIT = 1e-5  # of the MSE printed


Cells = dict[str, dict[str, float]]  # by row, m, and column, v


@dataclass(frozen=True)
class Moments:
    """fp32 m and v, flat and in whole blocks, and the parameters of the update."""

    m: Tensor
    v: Tensor
    updates: int  # t
    betas: tuple[float, float]
    eps: float

    def update(self, m: Tensor, v: Tensor) -> Tensor:
        """The update u of every element, in fp32, from moments m and v."""
        c1, c2 = (1 - beta**self.updates for beta in self.betas)
        return (m / c1) / ((v / c2).sqrt() + self.eps)


@dataclass(frozen=True)
class StateStudy:
    """The tables over all elements, and over those whose v no format rounds to zero ("nonzero")."""

    elements: int
    nonzero: int
    zeroed: dict[str, float]  # by column: the share of all elements whose v becomes zero
    mse: Cells
    error: Cells
    mse_nonzero: Cells
    error_nonzero: Cells


def read_moments(checkpoint: Path, *, elements: int | None = None) -> Moments:
    """Read the moments of the matrices to the host; the module docstring says which elements.

    Raises CheckpointError if there is no intact checkpoint. Raises ValueError if the checkpoint has
    another recipe, no update or no matrix of 128 elements, or if a moment is not finite or is zero
    everywhere.
    """
    if elements is not None and elements < SCALE_BLOCK:
        raise ValueError(f"elements={elements}: at least {SCALE_BLOCK}, a block")
    path = named_checkpoint(checkpoint, logging.getLogger("study_states"))
    state = read_run_state(path)
    optim, updates = saved_config(path, state).optim, state["updates"]
    if optim.recipe != RECIPE:
        raise ValueError(f"{path}: optim.recipe={optim.recipe}; only {RECIPE} has exact states")
    if updates < 1:
        raise ValueError(
            f"{path}: updates={updates}; at least 1; before the first, all moments are zero"
        )
    m, v = (_matrices(path, prefix) for prefix in (M_KEY, V_KEY))
    if not m or [x.shape for x in m] != [x.shape for x in v]:
        raise ValueError(f"{path} holds no m and v of a matrix of at least {SCALE_BLOCK} elements")
    share = 1.0 if elements is None else elements / sum(x.numel() for x in m)
    m_flat, v_flat = (torch.cat([_spread(x, share) for x in moment]) for moment in (m, v))
    if not all(bool(x.isfinite().all()) for x in (m_flat, v_flat)):
        raise ValueError(f"{path}: a moment is NaN or infinite")
    if not all(bool(x.any()) for x in (m_flat, v_flat)):
        raise ValueError(f"{path}: a moment is zero throughout")
    return Moments(m_flat, v_flat, updates, optim.betas, optim.eps)


def _matrices(checkpoint: Path, prefix: str) -> list[Tensor]:
    """The matrices in the order of their names, each in whole blocks, [blocks, 128]."""
    return [
        x.flatten()[: x.numel() // SCALE_BLOCK * SCALE_BLOCK].view(-1, SCALE_BLOCK)
        for key, x in read_tensors(checkpoint)
        if key.startswith(prefix) and x.dim() > 1 and x.numel() >= SCALE_BLOCK
    ]


def _spread(x_GE: Tensor, share: float) -> Tensor:
    """A share of the blocks, evenly spaced, flat."""
    count = max(1, min(len(x_GE), int(share * len(x_GE))))
    return x_GE[torch.arange(count) * len(x_GE) // count].flatten()


def study(moments: Moments, *, device: torch.device | str = "cpu") -> StateStudy:
    """The errors of each format of m with each format of v, computed in fp32, summed in fp64."""
    rows, columns = list(M_FORMATS), list(V_FORMATS)
    squares = torch.zeros(2, len(rows), len(columns), dtype=torch.float64)  # [all | nonzero]
    total, count = (torch.zeros(2, dtype=torch.float64) for _ in range(2))
    zeroed = torch.zeros(len(columns), dtype=torch.float64)
    pieces = zip(moments.m.split(PIECE), moments.v.split(PIECE), strict=True)
    for m, v in ((m.to(device), v.to(device)) for m, v in pieces):
        u = moments.update(m, v)
        ms = [round_trip(m, how) for how in M_FORMATS.values()]
        vs = [round_trip(v, how) for how in V_FORMATS.values()]
        lost = torch.stack([(q == 0) & (v > 0) for q in vs])
        nonzero = ~lost.any(0)
        zeroed += lost.sum(1).cpu()
        count += torch.tensor([nonzero.numel(), int(nonzero.sum())])
        total += _sums(u, nonzero)
        for i, m_stored in enumerate(ms):
            for j, v_stored in enumerate(vs):
                squares[:, i, j] += _sums(moments.update(m_stored, v_stored) - u, nonzero)
    cells = [
        {m: dict(zip(columns, row, strict=True)) for m, row in zip(rows, table, strict=True)}
        for which in (0, 1)
        for table in (
            (squares[which] / count[which]).tolist(),
            (squares[which] / total[which]).sqrt().tolist(),
        )
    ]
    shares = dict(zip(columns, (zeroed / count[0]).tolist(), strict=True))
    return StateStudy(int(count[0]), int(count[1]), shares, *cells)


def _sums(x: Tensor, nonzero: Tensor) -> Tensor:
    """The sums of squares over all elements and over the nonzero ones, fp64[2] on the host."""
    squares = x.double().square()
    return torch.stack([squares.sum(), squares[nonzero].sum()]).cpu()


def markdown(result: StateStudy) -> Iterator[str]:
    """The lines of Table 1, Table 8 and the rules of expansion, over all and nonzero elements."""
    lost = result.elements - result.nonzero
    views = [(f"all {result.elements:,} elements", result.mse, result.error)]
    if lost:
        which = f"all but the {lost:,} elements whose v some format rounds to zero"
        views.append((which, result.mse_nonzero, result.error_nonzero))
    for title, rows, columns in (
        ("Table 1", TABLE_1, TABLE_1),
        ("Table 8", *TABLE_8),
        ("Rules of expansion", *RULES),
    ):
        for which, mse, error in views:
            yield f"{title}: MSE of m / (sqrt(v) + eps) in {UNIT:g}, relative error; {which}"
            yield ""
            yield "| m \\ v | " + " | ".join(columns) + " |"
            yield "|---|" + "---:|" * len(columns)
            for m in rows:
                cells = [f"{mse[m][v] / UNIT:.4g}, {error[m][v]:.3g}" for v in columns]
                yield f"| {m} | " + " | ".join(cells) + " |"
            yield ""
    yield "| v that becomes zero | " + " | ".join(result.zeroed) + " |"
    yield "|---|" + "---:|" * len(result.zeroed)
    yield "| share | " + " | ".join(f"{100 * s:.2g} %" for s in result.zeroed.values()) + " |"
    yield ""
    for which, mse, _ in views:
        m, v = best(mse)
        yield f"Over {which}: the smallest MSE of Table 1 is that of m in {m} and v in {v};"
        yield f"E4M3 for both has {gain(mse):.3g} times that of E4M3 + Expand (paper: 1.63)."


def best(mse: Cells) -> tuple[str, str]:
    """The row and the column of Table 1 with the smallest MSE."""
    return min(((m, v) for m in TABLE_1 for v in TABLE_1), key=lambda cell: mse[cell[0]][cell[1]])


def gain(mse: Cells) -> float:
    """MSE of E4M3 for both moments over that of E4M3 with both expanded."""
    return mse["E4M3"]["E4M3"] / mse["E4M3 + Expand"]["E4M3 + Expand"]


def draw(moments: Moments, path: Path) -> None:
    """Draw |m| and |v| in E4M3's range before and after rounding, and the k of the blocks."""
    figure = Figure(figsize=(12, 6), layout="constrained")  # without pyplot: no display, no globals
    axes = figure.subplots(2, 3)
    for row, (name, x, how) in zip(
        axes, (("m", moments.m, M_E4M3), ("v", moments.v, V_E4M3)), strict=True
    ):
        x = _spread(x.view(-1, SCALE_BLOCK), min(1.0, DRAWN / x.numel()))
        _draw_range(row[0], x, plain(E4M3), f"{name}, E4M3")
        _draw_range(row[1], x, how, f"{name}, E4M3 + Expand")
        k = expand_quantize(x, how).k16.float() / K_STEPS
        k = k[x.view(-1, SCALE_BLOCK).any(1)]  # the k of a block of zeros means nothing
        row[2].hist(k.tolist(), bins=[i / 4 for i in range(65)], color="tab:green")
        row[2].set(title=f"k of {name}: median {k.median():.3g}", xlabel="k", ylabel="blocks")
    figure.savefig(path, format="png", dpi=130)


def _draw_range(axes: Axes, x: Tensor, how: Expansion, title: str) -> None:
    """Histograms of log2 of the values before and after rounding."""
    state = expand_quantize(x, how)
    k, scale = (state.k16.float() / K_STEPS)[:, None], state.log2_scale[:, None]
    a_GE = x.abs().view(-1, SCALE_BLOCK)
    before = (k * (a_GE.log2() - scale))[a_GE >= SMALLEST]
    codes = how.fmt.decode(state.codes).abs().view(-1, SCALE_BLOCK)
    after = codes[codes > 0].log2()
    lost = float(((codes == 0) & (a_GE >= SMALLEST)).float().mean())
    lowest, highest = math.log2(E4M3.smallest_subnormal), math.log2(E4M3.max)
    bins = [i / 4 for i in range(-64, 37)]
    axes.hist(before.clamp(min=bins[0]).tolist(), bins=bins, color="tab:blue", label="before")
    axes.hist(after.tolist(), bins=bins, histtype="step", color="tab:red", label="after rounding")
    axes.axvspan(lowest, highest, color="0.9", zorder=0, label="E4M3's range")
    axes.set(
        title=f"{title} ({lost:.2%} become zero)", xlabel="log2 of |x|^k / scale", ylabel="elements"
    )
    axes.legend(frameon=False)


def as_json(moments: Moments, result: StateStudy) -> dict[str, Any]:
    """The contents of states.json; the MSE is in units of 1."""
    return {
        "updates": moments.updates,
        "betas": list(moments.betas),
        "eps": moments.eps,
        **vars(result),
        "best_of_table_1": best(result.mse),
        "gain": gain(result.mse),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", type=local_path, metavar="CHECKPOINT")
    parser.add_argument(
        "--out", type=output_path, default=Path("study"), help="(default: %(default)s)"
    )
    parser.add_argument("--elements", type=int, help="at most this many (default: all)")
    options = parser.parse_args(arguments)
    try:
        check_output(options.out / "states.json")
        moments = read_moments(options.checkpoint, elements=options.elements)
        result = study(moments, device="cuda" if torch.cuda.is_available() else "cpu")
        text = json.dumps(as_json(moments, result), indent=1) + "\n"
        with whole_file(options.out / "states.json") as file:
            file.write_text(text, encoding="utf-8")
        with whole_file(options.out / "states.png") as file:
            draw(moments, file)
    except (ValueError, OSError, CheckpointError) as error:
        return fail(error)
    print("\n".join(markdown(result)))
    return 0


if __name__ == "__main__":
    process.run(main)
