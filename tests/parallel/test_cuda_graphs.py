"""CUDA graphs without a GPU: whether they are captured, and inputs of different widths."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.config import make_config
from coatlm.parallel import cuda_graphs
from coatlm.parallel.collectives import Traffic
from coatlm.parallel.cuda_graphs import Batch, MicrobatchGraphs, MicrobatchKind

LENGTH = 8


class Graphs(MicrobatchGraphs):
    """Notes what a microbatch computes with: the bounds of an eager one, or the static ones."""

    def __init__(self) -> None:
        sharding = SimpleNamespace(enabled=False, overlap=False, mark_replayed=lambda **_: None)
        group = SimpleNamespace(size=lambda: 1)
        model = SimpleNamespace(weights=sharding, grads=sharding, group=group, traffic=Traffic())
        model.no_sync, model.stream = nullcontext, None
        super().__init__(model)  # type: ignore[arg-type]
        self.seen: list[tuple[str, Any]] = []

    def _eager(self, inputs: Batch) -> Tensor:
        self.seen.append(("eager", inputs["document_bounds"].tolist()))
        return torch.zeros(())

    def _captured_work(self, kind: MicrobatchKind) -> Tensor:
        self.seen.append(("capture", self.inputs["document_bounds"].tolist()))
        return torch.zeros(())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    found = Graphs()

    class Graph:
        """Notes its replays."""

        def replay(self) -> None:
            found.seen.append(("replay", found.inputs["document_bounds"].tolist()))

        def reset(self) -> None:
            found.seen.append(("reset", None))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    return found


def run(graphs: Graphs, *bounds: int) -> list[tuple[str, Any]]:
    """What is done for a microbatch of one sample with these document bounds."""
    graphs.seen = []
    graphs.fit(len(bounds))
    batch = {"document_bounds": torch.tensor([bounds], dtype=torch.int32)}
    graphs.run(batch, torch.zeros(()), first=True, last=True)
    return graphs.seen


def test_narrow_bounds_fill_the_static_ones_and_wide_ones_capture_again(graphs: Graphs) -> None:
    assert run(graphs, 0, 3, LENGTH) == [("eager", [[0, 3, LENGTH]])]
    assert run(graphs, 0, 5, LENGTH)[-1] == ("replay", [[0, 5, LENGTH]])
    assert run(graphs, 0, LENGTH) == [("replay", [[0, LENGTH, LENGTH]])]
    wide = (0, 1, 2, 7, LENGTH)
    assert run(graphs, *wide) == [("reset", None), ("eager", [[*wide]])]
    assert [what for what, _ in run(graphs, *wide)] == ["capture", "replay"]
    assert run(graphs, 0, 4, LENGTH) == [("replay", [[0, 4, LENGTH, LENGTH, LENGTH]])]


def test_another_rank_s_wider_bounds_capture_again_and_are_room_for_later_ones(
    graphs: Graphs,
) -> None:
    for _ in range(2):
        run(graphs, 0, 3, LENGTH)
    graphs.seen = []
    graphs.fit(5)
    assert graphs.seen == [("reset", None)]
    assert run(graphs, 0, 3, LENGTH) == [("eager", [[0, 3, LENGTH]])]
    assert run(graphs, 0, 3, LENGTH)[-1] == ("replay", [[0, 3, LENGTH, LENGTH, LENGTH]])


@pytest.mark.parametrize(
    ("device", "asked", "found"),
    [
        ("cuda", True, True),
        ("cuda", "auto", True),
        ("cuda", False, False),
        ("cpu", "auto", False),
        ("cpu", False, False),
    ],
)
def test_auto_captures_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: bool | str, found: bool
) -> None:
    monkeypatch.setattr(cuda_graphs, "device", lambda: torch.device(device))
    assert cuda_graphs.captures(make_config({"train": {"cuda_graphs": asked}})) is found


def test_graphs_that_are_asked_for_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "device", lambda: torch.device("cpu"))
    with pytest.raises(ValueError, match=r"train.cuda_graphs=true needs a GPU"):
        cuda_graphs.captures(make_config({"train": {"cuda_graphs": True}}))
