"""Rank the layouts of a run on given GPUs by predicted tokens per second, within their memory.

    coatlm plan llama3.1-70b --gpus 64 --gpu h200
    coatlm plan llama3-8b --gpus 8 --gpu h100 --top 3
    coatlm plan llama3-8b parallel.tp=2 --gpus 8 --gpu h100 --keep
    coatlm plan llama3.1-405b --gpus 2048,16384 --tokens 15e12

The number formats and the global batch are those of CONFIG; tp, cp, pp, vpp, zero, recompute and
the microbatch are searched. An option that needs tp > 1 or cp > 1 is left out of a layout with tp=1
or cp=1. train.cuda_graphs=true admits only layouts whose microbatches a CUDA graph can capture: pp
1, zero 0 or 1, recompute none. --keep predicts CONFIG as it is. The times come from rates that were
measured on a GPU or fitted to steps on one to four of a node (coatlm/rates/, whose files say which;
coatlm/model/step_time.py); what more ranks and a network do to them is computed, not measured. With
several numbers of GPUs there is a line for the fastest layout of each: the bytes that a GPU sends
per step, also with gradients and weights in BF16 in place of FP8, the days that --tokens take, the
interruptions to expect in them, and the time between checkpoints that loses the least
(coatlm/model/failures.py).

Where no layout of CONFIG fits, the command tries changes that save memory, the cheapest first
(coatlm/model/changes.py): BF16 gradients, updates during backward, other formats of optimizer
states, states in host memory, other formats of layers. It prints layouts with the first that
suffice, and what they cost.

Exit code: 0; 1 if no layout of CONFIG fits as it is; 2 with one line per mistake.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice

from coatlm.commands.arguments import add_config
from coatlm.commands.estimate import sizes_of
from coatlm.config import LAYOUT, MOST_RANKS, ONLY_ABOVE_1, Config, ConfigError
from coatlm.console import Parser, duration, fail
from coatlm.hf.run_config import load_run_config
from coatlm.model.changes import costs, proposal, words
from coatlm.model.failures import DAY, checkpoint_interval, lost_share, time_between
from coatlm.model.layouts import (
    TP_CHUNKS,
    Choice,
    any_valid,
    describe,
    notes,
    predicted,
    ranked,
    usable,
)
from coatlm.model.memory import GIB, replaced
from coatlm.model.rates import known, load_rates
from coatlm.model.step_time import Cluster, forecast

PEAK_BF16 = 989e12  # FLOP/s of H100 and H200
TOP = 5  # layouts to show
TOKENS = 15e12  # of a run
SAVE = 60.0  # seconds by which a checkpoint delays training


def lines_of(
    config: Config, choices: Sequence[Choice], gpus: int, changes: Sequence[str] = ()
) -> Iterator[str]:
    """A table of layouts of `config`, and where the time of the first goes; `changes` are overrides
    that are printed before those of the layout."""
    yield "| layout | step s | tokens/s/GPU | MFU | peak GiB | NVLink GB | network GB |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for choice in choices:
        found = choice.forecast
        yield (
            f"| {describe(choice.config, gpus)} | {found.time.total:.3g} | "
            f"{found.tokens_per_s:,.0f} | {found.mfu(PEAK_BF16):.2f} | {choice.peak / GIB:.1f} | "
            f"{found.sent.nvlink / 1e9:.3g} | {found.sent.network / 1e9:.3g} |"
        )
    time = choices[0].forecast.time
    parts = [(f.name.replace("_", " "), getattr(time, f.name) / time.total) for f in fields(time)]
    shown = ", ".join(f"{name} {share:.1%}" for name, share in parts if share >= 0.0005)
    yield ""
    yield f"Time of the first: {shown}."
    yield from notes(config, (choice.config for choice in choices))
    yield f"As overrides: {' '.join([*changes, *overrides(config, choices[0].config)])}"


def lines_of_changes(config: Config, vocab: int, cluster: Cluster, top: int) -> Iterator[str]:
    """That no layout of `config` fits, and layouts of the cheapest changes with which one does."""
    graphs = " with train.cuda_graphs=true" if config.train.cuda_graphs is True else ""
    gpus, memory = f"{cluster.gpus} x {cluster.rates.gpu}", f"{cluster.rates.memory_gib:g} GiB"
    none = f"no layout of {gpus}{graphs} fits {memory}"
    found = proposal(config, vocab, cluster, top)
    if found is None:
        other = "other formats, offloaded states or steps of one microbatch"
        yield f"{none}, nor does one with {other}"
        return
    changes = words(found.changes)
    yield f"{none}; with {' '.join(changes)}:"
    yield ""
    yield from lines_of(config, found.choices, cluster.gpus, changes)
    yield ""
    yield from costs(config, vocab, cluster, found)


def scale_lines(
    config: Config,
    vocab: int,
    fastest: Sequence[tuple[Cluster, Choice | None]],
    tokens: float,
    save: float,
) -> Iterator[str]:
    """A line per number of GPUs: the fastest layout, and what a run of `tokens` takes with it."""
    yield (
        "| GPUs | layout | step s | MFU | NVLink GB | network GB | in BF16 | days | failures | "
        "save every | lost |"
    )
    yield "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for cluster, choice in fastest:
        gpus = cluster.gpus
        if choice is None:
            none = "none fits" if any_valid(config, cluster) else "none divides model and batch"
            yield f"| {gpus:,} | {none} |{' |' * 9}"
            continue
        found, between = choice.forecast, time_between(gpus)
        wider = replaced(choice.config, parallel={"grad_comm": "bf16", "weight_gather": "bf16"})
        sent = forecast(wider, vocab, cluster).sent
        days = tokens / (found.tokens_per_s * gpus) / DAY
        yield (
            f"| {gpus:,} | {describe(choice.config, gpus)} | {found.time.total:.3g} | "
            f"{found.mfu(PEAK_BF16):.2f} | {found.sent.nvlink / 1e9:.3g} | "
            f"{found.sent.network / 1e9:.3g} | {sent.network / 1e9:.3g} | {days:,.0f} | "
            f"{days * DAY / between:,.0f} | {duration(checkpoint_interval(save, between))} | "
            f"{lost_share(save, between):.1%} |"
        )
    if lines := notes(config, [choice.config for _, choice in fastest if choice is not None]):
        yield from ("", *lines)


def overrides(config: Config, layout: Config) -> list[str]:
    """The overrides that turn `config` into `layout`."""
    p, t = layout.parallel, layout.train
    keys = [key for section, key in (*LAYOUT, TP_CHUNKS) if section == "parallel"]
    options = [key for each in ONLY_ABOVE_1.values() for key in each if key not in keys]
    keys += [key for key in options if getattr(p, key) != getattr(config.parallel, key)]
    words = [f"parallel.{key}={str(getattr(p, key)).lower()}" for key in keys]
    return [*words, f"train.recompute={t.recompute}", f"train.micro_batch={t.micro_batch}"]


def undivided(config: Config, cluster: Cluster) -> str:
    """That no layout of so many GPUs is valid, and the next smaller number that has one."""
    m, gpus = config.model, cluster.gpus
    fewer = (replace(cluster, gpus=n, per_node=min(n, 8)) for n in range(gpus - 1, 0, -1))
    found = next((each.gpus for each in fewer if any_valid(config, each)), None)
    graphs = "; train.cuda_graphs=true also needs pp=1, zero 0 or 1 and recompute=none"
    graphs = graphs if config.train.cuda_graphs is True else ""
    return (
        f"--gpus {gpus}: no layout is valid: tp x cp x pp x dp must be {gpus}, where dp divides "
        f"train.global_batch={config.train.global_batch}, pp model.layers={m.layers} "
        f"and tp model.heads={m.heads}{graphs}" + (f"; {found} GPUs have one" if found else "")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__, "plan")
    add_config(parser)
    parser.add_argument("--gpus", type=whole_numbers, help="GPUs of the run; several with commas")
    parser.add_argument("--gpu", default="h100", help=f"{' | '.join(known())} (default: h100)")
    parser.add_argument("--nodes", type=int, help="number of nodes (default: 8 GPUs each)")
    parser.add_argument("--network", type=float, help="GB/s per GPU (default: the rates')")
    parser.add_argument("--top", type=int, help=f"layouts to show (default: {TOP})")
    parser.add_argument("--tokens", type=float, help=f"tokens of a run (default: {TOKENS:g})")
    saving = f"seconds by which a checkpoint delays training (default: {SAVE:g})"
    parser.add_argument("--save", type=float, help=saving)
    parser.add_argument("--keep", action="store_true", help="predict CONFIG's own layout")
    options = parser.parse(arguments)
    try:
        clusters = [
            cluster_of(gpus, options.gpu, options.nodes, options.network)
            for gpus in options.gpus or [None]
        ]
        cluster = clusters[0]
        for name, least in (("top", 1), ("tokens", 1.0), ("save", 0.001)):
            value = getattr(options, name)
            if value is not None and not least <= value < float("inf"):
                raise ConfigError(f"--{name} {value}: at least {least}")
            if value is not None and name != "top" and len(clusters) == 1:
                raise ConfigError(f"--{name} {value}: needs several numbers of --gpus")
        if options.top is not None and (options.keep or len(clusters) > 1):
            raise ConfigError(f"--top {options.top}: needs one number of --gpus, without --keep")
        top = options.top or TOP
        if options.keep and len(clusters) > 1:
            raise ConfigError(f"--gpus {options.gpus}: one number with --keep")
        config = load_run_config(options.config, options.overrides)
        if options.keep:
            vocab, _ = sizes_of(config, cluster.gpus)
            choices = [predicted(config, vocab, cluster)]
        else:
            config = replaced(config, parallel={"layout": "given"}, train={"micro_batch": 1})
            vocab, _ = sizes_of(replaced(config, train={"update": "step"}), None)
            if len(clusters) > 1:
                fastest = [(c, next(ranked(config, vocab, c), None)) for c in clusters]
                spent = options.tokens or TOKENS, options.save or SAVE
                print("\n".join(scale_lines(config, vocab, fastest, *spent)))
                return 0 if any(choice is not None for _, choice in fastest) else 1
            choices = list(islice(ranked(config, vocab, cluster), top))
            if not choices and not any_valid(config, cluster):
                raise ConfigError(undivided(config, cluster))
    except (ValueError, OSError) as error:
        return fail(error)
    if not choices:
        print("\n".join(lines_of_changes(config, vocab, cluster, top)))
        return 1
    print("\n".join(lines_of(config, choices, cluster.gpus)))
    if options.keep and choices[0].peak > usable(cluster):
        print(f"it does not fit: {usable(cluster) / GIB:.1f} GiB of a GPU can be used")
        return 1
    return 0


def whole_numbers(text: str) -> list[int]:
    """The numbers of --gpus."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: whole numbers, several with commas") from None


def cluster_of(gpus: int | None, kind: str, nodes: int | None, network: float | None) -> Cluster:
    """The GPUs that the options name. Raises ConfigError."""
    if gpus is None:
        raise ConfigError(f"--gpus: give 1 to {MOST_RANKS:,} GPUs")
    if not 1 <= gpus <= MOST_RANKS:
        raise ConfigError(f"--gpus {gpus}: 1 to {MOST_RANKS:,} GPUs")
    if nodes is not None and (nodes < 1 or gpus % nodes):
        raise ConfigError(f"--nodes {nodes}: must divide --gpus {gpus}")
    rates = load_rates(kind)
    if network is not None:
        if not 0 < network < float("inf"):
            raise ConfigError(f"--network {network}: GB/s per GPU, above 0")
        link = rates.network.model_copy(update={"gb_per_s": network})
        rates = rates.model_copy(update={"network": link})
    return Cluster(rates, gpus, gpus // nodes if nodes else min(8, gpus))


if __name__ == "__main__":
    process.run(main)
