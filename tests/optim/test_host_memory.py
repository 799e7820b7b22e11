"""Host memory of many gigabytes, as far as a CPU can show it."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from coatlm.optim.host_memory import FETCH, fetch_pages, host_zeros


def test_host_memory_outlives_its_allocation_for_as_long_as_a_view() -> None:
    view = host_zeros(1 << 20, torch.uint8)[5:7]
    gc.collect()
    view += 1
    assert view.tolist() == [1, 1]


@pytest.mark.parametrize("threads", [1, 3])
def test_every_page_is_fetched_and_keeps_its_values(threads: int) -> None:
    size = (1 << 27) + 12_345
    assert size > 30 * FETCH
    memory = host_zeros(size, torch.uint8)
    memory[::40_000_000] = 7
    before = psutil.Process().memory_info().rss
    fetch_pages(memory, threads)
    assert psutil.Process().memory_info().rss - before > 0.9 * size
    assert memory.nonzero().flatten().tolist() == list(range(0, size, 40_000_000))
    assert set(memory[::40_000_000].tolist()) == {7}
