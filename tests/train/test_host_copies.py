"""Copies that are made while training goes on hold the values of their step."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.utils._python_dispatch

from coatlm.train import host_copies
from coatlm.train.host_copies import HostCopies


def tensors() -> list[torch.Tensor]:
    return [
        torch.arange(5.0),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.ones(()),
    ]


def finish_later(copies: HostCopies, seconds: float) -> Future[list[torch.Tensor]]:
    def finish() -> list[torch.Tensor]:
        time.sleep(seconds)
        return copies.finish()

    pool = ThreadPoolExecutor(1)
    found = pool.submit(finish)
    pool.shutdown(wait=False)
    return found


def test_what_changes_after_the_wait_is_not_in_the_copies() -> None:
    made, copies = tensors(), HostCopies()
    copies.start(made)
    writer = finish_later(copies, 0.2)
    begin = time.monotonic()
    copies.wait()
    assert time.monotonic() - begin > 0.1  # for the writer
    for tensor in made:
        tensor.fill_(7)
    found = writer.result()
    assert all(torch.equal(copy, old) for copy, old in zip(found, tensors(), strict=True))
    assert [copy.dtype for copy in found] == [tensor.dtype for tensor in made]
    assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in found)


def test_nothing_waits_before_the_first_copies_and_after_a_copy_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = HostCopies()
    copies.wait()
    monkeypatch.setattr(host_copies, "host_zeros", lambda *_: 1 / 0)
    copies.start([torch.ones(3)])
    with pytest.raises(ZeroDivisionError):
        copies.finish()
    copies.wait()


def test_the_memory_of_one_save_serves_the_next() -> None:
    copies = HostCopies()
    copies.start(tensors())
    first = copies.finish()
    copies.start(tensors())
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in copies.finish()]
    copies.start([torch.ones(100)])
    assert torch.equal(copies.finish()[0], torch.ones(100))


def test_no_copy_reaches_over_the_end_of_a_locked_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "RANGE", 1000)
    memory, calls = torch.zeros(4096, dtype=torch.uint8), []
    source = torch.arange(700.0).reshape(7, 100)
    target = memory[64 : 64 + source.nbytes].view(torch.float32).view(7, 100)

    class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                at = args[0].data_ptr() - memory.data_ptr()
                calls.append((at, at + args[0].nbytes))
            return func(*args, **kwargs or {})

    with Recorded():
        host_copies._copy_ranges(target, source, memory.data_ptr())
    assert calls == [(64, 1000), (1000, 2000), (2000, 2864)]
    assert torch.equal(target, source)
