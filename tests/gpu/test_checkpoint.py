"""Checkpoints of tensors on a GPU: saved as they were when save() returned, loaded in place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from coatlm.optim.host_memory import RANGE
from coatlm.train import tensor_reader
from coatlm.train.checkpoint import Checkpointer, load, tensor_checksum, tensor_checksums
from coatlm.train.dcp import ShardReader
from coatlm.train.host_copies import HostCopies
from coatlm.train.shards import ShardedTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

SHAPE = (512, 1024)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
SPIN = 100_000_000  # cycles: longer than it takes to queue the copies


def random_bits(dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(SHAPE).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda").view(dtype).view(SHAPE)


def pieces_of(tensors: dict[str, torch.Tensor], row: int) -> list[ShardedTensor]:
    """Two rectangles a tensor, cut above `row`."""
    return [
        ShardedTensor(key, part, part.dtype, tuple(part.shape), SHAPE, (begin, 0), None)
        for key, tensor in tensors.items()
        for begin, part in ((0, tensor[:row]), (row, tensor[row:]))
    ]


@pytest.mark.parametrize("async_save", [False, True])
def test_values_of_the_moment_are_saved_and_loaded_in_place(
    tmp_path: Path, async_save: bool
) -> None:
    tensors = {str(dtype): random_bits(dtype) for dtype in DTYPES}
    expected = {key: tensor_checksum(tensor) for key, tensor in tensors.items()}
    saver = Checkpointer(tmp_path, keep=1, async_save=async_save)
    torch.cuda._sleep(SPIN)  # the copies are still queued when save() returns
    saver.save(1, pieces_of(tensors, 100), {})
    saver.wait_for_copies()
    for tensor in tensors.values():
        tensor.view(torch.uint8).zero_()
    saver.wait()
    path = tmp_path / "step_00000001"
    assert tensor_checksums(path) == expected
    load(path, pieces_of(tensors, 300))
    assert {key: tensor_checksum(tensor) for key, tensor in tensors.items()} == expected


def test_page_locked_copies_leave_no_trace_in_the_checkpoint(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, keep=1, async_save=True)
    saver.save(1, pieces_of({"a": random_bits(torch.float32)}, 100), {})
    saver.wait()
    [stored] = ShardReader(tmp_path / "step_00000001").tensors().values()
    assert not stored.properties.pin_memory


def test_copies_overlap_with_later_work_and_only_an_update_waits_for_them() -> None:
    # each but the first crosses the end of a range that is locked as a whole
    tensors = [torch.ones(n, device="cuda") for n in (16, *4 * (RANGE // 4,))]
    copies = HostCopies()
    copies.start(tensors)  # allocates
    copies.finish()
    torch.cuda.synchronize()
    begin, queued = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    copies.start(tensors)
    queued.record()  # on the current stream, which does not wait for the copies
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(copies.finish)
        copies.wait()
        for tensor in tensors:
            tensor.zero_()
        found = writer.result()
    torch.cuda.synchronize()
    assert all(copy.is_pinned() and bool((copy == 1).all()) for copy in found)
    assert begin.elapsed_time(queued) < 5.0  # ms; 1 GiB takes 20 over PCIe 5


def test_tensors_of_several_spans_are_loaded_through_the_page_locked_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reader, "SPAN", 100_000)
    tensors = {str(dtype): random_bits(dtype) for dtype in DTYPES}
    saver = Checkpointer(tmp_path, keep=1, async_save=False)
    saver.save(1, pieces_of(tensors, 100), {})
    expected = {key: tensor_checksum(tensor) for key, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.view(torch.uint8).zero_()
    load(tmp_path / "step_00000001", pieces_of(tensors, 300))
    assert {key: tensor_checksum(tensor) for key, tensor in tensors.items()} == expected


def test_a_graph_captured_after_a_save_does_not_wait_for_its_copies() -> None:
    tensor, copies, graph = torch.ones(1 << 20, device="cuda"), HostCopies(), torch.cuda.CUDAGraph()
    copies.start([tensor])
    [copy] = copies.finish()
    copies.wait()
    with torch.cuda.graph(graph):
        copies.wait()  # would be an error: the event was recorded outside
        tensor.zero_()
    graph.replay()
    assert bool((copy == 1).all())
