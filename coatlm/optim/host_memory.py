"""Host memory of many gigabytes for copies from and to a GPU.

torch's own pinned memory is rounded up to a power of two, up to twice the size. It is also locked
in one call, during which CUDA lets no other thread load a kernel or allocate memory, and most of
which is spent in fetching and clearing new pages. Here pages are fetched before, by threads, in
huge pages where the kernel has them, and can be locked range by range.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

RANGE = 1 << 28  # bytes that are locked at a time, in some hundredths of a second
FETCH = 1 << 22  # bytes that a thread fetches at a time, while nothing else can map memory
POPULATE_WRITE = 23  # Linux's MADV_POPULATE_WRITE, which Python's mmap does not name
LIBC = ctypes.CDLL(None)


def host_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros in host memory that starts and ends with pages, so that it can be page-locked."""
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def fetch_pages(memory: Tensor, threads: int = 1) -> None:
    """Let the kernel give memory of `host_zeros` its pages, whose values stay.

    Does nothing before Linux 5.14: locking then fetches the pages.
    """
    first, size = memory.data_ptr(), memory.nbytes
    pieces = [(first + at, min(FETCH, size - at)) for at in range(0, size, FETCH)]
    if threads == 1:  # a pool takes no work once the main thread has ended
        for piece in pieces:
            _advise(*piece, POPULATE_WRITE)
        return
    with ThreadPoolExecutor(threads, "host memory") as pool:
        for piece in pieces:
            pool.submit(_advise, *piece, POPULATE_WRITE)


def lock_pages(
    memory: Tensor, stream: torch.cuda.Stream, owner: object, *, step: int | None = None
) -> None:
    """Page-lock memory of `host_zeros`, so that copies from and to a GPU are asynchronous.

    With `step`, ranges of that many bytes are locked one after the other, and no copy may reach
    over the end of one. When `owner` is freed, the memory is unlocked once `stream`, which makes
    the last copies, has done its work. Processes that are forked later do not have the memory:
    copies to pages that a fork shares would go to only one of the two.
    """
    first, size = memory.data_ptr(), memory.nbytes
    step = step or size
    _advise(first, size, mmap.MADV_DONTFORK)
    starts = [first + at for at in range(0, size, step)]
    for start in starts:
        length = min(step, first + size - start)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(start, length, 0))
    # not at exit: a copy may wait for a rank that is gone, and the driver unlocks pages anyway
    weakref.finalize(owner, _unlock_pages, starts, stream).atexit = False


def _advise(first: int, size: int, advice: int) -> None:
    """madvise(2), whose failure is ignored. Other threads of Python go on during the call."""
    LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)


def _unlock_pages(starts: list[int], stream: torch.cuda.Stream) -> None:
    stream.synchronize()
    for start in starts:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(start))
