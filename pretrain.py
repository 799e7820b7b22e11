"""Train a Llama: `python pretrain.py CONFIG.yaml [key=value ...] [--dry-run]`.

One process needs no launcher; several are started by torchrun or srun:

    torchrun --nproc-per-node=8 pretrain.py configs/llama3-8b.yaml parallel.tp=2 optim.lr=3e-4

Exit codes: 0 done, 2 bad input, 3 too many skipped steps in a row, 4 checkpoint or disk trouble,
5 hang, 85 saved on SIGUSR1, 129 saved on SIGHUP, 130 saved on SIGINT, 143 saved on SIGTERM.
"""

from __future__ import annotations

import os
import signal

from coatlm import console

if __name__ == "__main__":  # before the imports that take seconds
    SPEAKS = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    console.listen(signal.SIGUSR1, speaks=SPEAKS)

import argparse
import errno
import sys
import warnings

from coatlm.config import Config, ConfigError, load_config

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a disk that is full or read-only


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, and turn errors of the user into one line and an exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a YAML file; every key is in coatlm/config.py")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for example optim.lr=1e-4"
    )
    parser.add_argument("--dry-run", action="store_true", help="check, print config and plan, stop")
    parser.add_argument("--ranks", type=int, help="with --dry-run: plan for so many processes")
    args = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(args.config, args.overrides)
        return dry_run(config, args.ranks) if args.dry_run else run(config)
    except ConfigError as error:
        return fail(error)


def dry_run(config: Config, ranks: int | None) -> int:
    """Print the resolved configuration and the plan; needs neither GPU nor launcher."""
    from coatlm.data.tokenizer import make_tokenizer
    from coatlm.model.plan import plan

    try:
        known = config.model.vocab is not None  # then the tokenizer's files need not be here yet
        vocab = None if known else make_tokenizer(config.data.tokenizer).vocab_size
        text = plan(config, ranks, tokenizer_vocab=vocab)
    except ValueError as error:
        return fail(error)
    print(config.to_yaml())
    print(text)
    return 0


def run(config: Config) -> int:
    """Train; errors of the user come before the first step."""
    parent = os.getppid()  # before the imports: the launcher may be gone when they are done
    console.outlive_streams()  # a pager or a terminal that is closed ends no training
    # what megatron-core says on import is about packages that coatlm does without
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    from coatlm.train.checkpoint import CheckpointError, LostPeerError
    from coatlm.train.faults import ExitCode, NonFiniteError
    from coatlm.train.loop import train

    try:
        return train(config, parent)
    except NonFiniteError as error:
        return fail(error, ExitCode.NONFINITE)
    except LostPeerError as error:
        return fail(error, 1)  # launchers try again after 1, and not after 4
    except CheckpointError as error:
        return fail(error, ExitCode.CHECKPOINT)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        problem = OSError(f"run.dir={config.run.dir}: {error.strerror}; the same command resumes")
        return fail(problem, ExitCode.CHECKPOINT)


def fail(error: Exception, code: int = 2) -> int:
    """One line a mistake, from one process."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    console.run(main, signal.SIGUSR1, hint="the same command starts or resumes", speaks=SPEAKS)
