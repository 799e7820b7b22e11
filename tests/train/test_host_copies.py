"""Copies that are made while training goes on hold the values of their step."""

from __future__ import annotations

import threading
import time

import torch

from coatlm.train.host_copies import HostCopies


def tensors() -> list[torch.Tensor]:
    return [
        torch.arange(5.0),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.ones(()),
    ]


def test_what_changes_after_the_wait_is_not_in_the_copies() -> None:
    made, copies = tensors(), HostCopies()
    found = copies.start(made)
    writer = threading.Timer(0.2, copies.finish)
    writer.start()
    begin = time.monotonic()
    copies.wait()
    assert time.monotonic() - begin > 0.1  # for the writer
    for tensor in made:
        tensor.fill_(7)
    writer.join()
    assert all(torch.equal(copy, old) for copy, old in zip(found, tensors(), strict=True))
    assert [copy.dtype for copy in found] == [tensor.dtype for tensor in made]


def test_nothing_waits_before_the_first_copies_and_after_a_copy_that_failed() -> None:
    copies = HostCopies()
    copies.wait()
    copies.start([torch.ones(3)])
    copies._pairs = [(torch.ones(2), torch.ones(3))]  # cannot be copied
    try:
        copies.finish()
    except RuntimeError:
        copies.wait()
    else:
        raise AssertionError("the copy did not fail")


def test_the_memory_of_one_save_serves_the_next() -> None:
    copies = HostCopies()
    first = copies.start(tensors())
    copies.finish()
    second = copies.start(tensors())
    copies.finish()
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in second]
    larger = copies.start([torch.ones(100)])
    copies.finish()
    assert torch.equal(larger[0], torch.ones(100))
