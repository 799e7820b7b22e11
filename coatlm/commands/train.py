"""Train a Llama: `coatlm train CONFIG [key=value ...] [--preset NAME]`.

    coatlm train quickstart optim.lr=3e-4            # a shipped configuration, or any YAML file
    coatlm train llama3-8b --dry-run --ranks 64      # check, print configuration and plan, exit
    coatlm train llama3-8b --dry-run --ranks 64 --gpu h100 parallel.layout=auto
    coatlm train llama3-8b preset=bf16               # in BF16, whatever formats the file has
    coatlm train --keys optim                        # every key of a section, with its meaning

Started by torchrun or srun, this is one rank. Otherwise the installed command and `make train` use
all GPUs of this machine, and a script is one process:

    srun --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 coatlm train llama3-8b
    torchrun --nproc-per-node=8 --no-python coatlm train llama3-8b parallel.tp=2
    torchrun --nproc-per-node=8 pretrain.py configs/llama3-8b.yaml parallel.tp=2

Exit codes: 0 done (with torchrun --max-restarts also: saved after a signal), 1 unexpected error or
missing rank, 2 invalid input, 3 too many consecutive skipped steps, 4 checkpoint or disk error or
run.dir taken over, 5 hang, 85 saved after SIGUSR1, 138 SIGUSR1 before the first step; 129, 130, 143
saved after SIGHUP, SIGINT, SIGTERM, unless before the first step or Ctrl-C was pressed twice.
"""

from __future__ import annotations

import os
import signal

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    SPEAKS = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    process.listen(signal.SIGUSR1, speaks=SPEAKS)

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from coatlm.commands.arguments import add_config
from coatlm.config import MOST_RANKS, PRESETS, Config, ConfigError, keys_table
from coatlm.console import Parser, fail, ignore_library_warnings
from coatlm.hf.run_config import load_run_config

if TYPE_CHECKING:
    from coatlm.train.setup import Launch

REFUSAL_S = 30.0  # seconds for a rank with an invalid configuration to reach the others


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; errors of the user become one line and an exit code."""
    try:
        args = parse(arguments)
        if args.keys is not None:
            print(keys_table(args.keys))
            return 0
        if args.dry_run:
            return dry_run(load(args), args.ranks, args.gpu)
    except ConfigError as error:
        return fail(error)
    try:
        config = load(args)
    except ConfigError as error:
        launched = bool({"RANK", "SLURM_PROCID"} & os.environ.keys())
        return run(error) if launched else fail(error)
    return run(config)


class RankParser(Parser):
    """A parser that raises ConfigError, which `main` prints or announces to the other ranks."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line. Raises ConfigError for invalid arguments."""
    parser = RankParser(__doc__, "train")
    add_config(parser, required=False)
    parser.add_argument(
        "--preset", choices=PRESETS, help="number formats in place of the file's; --keys preset"
    )
    parser.add_argument("--dry-run", action="store_true", help="check, print config and plan, exit")
    parser.add_argument("--ranks", type=int, help="with --dry-run: plan for this many processes")
    parser.add_argument("--gpu", help="with --dry-run: the kind of GPU, such as h100")
    parser.add_argument(
        "--keys", nargs="?", const="", metavar="SECTION", help="print all keys, or a section's"
    )
    args = parser.parse(arguments)
    if args.preset is not None:
        args.overrides = [f"preset={args.preset}", *args.overrides]
    if args.keys is None and args.config is None:
        parser.error("CONFIG is missing: a YAML file, or the name of a shipped configuration")
    if args.ranks is not None and not args.dry_run:
        parser.error(f"--ranks {args.ranks} needs --dry-run; torchrun or srun start processes")
    if args.gpu is not None and not args.dry_run:
        parser.error(f"--gpu {args.gpu} needs --dry-run; a run knows its GPUs")
    if args.ranks is not None and not 1 <= args.ranks <= MOST_RANKS:
        parser.error(f"--ranks {args.ranks}: 1 to {MOST_RANKS:,} processes")
    return args


def load(args: argparse.Namespace) -> Config:
    """The configuration. Raises ConfigError if it is invalid, or if checkpoint.weights_only names
    the run's own checkpoints, of which a run always loads the whole state."""
    config = load_run_config(args.config, args.overrides)
    source, own = Path(config.checkpoint.resume), config.run.dir / "checkpoints"
    places = map(os.path.realpath, (source, source.parent, source / "checkpoints"))
    if config.checkpoint.weights_only and os.path.realpath(own) in places:
        raise ConfigError(
            f"checkpoint.weights_only=true: checkpoint.resume={source} is of this run itself, "
            "which continues with its whole state; use another run.dir to start from its weights "
            "alone, or checkpoint.weights_only=false"
        )
    return config


