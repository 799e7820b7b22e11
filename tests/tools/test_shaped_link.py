"""The link between two nodes: when packets arrive, in which order, and how many wait for it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tools.benchmarks import nodes
from tools.benchmarks.shaped_link import Direction

RATE, LATENCY = 8e6, 0.5  # a byte per microsecond
Ends = tuple[socket.socket, socket.socket, Direction]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The sender's socket, the receiver's socket, and the direction between them."""
    with ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        (near, source), (sink, far) = pairs
        for end in (near, source, sink, far):
            stack.enter_context(end)
            end.setblocking(False)
        wire = Direction(source.fileno(), sink.fileno(), rate=RATE, latency=LATENCY)
        yield near, far, wire


def arrived(far: socket.socket) -> list[bytes]:
    """The packets that the receiver has."""
    found = []
    while True:
        try:
            found.append(far.recv(1 << 16))
        except BlockingIOError:
            return found


def test_packets_arrive_in_order_after_their_bytes_at_the_rate_and_the_latency(ends: Ends) -> None:
    near, far, wire = ends
    near.send(b"a" * 1000)
    near.send(b"b" * 3000)
    wire.take(10.0)
    for now, packets in ((10.5, []), (10.5005, []), (10.502, [b"a" * 1000])):
        wire.deliver(now)
        assert arrived(far) == packets
    assert wire.wait(10.502) == pytest.approx(0.002)
    near.send(b"c" * 2000)  # while b is on its way, but has left the wire
    wire.take(10.502)
    assert wire.wait(11.0) == 0.0  # late
    wire.deliver(10.5041)
    assert arrived(far) == [b"b" * 3000]
    assert wire.wait(10.5041) == pytest.approx(0.5 + 0.002 + 0.502 - 0.5041)
    wire.deliver(11.0041)
    assert arrived(far) == [b"c" * 2000] and wire.wait(11.0041) is None


def test_packets_beyond_the_queue_wait_at_their_sender_and_none_is_lost(ends: Ends) -> None:
    near, far, wire = ends
    sent = [bytes([number]) * 4000 for number in range(6)]
    for packet in sent:
        near.send(packet)
    wire.take(0.0)
    assert len(wire.flying) == 3  # the third begins after 8 ms, the fourth would after 12
    assert not wire.accepts(0.0) and not wire.accepts(0.0019) and wire.accepts(0.0021)
    assert wire.wait(0.0) == pytest.approx(0.002)  # until there is room, long before one arrives
    wire.take(0.0021)
    assert len(wire.flying) == 4
    wire.take(1.0)
    wire.deliver(2.0)
    assert arrived(far) == sent


def test_a_node_that_is_down_loses_its_packets_and_no_others(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(code: int) -> Callable[[int, bytes], int]:
        def write(_: int, __: bytes) -> int:
            raise OSError(code, "")

        return write

    near, far, wire = ends
    for packet in (b"lost", b"not lost in silence"):
        near.send(packet)
    wire.take(0.0)
    with monkeypatch.context() as patch:
        patch.setattr("os.write", refused(errno.EIO))
        wire.deliver(LATENCY + 4e-6)
        patch.setattr("os.write", refused(errno.ENOBUFS))
        with pytest.raises(OSError, match=str(errno.ENOBUFS)):
            wire.deliver(1.0)
    near.send(b"next")
    wire.take(1.0)
    wire.deliver(2.0)
    assert arrived(far) == [b"next"]


def test_the_least_time_is_that_of_the_bytes_and_one_latency() -> None:
    found = {
        "codes, one level": (0.4, 25_000_000.0),
        "codes, two levels": (0.3, 12_500_000.0),
        "bf16, one level": (0.5, 50_000_000.0),
    }
    rate, latency = nodes.rate_and_latency({"mbit": "500", "latency_us": "3000"})
    assert nodes.table(found, rate, latency) == [
        {"way": "codes, one level", "link_mb": 25.0, "least_ms": 403.0, "ms": 400.0},
        {
            "way": "codes, two levels",
            "link_mb": 12.5,
            "least_ms": 203.0,
            "ms": 300.0,
            "times": 0.75,
        },
        {"way": "bf16, one level", "link_mb": 50.0, "least_ms": 803.0, "ms": 500.0},
    ]


@pytest.mark.parametrize("sizes", ["", "0", "1,x", "1,2000", "0001024999", "9" * 50])
def test_invalid_sizes_are_refused(sizes: str) -> None:
    assert nodes.rows({"mib": "4"}) == ["link", "exchange 4 MiB", "step"]
    with pytest.raises(ValueError, match=r"mib=.*: whole numbers of MiB from 1 to 1024"):
        nodes.rows({"mib": sizes})


def test_a_machine_without_namespaces_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="needs root, network namespaces, /dev/net/tun"):
        nodes.measure("link", {})
