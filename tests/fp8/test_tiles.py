"""Kernels behind the epilogue compile for sm_90 as they are launched. Results: test_emit.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from coatlm.config.operands import ROW, TENSOR, Operand, block
from coatlm.fp8 import (
    amax,
    attention,
    emit,
    launch,
    loaders,
    rope_quantize,
    scaling,
    swiglu_quantize,
    swiglu_tiles,
    tiles,
    transpose,
)
from coatlm.fp8.formats import E4M3, E5M2
from coatlm.fp8.launch import Matrix, Placed, emit_operands
from coatlm.fp8.qtensor import QTensor
from coatlm.kernels import rope
from tests.fp8.sm90 import access_bytes, compile_sm90, launches_compiled

M, K = 1024, 512
CODES, BYTES = "*fp8e4nv", "*u8"


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fp32(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def saved(m: int, k: int) -> QTensor:
    scale = empty(m, k // 16, dtype=torch.float8_e8m0fnu)
    return QTensor(empty(m, k, dtype=E4M3.dtype), scale, block(1, 16), E4M3)


def compiled(function: Callable[..., Any], *args: Any, **options: Any) -> list[CompiledKernel]:
    with launches_compiled(emit, amax) as made:
        function(*args, **options)
    return made


def check_amax(kernel: CompiledKernel, wanted: bool) -> None:
    """One amax leaves a program, and an infinite quotient becomes NaN before it is converted."""
    ptx = kernel.asm["ptx"]
    assert ("max.s32" in "".join(line for line in ptx.splitlines() if "global" in line)) is wanted
    fused = re.search(r"fma\.rn\.f32.*0f00000000", ptx)  # x + 0 x, which no compiler may drop
    assert (fused is not None) is wanted


BOTH = {"direct": True, "transposed": True}
SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gradient, both ways": (empty(M, K), BOTH),
    "gradient, both ways, and its amax": (empty(M, K), BOTH | {"amax": fp32()}),
    "gradient as it is, and its amax": (empty(M, K), {"direct": True, "amax": fp32()}),
    "recomputed norm, transposed": (
        saved(M, K),
        {"transposed": True, "row": fp32(M), "column": empty(K)},
    ),
    "recomputed norm": (saved(M, K), {"direct": True, "row": fp32(M), "column": empty(K)}),
}


@pytest.mark.parametrize("source", SOURCES)
def test_matrices_compile_for_sm90_with_16_byte_accesses(source: str) -> None:
    x, options = SOURCES[source]
    (kernel,) = compiled(transpose._quantize, x, fp32(), E5M2, **options)
    assert access_bytes(kernel)[0] == 16
    assert "shared.b8" not in kernel.asm["ptx"]  # no byte changes threads by itself
    check_amax(kernel, "amax" in options)


def test_weights_and_moved_codes_compile_for_sm90_with_16_byte_accesses() -> None:
    for load, source, tile in (
        (loaders.load_forward_codes, (empty(M, K), fp32(M)), launch.WIDE_TILE),
        (loaders.load_codes, (empty(M, K, dtype=torch.uint8),), launch.CODES_TILE),
    ):
        options = {"transposed": True}
        (kernel,) = compiled(transpose._launch, load, source, fp32(), E4M3, tile, **options)
        assert access_bytes(kernel)[0] == 16


OPERANDS = [
    Operand("e4m3", granularity, power_of_two=power)
    for granularity in (TENSOR, ROW, block(1, 128), block(128, 128))
    for power in (True, False)
]


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
def test_operands_compile_for_sm90(operand: Operand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "scales_of", lambda amaxes, fmt, **options: amaxes)
    scale = fp32() if operand.granularity == TENSOR else None
    kernels = compiled(emit_operands, empty(1, K), operand, operand, scale, None, 128)
    kernels = compiled(emit_operands, empty(M, K), operand, operand, scale, None, M)
    assert len(kernels) == (2 if operand.granularity == ROW else 1)
    assert access_bytes(kernels[-1])[0] == 16
    assert ("div.rn" in kernels[-1].asm["ptx"]) is not (
        operand.power_of_two and operand.granularity.columns is None
    )


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("in_blocks", [True, False])
def test_swiglu_backward_compiles_for_sm90_without_divisions(
    in_blocks: bool, delayed: bool
) -> None:
    x = saved(M, 2 * K) if in_blocks else None
    source = (empty(M, K), x.codes, x.scale.view(torch.uint8)) if x else (
        empty(M, K), empty(M, 2 * K), None)  # fmt: skip
    gradient = Matrix(empty(M, 2 * K, dtype=E5M2.dtype), empty(2 * K, M, dtype=E5M2.dtype), fp32())
    a = Matrix(None, empty(K, M, dtype=E4M3.dtype), fp32())
    values = (Placed(0, E5M2, 2, 0), Placed(0, E5M2, 2, 1), Placed(1, E4M3))
    (kernel,) = compiled(
        launch.launch_emit, swiglu_tiles.load_gradient, source, (gradient, a), values, (M, M, K),
        swiglu_quantize.TILE, options=(16, True), amax=fp32() if delayed else None,
    )  # fmt: skip
    assert "div.full" not in kernel.asm["ptx"] and "div.rn" not in kernel.asm["ptx"]
    check_amax(kernel, delayed)
    load, tile = swiglu_tiles.load_largest, swiglu_quantize.AMAX_TILE
    compiled(launch.launch_amax, load, source, M, K, tile, options=16)


@pytest.mark.parametrize("half", [64, 40, 32])
@pytest.mark.parametrize("delayed", [True, False])
def test_rotary_gradients_compile_for_sm90(delayed: bool, half: int) -> None:
    parts = [empty(256, 4, heads, 2 * half) for heads in (4, 2, 2)]
    strides = [x.stride()[:3] for x in parts]
    source = (*parts, fp32(256, half), fp32(256, half), 4, *strides)
    width, tile, options = 16 * half, rope_quantize.tile_of(half), (4, half)
    codes = Matrix(empty(M, width, dtype=E5M2.dtype), empty(width, M, dtype=E5M2.dtype), fp32())
    values = (Placed(0, E5M2), Placed(0, E5M2, further=half))
    (kernel,) = compiled(
        launch.launch_emit, rope_quantize.load_joined, source, (codes,), values, (M, M, width),
        tile, options=options, amax=fp32() if delayed else None,
    )  # fmt: skip
    check_amax(kernel, delayed)
    assert access_bytes(kernel)[0] == 16
    few = tile._replace(rows=rope_quantize.AMAX_ROWS)
    compiled(launch.launch_amax, rope_quantize.load_joined, source, M, width, few, options=options)


def permuted(first: int, second: int, selector: int) -> int:
    """PTX's prmt.b32."""
    both_words = first.to_bytes(4, "little") + second.to_bytes(4, "little")
    return int.from_bytes(bytes(both_words[selector >> 4 * i & 7] for i in range(4)), "little")


