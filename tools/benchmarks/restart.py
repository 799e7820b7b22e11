"""Seconds of starts, of a restart after kill -9, and of saves, for a run of `pretrain.py`.

    first_loss_cold_s   from the start of the process to its first loss, with empty caches of
                        kernels, GEMM algorithms and tokens; files may be in the system's page cache
    first_loss_warm_s   the same in another run directory, with the caches of the first run
    restart_s           from the kill of the first run, after its checkpoint, to the first loss of
                        the same command, which resumes from that checkpoint
    step_s              the median time between the losses of steps before the save
    save_stall_s        the longest such time while the checkpoint is written - step_s
    stalls              the three longest such times - step_s, each after how many steps of the save
    save_s              from the start of the save to the complete checkpoint
    save_gb_per_s       bytes of the checkpoint / save_s
    plain_gb_per_s      the same bytes written to one file and fsynced, beside the checkpoint:
                        a virtual disk can be faster where files were deleted before
    write_ratio         save_gb_per_s / plain_gb_per_s

    *_parts             where the seconds of a start went, as the run's log has them

A row is a model: `3.37b`, `0.5b`, or `tiny`, which takes a minute on a CPU. All files are in a
temporary directory, which takes the bytes of two checkpoints.

Options: model=3.37b (several with commas) every=40 (steps before the save, which should take less
time than these) dir=DIR (where the temporary directory is) and dotted options of a run.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tools.benchmarks.ranks import ROOT

OPTIONS = ("model", "every", "dir", "SECTION.KEY")
EVERY = "40"  # the default of every=
MODELS = {  # row -> configuration, overrides, predicted seconds
    "3.37b": (
        "llama-3b",
        ("data.seq_len=2048", "train.micro_batch=8", "train.global_batch=16"),
        240.0,
    ),
    "0.5b": (
        "qwen2.5-0.5b",
        ("data.seq_len=1024", "train.micro_batch=16", "train.global_batch=32"),
        150.0,
    ),
    "tiny": (
        "quickstart",
        (
            *("model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2"),
            *("model.ffn=64", "data.seq_len=16", "train.micro_batch=1", "train.global_batch=1"),
        ),
        90.0,
    ),
}
ALL = (  # overrides of every row; the run does not end by itself
    *("data.paths=[]", "data.tokenizer=byte", "data.reset_attention_mask=false"),
    *("train.eval_every=0", "train.steps=1000000", "optim.warmup_steps=1", "log.every=1"),
)
STARTED = re.compile(r" s to the end of the first step: (.*)$")
STEP = re.compile(r"\bstep (\d+)/\d+ \| loss ")
SAVED = re.compile(r"\bsaved step_0*(\d+): .* in ([\d.]+) s")
TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(100_000))
BLOCK = 16 << 20  # bytes of a plain write


class Save(NamedTuple):
    """Seconds until a checkpoint is complete, of a step before it, and of the stalls of steps."""

    save: float
    step: float
    stalls: list[float]  # of each step from the one that ends after the start of the save


class WatchedRun:
    """A run of `pretrain.py` in a session of its own. `at`: seconds of `time.perf_counter`."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self.began = time.perf_counter()
        self.last = deque[str](maxlen=3)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def lines(self) -> Iterator[tuple[float, str]]:
        """The lines of the run, each with the time `at` which it came.

        Raises RuntimeError with the last lines if the run ends.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            at = time.perf_counter()
            self.last.append(line.strip())
            yield at, line
        raise RuntimeError(f"the run ended: {' | '.join(self.last)}")

    def steps(self) -> Iterator[tuple[float, int]]:
        """The steps of the run, each with the time `at` which its loss came."""
        for at, line in self.lines():
            if found := STEP.search(line):
                yield at, int(found[1])

    def first(self) -> tuple[float, int, str]:
        """The first step: `at` which time its loss came, its number, and the parts of the start."""
        at, step, parts = 0.0, 0, ""
        for now, line in self.lines():
            if not step and (found := STEP.search(line)):
                at, step = now, int(found[1])
            if found := STARTED.search(line):
                parts = found[1]
            if step and parts:
                break
        return at, step, parts

    def kill(self) -> float:
        """Send SIGKILL to all processes of the run; returns the time `at` which that was."""
        at = time.perf_counter()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return at


@contextmanager
def ended(run: WatchedRun) -> Iterator[WatchedRun]:
    """Kill `run` at the end, if it still runs."""
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.kill()
        assert run.process.stdout is not None
        run.process.stdout.close()


def rows(options: dict[str, str]) -> list[str]:
    """The models. Raises ValueError for one that is not known, and for a save after two steps."""
    if (every := options.get("every")) in ("1", "2"):
        raise ValueError(f"every={every}: must be at least 3 steps")
    names = options.get("model", "3.37b").split(",")
    for name in names:
        if name not in MODELS:
            raise ValueError(f"model={name}: one of {', '.join(MODELS)}")
    return names


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs; `tiny` needs none."""
    return int(any(name != "tiny" for name in rows(options)))


