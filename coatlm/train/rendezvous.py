"""How the processes of a run find each other: every rank announces itself in a store.

    rank r   store["rank/r"] = host, process id and, where it cannot go on, why
    rank 0   waits for all of them and names those missing, then sets store["verdict"] to the hosts
             of all ranks or to the error that ends them

A rank that fails before there are process groups still announces itself, with its error, so that
the others end with it at once. Rank 0 serves the store unless the launcher does. The store asks
nobody for a password: where all ranks are on one host, it listens on that host's address alone.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from coatlm.config import ConfigError
from coatlm.train.manifest import LostPeerError
from coatlm.train.reports import UNEXPECTED, AgreedError, Failure, merged, plural, print_error

POLL_S = 0.1
NOTICE_S = 5.0  # seconds until the ranks that are missing are named,
REPEAT_S = 60.0  # and between such lines
GRACE_S = 5.0  # for others to announce the same failure, and to read how it ended
BACKLOG = 2048  # connections: ranks arrive at the same time


def open_store(
    address: str, *, serve: bool, one_host: bool, seconds: float, rank: int
) -> dist.Store:
    """The store at `address` (host:port): served by this process, or the one that answers there.

    Raises ConfigError where the address cannot be listened on, LostPeerError where nobody answers
    for `seconds`.
    """
    host, port = address.rsplit(":", 1)
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host's name"
        raise ConfigError(
            f"MASTER_ADDR={host[:80]!r}: must be a host that this one can find: {reason}"
        ) from error
    deadline = time.monotonic() + seconds
    listener = None
    if serve:
        listener = _listen(host, int(port), one_host).detach()
    else:
        _wait_for_server(host, int(port), deadline, f"rank {rank}: ")
    left = max(1.0, deadline - time.monotonic())
    return dist.TCPStore(
        host,
        int(port),
        is_master=serve,
        timeout=timedelta(seconds=left),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    *,
    address: str,
    seconds: float,
    failure: Failure | None = None,
) -> tuple[str, ...]:
    """Announce this rank and wait for all others; the host of each rank.

    Raises AgreedError on every rank, after rank 0 has printed the reason, if some rank announces a
    `failure` or does not come within `seconds`.
    """
    mine = json.dumps([platform.node(), os.getpid(), failure and [failure.message, failure.code]])
    try:
        found = store.compare_set(f"rank/{rank}", "", mine).decode()
        if found != mine:
            host, pid, _ = json.loads(found)
            problem = f"RANK={rank}: process {pid} on {host} has it too: each process needs its own"
            store.set("twice", problem)
            raise ConfigError(problem)
        store.add("arrived", 1)
        if failure is not None:
            store.add("failed", 1)
        verdict = (
            _decide(store, world_size, address, seconds)
            if rank == 0
            else _await_verdict(store, address, seconds)
        )
    except dist.DistError as error:
        raise LostPeerError(f"the store at {address} has gone while ranks started") from error
    if verdict["message"] is not None:
        raise AgreedError(verdict["message"], verdict["code"])
    return tuple(verdict["hosts"])


def _decide(store: dist.Store, world_size: int, address: str, seconds: float) -> dict[str, Any]:
    """On rank 0: wait for all ranks, print what went wrong, tell the others."""
    start = time.monotonic()
    notice, deadline = start + NOTICE_S, start + seconds
    while store.add("arrived", 0) < world_size and not store.check(["twice"]):
        now = time.monotonic()
        if store.add("failed", 0):
            deadline = min(deadline, now + GRACE_S)
            notice = deadline
        if now >= deadline:
            break
        if now >= notice:
            notice = now + REPEAT_S
            missing = plural(_missing(store, world_size))
            print(
                f"waiting for {missing} of {world_size} at {address}", file=sys.stderr, flush=True
            )
        time.sleep(POLL_S)
    verdict = _verdict(store, world_size, address, seconds)
    if verdict["message"] is not None:
        # before other ranks can exit, because a launcher then ends this rank
        print_error(verdict["message"])
    store.set("verdict", json.dumps(verdict))
    if verdict["message"] is not None:
        patience = time.monotonic() + GRACE_S
        while store.add("read", 0) < store.add("arrived", 0) - 1 and time.monotonic() < patience:
            time.sleep(POLL_S)
    return verdict


def _verdict(store: dist.Store, world_size: int, address: str, seconds: float) -> dict[str, Any]:
    missing = set(_missing(store, world_size))
    hosts: list[str | None] = [None] * world_size
    failures, code = {}, UNEXPECTED
    for rank in range(world_size):
        if rank not in missing:
            hosts[rank], _, failure = json.loads(store.get(f"rank/{rank}"))
            if failure is not None:
                failures[rank] = failure[0]
                code = max(code, failure[1])
    message = None
    if store.check(["twice"]):
        message, code = store.get("twice").decode(), 2
    elif failures:
        message = merged(failures, hosts)
    elif missing:
        message = (
            f"{plural(sorted(missing))} of {world_size} did not come to {address} within "
            f"parallel.start_timeout={seconds:g} s"
        )
    return {"message": message, "code": code, "hosts": hosts}


def _await_verdict(store: dist.Store, address: str, seconds: float) -> dict[str, Any]:
    """On other ranks. Polls, since Python handles no signal inside a call that blocks."""
    deadline = time.monotonic() + seconds + 2 * GRACE_S  # rank 0 may have started later
    while not store.check(["verdict"]):
        if time.monotonic() >= deadline:
            raise LostPeerError(
                f"rank 0 has not come to {address} within parallel.start_timeout={seconds:g} s"
            )
        time.sleep(POLL_S)
    verdict: dict[str, Any] = json.loads(store.get("verdict"))
    with suppress(dist.DistError):  # rank 0 need not wait for this
        store.add("read", 1)
    return verdict


def _missing(store: dist.Store, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if not store.check([f"rank/{rank}"])]


def _listen(host: str, port: int, one_host: bool) -> socket.socket:
    """A socket for the store: on the address of `host` where all ranks are there, else on all."""
    try:
        if not one_host:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            return socket.create_server(
                ("", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual
            )
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        second = "; another run has it, or a second process with RANK=0"
        raise ConfigError(
            f"MASTER_ADDR={host}, MASTER_PORT={port}: cannot be listened on: "
            f"{os.strerror(error.errno or 0)}{second if error.errno == errno.EADDRINUSE else ''}"
        ) from error


def _wait_for_server(host: str, port: int, deadline: float, who: str) -> None:
    """Until something answers at host:port, without the warnings of torch's own attempts."""
    seconds = deadline - time.monotonic()
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, left))).close()
            return
        except OSError as error:
            if left <= 0:
                raise LostPeerError(
                    f"{who}rank 0 does not answer at {host}:{port} within "
                    f"parallel.start_timeout={seconds:.0f} s: {error}"
                ) from error
            time.sleep(POLL_S)
