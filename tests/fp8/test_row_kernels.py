"""Kernels that take rows between FP8 linears, for sm_90: how they move data. Results: on a GPU."""

import pytest
import torch

from coatlm.fp8 import norm_quantize, swiglu_quantize
from coatlm.fp8.formats import E4M3
from coatlm.fp8.scaling import top_exponent
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90

CODES = POINTER[E4M3.dtype]


@pytest.mark.parametrize(("f", "size"), [(11008, 16), (5504, 16), (8192, 16), (14336, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swiglu_reads_a_row_once_and_stores_codes_16_bytes_at_a_time(
    f: int, size: int, dtype: torch.dtype
) -> None:
    tile = swiglu_quantize._row_tile(f, size)
    assert tile.pop("num_warps") * tile["CHUNKS"] * 32 * tile["RUN"] >= f
    kernel = compile_sm90(
        swiglu_quantize._swiglu_quantize_kernel,
        {"x_ptr": POINTER[dtype], "a_ptr": CODES, "a_scale_ptr": "*fp32"}
        | {"saved_ptr": CODES, "saved_exponent_ptr": "*u8"},
        {"TOP": top_exponent(E4M3)} | tile,
        num_warps=tile["WARPS"],
    )
    loads, stores = 2 * dtype.itemsize, 3  # of 16 bytes, for RUN elements of gate and of up
    assert access_bytes(kernel).count(16) == tile["CHUNKS"] * (loads + stores)
    assert "div" not in kernel.asm["ptx"]


@pytest.mark.parametrize(("hidden", "size"), [(2048, 16), (3072, 16), (4096, 128), (8192, 16)])
def test_norm_backward_moves_rows_16_bytes_at_a_time(hidden: int, size: int) -> None:
    tile = norm_quantize.backward_tile(hidden, size)
    kernel = compile_sm90(
        norm_quantize._norm_backward_kernel,
        {"dy_ptr": "*bf16", "x_ptr": CODES, "x_exponent_ptr": "*u8", "rstd_ptr": "*fp32"}
        | {"weight_ptr": "*bf16", "dresidual_ptr": "*bf16", "dx_ptr": "*bf16"}
        | {"part_ptr": "*fp32", "amax_ptr": "*fp32", "R": "i32"},
        tile,
        num_warps=tile["WARPS"],
    )
    # two for each row's dy, dresidual (read before the loop and in it) and dx, one for its codes;
    # two for the weight, four for its gradient
    assert access_bytes(kernel).count(16) == 2 * (2 + 2 + 1) + 2 + 2 + 4
