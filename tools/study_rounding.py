"""Bias and variance of the rounding of gradients to FP8, with the weights of a trained model.

    python tools/study_rounding.py runs/mine --batches 32 --out study
    python tools/study_rounding.py runs/mine --rows "e5m2 nearest" "e5m2 stochastic" --out study

CHECKPOINT is a checkpoint, or the directory of a run, whose newest one is read. Each row is a way
to round gradients; its errors are to a model that differs in nothing else:

    e5m2 nearest, e5m2 stochastic    gradients of the GEMMs of `coat` layers, with current scales,
    e4m3 nearest, e4m3 stochastic    against the same layers with these gradients in BF16
    logits                           the output layer's backward with precision.output_layer=
                                     fp8-gradients, which rounds its other operands too, against
                                     one in BF16, with layers in BF16

No GEMM uses fast accumulation. A microbatch b of the run's validation split has the gradient g_b
without the rounding and g_b + e_b with it. The mean of N microbatches, as an update takes it, has a
squared error of bias + variance / N. Estimated from n microbatches, for each weight matrix:

    bias      |E e|^2 / |E g|^2,  with |E e|^2 = (|sum_b e_b|^2 - sum_b |e_b|^2) / (n (n - 1))
    variance  (sum_b |e_b|^2 / n - |E e|^2) / |E g|^2
    own       the variance of g_b itself, by the same formulas: what other samples would change

The estimate of a bias may be negative where there is none. Tables have means over the matrices of
the layers, and the values of the output weight, with standard errors of the biases (jackknife over
8 groups of microbatches).

Prints a table in Markdown; writes rounding.json to --out. Exit code: 0; 2 for invalid input, 4 for
a damaged checkpoint, each with one line that explains it.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds, and warn
    process.listen()
    import warnings

    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")

import json
import logging
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.config import Config
from coatlm.console import Parser, fail, local_path, output_path, progress
from coatlm.data.batches import Microbatch
from coatlm.files import check_output, whole_file
from coatlm.model.rounding import GradientNoise
from coatlm.platform import device
from coatlm.train.checkpoint import CheckpointError, named_checkpoint, saved_config
from coatlm.train.chunks import gradient_noise
from coatlm.train.setup import quiet_megatron
from coatlm.train.state import read_run_state

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # the repository

from tools.studies.outliers import OUTPUT, Weights, rounded  # noqa: E402
from tools.studies.recipe_models import (  # noqa: E402
    RecipeModel,
    config_of,
    described,
    is_layer_matrix,
    one_process,
    read_weights,
)
from tools.study_outliers import read_batches  # noqa: E402

Keys = Mapping[str, Any]  # of section precision
LAYERS: Keys = {"recipe": "coat", "fast_accumulation": []}
EXACT_GRADIENTS: Keys = {**LAYERS, "bf16_operands": ["dgrad.gradient", "wgrad.gradient"]}
PLAIN: Keys = {"recipe": "bf16"}
ROWS: dict[str, tuple[Keys, Keys]] = {  # the row, and what it is compared with
    **{
        f"{fmt} {how}": ({**LAYERS, "grad_format": fmt, "grad_rounding": how}, EXACT_GRADIENTS)
        for fmt in ("e5m2", "e4m3")
        for how in ("nearest", "stochastic")
    },
    "logits": ({**PLAIN, "output_layer": "fp8-gradients"}, PLAIN),
}
GROUPS = 8  # of microbatches, for standard errors
FEWEST, MOST = 2 * GROUPS, 4096  # microbatches


@dataclass
class VectorSums:
    """Sums over microbatches of one matrix: of vectors, and of their squared lengths."""

    count: int = 0
    total: Tensor | float = 0.0
    squares: float = 0.0

    def add_(self, x: Tensor) -> None:
        self.count += 1
        self.total = self.total + x.double()
        self.squares += float(x.double().square().sum())

    def without(self, part: VectorSums) -> VectorSums:
        """The sums of all microbatches but those of a part."""
        total, squares = self.total - part.total, self.squares - part.squares
        return VectorSums(self.count - part.count, total, squares)

    @property
    def of_mean(self) -> float:
        """|E x|^2, without bias."""
        length = float(torch.as_tensor(self.total).square().sum())
        return (length - self.squares) / (self.count * (self.count - 1))

    @property
    def variance(self) -> float:
        return self.squares / self.count - self.of_mean


@dataclass(frozen=True)
class RoundingErrors:
    """A line of the table: of the matrices of all layers, or of the output weight."""

    row: str
    of: str
    bias: float
    bias_se: float
    variance: float
    own: float


class RowSums:
    """Sums of errors and gradients of a row's matrices, in groups of microbatches."""

    def __init__(self) -> None:
        self.groups: list[dict[str, tuple[VectorSums, VectorSums]]] = [{} for _ in range(GROUPS)]

    def add_(self, number: int, got: Weights, wanted: Weights) -> None:
        """Add microbatch `number`, from 0."""
        group = self.groups[number % GROUPS]
        for key, exact in wanted.items():
            if key == OUTPUT or is_layer_matrix(key, exact):
                errors, gradients = group.setdefault(key, (VectorSums(), VectorSums()))
                errors.add_(got[key] - exact)
                gradients.add_(exact)

    def result(self, row: str, of: str) -> RoundingErrors:
        """The line `of` layers or of the output weight."""
        keys = [key for key in self.groups[0] if (key == OUTPUT) == (of == "output")]
        parts = [[group[key] for group in self.groups] for key in keys]
        wholes = [
            (_joined([errors for errors, _ in part]), _joined([exact for _, exact in part]))
            for part in parts
        ]

        def bias(left_out: int | None = None) -> float:
            found = []
            for part, (errors, exact) in zip(parts, wholes, strict=True):
                if left_out is not None:
                    errors = errors.without(part[left_out][0])
                    exact = exact.without(part[left_out][1])
                found.append(errors.of_mean / exact.of_mean)
            return statistics.fmean(found)

        def mean(value: Callable[[VectorSums, VectorSums], float]) -> float:
            return statistics.fmean(value(*pair) / pair[1].of_mean for pair in wholes)

        each = [bias(group) for group in range(GROUPS)]
        spread = statistics.pvariance(each) * (GROUPS - 1)
        variance, own = mean(lambda e, _: e.variance), mean(lambda _, g: g.variance)
        return RoundingErrors(row, of, bias(), math.sqrt(spread), variance, own)


