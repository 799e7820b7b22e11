"""Whether microbatches run as CUDA graphs: as the configuration says, and on GPUs alone."""

from __future__ import annotations

import pytest
import torch

from coatlm.config import make_config
from coatlm.parallel import cuda_graphs


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
