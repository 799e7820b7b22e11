"""torchrun for batch systems: signals reach the ranks, and the exit code of the ranks survives.

    python tools/elastic.py [torchrun's options] pretrain.py CONFIG.yaml [key=value ...]

torchrun dies of SIGUSR1, gives its ranks 30 seconds after SIGTERM, and exits with 1 whatever they
exit with. Here both signals are passed on to the ranks of this node, which save and leave in their
own time, and the exit code is that of the signal, else of the first rank that failed.

Ranks that were still starting die of SIGUSR1 and are started again by --max-restarts. So a signal
is repeated until all have left; those that have heard it take no notice.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from coatlm.train.faults import SIGNALS

PASSED_ON = (signal.SIGUSR1, signal.SIGTERM)
LEFT_TO_TORCHRUN = "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"
REPEAT_S = 5.0  # seconds between signals to the ranks


def main(arguments: list[str]) -> int:
    """Run torchrun in this process; its exit code as described above."""
    received: list[signal.Signals] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        send(received[-1])

    def repeat() -> None:
        while True:
            time.sleep(REPEAT_S)
            if received:
                send(received[-1])

    for number in PASSED_ON:
        signal.signal(number, remember)
    threading.Thread(target=repeat, name="signals", daemon=True).start()
    code = 0
    try:
        torchrun([LEFT_TO_TORCHRUN, *arguments])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
    if received:
        return max(SIGNALS[number] for number in received)
    return 128 - code if code < 0 else code


def send(number: signal.Signals) -> None:
    """To the children that torchrun has given a rank; it may have others."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "LOCAL_RANK" in child.environ():
                child.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
