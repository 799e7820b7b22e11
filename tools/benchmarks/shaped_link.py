"""A network link between two nodes, shaped in user space: a rate, a latency, a bounded queue.

    python -m tools.benchmarks.shaped_link PID PID BITS_PER_S LATENCY_S

gives the network namespaces of both processes a TUN interface named LINK and moves packets between
them until its standard input ends. Any kernel with namespaces and /dev/net/tun can do this, where
`tc netem` needs a module. Each direction is a wire of its own. Times are in seconds:

    begin   = max(time at which the packet is read, end of the packet before)
    end     = begin + 8 bytes / rate
    arrival = end + latency

No packet is read while those already read occupy the wire for QUEUE_S or longer: the others wait in
the queue of the interface. None is lost unless that queue overflows or the receiver is down. The
link is never faster than its rate and latency say. It is slower while this process waits for a CPU.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

LINK = "link0"  # the interface to the other node
MTU = 9000  # bytes of a packet with its headers
QUEUE_S = 0.01  # seconds of traffic that wait for the wire: 1.25 MB at 1 Gbit/s
TUNSETIFF = 0x400454CA  # of linux/if_tun.h, as are the flags
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000  # packets of IP, without a header of the driver


class Direction:
    """One wire: packets from the file `source` to the file `sink`, first in, first out."""

    def __init__(self, source: int, sink: int, *, rate: float, latency: float) -> None:
        """`rate` in bits per second, `latency` in seconds; reads of `source` must not block."""
        self.source, self.sink, self.rate, self.latency = source, sink, rate, latency
        self.free = 0.0  # when the wire is free
        self.flying: deque[tuple[float, bytes]] = deque()  # (time of arrival, packet)

    def accepts(self, now: float) -> bool:
        """Whether there is room for another packet before the wire."""
        return self.free - now < QUEUE_S

    def take(self, now: float) -> None:
        """Read the packets that wait at `source` and for which there is room."""
        while self.accepts(now):
            try:
                packet = os.read(self.source, MTU)
            except BlockingIOError:
                return
            self.free = max(now, self.free) + 8 * len(packet) / self.rate
            self.flying.append((self.free + self.latency, packet))

    def deliver(self, now: float) -> None:
        """Write the packets that have arrived. A node that is down loses them."""
        while self.flying and self.flying[0][0] <= now:
            try:
                os.write(self.sink, self.flying.popleft()[1])
            except OSError as error:
                if error.errno != errno.EIO:  # what a TUN interface that is down answers
                    raise

    def wait(self, now: float) -> float | None:
        """Seconds until a packet arrives or another one is accepted; None: none is on its way."""
        if not self.flying:
            return None
        arrives = self.flying[0][0]
        return max((arrives if self.accepts(now) else min(arrives, self.free - QUEUE_S)) - now, 0.0)


def forward(directions: list[Direction], until: int) -> None:
    """Move packets until the file `until` ends."""
    while True:
        now = time.monotonic()
        for direction in directions:
            direction.deliver(now)
        waits = [wait for direction in directions if (wait := direction.wait(now)) is not None]
        sources = [direction.source for direction in directions if direction.accepts(now)]
        ready = select.select([*sources, until], [], [], min(waits, default=None))[0]
        if until in ready:
            return
        now = time.monotonic()
        for direction in directions:
            if direction.source in ready:
                direction.take(now)


def enter(namespace: str) -> None:
    """Move this thread into a namespace, a file of /proc/PID/ns."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


@contextmanager
def network_of(pid: int) -> Iterator[None]:
    """Let sockets and interfaces that this thread creates be those of the node of process `pid`."""
    with open("/proc/thread-self/ns/net") as own:
        enter(f"/proc/{pid}/ns/net")
        try:
            yield
        finally:
            enter(f"/proc/self/fd/{own.fileno()}")


def interface(pid: int) -> int:
    """Create LINK in the network namespace of `pid`; returns the file of its packets."""
    with network_of(pid):
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", LINK.encode(), IFF_TUN | IFF_NO_PI))
    return file


def main() -> None:
    """Create the interfaces, say so in a line, and forward."""
    first, second = (interface(int(pid)) for pid in sys.argv[1:3])
    rate, latency = map(float, sys.argv[3:5])
    pairs = ((first, second), (second, first))
    print("up", flush=True)
    forward([Direction(a, b, rate=rate, latency=latency) for a, b in pairs], sys.stdin.fileno())


if __name__ == "__main__":
    main()
