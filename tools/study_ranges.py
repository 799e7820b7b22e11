"""The range R of v: errors of stored moments after few and many steps, by the rule that chooses R.

    python tools/study_ranges.py --out study        # 1000 steps: ten minutes on one CPU core

AdamW's moments of simulated gradients are encoded and decoded after every step, in blocks of 128
(coatlm/fp8/expand.py), by each rule below and by that of COAT's published kernel. Against moments
in fp64, after t steps,

    MSE = mean (m' / sqrt(v') - m / sqrt(v))^2        of the stored m' and v'

and the tables have the MSE of each rule divided by that of the published kernel, which has
R = 448 * 448 / 2 for both moments, rounds k down to a multiple of 1/16, and bounds k by 1/16 alone.
R = 448 / 2^e means that the smallest element of a block becomes 2^e, so that E4M3's normal numbers
end at e = -6, and its subnormal ones at -9.

    coatlm       e = -9 for m, -6 for v: M_E4M3 and V_E4M3
    v to 2^-7    coatlm, but e = -7 for v
    v to 2^-9    coatlm, but e = -9 for v, the paper's R for both moments
    by span      e = -7 for blocks of v whose log2(max / min) is at most 9, else -9
    best of 4    each block of v takes the e of -6, -7, -8 and -9 with the smallest relative error
    by age       e = -8 for both moments and k of m an even number of sixteenths in the first two
                 steps; later e = -9 for m and -7 for v

Prints the tables in Markdown; writes ranges.json to --out. Exit code: 0, or 2 with one line that
says what is wrong.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coatlm.console import Parser, fail, output_path
from coatlm.files import check_output, whole_file
from coatlm.fp8.formats import E4M3, SCALE_BLOCK

MAX = math.log2(E4M3.max)
STEPS = (1, 2, 3, 5, 10, 30, 100, 200, 1000)  # after which errors are reported
BETA1, SEED = 0.9, 0
NARROW_SPAN = 9.0  # bits
ENDS = (-6.0, -7.0, -8.0, -9.0)
NextGradient = Callable[[], Tensor]  # of the next step, [G, 128]
Table = dict[str, dict[int, float]]  # rule -> step -> MSE relative to the published kernel


@dataclass(frozen=True)
class Range:
    """How one moment is stored: log2 of the smallest element's code, and the rounding of k."""

    end: float
    wide_end: float | None = None  # of blocks whose span exceeds NARROW_SPAN
    ends: tuple[float, ...] = ()  # the best of these, instead of `end`
    multiple: int = 1  # k is a multiple of this many sixteenths
    down: bool = False  # k is rounded down, not to nearest
    k16_min: int = 16

    def stored(self, x_GE: Tensor) -> Tensor:
        """x after it was encoded and decoded, fp32[G, 128]; a sign is stored if x has one."""
        if not self.ends:
            return self._stored(x_GE, x_GE.new_full((len(x_GE),), self.end))
        tried = [self._stored(x_GE, x_GE.new_full((len(x_GE),), end)) for end in self.ends]
        errors = [((y - x_GE) / x_GE).nan_to_num().square().sum(1) for y in tried]
        best = torch.stack(errors).argmin(0)
        return torch.stack(tried)[best, torch.arange(len(x_GE))]

    def _stored(self, x_GE: Tensor, end_G: Tensor) -> Tensor:
        """The arithmetic of `expand_quantize_ref` and `expand_dequantize_ref` with R by block."""
        a_GE = x_GE.abs()
        high = a_GE.amax(1)
        low = torch.where(a_GE > 0, a_GE, torch.inf).amin(1)
        span = (high.log2() - low.log2()).clamp(min=0.5)
        if self.wide_end is not None:
            end_G = torch.where(span > NARROW_SPAN, self.wide_end, end_G)
        steps = 16 / self.multiple * (MAX - end_G) / span
        steps = steps.floor() if self.down else (steps + 0.5).floor()
        k16 = (self.multiple * steps).clamp(self.k16_min, 255)
        log2_scale = torch.where(high > 0, high.log2() - MAX * (16 / k16), 0.0)
        k_GE, log2_scale = (k16 / 16)[:, None], log2_scale[:, None]
        y_GE = torch.exp2(k_GE * (a_GE.log2() - log2_scale))
        if self.k16_min == 8:  # V_E4M3: non-zero values stay so
            lost = (a_GE > 0) & (y_GE < E4M3.smallest_subnormal)
            y_GE = torch.where(lost, E4M3.smallest_subnormal, y_GE)
        c_GE = E4M3.decode(E4M3.encode(y_GE))
        return torch.copysign(torch.exp2(c_GE.log2() * (16 / k16)[:, None] + log2_scale), x_GE)


@dataclass(frozen=True)
class RangeRule:
    """The ranges of both moments, and other ones for the first `early_steps` steps."""

    m: Range
    v: Range
    early: tuple[Range, Range] | None = None
    early_steps: int = 2

    def at(self, step: int) -> tuple[Range, Range]:
        """The ranges of m and v at `step`, counted from 1."""
        return self.early if self.early and step <= self.early_steps else (self.m, self.v)


def v_to(end: float, wide_end: float | None = None) -> Range:
    """A range of v with the bound of k that V_E4M3 has."""
    return Range(end, wide_end, k16_min=8)


