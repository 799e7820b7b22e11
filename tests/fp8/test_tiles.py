"""The flow's tile kernels and their smaller companions compile for sm_90. Results: on a GPU."""

import re
from typing import Any

import pytest

from coatlm.fp8 import (
    attention,
    rope,
    rope_quantize,
    scaling,
    swiglu_quantize,
    swiglu_tiles,
    tiles,
    transpose,
)
from coatlm.fp8.formats import E4M3, E5M2
from tests.fp8.sm90 import access_bytes, compile_sm90

CODES, BYTES, WORDS = "*fp8e4nv", "*u8", "*i32"
WIDE: dict[str, Any] = {"x_ptr": "*bf16", "scale_ptr": "*fp32"}
SIZES = {"M": "i32", "padded": "i32", "K": "i32"}
SOURCES = {  # what there is, what there is not
    "gradient, both ways": (
        WIDE | {"code_ptr": BYTES, "code_t_ptr": WORDS},
        ["exponent_ptr", "row_ptr", "column_ptr", "amax_ptr"],
    ),
    "gradient, both ways, and its amax": (
        WIDE | {"code_ptr": BYTES, "code_t_ptr": WORDS, "amax_ptr": WORDS},
        ["exponent_ptr", "row_ptr", "column_ptr"],
    ),
    "gradient as it is, and its amax": (
        WIDE | {"code_ptr": BYTES, "amax_ptr": WORDS},
        ["exponent_ptr", "row_ptr", "column_ptr", "code_t_ptr"],
    ),
    "norm made again": (
        {"x_ptr": CODES, "exponent_ptr": BYTES, "row_ptr": "*fp32", "column_ptr": "*bf16"}
        | {"scale_ptr": "*fp32", "code_t_ptr": WORDS},
        ["code_ptr", "amax_ptr"],
    ),
    "weight of forward's codes": (
        WIDE | {"row_ptr": "*fp32", "code_t_ptr": WORDS},
        ["exponent_ptr", "column_ptr", "code_ptr", "amax_ptr"],
    ),
    "codes moved": (
        {"x_ptr": BYTES, "scale_ptr": "*fp32", "code_t_ptr": WORDS},
        ["exponent_ptr", "row_ptr", "column_ptr", "code_ptr", "amax_ptr"],
    ),
}


def tile_options(tile: transpose.Tile) -> dict[str, int]:
    rows, columns, run, down, warps = tile
    return {"ROWS": rows, "COLUMNS": columns, "RUN": run, "DOWN": down, "WARPS": warps}


@pytest.mark.parametrize("source", SOURCES)
def test_transposes_compile_for_sm90_with_16_byte_accesses(source: str) -> None:
    pointers, absent = SOURCES[source]
    tile = transpose.WIDE_TILE if pointers["x_ptr"] == "*bf16" else transpose.CODES_TILE
    kernel = compile_sm90(
        tiles.transpose_kernel,
        pointers | SIZES,
        dict.fromkeys(absent)
        | {"FORMAT": E4M3.triton_dtype, "SIZE": 16, "CAST_ROWS": source.startswith("weight")}
        | tile_options(tile),
        aligned=tuple(SIZES),
        num_warps=tile.warps,
    )
    assert access_bytes(kernel)[0] == 16
    check_amax(kernel, "amax_ptr" in pointers)


def check_amax(kernel: Any, wanted: bool) -> None:
    """One amax leaves a program, and an infinite quotient becomes NaN before it is converted."""
    ptx = kernel.asm["ptx"]
    assert ("max.s32" in "".join(line for line in ptx.splitlines() if "global" in line)) is wanted
    fused = re.search(r"fma\.rn\.f32.*0f00000000", ptx)  # x + 0 x, which no compiler may drop
    assert (fused is not None) is wanted


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_swiglu_backward_compiles_for_sm90_without_divisions(kept: bool, delayed: bool) -> None:
    x: dict[str, Any] = {"x_ptr": CODES, "exponent_ptr": BYTES} if kept else {"x_ptr": "*bf16"}
    absent = {} if kept else {"exponent_ptr": None}
    amax: dict[str, Any] = {"amax_ptr": WORDS} if delayed else {}
    tile = swiglu_quantize.TILE
    kernel = compile_sm90(
        swiglu_tiles.swiglu_backward_kernel,
        {"da_ptr": "*bf16", **x, "dx_scale_ptr": "*fp32", "a_scale_ptr": "*fp32"}
        | {"dx_ptr": BYTES, "dx_t_ptr": WORDS, "a_t_ptr": WORDS, **amax}
        | {"M": "i32", "padded": "i32", "F": "i32"},
        absent
        | ({} if delayed else {"amax_ptr": None})
        | {"FORMAT": E5M2.triton_dtype, "A_FORMAT": E4M3.triton_dtype, "SIZE": 16}
        | tile_options(tile),
        aligned=("M", "padded", "F"),
        num_warps=tile.warps,
    )
    assert "div.full" not in kernel.asm["ptx"] and "div.rn" not in kernel.asm["ptx"]
    check_amax(kernel, delayed)
    tile = swiglu_quantize.AMAX_TILE
    options = tile_options(tile)
    del options["DOWN"]
    compile_sm90(
        swiglu_tiles.swiglu_amax_kernel,
        {"da_ptr": "*bf16", **x, "amax_ptr": "*fp32", "M": "i32", "F": "i32"},
        absent | {"SIZE": 16} | options,
        aligned=("M", "F"),
        num_warps=tile.warps,
    )


@pytest.mark.parametrize(
    "given",
    [{"scale_ptr": "*fp32"}, {"amax_ptr": "*fp32"}, {"scale_ptr": "*fp32", "amax_ptr": WORDS}],
    ids=["codes", "amax", "codes and amax"],
)
def test_rotary_gradients_compile_for_sm90(given: dict[str, str]) -> None:
    strides = {f"{x}_{axis}": "i32" for x in "qkv" for axis in "sbn"}
    kernel = compile_sm90(
        rope_quantize._join_kernel,
        {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "cos_ptr": "*fp32"}
        | {"sin_ptr": "*fp32", **given, "code_ptr": BYTES, "code_t_ptr": WORDS}
        | {"tokens": "i32", "words": "i32", "B": "i32", "heads": "i32", **strides},
        dict.fromkeys({"amax_ptr", "scale_ptr"} - set(given))
        | {"FORMAT": E5M2.triton_dtype}
        | {"GROUP": 3, "HALF": 64, "WORDS": rope_quantize.WORDS, "BLOCK": 64},
        aligned=("tokens", "words", *strides),
        num_warps=rope_quantize.WARPS,
    )
    if "scale_ptr" in given:
        check_amax(kernel, "amax_ptr" in given)


def test_small_kernels_of_the_flow_compile_for_sm90() -> None:
    compile_sm90(
        rope._rotate_in_place_kernel,
        {"qkv_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
        | {"B": "i32", "rotated": "i32", "width": "i32"},
        {"GROUP": 3} | rope._tile(128),
        num_warps=rope.WARPS,
    )
    compile_sm90(
        attention._dequantize_kernel,
        {"code_ptr": CODES, "exponent_ptr": BYTES, "x_ptr": "*bf16", "groups": "i32"},
        {"SIZE": 16, "GROUPS": attention.TILE // 16},
        num_warps=attention.WARPS,
    )
    compile_sm90(
        scaling._amax_kernel,
        {"x_ptr": "*bf16", "amax_ptr": "*fp32", "n": "i32"},
        {"BLOCK": scaling.BLOCK},
        num_warps=scaling.WARPS,
    )
