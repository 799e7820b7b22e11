"""Kernels that take rows between FP8 linears, for sm_90: how they move data. Results: on a GPU."""

import re

import pytest
import torch

from coatlm.fp8 import norm_backward, norm_quantize, row_codes, swiglu_quantize
from coatlm.fp8.formats import E4M3, INT8, Coding
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, launches_compiled, spilled_bytes

CODES = POINTER[E4M3.dtype]


@pytest.mark.parametrize(("f", "size"), [(11008, 16), (5504, 16), (8192, 16), (14336, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", [E4M3, INT8], ids=lambda fmt: fmt.name)
def test_swiglu_reads_a_row_once_and_stores_codes_16_bytes_at_a_time(
    f: int, size: int, dtype: torch.dtype, fmt: Coding
) -> None:
    rotated = fmt is INT8
    most = swiglu_quantize.ROTATED_CHUNKS if rotated else swiglu_quantize.CHUNKS
    tile = row_codes.row_tile(f, size, most, rotated=rotated)
    assert tile["WARPS"] * tile["CHUNKS"] * 32 * tile["RUN"] >= f
    x = torch.empty(512, 2 * f, dtype=dtype, device="meta")
    with launches_compiled(swiglu_quantize) as made:
        swiglu_quantize._swiglu_quantize(x, size, rotated)
    (kernel,) = made
    loads, stores = 2 * dtype.itemsize, 3  # of 16 bytes, for RUN elements of gate and of up
    assert access_bytes(kernel).count(16) == tile["CHUNKS"] * (loads + stores)
    assert kernel.asm["ptx"].count("div") == (2 if rotated else 0)  # for the scale of the row
    assert moves_nothing_between_threads(kernel.asm["ptx"])
    assert spilled_bytes(kernel) == 0
    assert kernel.asm["ptx"].count("mma.sync") == (4 * tile["CHUNKS"] if rotated else 0)


def moves_nothing_between_threads(ptx: str) -> bool:
    """Whether threads share only the amax of a row (and a sum): in one word per warp."""
    shared = re.findall(r"(?:ld|st)\.shared\S*", ptx)
    return len(shared) <= 8 and not any("v4" in access for access in shared)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("k", "size"), [(4096, 16), (1024, 16), (8192, 128), (896, 16)])
def test_norm_reads_a_row_once_and_stores_codes_16_bytes_at_a_time(
    k: int, size: int, rotated: bool, saved: bool
) -> None:
    x = torch.empty(512, k, dtype=torch.bfloat16, device="meta")
    with launches_compiled(norm_quantize) as made:
        norm_quantize._norm_quantize(x, x[0], 1e-5, x, size if saved else 0, rotated)
    ptx = made[0].asm["ptx"]
    chunks = row_codes.row_tile(k, size, norm_quantize.CHUNKS, rotated=rotated)["CHUNKS"]
    # two for each of x, what is added, their sum, and the weight; one for codes of each kind
    assert access_bytes(made[0]).count(16) == chunks * (2 * 4 + 1 + saved)
    assert ptx.count("mma.sync") == (4 * chunks if rotated else 0)
    assert moves_nothing_between_threads(ptx)
    assert spilled_bytes(made[0]) == 0


@pytest.mark.parametrize(("hidden", "size"), [(2048, 16), (3072, 16), (4096, 128), (8192, 16)])
def test_norm_backward_moves_rows_16_bytes_at_a_time(hidden: int, size: int) -> None:
    tile = norm_backward.backward_tile(hidden, size)
    kernel = compile_sm90(
        norm_backward._norm_backward_kernel,
        {"dy_ptr": "*bf16", "x_ptr": CODES, "x_exponent_ptr": "*u8", "rstd_ptr": "*fp32"}
        | {"weight_ptr": "*bf16", "dresidual_ptr": "*bf16", "dx_ptr": "*bf16"}
        | {"part_ptr": "*fp32", "amax_ptr": "*fp32", "R": "i32"},
        tile,
        num_warps=tile["WARPS"],
    )
    # two for each row's dy, dresidual (read before the loop and in it) and dx, one for its codes;
    # two for the weight, four for its gradient
    assert access_bytes(kernel).count(16) == 2 * (2 + 2 + 1) + 2 + 2 + 4
