"""Signals, hangs and non-finite steps, with real signals and real processes."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coatlm.train.faults import (
    SIGNALS,
    ExitCode,
    HangWatchdog,
    NonFiniteError,
    NonFiniteGuard,
    StopSignal,
)

ROOT = Path(__file__).parents[2]


def python(script: str, *args: str) -> subprocess.Popen[str]:
    """Run `script` in a new interpreter; stdout and stderr are pipes."""
    command = [sys.executable, "-c", script, *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def handlers() -> Iterator[list[Any]]:
    """The handlers of SIGNALS, which are put back after the test."""
    before = [signal.getsignal(s) for s in SIGNALS]
    yield before
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def stop(handlers: list[Any]) -> Iterator[StopSignal]:
    with StopSignal() as value:
        yield value


@pytest.mark.parametrize("number", list(SIGNALS))
def test_a_signal_sets_the_flag_and_the_program_goes_on(
    stop: StopSignal, number: signal.Signals
) -> None:
    assert stop.agreed() is None
    os.kill(os.getpid(), number)
    assert stop.agreed() is number


@pytest.mark.parametrize("first_last", [(0, 1), (1, 0)])
def test_the_more_urgent_signal_wins_whatever_the_order(
    stop: StopSignal, first_last: tuple[int, int]
) -> None:
    for at in first_last:
        os.kill(os.getpid(), (signal.SIGUSR1, signal.SIGTERM)[at])
    assert stop.agreed() is signal.SIGTERM


def test_a_second_sigint_interrupts_at_once() -> None:
    process = python(
        "import os\n"
        "from coatlm.train.faults import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    os.kill(os.getpid(), 15)\n"
        "    os.kill(os.getpid(), 2)\n"
        "    print(stop.agreed().name)\n"
        "    try:\n"
        "        os.kill(os.getpid(), 2)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    assert process.communicate(timeout=60)[0] == "SIGTERM\ninterrupted\n"


def test_close_restores_the_previous_handlers(handlers: list[Any]) -> None:
    with StopSignal() as stop:
        assert [signal.getsignal(s) for s in SIGNALS] != handlers
        assert stop.agreed() is None
    assert [signal.getsignal(s) for s in SIGNALS] == handlers


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_is_repeated_does_not_kill_a_process_that_leaves(
    handlers: list[Any], number: signal.Signals
) -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), number)
        assert stop.agreed() is number
    for repeated in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
        os.kill(os.getpid(), repeated)
    assert signal.getsignal(signal.SIGINT) == handlers[list(SIGNALS).index(signal.SIGINT)]


def test_a_signal_after_the_run_does_not_kill_a_process_that_leaves(handlers: list[Any]) -> None:
    with StopSignal() as stop:
        assert stop.agreed() is None
        stop.leave()
    for late in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
        os.kill(os.getpid(), late)
    assert signal.getsignal(signal.SIGINT) == handlers[list(SIGNALS).index(signal.SIGINT)]


def test_codes_of_signals_are_the_shells_and_a_requeue_code_of_its_own() -> None:
    assert SIGNALS[signal.SIGINT] == 128 + signal.SIGINT == 130
    assert SIGNALS[signal.SIGTERM] == 128 + signal.SIGTERM == 143
    assert SIGNALS[signal.SIGHUP] == 128 + signal.SIGHUP == 129
    assert SIGNALS[signal.SIGUSR1] == ExitCode.REQUEUE == 85
    assert len(set(ExitCode)) == len(ExitCode.__members__)


def test_a_sighup_that_is_ignored_stays_ignored(handlers: list[Any]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.agreed() is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


BUSY = """
import ctypes, sys, time
from coatlm.train import faults
faults.QUIT_S = 0.3
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
with faults.StopSignal(speaks=sys.argv[1] == "speaks"):
    print("ready", flush=True)
    lock(mutex)
    lock(mutex)  # a step that does not end: no Python of this thread runs any more
"""


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, "; again to quit now"),
        (signal.SIGHUP, " and leaving"),
    ],
)
def test_a_signal_is_answered_while_a_step_runs_and_once(
    number: signal.Signals, words: str
) -> None:
    process = python(BUSY, "speaks")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert first_line(process) == f"{number.name}: finishing this step, then saving{words}\n"
    if number is not signal.SIGINT:
        process.send_signal(number)
    time.sleep(0.2)
    process.kill()
    assert process.communicate()[1] == ""


@pytest.mark.parametrize("speaks", [True, False])
def test_a_second_sigint_ends_a_process_whose_step_does_not_end(speaks: bool) -> None:
    process = python(BUSY, "speaks" if speaks else "")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    if speaks:
        assert "again to quit now" in first_line(process)
    else:
        time.sleep(0.2)  # signals of a kind that come together count once
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == ("error: interrupted twice: left without saving this step\n" if speaks else "")


ORPHAN = """
import os, sys, time
from coatlm.train import faults
faults.PARENT_S = 0.05
parent = os.getpid()
if os.fork() == 0:
    faults.end_with(parent)
    print(os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


def test_a_process_ends_with_its_parent() -> None:
    parent = python(ORPHAN)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.3)
    os.kill(child, 0)  # it runs as long as the parent does
    parent.kill()
    _, said = parent.communicate(timeout=30)  # until the child has closed its end, too
    launcher = f"its launcher, pid {parent.pid}"
    assert said == f"error: pid {child}: exiting, as {launcher}, has exited\n"


