"""Estimate the device memory of a run, and what would make it fit; needs no GPU and no data.

    coatlm estimate llama2-7b optim.recipe=coat --ranks 8
    coatlm estimate llama2-7b --ranks 8 --memory-gib 79.2
    coatlm estimate --table7
    coatlm estimate --fits

Prints weights, gradients, states, activations, logits, buffers and CUDA graphs of a rank of every
pipeline stage (coatlm/model/memory.py has the formulas; `coatlm train --dry-run` prints the same),
the peak with every optimizer recipe and gradient dtype, and with every precision recipe and
recompute mode, all else as configured. With --memory-gib it names the largest
train.micro_batch that fits, a divisor of the global batch, so that the run stays the same.
--reserve-gib is left free for what is not in the estimate: the CUDA context, NCCL's buffers and
fragmentation. The default is 10 % of the memory, or 6 % on a single GPU, as in `coatlm plan`; with
--table7 it is 2 GiB.

--table7 takes the models, GPUs and batches of COAT's Table 7 (arXiv 2410.19313) and tries layouts
from data parallel with ZeRO-1 to tensor parallel; the first that fits is shown. --fits shows
with which formats models of 8B to 70B fit GPUs of 80 and 141 GB.

Exit code: 0; 1 if --memory-gib is given and not even one sample fits; 2 with one line per mistake.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from coatlm.commands import fitting
from coatlm.commands.arguments import add_config
from coatlm.config import (
    Config,
    ConfigError,
    OptimRecipe,
    PrecisionRecipe,
    make_config,
)
from coatlm.config.recipes import TE_RECIPES
from coatlm.console import Parser, fail
from coatlm.data.tokenizer import make_tokenizer
from coatlm.hf.run_config import load_run_config
from coatlm.model.accounting import model_vocab
from coatlm.model.layer_memory import weight_dtype
from coatlm.model.layouts import spare
from coatlm.model.memory import GIB, largest_micro_batch, peak_bytes, replaced
from coatlm.model.plan import memory_table, stage_table
from coatlm.optim.recipes import RECIPES

RECOMPUTE = ("none", "selective", "full")
MAIN_GRADS = ("fp32", "bf16", "fp8")
TABLE7_GIB, TABLE7_RESERVE_GIB = 80.0, 2.0  # the defaults with --table7
LARGEST_BATCH = 64  # samples per replica that --table7 tries


class PublishedModel(NamedTuple):
    """A model of Table 7, with Llama's vocabulary."""

    layers: int
    hidden: int
    heads: int
    ffn: int


class Table7Case(NamedTuple):
    """A line of Table 7: what the paper ran on GPUs of 80 GB."""

    model: str
    gpus: int
    batch: int  # samples per GPU
    seq_len: int
    peaks: dict[str, float | None]  # GB by the paper's recipe; None: out of memory


class Recipes(NamedTuple):
    """The recipes of one row of the table."""

    name: str
    paper: str  # the paper's recipe that it is compared with
    precision: str
    optim: str
    main_grads: str


MODELS = {
    "7B": PublishedModel(32, 4096, 32, 11008),
    "13B": PublishedModel(40, 5120, 40, 13824),
    "30B": PublishedModel(60, 6656, 52, 17920),
}
CASES = [
    Table7Case("7B", 1, 1, 2048, {"BF16": None, "TE": None, "COAT": 79.3}),
    Table7Case("7B", 2, 2, 2048, {"BF16": None, "TE": None, "COAT": 52.8}),
    Table7Case("7B", 4, 2, 2048, {"BF16": 55.1, "TE": 51.1, "COAT": 35.6}),
    Table7Case("7B", 8, 2, 2048, {"BF16": 41.2, "TE": 37.2, "COAT": 27.0}),
    Table7Case("13B", 2, 1, 1024, {"BF16": None, "TE": None, "COAT": 73.2}),
    Table7Case("13B", 4, 1, 2048, {"BF16": 76.1, "TE": 73.0, "COAT": 49.1}),
    Table7Case("13B", 8, 1, 2048, {"BF16": 49.4, "TE": 46.5, "COAT": 32.5}),
    Table7Case("30B", 8, 1, 2048, {"BF16": None, "TE": None, "COAT": 70.5}),
]
TABLE7 = [
    Recipes("bf16, adamw-fp32", "BF16", "bf16", "adamw-fp32", "fp32"),
    Recipes("te-delayed, adamw-fp32", "TE", "te-delayed", "adamw-fp32", "fp32"),
    Recipes("coat, coat", "COAT", "coat", "coat", "fp32"),
    Recipes("coat, coat, BF16 gradients", "COAT", "coat", "coat", "bf16"),
    Recipes("coat-lean, coat-lean, BF16 gradients", "COAT", "coat-lean", "coat-lean", "bf16"),
]


