"""On several GPUs, through NCCL, each layout trains the same model in BF16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.parallel.test_parity import LAYOUTS

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]
# BF16 has 8 bits: a value is off by up to 2^-9. Losses average over many tokens; norms of small
# models do not, and layouts round partial sums at other places.
LOSS_RELATIVE, NORM_RELATIVE = 2e-3, 3e-2
DELAYED = {
    1: ["single"],
    2: ["tp2 sp", "tp2, split", "tp2 sp, split", "pp2", "dp2 zero1", "cp2"],
    4: ["tp2 pp2", "tp2 pp2, split", "tp2 cp2, split"],
}  # with FP8 layers
CURRENT = {
    1: [("single", "blocks"), ("single", "four kv heads")],
    2: [("tp2 sp, fp8 sums", "blocks"), ("tp2 sp, fp8 sums, split", "blocks")],
    4: [("tp4 sp, split", "four kv heads")],
}  # with FP8 layers and current scales


@pytest.fixture(scope="module")
def curves() -> dict[str, Any]:
    """Three steps and an evaluation of each layout that fits the GPUs here."""
    found: dict[str, Any] = {}
    for size in (n for n in LAYOUTS if n <= GPUS):
        cases = [(layout, "plain", "bf16") for layout in LAYOUTS[size]]
        cases += [(layout, "delayed", "coat") for layout in DELAYED[size]]
        cases += [(*case, "coat") for case in CURRENT[size]]
        found |= run_ranks(size, "tests.parallel.test_parity:train_cases", cases)[0]
    return found


@pytest.mark.parametrize("layout", [x for n in LAYOUTS if n <= max(GPUS, 2) for x in LAYOUTS[n]])
def test_layout_trains_like_one_gpu(curves: Any, layout: str) -> None:
    for expected, actual in zip(
        curves["single/plain/bf16"], curves[f"{layout}/plain/bf16"], strict=True
    ):
        assert actual[0] == pytest.approx(expected[0], rel=LOSS_RELATIVE)
        assert actual[1] == pytest.approx(expected[1], rel=NORM_RELATIVE)


@pytest.mark.parametrize("layout", [x for n in (2, 4) if n <= max(GPUS, 2) for x in DELAYED[n]])
def test_layout_trains_fp8_layers_with_delayed_scales_like_one_gpu(
    curves: Any, layout: str
) -> None:
    for expected, actual in zip(
        curves["single/delayed/coat"], curves[f"{layout}/delayed/coat"], strict=True
    ):
        assert actual[0] == pytest.approx(expected[0], rel=LOSS_RELATIVE)
        assert actual[1] == pytest.approx(expected[1], rel=NORM_RELATIVE)


@pytest.mark.parametrize(
    ("layout", "variant"), [case for n in (2, 4) if n <= max(GPUS, 2) for case in CURRENT[n]]
)
def test_layout_trains_with_sums_in_fp8_and_rows_that_arrive_one_by_one_like_one_gpu(
    curves: Any, layout: str, variant: str
) -> None:
    for expected, actual in zip(
        curves[f"single/{variant}/coat"], curves[f"{layout}/{variant}/coat"], strict=True
    ):
        assert actual[0] == pytest.approx(expected[0], rel=LOSS_RELATIVE)
        assert actual[1] == pytest.approx(expected[1], rel=NORM_RELATIVE)
