"""What every test runs under: one thread, no network, and skips where the hardware is missing."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

# Before torch is imported anywhere, and inherited by the processes that tests start.
os.environ |= {
    "OMP_NUM_THREADS": "1",  # tests run several processes a core
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_CACHE": (DATASETS := tempfile.TemporaryDirectory(prefix="coatlm-datasets-")).name,
    "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive a fork
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "MPLBACKEND": "agg",
}

import torch

# Tests hang up what they start. It would inherit that nohup ignores SIGHUP, but not a handler.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Files of these names take up to minutes each. With several workers they begin first, so that all
# workers end at about the same time.
LONG = tuple(f"tests/{name}" for name in ("tools", "parallel", "train", "test_", "fuzz", "convert"))

if importlib.util.find_spec("hypothesis"):  # GPU machines run tests/gpu without it
    from hypothesis import settings

    settings.register_profile("coatlm", deadline=None, derandomize=True)
    settings.load_profile("coatlm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out tests marked slow, unless tests are chosen by path, -k or -m",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Ignore --quick where tests are chosen."""
    by_path = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if by_path or config.option.keyword or config.option.markexpr:
        config.option.quick = False


def has_slurm() -> bool:
    """Whether a cluster answers with a partition that is up."""
    if not shutil.which("sbatch"):
        return False
    command = ["sinfo", "--noheader", "--format=%a"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return False
    return "up" in done.stdout.split()


@pytest.fixture(autouse=True)
def no_log_of_another_test() -> Iterator[None]:
    """A run in this process leaves its log's handlers, which the next test would write to."""
    yield
    if run_directory := sys.modules.get("coatlm.train.run_directory"):
        run_directory.stop_logging()


@pytest.hookimpl(optionalhook=True)  # GPU machines run tests/gpu without xdist
def pytest_xdist_auto_num_workers() -> int:
    """How many processes `make test` starts: one per core, up to eight; none where there are GPUs.

    Most tests would use the first GPU.
    """
    return 0 if torch.cuda.is_available() else min(len(os.sched_getaffinity(0)), 8)


def pytest_collection_finish() -> None:
    """Exempt what exists after collection, and lives to the end, from garbage collections later."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files that start programs first; skip tests whose mark names what this machine lacks."""
    if config.option.quick:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    gpus = torch.cuda.device_count()
    lacking = {
        "gpu": None if gpus >= 1 else "needs a CUDA device",
        "multigpu": None if gpus >= 2 else "needs two CUDA devices",
        "slurm": None if has_slurm() else "needs a running SLURM: .ci/slurm start",
    }
    for item in items:
        for mark, reason in lacking.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