def sizes_of(config: Config, ranks: int | None) -> tuple[int, int]:
    """The vocabulary, and the data-parallel size of `ranks` processes; None: tp * pp * cp."""
    p = config.parallel
    dp = config.data_parallel_size(p.tp * p.pp * p.cp if ranks is None else ranks)
    known = config.model.vocab is not None
    tokenizer = None if known else make_tokenizer(config.data.tokenizer).vocab_size
    return model_vocab(config, tokenizer), dp


def report(config: Config, vocab: int, dp: int) -> Iterator[str]:
    """The tables of one configuration."""
    yield from memory_table(config, vocab, dp)
    yield ""
    yield from stage_table(config, vocab, dp)
    yield from ("", "Peak in GiB by optimizer recipe and gradient dtype", "")
    grads = _main_grads(config)
    yield from _table("optim.recipe", grads, "main grads", _by_optimizer(config), vocab, dp)
    yield from ("", "Peak in GiB by precision recipe and recomputation", "")
    yield from _table("precision.recipe", RECOMPUTE, "recompute", _by_precision(config), vocab, dp)


def proposal(config: Config, vocab: int, dp: int, memory: float) -> tuple[str, bool]:
    """A line with the largest train.micro_batch for `memory` bytes, and whether at least 1 fits."""
    largest = {
        mode: largest_micro_batch(replaced(config, train={"recompute": mode}), vocab, dp, memory)
        for mode in RECOMPUTE
    }
    as_configured = largest[config.train.recompute]
    by_mode = ", ".join(f"{size or 'none'} with recompute={mode}" for mode, size in largest.items())
    return (
        f"largest train.micro_batch within {memory / GIB:.1f} GiB: "
        f"{as_configured or 'not even 1 fits'} ({by_mode})"
    ), as_configured > 0


def _main_grads(config: Config) -> Sequence[str]:
    """The gradient dtypes to compare; train.update=backward refuses the last."""
    return MAIN_GRADS[:-1] if config.train.update == "backward" else MAIN_GRADS


def _by_optimizer(config: Config) -> Iterator[tuple[str, list[Config]]]:
    """Yield the configuration with every optimizer recipe that supports its weight dtype."""
    for recipe in get_args(OptimRecipe):
        if weight_dtype(config) in RECIPES[recipe].weights:
            yield (
                recipe,
                [
                    replaced(config, optim={"recipe": recipe}, parallel={"main_grads": grads})
                    for grads in _main_grads(config)
                ],
            )


def _check_model(config: Config) -> None:
    """Raise ConfigError if layers of this model, with this tp, cannot be in the recipe."""
    recipe, data = config.precision.recipe, config.model_dump(mode="json")
    spec = {"spec": "te"} if recipe in TE_RECIPES else {}
    make_config(
        {
            "model": data["model"] | spec,
            "data": data["data"],
            "precision": {"recipe": recipe},
            "optim": {"recipe": config.optim.recipe},
            "parallel": {key: data["parallel"][key] for key in ("tp", "sequence_parallel")},
        }
    )


def _by_precision(config: Config) -> Iterator[tuple[str, list[Config]]]:
    """Yield the configuration with every precision recipe whose weights its optimizer supports.

    Left out are FP8 recipes that cannot have what another key asks of their formats, as
    grad_rounding=stochastic does of rowwise, or that a run of this model refuses. Keys that do not
    change bytes, as scaling, may be those of the configuration's own recipe alone.
    """
    for recipe in get_args(PrecisionRecipe):
        changed = replaced(config, precision={"recipe": recipe})
        if weight_dtype(changed) not in RECIPES[config.optim.recipe].weights:
            continue
        try:
            if changed.precision.flow:
                changed.precision.flow_recipe()
            _check_model(changed)
        except ValueError:
            continue
        yield recipe, [replaced(changed, train={"recompute": mode}) for mode in RECOMPUTE]


def _table(
    label: str,
    columns: Sequence[str],
    kind: str,
    rows: Iterator[tuple[str, list[Config]]],
    vocab: int,
    dp: int,
) -> Iterator[str]:
    yield f"| {label} | " + " | ".join(f"{kind} {column}" for column in columns) + " |"
    yield "|---|" + "---:|" * len(columns)
    for name, configs in rows:
        sizes = [f"{peak_bytes(c, vocab, dp) / GIB:.1f}" for c in configs]
        yield f"| {name} | " + " | ".join(sizes) + " |"


