"""torchrun for batch systems: signals reach the ranks, and the exit code of the ranks survives.

    python tools/elastic.py [torchrun's options] pretrain.py CONFIG.yaml [key=value ...]

torchrun dies of SIGUSR1, gives its ranks 30 seconds after SIGTERM, and exits with 1 whatever they
exit with. Here both signals are passed on to the ranks of this node, which save and leave in their
own time, and the exit code is that of the signal, else of the first rank that failed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from coatlm.train.faults import SIGNALS

PASSED_ON = (signal.SIGUSR1, signal.SIGTERM)
LEFT_TO_TORCHRUN = "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"


def main(arguments: list[str]) -> int:
    """Run torchrun in this process; its exit code as described above."""
    received: list[signal.Signals] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for rank in ranks():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    code = 0
    try:
        torchrun([LEFT_TO_TORCHRUN, *arguments])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
    if received:
        return max(SIGNALS[number] for number in received)
    return 128 - code if code < 0 else code


def ranks() -> list[psutil.Process]:
    """The children that torchrun has given a rank; it may have others."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "LOCAL_RANK" in child.environ():
                found.append(child)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