def test_the_words_that_the_kernel_stores_are_columns_of_four_rows() -> None:
    rows = torch.arange(16, dtype=torch.uint8).view(4, 4)
    registers = {
        f"${4 + i}": int.from_bytes(bytes(row.tolist()), "little") for i, row in enumerate(rows)
    }
    for line in re.findall(r"prmt\.b32 (.*);", tiles.TRANSPOSE_4X4.value):
        to, first, second, selector = line.split(", ")
        registers[to] = permuted(registers[first], registers[second], int(selector, 16))
    columns = [list(registers[f"${i}"].to_bytes(4, "little")) for i in range(4)]
    assert columns == rows.t().tolist()


def test_small_kernels_of_the_flow_compile_for_sm90() -> None:
    compile_sm90(
        rope._rotate_in_place_kernel,
        {"qkv_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
        | {"B": "i32", "rotated": "i32", "width": "i32"},
        {"PER_KV_HEAD": 3} | rope._tile(128),
        num_warps=rope.WARPS,
    )
    compile_sm90(
        attention._dequantize_kernel,
        {"code_ptr": CODES, "exponent_ptr": BYTES, "x_ptr": "*bf16", "blocks": "i32"},
        {"SIZE": 16, "BLOCKS": attention.TILE // 16},
        num_warps=attention.WARPS,
    )
    compile_sm90(
        scaling._amax_kernel,
        {"x_ptr": "*bf16", "amax_ptr": "*fp32", "n": "i32"},
        {"BLOCK": scaling.BLOCK},
        num_warps=scaling.WARPS,
    )
