"""Warp-specialized Gluon kernels on a CPU: partitions are threads, for gluon_on_cpu.py.

A copy into shared memory is done by another thread, at any time. A copy out of it happens at the
next `store_wait`, a product when it is waited for: as late as they may. So a kernel that waits too
little has wrong results, or fails because it overwrites an operand of a product that is not yet
computed. A barrier that nobody completes fails after LIMIT seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

LIMIT = 20.0  # seconds that a thread waits
BARRIER = object()  # the layout of barriers
ASIDE = threading.local()  # copies out of shared memory that a thread has not waited for
UNREAD: set[int] = set()  # addresses of operands that are loaded, but whose product is not computed


class Barrier:
    """A phase ends when all arrivals that `init` counts and all bytes that are expected came."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.left = self.bytes = self.phase = 0

    def change(self, arrivals: int, received: int) -> None:
        with self.changed:
            self.left -= arrivals
            self.bytes += received
            assert self.left >= 0, "more arrivals than the barrier counts"
            if self.left == 0 and self.bytes == 0:
                self.phase, self.left = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            ended = self.changed.wait_for(lambda: self.phase & 1 != parity, LIMIT)
            assert ended, "a barrier that is never completed"


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, data: Any) -> None:
        self.data, self.shape = data, data.shape
        self.address = data.__array_interface__["data"][0]

    def index(self, at: Any) -> Any:
        part = self.data[int(at)]
        return part[0] if isinstance(part[0], Barrier) else Shared(part)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.transpose(order))

    def store(self, value: Any) -> None:
        self.data[...] = value


class Sums:
    """An accumulator with products that are not yet computed."""

    def __init__(self, value: Any, products: list[tuple[Shared, Shared]]) -> None:
        self.value, self.products = value, products


class Descriptor:
    """A CPU tensor as TMA sees it: zeros beyond its ends."""

    def __init__(self, source: Any) -> None:
        self.tensor, self.layout = source.base, source.layout
        self.block_type = SimpleNamespace(shape=list(source.block_shape))

    def inside(self, at: list[Any]) -> tuple[slice, ...]:
        ends = zip(at, self.block_type.shape, self.tensor.shape, strict=True)
        return tuple(slice(int(i), max(int(i), min(int(i) + n, end))) for i, n, end in ends)


def allocate(dtype: Any, shape: list[int], layout: Any) -> Shared:
    if layout is not BARRIER:
        return Shared(np.full(shape, 99, np.float32 if not isinstance(dtype, np.dtype) else dtype))
    barriers = np.empty(shape, object)
    barriers.flat[:] = [Barrier() for _ in range(barriers.size)]
    return Shared(barriers)


def specialize(parts: list[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
    """Run all partitions; raise what one of them raised."""
    UNREAD.clear()
    errors: list[BaseException] = []

    def run(partition: Any, arguments: tuple[Any, ...]) -> None:
        ASIDE.copies = []
        try:
            with np.errstate(all="ignore"):
                partition(*arguments)
            assert not ASIDE.copies, "the program ends before it has stored its results"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    if errors:
        raise errors[0]


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


def arrive(barrier: Barrier, pred: Any = True) -> None:
    if pred:
        barrier.change(1, 0)


def load(source: Descriptor, at: list[Any], barrier: Barrier, to: Shared) -> None:
    assert to.address not in UNREAD, "an operand is overwritten before its product is computed"
    UNREAD.add(to.address)

    def copy() -> None:
        time.sleep(0)
        rows = source.tensor[source.inside(at)].numpy()
        to.data[...] = 0
        to.data[tuple(slice(n) for n in rows.shape)] = rows
        barrier.change(0, -to.data.nbytes)

    threading.Thread(target=copy, daemon=True).start()


def store(target: Descriptor, at: list[Any], source: Shared) -> None:
    def copy() -> None:
        to = target.tensor[target.inside(at)]
        to.copy_(torch.from_numpy(source.data[tuple(slice(n) for n in to.shape)].copy()))

    ASIDE.copies.append(copy)


def store_wait(pending: int) -> None:
    while len(ASIDE.copies) > pending:
        ASIDE.copies.pop(0)()


def multiply(a: Shared, b: Shared, sums: Any, is_async: bool) -> Sums:
    assert is_async
    before = sums if isinstance(sums, Sums) else Sums(sums, [])
    return Sums(before.value, [*before.products, (a, b)])


def hopper(tile: Callable[[Any], Any]) -> SimpleNamespace:
    """The module `hopper` of Gluon; `tile` makes a tensor of a kernel."""

    def wait_for_products(pending: int, dependent: tuple[Any, ...]) -> Any:
        (sums,) = dependent
        value, products = sums.value, sums.products
        while len(products) > pending:
            time.sleep(0.001)
            a, b = products[0]
            products = products[1:]
            value = tile(value + (a.data.astype(np.float64) @ b.data).astype(np.int32))
            UNREAD.difference_update((a.address, b.address))
        return Sums(value, products) if products else value

    return SimpleNamespace(
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: BARRIER,
            init=init,
            wait=lambda barrier, parity: barrier.wait(int(parity)),
            arrive=arrive,
            expect=lambda barrier, size: barrier.change(1, int(size)),
        ),
        tma=SimpleNamespace(
            async_copy_global_to_shared=load,
            async_copy_shared_to_global=store,
            store_wait=store_wait,
        ),
        fence_async_shared=lambda: None,
        warpgroup_mma=multiply,
        warpgroup_mma_wait=wait_for_products,
    )
