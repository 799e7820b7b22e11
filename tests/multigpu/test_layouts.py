"""On several GPUs, through NCCL, each layout trains the same model in BF16 and with FP8 layers."""

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
# models do not, and layouts round partial sums at other places. Documents change norms by 0.1.
LOSS_RELATIVE, NORM_RELATIVE = 2e-3, 3e-2
Case = tuple[str, str, str]  # layout, variant, precision.recipe
CASES: dict[int, list[Case]] = {  # beside every layout in BF16
    2: [
        *(
            (layout, "delayed", "coat")
            for layout in ("tp2 sp", "tp2, split", "tp2 sp, split", "pp2", "dp2 zero1", "cp2")
        ),
        *(("cp2 gathered", "delayed", recipe) for recipe in ("coat", "coat-lean")),
        *((layout, "plain", "rowwise") for layout in ("cp2", "cp2 gathered")),
        *(
            (layout, "documents", recipe)
            for layout in ("tp2 sp", "cp2", "cp2 gathered")
            for recipe in ("bf16", "coat-lean")
        ),
        ("tp2 sp, split", "documents", "coat-lean"),
        ("tp2 sp, fp8 sums", "blocks", "coat"),
        ("tp2 sp, fp8 sums, split", "blocks", "coat"),
    ],
    4: [
        *(
            (layout, "delayed", "coat")
            for layout in ("tp2 pp2", "tp2 pp2, split", "tp2 cp2, split")
        ),
        ("tp4 sp, split", "four kv heads", "coat"),  # gathered rows arrive one by one
    ],
}


def cases_of(size: int) -> list[Case]:
    """The cases on `size` GPUs; on one those that the others are compared with."""
    plain = [(layout, "plain", "bf16") for layout in LAYOUTS[size]]
    if size > 1:
        return plain + CASES[size]
    compared = {("single", variant, recipe) for n in CASES for _, variant, recipe in CASES[n]}
    return plain + sorted(compared)


ALL = [
    case
    for size in LAYOUTS
    if size <= max(GPUS, 2)
    for case in cases_of(size)
    if case[0] != "single"
]


@pytest.fixture(scope="module")
def curves() -> dict[str, Any]:
    """Three steps and an evaluation of each case that fits the GPUs here."""
    found: dict[str, Any] = {}
    for size in (n for n in LAYOUTS if n <= GPUS):
        found |= run_ranks(size, "tests.parallel.test_parity:train_cases", cases_of(size))[0]
    return found


@pytest.mark.parametrize(("layout", "variant", "recipe"), ALL)
def test_layout_trains_like_one_gpu(curves: Any, layout: str, variant: str, recipe: str) -> None:
    for expected, actual in zip(
        curves[f"single/{variant}/{recipe}"], curves[f"{layout}/{variant}/{recipe}"], strict=True
    ):
        assert actual[0] == pytest.approx(expected[0], rel=LOSS_RELATIVE)
        assert actual[1] == pytest.approx(expected[1], rel=NORM_RELATIVE)
