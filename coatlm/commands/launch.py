"""Start training on all GPUs of this machine, or as one process if there is none.

    coatlm train CONFIG [key=value ...] [--preset NAME]

n processes have data-parallel size dp = n / (tp * pp * cp), and global_batch is divided by dp. The
number of processes is the largest n, at most the number of GPUs, that the configuration allows with
its micro_batch or, where that does not fit, with a divisor of it; the samples per step, and so the
loss, stay the same.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from coatlm.commands.entry import entry, torchrun
from coatlm.config import ConfigError
from coatlm.hf.run_config import load_run_config

ROOT = Path("/")
NODE = re.compile(r"nvidia\d+")  # in /dev, one per GPU; the driver may add them late
NVIDIA, DISPLAY = "0x10de", "0x03"  # vendor of a PCI device; first digits of the class of a GPU
WSL = "dxg"  # in /dev, one for all GPUs of a virtual machine of Windows
PRESET = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
PRESET.add_argument("--preset")


def command(arguments: Sequence[str], gpus: int) -> list[str]:
    """The command that trains with these arguments on `gpus` GPUs.

    It has one process if the arguments are invalid or do not train; that process prints the
    reason. If no number of processes fits, it has one process per GPU, and they name the field
    that does not fit.
    """
    given, rest = PRESET.parse_known_args(arguments)
    options = [word for word in rest if word.startswith("-")]
    words = [word for word in rest if word not in options]
    words += [] if given.preset is None else [f"preset={given.preset}"]
    count, overrides = (1, []) if gpus < 2 or options or not words else fit(words, gpus)
    if count == 1:
        return [sys.executable, *entry("train"), *arguments]
    start = torchrun(sys.executable, "--standalone", f"--nproc-per-node={count}")
    return [*start, *arguments, *overrides]


def fit(words: Sequence[str], gpus: int) -> tuple[int, list[str]]:
    """The number of processes for CONFIG and overrides, and an override that it requires."""
    try:
        config = load_run_config(words[0], words[1:])
    except ConfigError:
        return 1, []
    parallel, train = config.parallel, config.train
    if parallel.layout == "auto":
        return gpus, []
    ranks = parallel.tp * parallel.pp * parallel.cp
    open_size = isinstance(train.micro_batch, str)  # the run will choose
    for dp in range(gpus // ranks, 0, -1):
        share = train.global_batch // dp
        largest = share if open_size else math.gcd(train.micro_batch, share)
        for size in (n for n in range(largest, 0, -1) if largest % n == 0):
            decided = train.model_copy(update={"micro_batch": size})
            with suppress(ConfigError):
                config.model_copy(update={"train": decided}).data_parallel_size(dp * ranks)
                kept = open_size or size == train.micro_batch
                return dp * ranks, [] if kept else [f"train.micro_batch={size}"]
    return gpus, []


def count_gpus(root: Path = ROOT) -> int:
    """The number of GPUs that CUDA can use; 1 where fewer than two are seen without asking it.

    torch, whose import takes seconds, is only asked where several GPUs are possible: one process
    is started for no GPU and for one. `root` is the directory that has dev/ and sys/.
    """
    nodes = [path.name for path in (root / "dev").glob("*")]
    devices = list((root / "sys/bus/pci/devices").glob("*"))
    seen = max(
        sum(NODE.fullmatch(name) is not None for name in nodes),
        sum(_line(path / "vendor") == NVIDIA and _is_gpu(path) for path in devices),
    )
    if seen < 2 and WSL not in nodes:
        return 1
    import torch

    return torch.cuda.device_count()


def _is_gpu(device: Path) -> bool:
    """Whether a PCI device is a GPU, not its audio or USB part or a bridge."""
    return _line(device / "class").startswith(DISPLAY)


def _line(path: Path) -> str:
    """The line of a file in /sys; empty if it cannot be read, as in some containers."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def main() -> None:
    line = command(sys.argv[1:], count_gpus())
    print("+", *line[1:], flush=True)
    os.execv(line[0], line)


if __name__ == "__main__":
    process.run(main)
