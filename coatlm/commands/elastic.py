"""torchrun for batch systems: forwards signals to the ranks and returns the ranks' exit code.

    python tools/elastic.py [torchrun's options] pretrain.py CONFIG.yaml [key=value ...]

Rank 0 serves the ranks' store, a new one at every start. In a store that torchrun shares with them
a node that comes back finds no address and waits for ever, as the address is published once. With
--standalone nothing listens on the network: torchrun's own stores have no authentication and would
listen on all interfaces, and rank 0's listens on the loopback address.

torchrun itself is killed by SIGUSR1 and, under nohup, by SIGHUP, gives its ranks 30 seconds after
SIGTERM, and always exits with 1 if a rank fails. This wrapper forwards SIGINT, SIGUSR1, SIGHUP and
SIGTERM to the ranks of this node, which save and exit without a time limit. It exits with the code
of the first rank that failed, 0 if none did; after a signal, ranks that end with 0 or the code of a
signal give the code of that signal. A second SIGINT ends all ranks immediately.

Ranks that are still starting end at a signal, and --max-restarts starts them again. So signals are
repeated until all ranks have exited; ranks ignore repeated signals. Only SIGINT, which ends a rank
at once if it is repeated, is sent once to each process.
"""

from __future__ import annotations

import signal

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen(signal.SIGUSR1)

import atexit
import contextlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from coatlm.console import fail
from coatlm.train.faults import SIGNALS, ExitCode

LEFT_TO_TORCHRUN = "--signals-to-handle=SIGQUIT"
COUNTS = ("--nnodes", "--nproc-per-node")
DEVICES = ("auto", "cpu", "gpu", "xpu")  # of which torchrun starts a process each
REPEAT_S = 5.0  # seconds between signals to the ranks
# codes of ranks that a signal ended; under --max-restarts, ranks that have saved end with 0
STOPPED = {ExitCode.OK, *SIGNALS.values(), *(128 + number for number in SIGNALS)}
UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # keeps torchrun from serving a store to the ranks


def main(arguments: list[str] | None = None) -> int:
    """Run torchrun in this process; returns the exit code described above."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if wrong := wrong_count(arguments):
        return fail(ValueError(wrong))
    received: list[signal.Signals] = []
    told: set[int] = set()  # processes that have received a SIGINT

    def remember(number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and signal.SIGINT in received
        received.append(signal.Signals(number))
        if again:
            raise SignalException("interrupted twice", signal.SIGINT)  # torchrun ends its ranks
        send(received[-1], told)

    def repeat() -> None:
        while True:
            time.sleep(REPEAT_S)
            if received:
                send(received[-1], told)

    for number in process.handled(tuple(SIGNALS)):
        signal.signal(number, remember)
    threading.Thread(target=repeat, name="signals", daemon=True).start()
    os.environ[UNSHARED] = "1"
    code = 0
    try:
        torchrun([LEFT_TO_TORCHRUN, *on_loopback(arguments)])
    except ChildFailedError as error:
        first = error.get_first_failure()[1]
        code = first.exitcode
        if isinstance(first.message, dict):  # from the rank's own error file
            print(first.message["extraInfo"]["py_callstack"], file=sys.stderr, flush=True)
    except SignalException:
        return SIGNALS[signal.SIGINT]
    code = 128 - code if code < 0 else code
    if received and code in STOPPED:
        return max(SIGNALS[number] for number in received)
    return code


def wrong_count(arguments: list[str]) -> str:
    """What is wrong with a number of nodes or processes, which torchrun answers with a traceback;
    "" if nothing is."""
    for at, word in enumerate(arguments):
        name, equals, value = word.replace("_", "-").partition("=")
        if name not in COUNTS:
            if not name.startswith("-") and name.endswith(".py"):
                break  # the script, behind which its own arguments begin
            continue
        given = value if equals else "".join(arguments[at + 1 : at + 2])
        if name == COUNTS[1] and not given.lstrip("-").isdigit() and given not in DEVICES:
            return f"{name} {given}: a number, or one of {', '.join(DEVICES)}"
        if any(part.lstrip("-").isdigit() and int(part) < 1 for part in given.split(":")):
            return f"{name} {given}: at least 1"
    return ""


def on_loopback(arguments: list[str]) -> list[str]:
    """Replace --standalone by a rendezvous that does not listen on the network."""
    if "--standalone" not in arguments:
        return arguments
    file, path = tempfile.mkstemp(prefix="coatlm-rendezvous-")  # readable by this user only
    os.close(file)
    atexit.register(lambda: Path(path).unlink(missing_ok=True))
    options = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={path}"]
    at = arguments.index("--standalone")
    return [*arguments[:at], *options, "--local-addr=127.0.0.1", *arguments[at + 1 :]]


def send(number: signal.Signals, told: set[int]) -> None:
    """Send a signal to the ranks, which are not the only children of torchrun."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "LOCAL_RANK" not in child.environ():
                continue
            if number != signal.SIGINT or child.pid not in told:
                child.send_signal(number)
            if number == signal.SIGINT:
                told.add(child.pid)


if __name__ == "__main__":
    process.run(main)