M_NOW, KERNEL = Range(-9.0), Range(MAX - math.log2(448 * 448 / 2), down=True, k16_min=1)
PUBLISHED = RangeRule(KERNEL, KERNEL)
RULES = {
    "coatlm": RangeRule(M_NOW, v_to(-6.0)),
    "v to 2^-7": RangeRule(M_NOW, v_to(-7.0)),
    "v to 2^-9": RangeRule(M_NOW, v_to(-9.0)),
    "by span": RangeRule(M_NOW, v_to(-7.0, wide_end=-9.0)),
    "best of 4": RangeRule(M_NOW, Range(-6.0, ends=ENDS, k16_min=8)),
    "by age": RangeRule(M_NOW, v_to(-7.0), early=(Range(-8.0, multiple=2), v_to(-8.0))),
}


def gradients(kind: str, blocks: int) -> NextGradient:
    """Simulated gradients, drawn again at each call."""
    generator = torch.Generator().manual_seed(SEED)

    def normal() -> Tensor:
        return torch.randn(blocks, SCALE_BLOCK, generator=generator)

    def heavy() -> Tensor:
        squares = sum((normal().square() for _ in range(3)), torch.zeros(()))
        return normal() / (squares / 3).sqrt()

    def sparse() -> Tensor:
        drawn = torch.rand(blocks, SCALE_BLOCK, generator=generator)
        return normal() * (drawn < 0.1)

    if kind in ("narrow", "wide"):
        deviation = torch.exp({"narrow": 0.5, "wide": 1.5}[kind] * normal())
        mean = 0.2 * deviation * normal()
        return lambda: mean + deviation * normal()
    if kind == "steady":
        constant = normal()
        return lambda: constant + 0.3 * normal()
    return {"normal": normal, "heavy": heavy, "sparse": sparse}[kind]


KINDS = {
    "normal": "standard normal",
    "narrow": "normal; deviations in a block are log-normal with sigma 0.5, means 0.2 of them",
    "wide": "the same with sigma 1.5",
    "heavy": "Student's t with 3 degrees of freedom",
    "sparse": "normal, of which nine tenths are zero",
    "steady": "a constant, drawn once, plus 0.3 of a standard normal",
}


def simulate(kind: str, *, beta2: float, steps: int, blocks: int) -> Table:
    """The MSE of each rule relative to the published kernel's, after those of STEPS up to `steps`.

    An element that had no gradient yet does not count.
    """
    draw = gradients(kind, blocks)
    found: Table = {name: {} for name in RULES}
    rules = {"published": PUBLISHED} | RULES
    m, v = (torch.zeros(blocks, SCALE_BLOCK, dtype=torch.float64) for _ in range(2))
    kept = {name: (m.float(), v.float()) for name in rules}
    for step in range(1, steps + 1):
        g = draw()
        m, v = BETA1 * m + (1 - BETA1) * g, beta2 * v + (1 - beta2) * g.double().square()
        for name, rule in rules.items():
            m_how, v_how = rule.at(step)
            m_last, v_last = kept[name]
            kept[name] = (
                m_how.stored(BETA1 * m_last + (1 - BETA1) * g),
                v_how.stored(beta2 * v_last + (1 - beta2) * g * g),
            )
        if step in STEPS:
            there = v > 0
            exact = (m / v.sqrt())[there]
            mse = {
                name: float(((p.double() / q.double().sqrt())[there] - exact).square().mean())
                for name, (p, q) in kept.items()
            }
            for name, row in found.items():
                row[step] = mse[name] / mse["published"]
    return found


def markdown(kind: str, beta2: float, table: Table) -> Iterator[str]:
    """The lines of a table."""
    steps = list(next(iter(table.values())))
    yield f"{kind} ({KINDS[kind]}), beta2 = {beta2}: MSE relative to the published kernel's"
    yield ""
    yield "| after steps | " + " | ".join(map(str, steps)) + " |"
    yield "|---|" + "---:|" * len(steps)
    for name, row in table.items():
        yield f"| {name} | " + " | ".join(f"{row[step]:.2f}" for step in steps) + " |"
    yield ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--out", type=output_path, default=Path("study"), help="(default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument(
        "--blocks", type=int, default=256, help="blocks of 128 elements (default: %(default)s)"
    )
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.95, 0.999])
    parser.add_argument("--gradients", nargs="+", default=list(KINDS))
    options = parser.parse_args(arguments)
    path = options.out / "ranges.json"
    try:
        if not (1 <= options.steps <= 1 << 20 and 1 <= options.blocks <= 1 << 20):
            raise ValueError("--steps and --blocks: from 1 to 1048576")
        if not all(0 < beta2 < 1 for beta2 in options.beta2):
            raise ValueError("--beta2: between 0 and 1")
        for kind in options.gradients:
            if kind not in KINDS:
                raise ValueError(f"--gradients {kind}: one of {', '.join(KINDS)}")
        check_output(path)
        found: dict[str, Table] = {}
        for kind in options.gradients:
            for beta2 in options.beta2:
                sizes = {"steps": options.steps, "blocks": options.blocks}
                table = simulate(kind, beta2=beta2, **sizes)
                found[f"{kind}, {beta2}"] = table
                print("\n".join(markdown(kind, beta2, table)), flush=True)
        with whole_file(path) as file:
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # the repository
    process.run(main)
