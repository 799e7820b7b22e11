"""Start pretrain.py on every GPU of this machine, or as one process where there is none.

    python tools/launch.py CONFIG.yaml [key=value ...]

A batch splits evenly: for n processes tp * pp * cp divides n, and micro_batch * n / (tp * pp * cp)
divides global_batch. The largest such n up to the number of GPUs is started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from coatlm.config import Config, ConfigError, load_config

PRETRAIN = Path(__file__).resolve().parent.parent / "pretrain.py"


def processes(arguments: Sequence[str], gpus: int) -> int:
    """How many processes to start with these arguments of pretrain.py on so many GPUs.

    One where the arguments hold a mistake, and pretrain.py reports it. One a GPU where no number
    fits: pretrain.py then says which field is in the way.
    """
    words = [word for word in arguments if not word.startswith("-")]
    if gpus < 2 or not words or any(word in arguments for word in ("--dry-run", "--help", "-h")):
        return 1
    try:
        config = load_config(words[0], words[1:])
    except ConfigError:
        return 1
    return next((n for n in range(gpus, 0, -1) if _fits(config, n)), gpus)


def command(arguments: Sequence[str], count: int) -> list[str]:
    """What to execute for `count` processes: torchrun for several, else pretrain.py itself."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return [sys.executable, *(torchrun if count > 1 else []), str(PRETRAIN), *arguments]


def _fits(config: Config, world_size: int) -> bool:
    try:
        config.data_parallel_size(world_size)
    except ConfigError:
        return False
    return True


def main() -> None:
    arguments, gpus = sys.argv[1:], torch.cuda.device_count()
    count = processes(arguments, gpus)
    if 1 < count < gpus:
        print(
            f"using {count} of {gpus} GPUs: the batch does not split evenly over more", flush=True
        )
    os.execv(sys.executable, command(arguments, count))


if __name__ == "__main__":
    main()