def dry_run(config: Config, ranks: int | None, kind: str | None) -> int:
    """Print the resolved configuration and the plan; needs neither GPU nor launcher.

    `kind` is that of the GPUs, 8 in a node; None plans for a CPU. Raises ConfigError if the
    configuration does not fit this number of ranks.
    """
    from coatlm.data.tokenizer import make_tokenizer
    from coatlm.model.accounting import model_vocab
    from coatlm.model.decide import Gpu, decide, expectation
    from coatlm.model.fits import with_fitting
    from coatlm.model.memory import GIB
    from coatlm.model.plan import plan
    from coatlm.model.rates import load_rates

    try:
        rates = None if kind is None else load_rates(kind)
        gpu = None if rates is None else Gpu(rates.gpu, round(rates.memory_gib * GIB))
        known = config.model.vocab is not None  # then the tokenizer's files are not needed
        tokens = None if known else make_tokenizer(config.data.tokenizer).vocab_size
        vocab, p = model_vocab(config, tokens), config.parallel
        ranks = p.tp * p.pp * p.cp if ranks is None else ranks
        per_node = min(8, ranks)
        config, chosen = decide(config, vocab, ranks=ranks, per_node=per_node, gpu=gpu)
        dp, planned = config.data_parallel_size(ranks), config
        if gpu is not None:
            planned = with_fitting(config, vocab, dp, gpu.memory)
        expected = expectation(planned, vocab, ranks=ranks, per_node=per_node, gpu=gpu)
        text = plan(planned, ranks, tokenizer_vocab=tokens, chosen=chosen, expected=expected)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(config.to_yaml())
    print(text)
    return 0


def run(config: Config | ConfigError) -> int:
    """Train and return the exit code.

    A ConfigError in place of a configuration is reported together with those of other ranks.
    """
    parent = os.getppid()  # before the imports, during which the launcher may exit
    process.outlive_streams()  # a closed pager or terminal must not end training
    ignore_library_warnings()
    with uncollected():
        from coatlm.train.faults import end_with
        from coatlm.train.reports import report_error
        from coatlm.train.setup import Launch

    launch = Launch()
    try:
        launch = Launch.from_environment()
        if launch.owned:
            end_with(parent)
        return refuse(config, launch) if isinstance(config, ConfigError) else start(config, launch)
    except Exception as error:
        return report_error(
            error, rank=launch.rank, world_size=launch.world_size, file=launch.error_file
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collection of cyclic garbage, which takes a tenth of the time of imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def start(config: Config, launch: Launch) -> int:
    """Train; the error of a full or read-only disk names run.dir, or a file elsewhere.

    What is imported, some 300,000 objects, is no longer searched for garbage: a search takes most
    of a second, in which the GPU would run out of work.
    """
    from coatlm import megatron_hook

    if config.model.spec != "te":
        megatron_hook.hide_transformer_engine()
    with uncollected():
        from coatlm.data.checksums import CacheFullError
        from coatlm.train.manifest import CheckpointError
        from coatlm.train.reports import UNWRITABLE
        from coatlm.train.start import train

        gc.freeze()
    try:
        return train(config, launch)
    except CacheFullError:  # already names data.cache_dir
        raise
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        where = elsewhere(error, config.run.dir) or f"run.dir={config.run.dir}"
        raise CheckpointError(f"{where}: {error.strerror}; the same command resumes") from error


def elsewhere(error: OSError, run_dir: Path) -> str | None:
    """The file of an error, if it is known and lies outside the run directory."""
    if not isinstance(error.filename, str | bytes):
        return None
    name = os.fsdecode(error.filename)
    inside = Path(os.path.realpath(name)).is_relative_to(os.path.realpath(run_dir))
    return None if inside else name


def refuse(error: ConfigError, launch: Launch) -> int:
    """Announce an invalid configuration to the other ranks. Raises AgreedError or `error`."""
    from coatlm.train.manifest import LostPeerError
    from coatlm.train.setup import start_processes

    with suppress(LostPeerError):  # if rank 0 does not answer, raise the error itself
        start_processes(launch, start_timeout=REFUSAL_S, refusal=error)
    raise error


if __name__ == "__main__":
    process.run(main, signal.SIGUSR1, hint="the same command starts or resumes", speaks=SPEAKS)
