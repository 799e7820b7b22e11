"""Copies of weights and states in host memory, made while the next step computes its gradients.

    training    step t | forward and backward of t + 1 | wait | update of t + 1
    copying            | weights and states of step t .......|

Only updates change weights and states, so copies that are complete before the next update are those
of step t, bit for bit. Tensors on a GPU are copied on a separate CUDA stream into page-locked
memory; tensors on the host, such as offloaded states, by the thread that calls `finish`. The memory
of the copies is allocated once, by a thread, because some gigabytes take seconds; its pages are
locked in ranges, so that training meanwhile waits for one range at most, and copies end where
ranges do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from coatlm.optim.host_memory import RANGE, fetch_pages, host_zeros, lock_pages

ALIGNMENT = 64  # bytes


class HostCopies:
    """Host memory for one copy of each of a list of tensors, and the stream that fills it."""

    def __init__(self) -> None:
        self._size = 0
        self._memory: Future[Tensor] | None = None
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._copied: torch.cuda.Event | None = None  # the copies from the GPU are complete
        self._awaited = True  # by `wait`
        self._pairs: list[tuple[Tensor, Tensor]] = []  # copies and tensors on the host
        self._done = threading.Event()  # the copies of tensors on the host are complete
        self._done.set()

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Start to allocate memory for copies of `tensors`, in a thread."""
        size = sum(_padded(tensor.nbytes) for tensor in tensors)
        if self._memory is not None and self._size == size:
            return
        self._size = size
        pool = ThreadPoolExecutor(1, "host copies")
        stream = self._stream if any(tensor.is_cuda for tensor in tensors) else None
        self._memory = pool.submit(self._allocate, size, stream)
        pool.shutdown(wait=False)

    def start(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Start to copy `tensors`. The copies are complete after `finish` and valid until the next
        call. Call `wait` before the tensors are changed.
        """
        self.reserve(tensors)
        assert self._memory is not None
        memory, at, copies, parts = self._memory.result(), 0, [], list[tuple[Tensor, Tensor]]()
        for tensor in tensors:
            end = at + tensor.nbytes
            copies.append(memory[at:end].view(tensor.dtype).view(tensor.shape))
            if tensor.is_cuda:
                flat = tensor.detach().reshape(-1).view(torch.uint8)
                parts += [(memory[a:b], flat[a - at : b - at]) for a, b in _ranges(at, end)]
            at += _padded(tensor.nbytes)
        pairs = [(c, tensor.detach()) for c, tensor in zip(copies, tensors, strict=True)]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for copy, part in parts:
                    copy.copy_(part, non_blocking=True)
                self._copied = torch.cuda.Event(blocking=True)
                self._copied.record()
                self._awaited = False
        self._pairs = [(copy, tensor) for copy, tensor in pairs if not tensor.is_cuda]
        if self._pairs:
            self._done.clear()
        return copies

    def finish(self) -> None:
        """Copy tensors on the host, and wait for the copies from the GPU."""
        try:
            for copy, tensor in self._pairs:
                copy.copy_(tensor)
        finally:
            self._done.set()
        if self._copied is not None:
            self._copied.synchronize()

    def wait(self) -> None:
        """Let the current stream wait for the copies from the GPU, and the host for the others.

        The stream waits once per `start`: a CUDA graph cannot capture a wait for an event that was
        recorded outside of it.
        """
        if self._copied is not None and not self._awaited:
            torch.cuda.current_stream().wait_event(self._copied)
            self._awaited = True
        self._done.wait()

    def _allocate(self, size: int, stream: torch.cuda.Stream | None) -> Tensor:
        memory = host_zeros(max(size, ALIGNMENT), torch.uint8)
        if stream is not None:
            torch.cuda.set_device(stream.device)  # of this thread
            fetch_pages(memory)
            lock_pages(memory, stream, memory, step=RANGE)
        return memory


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _ranges(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Bytes [start, end) of the memory, cut where the ranges end that are locked as a whole."""
    while start < end:
        stop = min(end, (start // RANGE + 1) * RANGE)
        yield start, stop
        start = stop
