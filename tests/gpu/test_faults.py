"""What watches a run on a GPU must not wait for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from coatlm.train.spikes import SpikeGuard
from coatlm.train.stragglers import PhaseTimer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SPIN = 100_000_000  # cycles: some 50 ms


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_phases_on_the_gpu_are_timed_there_and_recorded_without_waiting() -> None:
    timer = PhaseTimer(cuda=True)
    with waiting_is_an_error():
        timer.enter("data")
        timer.enter("forward_backward")
        torch.cuda._sleep(SPIN)
        timer.enter(None)
        torch.cuda._sleep(SPIN)  # waiting for others
        timer.enter("update")
        timer.enter(None)
    torch.cuda.synchronize()
    data, forward_backward, update = timer.read()
    assert 20 < forward_backward < 200
    assert data < 10 and update < 10


def test_the_spike_guard_decides_on_the_gpu_as_on_the_cpu_without_waiting() -> None:
    draw = random.Random(0)
    losses = torch.tensor([3.0 + draw.gauss(0, 0.1) + 2 * (i % 23 == 22) for i in range(120)])
    host = SpikeGuard(4.0, 16)
    expected = [bool(host.accepts(loss, loss)) for loss in losses]
    guard, losses = SpikeGuard(4.0, 16, device="cuda"), losses.cuda()
    with waiting_is_an_error():
        verdicts = torch.stack([guard.accepts(loss, loss) for loss in losses.unbind()])
    assert verdicts.tolist() == expected
    assert 0 < expected.count(False) < 10


def test_a_replay_times_the_phases_that_its_graph_holds() -> None:
    timer, graph = PhaseTimer(cuda=True), torch.cuda.CUDAGraph()
    timer.enter("data")
    timer.enter(None)
    with torch.cuda.graph(graph):
        for phase, spins in (("forward_backward", 2), (None, 1), ("update", 1), (None, 1)):
            timer.enter(phase)
            for _ in range(spins):
                torch.cuda._sleep(SPIN)
    for _ in range(3):
        timer.enter("data")
        timer.enter(None)
        graph.replay()
        timer.count_replay()
    torch.cuda.synchronize()
    _, passes, update = timer.read()
    assert update > 10
    assert passes == pytest.approx(2 * update, rel=0.1)
    assert timer.read() == [0.0, 0.0, 0.0]