AGREE = """
import os, signal, sys
import torch.distributed as dist
from coatlm.train.faults import StopSignal
from coatlm.train.lock import LostLockError
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
stop, seen = StopSignal(), []
for step in range(4):
    if (rank, step) == (1, 1):
        os.kill(os.getpid(), signal.SIGUSR1)
    if (rank, step) == (0, 3):
        os.kill(os.getpid(), signal.SIGTERM)
    agreed = stop.agreed(dist.group.WORLD)
    seen.append(agreed.name if agreed else "-")
try:
    stop.agreed(dist.group.WORLD, lost=rank == 1)
except LostLockError:
    seen.append("lost")
print(*seen)
dist.destroy_process_group()
"""


def test_ranks_agree_in_the_step_in_which_one_of_them_has_a_signal(tmp_path: Path) -> None:
    ranks = [python(AGREE, str(rank), str(tmp_path / "store")) for rank in range(2)]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [out for out, _ in said] == ["- SIGUSR1 SIGUSR1 SIGTERM lost\n"] * 2, said


HANG = """
import sys, time
from pathlib import Path
from coatlm.train.faults import HangWatchdog
def stuck_in_a_collective():
    time.sleep(60)
watchdog = HangWatchdog(0.5, run_dir=Path(sys.argv[1]), rank=3)
for _ in range(8):
    time.sleep(0.1)
    watchdog.beat()
print("eight beats", flush=True)
stuck_in_a_collective()
"""


def test_a_hang_dumps_stacks_and_exits_with_its_code(tmp_path: Path) -> None:
    process = python(HANG, str(tmp_path))
    out, err = process.communicate(timeout=30)
    assert process.returncode == ExitCode.HANG == 5
    assert out == "eight beats\n"  # 0.8 s with a beat every 0.1 s were no hang
    dumped = (tmp_path / "hang_rank3.txt").read_text()
    assert "in stuck_in_a_collective" in err
    assert "in stuck_in_a_collective" in dumped
    assert "rank 3: no step for 0.5 s" in err


ONE_HANGS = """
import sys, time
from pathlib import Path
from coatlm.train.faults import FLIGHT, HangWatchdog
from coatlm.train.setup import record_collectives, recorded_collectives
rank, run = int(sys.argv[1]), Path(sys.argv[2])
record_collectives(run / FLIGHT)
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{run}/store", rank=rank, world_size=2)
watchdog = HangWatchdog(5.0 + 5 * rank, run_dir=run, rank=rank, flight=recorded_collectives)
dist.all_reduce(torch.ones(5))
if rank == 1:
    time.sleep(60)
dist.broadcast(torch.ones(7), src=0)
dist.all_reduce(torch.ones(3))
"""


def test_a_hang_leaves_the_latest_collectives_of_each_rank(tmp_path: Path) -> None:
    ranks = [python(ONE_HANGS, str(rank), str(tmp_path)) for rank in range(2)]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.HANG] * 2, said
    records = [pickle.loads((tmp_path / f"flight_rank_{rank}").read_bytes()) for rank in range(2)]
    names = [[entry["profiling_name"] for entry in record["entries"]] for record in records]
    assert names[1] == ["gloo:all_reduce"]  # and never came to the next, for which rank 0 waits
    assert names[0][:2] == ["gloo:all_reduce", "gloo:broadcast"]


def test_the_watchdog_acts_once_and_not_after_close(tmp_path: Path) -> None:
    acted = threading.Event()
    watchdog = HangWatchdog(0.05, acted.set, run_dir=tmp_path)
    assert acted.wait(10)
    watchdog.close()
    acted.clear()
    closed = HangWatchdog(0.05, acted.set, run_dir=tmp_path)
    closed.close()
    assert not acted.wait(0.2)


def test_timeout_zero_switches_the_watchdog_off(tmp_path: Path) -> None:
    acted = threading.Event()
    threads = threading.active_count()
    watchdog = HangWatchdog(0.0, acted.set, run_dir=tmp_path)
    assert threading.active_count() == threads
    watchdog.beat()
    watchdog.close()


SUSPEND = """
import sys, time
from pathlib import Path
from coatlm.train.faults import HangWatchdog
watchdog = HangWatchdog(1.0, run_dir=Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(0.1)
watchdog.close()
"""


def test_a_suspended_process_has_not_hung(tmp_path: Path) -> None:
    process = python(SUSPEND, str(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # past the timeout
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err


def test_the_guard_ends_a_run_at_the_limit_of_skipped_steps_in_a_row() -> None:
    guard = NonFiniteGuard(3)
    guard.observe(4, [float("nan"), float("inf"), 1.0, float("nan")])
    assert (guard.total, guard.in_row) == (3, 1)
    guard.observe(5, [float("-inf")])
    with pytest.raises(NonFiniteError, match=r"step 6: train\.max_skipped=3 .* from 4 on;"):
        guard.observe(6, [float("nan")])


def test_the_guard_names_every_skipped_step(caplog: pytest.LogCaptureFixture) -> None:
    guard = NonFiniteGuard(9, total=2)
    with caplog.at_level(logging.WARNING, logger="coatlm"):
        guard.observe(20, [0.5, float("nan"), float("inf")])
    assert [r.getMessage() for r in caplog.records] == [
        "step 19 skipped: gradient norm nan",
        "step 20 skipped: gradient norm inf",
    ]
    assert guard.total == 4


def test_the_guard_warns_once_of_steps_in_which_no_token_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard, nan = NonFiniteGuard(9), float("nan")
    with caplog.at_level(logging.WARNING, logger="coatlm"):
        guard.observe(3, [0.5, 0.0, 0.0], losses=[2.0, nan, nan])
        guard.observe(4, [0.0], losses=[nan])
        guard.observe(5, [0.0], losses=[0.0])
    (record,) = caplog.records
    assert record.getMessage().startswith("step 2: no token of the batch counts (data.loss_mask)")
    assert guard.total == 0
