"""Errors of FP8 recipes on the weights of a trained model, rescaled so that outliers grow.

    python tools/study_outliers.py runs/mine --factors 1 16 128 1024 8192 --out study
    python tools/study_outliers.py runs/mine --recipes coat te-delayed --stresses swiglu --out study
    python tools/study_outliers.py runs/mine --stresses swiglu aligned --smooth --out study

CHECKPOINT is a checkpoint, or the directory of a run, whose newest one is read. Its weights are
rescaled in four ways (--stresses; tools/studies/outliers.py has the formulas), by the powers of two
in --factors. "exact" means that the model computes the same function, apart from rounding:

    swiglu    channels of SwiGLU's output grow by f, the columns of down shrink by f; exact
    aligned   two channels with parallel gate and up rows grow by f at few tokens; exact
    norm      a channel of every norm's output grows by f, the columns that read it shrink; exact
    stream    a channel of the residual stream is f times the others. No rescaling does that
              exactly: the loss printed for fp32 says how much the function changes

One process computes loss and gradients of --batches microbatches of the run's validation split, on
a GPU if there is one, with each of --recipes and, on the same weights (BF16 values), in fp32:

    loss error       ||l - l32|| / ||l32||, with l the losses of all tokens of a microbatch
    gradient error   root mean square of ||g - g32|| / ||g32|| over the weight matrices of the
                     layers, with g the gradient for the weights before they are rescaled

Each is a mean over the microbatches, followed by its standard error. te-delayed first runs on
another microbatch until its delayed scales have settled. By default all recipes that run here are
compared: te-* need TransformerEngine and a GPU, fp8-block a model whose sizes are multiples of 128.

--smooth adds, for each of coatlm's FP8 recipes, a row "RECIPE + smoothing": the same with a factor
per channel between SwiGLU and the down projection (Smooth-SwiGLU; tools/studies/smoothing.py).

Prints tables in Markdown; writes outliers.json and outliers.png to --out. Exit code: 0; 2 for
invalid input, 4 for a damaged checkpoint, each with one line that explains it.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds, and warn
    process.listen()
    import warnings

    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")

import importlib.util
import logging
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.config import Config, ConfigError
from coatlm.config.recipes import PRECISION_RECIPES, TE_RECIPES
from coatlm.console import Parser, fail, local_path, output_path, progress
from coatlm.data.batches import Microbatch, microbatches
from coatlm.data.dataset import open_datasets
from coatlm.data.tokenizer import make_tokenizer
from coatlm.files import check_output, whole_file
from coatlm.platform import device
from coatlm.train.checkpoint import CheckpointError, named_checkpoint, saved_config
from coatlm.train.setup import quiet_megatron
from coatlm.train.state import read_run_state

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # the repository

from tools.studies.outlier_report import (  # noqa: E402
    SMOOTHED,
    OutlierStudy,
    Point,
    RecipeErrors,
    as_json,
    draw,
    markdown,
)
from tools.studies.outliers import STRESSES, Stress, Weights, outlier_ratio, rounded  # noqa: E402
from tools.studies.recipe_models import (  # noqa: E402
    RecipeModel,
    Result,
    config_of,
    described,
    is_layer_matrix,
    one_process,
    read_weights,
)

REFERENCE = "fp32"
RECIPES = tuple(name for name in PRECISION_RECIPES if name != REFERENCE)
FACTORS = (1, 16, 128, 1024, 8192)
LARGEST = 2**30  # of a factor: its products with weights stay in the range of BF16
CALIBRATION = 16384  # tokens whose activations decide on directions and channels


def study(
    saved: Config,
    checkpoint: Path,
    batches: Sequence[Microbatch],
    calibration: Sequence[Microbatch],
    *,
    configs: Mapping[str, Config],
    stresses: Sequence[str],
    factors: Sequence[int],
    smooth: bool,
) -> OutlierStudy:
    """Compare `configs`, by recipe, with fp32. Raises ValueError if the checkpoint does not fit.

    `smooth`: the FP8 recipes with smoothed down projections as well.
    """
    result = OutlierStudy([], [])
    weights = read_weights(checkpoint, device())
    vocab = len(weights["embedding.word_embeddings.weight"])
    rows = [(name, config, False) for name, config in configs.items()]
    if smooth:
        fp8 = {name: config for name, config in configs.items() if config.precision.flow}
        rows += [(f"{name}{SMOOTHED}", config, True) for name, config in fp8.items()]
    total = len(stresses) * len(factors) * (len(rows) + 1)
    with one_process() as groups, progress("stressing", total, unit="models") as advance:
        reference = RecipeModel(config_of(saved, REFERENCE), groups, vocab)
        reference.load(rounded(weights))
        trained = statistics.fmean(float(reference.run(b).losses.mean()) for b in batches)
        seen = reference.activations(calibration)
        models = {
            name: RecipeModel(config, groups, vocab, smooth=smoothed)
            for name, config, smoothed in rows
        }
        for stress in (STRESSES[name](weights, seen) for name in stresses):
            for factor in factors:
                wanted = measure(reference, stress, factor, batches)
                activations = reference.activations(batches[:1])
                watched = {**activations.stream, **activations.linear}[stress.watched]
                loss = statistics.fmean(float(r.losses.mean()) for r in wanted)
                ratio = outlier_ratio(watched)
                result.points.append(Point(stress.name, factor, loss, loss / trained - 1, ratio))
                advance(1)
                for name, model in models.items():
                    if model.delayed:
                        model.load(stress.weights(factor))
                        model.settle(calibration[0])
                    got = measure(model, stress, factor, batches)
                    result.found.append(judge(stress.name, factor, name, got, wanted))
                    advance(1)
    return result


def measure(
    model: RecipeModel, stress: Stress, factor: int, batches: Sequence[Microbatch]
) -> list[Result]:
    """Losses, and gradients of base weights, of each microbatch."""
    model.load(stress.weights(factor))
    results = [model.run(batch) for batch in batches]
    for result in results:
        stress.pull_back_(result.gradients, factor)
    return results


def judge(
    stress: str, factor: int, recipe: str, got: Sequence[Result], wanted: Sequence[Result]
) -> RecipeErrors:
    """The errors of `got`, a recipe's results, to `wanted`, those of fp32."""
    pairs = list(zip(got, wanted, strict=True))
    errors = [matrix_errors(g.gradients, w.gradients) for g, w in pairs]
    losses = mean_and_error([relative_error(g.losses, w.losses) for g, w in pairs])
    gradients = mean_and_error([root_mean_square(list(e.values())) for e in errors])
    by_matrix = {key: statistics.fmean(e[key] for e in errors) for key in errors[0]}
    # a NaN is the worst of all
    worst = max(by_matrix, key=lambda key: (math.isnan(by_matrix[key]), by_matrix[key]))
    return RecipeErrors(
        stress,
        factor,
        recipe,
        statistics.fmean(float(g.losses.mean()) for g in got),
        *losses,
        *gradients,
        worst,
    )