def _joined(parts: Sequence[VectorSums]) -> VectorSums:
    total = sum((part.total for part in parts[1:]), start=parts[0].total)
    return VectorSums(sum(p.count for p in parts), total, sum(p.squares for p in parts))


def study(
    saved: Config, checkpoint: Path, batches: Sequence[Microbatch], rows: Sequence[str]
) -> list[RoundingErrors]:
    """Measure `rows`. Raises ValueError if the checkpoint does not fit."""
    weights = rounded(read_weights(checkpoint, device()))
    vocab = len(weights["embedding.word_embeddings.weight"])
    found: list[RoundingErrors] = []
    exact = [keys for keys in (EXACT_GRADIENTS, PLAIN) if any(ROWS[r][1] is keys for r in rows)]
    total = (len(rows) + len(exact)) * len(batches)
    with one_process() as groups, progress("rounding", total, unit="microbatches") as advance:

        def loaded(keys: Keys) -> tuple[RecipeModel, GradientNoise | None]:
            config = config_of(saved, **keys)
            model = RecipeModel(config, groups, vocab)
            model.load(weights)
            return model, gradient_noise(config, [model.module], groups)

        for keys in exact:
            reference, _ = loaded(keys)
            compared = {r: (*loaded(ROWS[r][0]), RowSums()) for r in rows if ROWS[r][1] is keys}
            for number, batch in enumerate(batches):
                wanted = reference.run(batch).gradients
                for model, noise, sums in compared.values():
                    if noise is not None:
                        noise.begin_()
                    sums.add_(number, model.run(batch).gradients, wanted)
                advance(1 + len(compared))
            for row, (_, _, sums) in compared.items():
                found.append(sums.result(row, "layers"))
                if row == "logits":
                    found.append(sums.result(row, "output"))
    return found


def markdown(found: Sequence[RoundingErrors]) -> list[str]:
    """The table, in % of the squared length of the mean gradient."""
    lines = [
        "| rounding | gradients of | bias, % | variance of a microbatch, % | own variance, % |"
    ]
    lines.append("| --- | --- | ---: | ---: | ---: |")
    for r in found:
        bias = f"{100 * r.bias:.3g} +- {100 * r.bias_se:.2g}"
        lines.append(f"| {r.row} | {r.of} | {bias} | {100 * r.variance:.3g} | {100 * r.own:.3g} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", type=local_path, metavar="CHECKPOINT")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), metavar="ROW")
    parser.add_argument("--batches", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument(
        "--out", type=output_path, default=Path("study"), help="(default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    quiet_megatron()
    try:
        if not FEWEST <= options.batches <= MOST:
            raise ValueError(f"batches={options.batches}: from {FEWEST} to {MOST} microbatches")
        check_output(options.out / "rounding.json")
        found, about = _study(options)
        with whole_file(options.out / "rounding.json") as file:
            result = {**about, "found": [asdict(r) for r in found]}
            file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except CheckpointError as error:
        return fail(error, 4)
    except (ValueError, OSError) as error:
        return fail(error)
    print("\n".join(markdown(found)))
    return 0


def _study(options: Any) -> tuple[list[RoundingErrors], dict[str, Any]]:
    """Read the checkpoint and the data that the command line names, and study them."""
    path = named_checkpoint(options.checkpoint, logging.getLogger("coatlm"))
    state = read_run_state(path)
    saved = saved_config(path, state)
    batches, _ = read_batches(saved, state["tokenizer"], options.batches)
    found = study(saved, path, batches, list(dict.fromkeys(options.rows or ROWS)))
    return found, described(path, state["step"], batches)


if __name__ == "__main__":
    process.run(main)
