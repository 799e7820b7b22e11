"""Copies of weights and states in host memory, made while the next step computes its gradients.

    training    step t | forward and backward of t + 1 | wait | update of t + 1
    copying            | weights and states of step t .......|

Only updates change weights and states, so copies that are complete before the next update are those
of step t, bit for bit; where a CUDA graph holds the whole step, all of step t + 1 waits. The thread
that calls `finish` makes them, so that training need not wait until some thousand copies are
launched: those of tensors on a GPU on a separate CUDA stream and into page-locked memory, then
those of tensors on the host, such as offloaded states. The memory of the copies is allocated once,
by a thread, because some gigabytes take seconds. Its pages are locked in ranges, so that training
meanwhile waits for one range at most. CUDA takes no copy that crosses the end of a locked range.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
        self._tensors: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None  # the copies from the GPU are complete
        self._queued = threading.Event()  # all copies are made, but for those before `_copied`
        self._queued.set()

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

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Remember `tensors` with their present values, which `finish` copies in another thread.
        Call `wait` before they are changed.
        """
        self.reserve(tensors)
        self._tensors = [tensor.detach() for tensor in tensors]
        self._copied = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._queued.clear()

    def finish(self) -> list[Tensor]:
        """Copy the tensors, and return the complete copies, which are valid until the next one."""
        try:
            copies, copied = self._copy()
        finally:
            self._queued.set()
        if copied is not None:
            copied.synchronize()
        return copies

    def failure(self) -> BaseException | None:
        """Why the memory that `reserve` began to allocate is not there; None if nothing failed."""
        done = self._memory is not None and self._memory.done()
        return self._memory.exception() if done and self._memory is not None else None

    def wait(self) -> None:
        """Let the current stream wait for the copies from the GPU, and the host for the others.

        The stream waits once per `start`: a CUDA graph cannot capture a wait for an event that was
        recorded outside of it.
        """
        self._queued.wait()
        copied, self._copied = self._copied, None
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)

    def _copy(self) -> tuple[list[Tensor], torch.cuda.Event | None]:
        assert self._memory is not None
        memory, at, copies = self._memory.result(), 0, []
        for tensor in self._tensors:
            copies.append(_like(tensor, memory, at))
            at += _padded(tensor.nbytes)
        pairs = list(zip(copies, self._tensors, strict=True))
        copied = None
        if self._stream is not None:
            # of this thread, which would otherwise initialize CUDA on device 0
            torch.cuda.set_device(self._stream.device)
            with torch.cuda.stream(self._stream):
                for copy, tensor in pairs:
                    if tensor.is_cuda:
                        _copy_ranges(copy, tensor, memory.data_ptr())
                copied = torch.cuda.Event(blocking=True)
                copied.record()
            self._copied = copied
        for copy, tensor in pairs:
            if not tensor.is_cuda:
                copy.copy_(tensor)
        return copies, copied

    def _allocate(self, size: int, stream: torch.cuda.Stream | None) -> Tensor:
        memory = host_zeros(max(size, ALIGNMENT), torch.uint8)
        if stream is not None:
            torch.cuda.set_device(stream.device)  # of this thread
            fetch_pages(memory)
            lock_pages(memory, stream, memory, step=RANGE)
        return memory


def _like(tensor: Tensor, memory: Tensor, at: int) -> Tensor:
    """A tensor of the type and shape of `tensor` in byte `at` of `memory` and the bytes after it.

    Its storage is only these bytes: DCP would clone a tensor that is a part of its storage.
    """
    if not tensor.nbytes:
        return torch.empty_like(tensor, device="cpu")
    mine = torch.frombuffer(memory.numpy(), dtype=torch.uint8, count=tensor.nbytes, offset=at)
    return mine.view(tensor.dtype).view(tensor.shape)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _copy_ranges(copy: Tensor, tensor: Tensor, memory: int) -> None:
    """Copy `tensor` to page-locked memory that begins at the address `memory`, cut where ranges of
    it end that were locked as a whole.
    """
    target, source = (t.reshape(-1).view(torch.uint8) for t in (copy, tensor))
    first, done = copy.data_ptr() - memory, 0
    while done < len(target):
        stop = min(len(target), done + RANGE - (first + done) % RANGE)
        target[done:stop].copy_(source[done:stop], non_blocking=True)
        done = stop