def matrix_errors(got: Weights, wanted: Weights) -> dict[str, float]:
    """The relative errors of the gradients of the layers' weight matrices."""
    return {
        key: relative_error(got[key], gradient)
        for key, gradient in wanted.items()
        if is_layer_matrix(key, gradient)
    }


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """||got - wanted|| / ||wanted||; NaN where either holds one."""
    exact = wanted.double()
    return float((got.double() - exact).norm() / exact.norm())


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error: NaN for a single value and where one is not finite."""
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return mean, math.nan
    return mean, statistics.stdev(values) / math.sqrt(len(values))


def chosen_configs(saved: Config, recipes: Sequence[str] | None) -> dict[str, Config]:
    """The configuration of each recipe. Without `recipes`: of all that run here.

    Raises ConfigError for a recipe that was asked for and does not fit the model or this machine.
    """
    result: dict[str, Config] = {}
    for recipe in recipes or RECIPES:
        try:
            if recipe in TE_RECIPES and not _has_transformer_engine():
                raise ConfigError(f"{recipe} needs TransformerEngine and a GPU")
            result[recipe] = config_of(saved, recipe)
        except ConfigError as error:
            if recipes:
                raise
            print(f"not compared: {recipe}: {str(error).splitlines()[0]}", file=sys.stderr)
    return result


def _has_transformer_engine() -> bool:
    installed = importlib.util.find_spec("transformer_engine") is not None
    return installed and torch.cuda.is_available()


def read_batches(
    saved: Config, fingerprint: str, count: int
) -> tuple[list[Microbatch], list[Microbatch]]:
    """`count` microbatches of the validation split, and the next CALIBRATION tokens of it.

    Raises ValueError if the tokenizer is another one than that of training, and if the split has
    fewer microbatches than `count`.
    """
    tokenizer = make_tokenizer(saved.data.tokenizer)
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"tokenizer {tokenizer.spec}: the run was trained with another one")
    data = open_datasets(saved.data, tokenizer, seed=saved.run.seed).validation
    if data is None:
        raise ValueError(f"data.split={list(saved.data.split)}: has no validation split")
    size = saved.train.micro_batch
    held_out = sum(stream.windows for stream in data.streams) // size
    if held_out < count:
        raise ValueError(f"batches={count}: the validation split has {held_out} microbatches")
    more = -(-CALIBRATION // (size * saved.data.seq_len))
    found = list(
        microbatches(
            data,
            0,
            global_batch=(count + more) * size,
            micro_batch=size,
            dp_rank=0,
            dp_size=1,
            device=device(),
        )
    )
    return found[:count], found[count:]


def check_numbers(factors: Sequence[int], batches: int) -> None:
    """Raise ValueError for invalid factors or numbers of microbatches."""
    for factor in factors:
        if not 1 <= factor <= LARGEST or factor & (factor - 1):
            raise ValueError(f"factor={factor}: a power of two from 1 to {LARGEST}")
    if not 1 <= batches <= 1024:
        raise ValueError(f"batches={batches}: from 1 to 1024 microbatches")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", type=local_path, metavar="CHECKPOINT")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, metavar="RECIPE")
    parser.add_argument(
        "--stresses", nargs="+", choices=tuple(STRESSES), default=list(STRESSES), metavar="STRESS"
    )
    parser.add_argument("--factors", type=int, nargs="+", default=list(FACTORS), metavar="F")
    parser.add_argument("--smooth", action="store_true", help="also with Smooth-SwiGLU")
    parser.add_argument("--batches", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--out", type=output_path, default=Path("study"), help="(default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    quiet_megatron()
    try:
        check_numbers(options.factors, options.batches)
        check_output(options.out / "outliers.json")
        result, about = _study(options)
        with whole_file(options.out / "outliers.json") as file:
            file.write_text(as_json(result, about), encoding="utf-8")
        with whole_file(options.out / "outliers.png") as file:
            draw(result, file)
    except CheckpointError as error:
        return fail(error, 4)
    except (ValueError, OSError) as error:
        return fail(error)
    print("\n".join(markdown(result)))
    return 0


def _study(options: Any) -> tuple[OutlierStudy, dict[str, Any]]:
    """Read the checkpoint and the data that the command line names, and study them."""
    path = named_checkpoint(options.checkpoint, logging.getLogger("coatlm"))
    state = read_run_state(path)
    saved = saved_config(path, state)
    configs = chosen_configs(saved, options.recipes)
    batches, calibration = read_batches(saved, state["tokenizer"], options.batches)
    result = study(
        saved,
        path,
        batches,
        calibration,
        configs=configs,
        stresses=list(dict.fromkeys(options.stresses)),
        factors=sorted(set(options.factors)),
        smooth=options.smooth,
    )
    return result, described(path, state["step"], batches)


if __name__ == "__main__":
    process.run(main)