def seconds(row: str, options: dict[str, str]) -> float:
    """What the row is predicted to take."""
    return MODELS[row][2]


def measure(row: str, options: dict[str, str]) -> dict[str, Any]:
    """Start, save, kill, restart, and start another run; then write the same bytes plainly."""
    every = int(options.get("every", EVERY))
    with tempfile.TemporaryDirectory(dir=options.get("dir")) as name:
        place = Path(name)
        (place / "text.txt").write_text(TEXT)
        overrides = [f"{key}={value}" for key, value in options.items() if "." in key]
        env = os.environ | {
            "TRITON_CACHE_DIR": str(place / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        }

        def start(run: str) -> WatchedRun:
            return WatchedRun(command(row, place, place / run, every, overrides), env)

        with ended(start("first")) as first:
            at, _, cold_parts = first.first()
            cold = at - first.began
            save = until_saved(first, every - 1)
            killed = first.kill()
        with ended(start("first")) as second:
            at, step, restart_parts = second.first()
            restart = at - killed
            if step <= every or step % every != 1:
                raise RuntimeError(
                    f"the run resumed at step {step}, not after a multiple of {every}"
                )
        with ended(start("other")) as third:
            at, _, warm_parts = third.first()
            warm = at - third.began
        checkpoint = next((place / "first" / "checkpoints").glob("step_*"))
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        plain = plain_write(place / "plain", size)
    return {
        "first_loss_cold_s": round(cold, 2),
        "first_loss_warm_s": round(warm, 2),
        "restart_s": round(restart, 2),
        "step_s": round(save.step, 4),
        "save_stall_s": round(max(save.stalls), 3),
        "stalls": longest(save.stalls),
        "save_s": save.save,
        **rates(size, save.save, plain),
        "cold_parts": cold_parts,
        "restart_parts": restart_parts,
        "warm_parts": warm_parts,
    }


def command(
    row: str, place: Path, run: Path, every: int, overrides: Sequence[str] = ()
) -> list[str]:
    """The command of a run with its directory `run`, and text and caches in `place`."""
    config, own, _ = MODELS[row]
    paths = [f"data.text=[{place / 'text.txt'}]", f"data.cache_dir={place / 'cache'}"]
    paths += [f"run.dir={run}", f"checkpoint.every={every}"]
    file = f"coatlm/configs/{config}.yaml"
    return [sys.executable, "pretrain.py", file, *ALL, *own, *paths, *overrides]


def until_saved(run: WatchedRun, every: int) -> Save:
    """The checkpoint of `run` after the next `every` steps."""
    times: list[float] = []
    saved = None
    for at, line in run.lines():
        if found := SAVED.search(line):
            saved = float(found[2])
        elif STEP.search(line):
            times.append(at)
        if saved is not None and len(times) > every:
            break
    laps = [later - earlier for earlier, later in itertools.pairwise(times)]
    usual = statistics.median(laps[: every - 1])
    assert saved is not None
    return Save(saved, usual, [lap - usual for lap in laps[every - 1 :]])


def longest(stalls: Sequence[float]) -> list[tuple[int, float]]:
    """The three longest stalls, each with the number of its step after the save."""
    order = sorted(range(len(stalls)), key=lambda at: -stalls[at])[:3]
    return [(at + 1, round(stalls[at], 3)) for at in order]


def plain_write(path: Path, size: int) -> float:
    """The seconds that `size` bytes take to be written and fsynced."""
    block = os.urandom(BLOCK)
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, BLOCK):
            file.write(block[: size - start])
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def rates(size: int, saved: float, plain: float) -> dict[str, float]:
    """Bytes per second of a save and of a plain write; a save below 0.1 s has no rate."""
    found = {
        "checkpoint_gib": round(size / 2**30, 4),
        "plain_gb_per_s": round(size / plain / 1e9, 3),
    }
    if saved:
        found["save_gb_per_s"] = round(size / saved / 1e9, 3)
        found["write_ratio"] = round(plain / saved, 3)
    return found
