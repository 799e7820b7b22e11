"""Two nodes on one machine: network namespaces with a link of 1 Gbit/s between them.

A node has a host name, a loopback interface and the interface LINK of its own. Its name is its
address, so that no name server is asked. Processes of the two nodes reach each other over the link
alone, whose bytes the kernel counts. Where the kernel can
(netem), the link also delays packets by LATENCY. The namespaces end with the processes in them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LINK = "link0"  # the interface to the other node
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RATE, LATENCY = "1gbit", "50us"
TOOLS = ("unshare", "nsenter", "ip", "tc")


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
        for line in Path(f"/proc/{self.holder.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.strip().partition(":")
            if name == LINK:
                return int(counters.split()[8])
        raise AssertionError(f"{LINK} does not exist")


def enter(pid: int) -> None:
    """Move this process, which must have one thread, into the node that process `pid` is in."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts"):
        with open(f"/proc/{pid}/ns/{kind}") as file:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def two_nodes() -> Iterator[list[Node] | None]:
    """The two nodes; None where this process may not create namespaces, or lacks the tools."""
    if not all(map(shutil.which, TOOLS)) or os.geteuid():
        yield None
        return
    nodes: list[Node] = []
    try:
        for index in range(2):
            begin = f"hostname {ADDRESSES[index]} && ip link set lo up && echo up && exec cat"
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "sh", "-c", begin],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            nodes.append(Node(index, holder))
        yield nodes if all(map(_ready, nodes)) and _connect(*nodes) else None
    finally:
        for node in nodes:
            node.holder.kill()
            node.holder.communicate()


def _ready(node: Node) -> bool:
    assert node.holder.stdout is not None
    return node.holder.stdout.readline() == "up\n"


def _connect(first: Node, second: Node) -> bool:
    """Create the link; whether that was allowed."""
    ends = ["ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK]
    made = first.run(*ends, "netns", str(second.holder.pid))
    for node in (first, second):
        made = made and node.run("ip", "address", "add", f"{node.address}/24", "dev", LINK)
        made = made and node.run("ip", "link", "set", LINK, "up")
        shape = ("tc", "qdisc", "add", "dev", LINK, "root")
        made = made and (
            node.run(*shape, "netem", "rate", RATE, "delay", LATENCY)
            or node.run(*shape, "tbf", "rate", RATE, "burst", "256k", "latency", "50ms")
        )
    return made