def table7(memory: float) -> Iterator[str]:
    """COAT's Table 7 for `memory` bytes per GPU, in Markdown."""
    heads = ("model", "GPUs", "batch x length", "precision and optim recipes", "layout")
    yield "| " + " | ".join((*heads, "peak GiB", "fits", "max batch", "paper")) + " |"
    yield "|---|---:|---|---|---|---:|---|---:|---|"
    for case in CASES:
        for recipes in TABLE7:
            layout, peak, largest = best_layout(case, recipes, memory)
            paper = case.peaks[recipes.paper]
            told = "OOM" if paper is None else f"{paper} GB"
            yield (
                f"| {case.model} | {case.gpus} | {case.batch} x {case.seq_len} | {recipes.name} | "
                f"{layout} | {peak / GIB:.1f} | {'yes' if peak <= memory else 'no'} | "
                f"{largest or '-'} | {recipes.paper}: {told} |"
            )


def best_layout(case: Table7Case, recipes: Recipes, memory: float) -> tuple[str, int, int]:
    """The first layout that fits, else that with the lowest peak: its name, peak, largest batch.

    Data parallel with ZeRO-1 comes first, then more and more tensor parallelism, which communicates
    more. Batches are per replica.
    """
    found = []
    for tp in (n for n in (1, 2, 4, 8) if case.gpus % n == 0 and MODELS[case.model].heads % n == 0):
        config, dp = case_config(case, recipes, tp), case.gpus // tp
        name = f"dp {dp}" if tp == 1 else f"tp {tp} x dp {dp}"
        peak = peak_bytes(config, 32000, dp)
        if peak <= memory:
            return name, peak, largest_micro_batch(config, 32000, dp, memory)
        found.append((name, peak, 0))
    return min(found, key=lambda layout: layout[1])


def case_config(case: Table7Case, recipes: Recipes, tp: int) -> Config:
    """The configuration of one row of the table."""
    dp = case.gpus // tp
    base = make_config(
        {
            "model": {**MODELS[case.model]._asdict(), "vocab": 32000},
            "data": {"text": ["-"], "seq_len": case.seq_len},
            "parallel": {
                "tp": tp,
                "sequence_parallel": tp > 1,
                "main_grads": recipes.main_grads,
            },
            "optim": {"recipe": recipes.optim},
            "train": {"micro_batch": case.batch, "global_batch": LARGEST_BATCH * dp},
        }
    )
    return replaced(base, precision={"recipe": recipes.precision})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__, "estimate")
    add_config(parser, required=False)
    parser.add_argument("--ranks", type=int, help="processes (default: the fewest that hold it)")
    parser.add_argument("--memory-gib", type=float, help="memory of a GPU in GiB (--table7: 80)")
    parser.add_argument("--reserve-gib", type=float, help="GiB left free (default: see above)")
    parser.add_argument("--table7", action="store_true", help="COAT's Table 7, without CONFIG")
    parser.add_argument("--fits", action="store_true", help="what fits 80 and 141 GB; no CONFIG")
    options = parser.parse(arguments)
    try:
        if options.table7 + options.fits + bool(options.config) != 1:
            raise ConfigError("give either CONFIG, --table7 or --fits")
        if options.ranks is not None and (options.ranks < 1 or not options.config):
            raise ConfigError(f"--ranks {options.ranks}: at least 1, with CONFIG")
        if options.fits and options.memory_gib is not None:
            raise ConfigError(f"--memory-gib {options.memory_gib}: --fits has GPUs of its own")
        given, reserve = options.memory_gib, options.reserve_gib
        if options.table7:
            given = TABLE7_GIB if given is None else given
            reserve = TABLE7_RESERVE_GIB if reserve is None else reserve
        if reserve is not None and not 0 <= reserve < math.inf:
            raise ConfigError(f"--reserve-gib {reserve}: at least 0")
        if reserve is not None and options.config and given is None:
            raise ConfigError(f"--reserve-gib {reserve}: needs --memory-gib with CONFIG")
        if given is not None and given <= (reserve or 0.0):
            least = f"--reserve-gib {reserve}" if reserve else "0"
            raise ConfigError(f"--memory-gib {given} must be above {least}")
        if given is not None and not given < math.inf:
            raise ConfigError(f"--memory-gib {given}: must be finite")
        if options.fits:
            print("\n".join(fitting.table(reserve)))
            return 0
        if options.table7:
            print("\n".join(table7((given - reserve) * GIB)))
            return 0
        config = load_run_config(options.config, options.overrides)
        vocab, dp = sizes_of(config, options.ranks)
        lines = list(report(config, vocab, dp))
        fits = True
        if given is not None:
            p = config.parallel
            share = spare(dp * p.tp * p.pp * p.cp)
            left = given * share if reserve is None else reserve
            line, fits = proposal(config, vocab, dp, (given - left) * GIB)
            lines += ["", line]
    except (ValueError, OSError) as error:
        return fail(error)
    print("\n".join(lines))
    return 0 if fits else 1


if __name__ == "__main__":
    process.run(main)
