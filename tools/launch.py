"""Start pretrain.py on every GPU of this machine, or as one process where there is none.

    python tools/launch.py CONFIG.yaml [key=value ...]

n processes hold dp = n / (tp * pp * cp) replicas, and each step's global_batch is split evenly over
them: the largest n up to the number of GPUs is taken with which both divisions have no remainder.
Where micro_batch does not divide a replica's share, their greatest common divisor takes its place;
the samples of a step, and so the loss, stay the same.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from coatlm.config import ConfigError, load_config

ELASTIC = Path(__file__).resolve().parent / "elastic.py"  # torchrun, which listens to no network
PRETRAIN = ELASTIC.parent.parent / "pretrain.py"


def command(arguments: Sequence[str], gpus: int) -> list[str]:
    """What to execute for these arguments of pretrain.py on so many GPUs.

    One process where the arguments hold a mistake or ask for no training: pretrain.py says the
    rest. One a GPU where no number fits: it then says which field is in the way.
    """
    options = [word for word in arguments if word.startswith("-")]
    words = [word for word in arguments if word not in options]
    count, overrides = (1, []) if gpus < 2 or options or not words else fit(words, gpus)
    torchrun = [str(ELASTIC), "--standalone", f"--nproc-per-node={count}"]
    start = [sys.executable, *(torchrun if count > 1 else []), str(PRETRAIN)]
    return [*start, *arguments, *overrides]


def fit(words: Sequence[str], gpus: int) -> tuple[int, list[str]]:
    """The number of processes for CONFIG and overrides, and the override that it asks for."""
    try:
        config = load_config(words[0], words[1:])
    except ConfigError:
        return 1, []
    parallel, train = config.parallel, config.train
    ranks = parallel.tp * parallel.pp * parallel.cp
    for dp in range(gpus // ranks, 0, -1):
        if train.global_batch % dp:
            continue
        micro_batch = math.gcd(train.micro_batch, train.global_batch // dp)
        same = micro_batch == train.micro_batch
        return dp * ranks, [] if same else [f"train.micro_batch={micro_batch}"]
    return gpus, []


def main() -> None:
    line = command(sys.argv[1:], torch.cuda.device_count())
    print("+", *line[1:], flush=True)
    os.execv(line[0], line)


if __name__ == "__main__":
    process.run(main)
