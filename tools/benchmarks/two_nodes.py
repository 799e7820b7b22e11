"""Two nodes on one machine: network namespaces with a shaped link (`shaped_link`) between them.

A node has a host name, a loopback interface and the interface LINK of its own. Its name is its
address, so that no name server is asked. Processes of the two nodes reach each other over the link
alone, whose bytes the kernel counts. The link loses no packet but may be late when the machine is
busy, so TCP waits RESEND before it sends anything again: the count has every byte once. As no
packet is lost, TCP's congestion control acts only through the slow start of a new connection. It is
Reno on every machine, and a pause does not begin another slow start. The namespaces end with the
processes in them.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from tools.benchmarks.ranks import ROOT, received_record
from tools.benchmarks.row_process import POLL, last_error
from tools.benchmarks.shaped_link import LINK, MTU, network_of

NETWORK = "10.77.0.0/24"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RATE, LATENCY = 1e9, 1e-3  # bits per second in each direction; seconds in each direction
RESEND = "5s"
QUEUE = 10_000  # packets that wait for the link in the kernel: 90 MB, more than TCP's buffers
TOOLS = ("unshare", "nsenter", "ip")
NEEDS = f"root, network namespaces, /dev/net/tun, and {', '.join(TOOLS)}"
BEGIN = """
hostname {address} && ip link set lo up && cd /proc/sys/net/ipv4 &&
echo 0 > tcp_early_retrans && echo 0 > tcp_slow_start_after_idle &&
echo reno > tcp_congestion_control && echo up && exec cat
"""
PORT = 29500  # of rank 0; in namespaces of their own all ports are free


@dataclass(frozen=True)
class Node:
    """A node, whose namespaces the process `holder` keeps."""

    index: int
    holder: subprocess.Popen[str]

    @property
    def address(self) -> str:
        return ADDRESSES[self.index]

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` on this node."""
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--uts", *words]

    def run(self, *words: str) -> bool:
        """Run a command on this node; whether it succeeded."""
        return not subprocess.run(self.command(*words), capture_output=True).returncode

    def sent(self) -> int:
        """Bytes that this node has sent over the link, headers included."""
        return sent(self.holder.pid)


def sent(pid: int | str = "self") -> int:
    """Bytes that the node of process `pid` has sent over the link, headers included."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == LINK:
            return int(counters.split()[8])
    raise AssertionError(f"{LINK} does not exist")


@contextmanager
def two_nodes(rate: float = RATE, latency: float = LATENCY) -> Iterator[list[Node] | None]:
    """The two nodes; None where this process may not create them, or lacks what they need.

    The link has `rate` bits per second and `latency` seconds, each way.
    """
    if os.geteuid() or not all(map(shutil.which, TOOLS)) or not os.path.exists("/dev/net/tun"):
        yield None
        return
    started: list[subprocess.Popen[str]] = []
    try:
        for address in ADDRESSES:
            begin = BEGIN.format(address=address)
            started.append(_start("unshare", "--net", "--uts", "sh", "-c", begin))
        nodes = [Node(index, holder) for index, holder in enumerate(started)]
        made = all(map(_is_up, started))
        if made:
            pids = [str(holder.pid) for holder in started]
            words = ("-m", "tools.benchmarks.shaped_link", *pids, str(rate), str(latency))
            started.append(_start(sys.executable, *words))
            made = _is_up(started[-1]) and all(map(_connect, nodes))
        yield nodes if made else None
    finally:
        for process in reversed(started):
            process.kill()
            process.communicate()


def _start(*words: str) -> subprocess.Popen[str]:
    """A process that prints a line when it is ready, and ends when its standard input does."""
    quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=quiet, text=True)


def _is_up(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == "up\n"


def _connect(node: Node) -> bool:
    """Give a node its address on the link; whether that was allowed."""
    queue = ("mtu", str(MTU), "txqueuelen", str(QUEUE))
    commands = (
        ("link", "set", LINK, *queue, "up"),
        ("address", "add", f"{node.address}/32", "dev", LINK),
        ("route", "add", NETWORK, "dev", LINK, "src", node.address, "rto_min", RESEND),
    )
    return all(node.run("ip", *words) for words in commands)


def rank_environment(node: Node, rank: int, ranks: int, local: int) -> dict[str, str]:
    """What torchrun would set for one of `ranks` CPU ranks, `local` of which are on each node."""
    return {
        **{"RANK": str(rank), "WORLD_SIZE": str(ranks)},
        **{"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)},
        **{"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)},
        **{"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    }


def measure_link(nodes: Sequence[Node], *, pings: int, size: int) -> tuple[float, float]:
    """Seconds of one byte there and back, the median of `pings`; seconds of a stream of `size`
    bytes.

    The stream's time begins before its first byte is sent and ends when the last one has arrived.
    """
    near, far = _connection(nodes)
    with near, far:
        times = []
        for _ in range(pings):
            begin = time.perf_counter()
            for source, sink in ((near, far), (far, near)):
                source.sendall(b"x")
                sink.recv(1)
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        sender = Thread(target=near.sendall, args=(bytes(size),))
        sender.start()
        left = size
        while left and (got := len(far.recv(1 << 20))):
            left -= got
        stream = time.perf_counter() - begin
        sender.join()
    assert not left, "the connection ended"
    return statistics.median(times), stream


def _connection(nodes: Sequence[Node]) -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection from the first node to the second, both in this process."""
    first, second = nodes
    with network_of(second.holder.pid):
        listener = socket.create_server((second.address, 0))
    with listener, network_of(first.holder.pid):
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def run_on_nodes(
    nodes: Sequence[Node], module: str, words: Sequence[str], *, local: int
) -> dict[str, Any]:
    """Run `python -m MODULE WORDS` on `local` ranks of each node; returns what one rank sent.

    Raises RuntimeError with the first error if a rank fails, or if none has sent a record.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    count = local * len(nodes)
    with TemporaryDirectory() as directory:
        logs = [Path(directory) / str(rank) for rank in range(count)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                node = nodes[rank // local]
                env = os.environ | rank_environment(node, rank, count, local) | {"PYTHONPATH": path}
                command = node.command(sys.executable, "-m", module, *words)
                with log.open("w") as out:
                    ranks.append(
                        subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=env)
                    )
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                time.sleep(POLL)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [log.read_text() for log in logs]
    failed = [text for text, code in zip(texts, codes, strict=True) if code]
    record = next(filter(None, map(received_record, texts)), None)
    if failed or record is None:
        raise RuntimeError(last_error(failed[0] if failed else texts[0]))
    return record
