"""Quantization: error bounds from the formats' eps, scales per block, and the kernels' arithmetic.

The codes of the kernels are compared on a GPU; on the CPU they compile, their scales are right in
the interpreter, and the division they use is checked with the C library's fused multiply-add.
"""

import ctypes
import ctypes.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from coatlm.fp8 import quantize as module
from coatlm.fp8.formats import E4M3, E5M2, Fp8Format, cast
from coatlm.fp8.qtensor import ROW, TENSOR, Granularity, QTensor, block
from coatlm.fp8.quantize import quantize, quantize_ref
from coatlm.fp8.scaling import current_scale, scale_ref
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, run_interpreted

E8M0 = torch.float8_e8m0fnu
GRANULARITIES = [TENSOR, ROW, block(1, 16), block(1, 128), block(128, 128)]
both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
every = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
seeds = st.integers(0, 2**32 - 1)


def random(seed: int, rows: int = 130, columns: int = 256) -> Tensor:
    """Normal values of very different size from column to column."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.exp(2 * torch.randn(columns, generator=generator))


def bits(q: QTensor) -> Tensor:
    return q.codes.view(torch.uint8)


def block_of(granularity: Granularity, x: Tensor) -> Tensor:
    """The number of each element's block, by counting rows and columns."""
    row, column = torch.meshgrid(*map(torch.arange, x.shape), indexing="ij")
    rows = granularity.rows or x.shape[0]
    columns = granularity.columns or x.shape[1]
    return row // rows * -(-x.shape[1] // columns) + column // columns


@both
@every
@settings(max_examples=10)
@given(seed=seeds)
def test_error_is_half_a_spacing_of_the_blocks_scale(
    fmt: Fp8Format, granularity: Granularity, seed: int
) -> None:
    x = random(seed)
    q = quantize(x, fmt=fmt, granularity=granularity)
    scale = granularity.spread(q.scale, x.shape)
    # Half a spacing; relative 2^-22 more for the roundings of S, x / S and codes * S in fp32.
    half_spacing = torch.maximum(x.abs() * fmt.eps, fmt.smallest_subnormal * scale) / 2
    assert ((q.dequantize() - x).abs() <= half_spacing + 2.0**-22 * x.abs()).all()


@both
@every
def test_every_block_has_the_scale_of_its_own_amax(
    fmt: Fp8Format, granularity: Granularity
) -> None:
    x = random(1)
    q = quantize(x, fmt=fmt, granularity=granularity)
    number = block_of(granularity, x)
    amax = torch.zeros(number.max() + 1).scatter_reduce(
        0, number.flatten(), x.abs().flatten(), "amax"
    )
    assert torch.equal(q.scale.flatten(), scale_ref(amax, fmt))
    assert q.scale.shape == granularity.scale_shape(x.shape)
    largest = cast(torch.tensor(fmt.max), fmt).view(torch.uint8)
    reached = torch.zeros(len(amax), dtype=torch.int32).scatter_reduce(
        0, number.flatten(), (bits(q) & 0x7F).int().flatten(), "amax"
    )
    assert (reached == largest.int()).all()


@both
@every
@settings(max_examples=10)
@given(seed=seeds)
def test_quantizing_what_was_quantized_changes_nothing(
    fmt: Fp8Format, granularity: Granularity, seed: int
) -> None:
    once = quantize(random(seed), fmt=fmt, granularity=granularity)
    again = quantize(once.dequantize(), fmt=fmt, granularity=granularity)
    # MAX * S rounds, so S may move by a unit in the last place; no code is that close to a tie.
    assert torch.equal(bits(once), bits(again))
    torch.testing.assert_close(once.scale, again.scale, rtol=2.0**-22, atol=0)


@both
@every
@settings(max_examples=10)
@given(seed=seeds, power=st.integers(-40, 40))
def test_a_power_of_two_moves_the_scale_and_no_code(
    fmt: Fp8Format, granularity: Granularity, seed: int, power: int
) -> None:
    x = random(seed)
    plain, moved = (quantize(y, fmt=fmt, granularity=granularity) for y in (x, x * 2.0**power))
    assert torch.equal(bits(plain), bits(moved))
    assert torch.equal(plain.scale * 2.0**power, moved.scale)


@both
@every
def test_zeros_have_scale_one_and_keep_their_signs(
    fmt: Fp8Format, granularity: Granularity
) -> None:
    x = torch.zeros(128, 128)
    x[::2] = -0.0
    q = quantize(x, fmt=fmt, granularity=granularity)
    assert (q.scale == 1).all()
    assert torch.equal(bits(q), x.signbit().to(torch.uint8) * 0x80)


@both
@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_spoils_its_block_and_no_other(
    fmt: Fp8Format, granularity: Granularity, bad: float
) -> None:
    x = random(2, 256, 256)
    good = quantize(x, fmt=fmt, granularity=granularity)
    x[3, 5] = bad
    q = quantize(x, fmt=fmt, granularity=granularity)
    number = block_of(granularity, x)
    spoilt = number == number[3, 5]
    assert q.codes.float()[spoilt].isnan().all() and q.dequantize()[spoilt].isnan().all()
    assert torch.equal(bits(q)[~spoilt], bits(good)[~spoilt])
    assert (~q.scale.isfinite()).sum() == 1


def test_the_reference_uses_a_given_scale_as_it_is_and_saturates() -> None:
    x, scale = torch.tensor([1.0, -3.0, 1000.0, -math.inf, math.nan]), torch.tensor(2.0)
    q = quantize_ref(x, fmt=E4M3, granularity=TENSOR, scale=scale)
    assert q.scale is scale
    assert q.codes.float()[:3].tolist() == [0.5, -1.5, 448.0]
    assert q.codes.float()[3:].isnan().all()


def test_a_tensor_is_quantized_with_its_current_scale() -> None:
    x = random(3).bfloat16()
    scale = current_scale(x, E4M3)
    given_scale = quantize_ref(x, fmt=E4M3, granularity=TENSOR, scale=scale)
    own_scale = quantize(x, fmt=E4M3, granularity=TENSOR)
    assert torch.equal(own_scale.scale, scale) and torch.equal(bits(own_scale), bits(given_scale))


@pytest.mark.parametrize("granularity", GRANULARITIES[1:], ids=str)
def test_e8m0_scales_cost_a_byte_and_at_most_a_bit_of_range(granularity: Granularity) -> None:
    x = random(5)
    q = quantize(x, fmt=E4M3, granularity=granularity, scale_dtype=E8M0)
    assert q.nbytes == x.numel() + q.scale.numel()
    ratio = q.scale.float() / quantize(x, fmt=E4M3, granularity=granularity).scale
    assert (ratio >= 1).all() and (ratio < 2).all()
    scale = granularity.spread(q.scale.float(), x.shape)
    assert torch.equal(bits(q), cast(x / scale, E4M3).view(torch.uint8))


def test_nbytes_counts_codes_and_scales() -> None:
    x = random(6, 128, 256)
    assert quantize(x, fmt=E4M3, granularity=block(1, 16)).nbytes == x.numel() * (1 + 4 / 16)
    assert quantize(x, fmt=E4M3, granularity=TENSOR).nbytes == x.numel() + 4


def test_dequantize_rounds_once_to_the_dtype_asked_for() -> None:
    q = quantize(random(7), fmt=E4M3, granularity=block(1, 16))
    assert torch.equal(q.dequantize(torch.bfloat16), q.dequantize().bfloat16())


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_quantized_as_their_fp32_values(
    granularity: Granularity, dtype: torch.dtype
) -> None:
    x = random(8).clamp(-60000, 60000).to(dtype)
    narrow, wide = (quantize(y, fmt=E4M3, granularity=granularity) for y in (x, x.float()))
    assert torch.equal(bits(narrow), bits(wide)) and torch.equal(narrow.scale, wide.scale)


@pytest.mark.parametrize("shape", [(0, 128), (3, 0, 128)])
@every
def test_an_empty_tensor_has_no_codes(granularity: Granularity, shape: tuple[int, ...]) -> None:
    if granularity == block(128, 128) and len(shape) != 2:
        return
    q = quantize(torch.empty(shape), fmt=E4M3, granularity=granularity)
    assert q.shape == shape and q.scale.shape == granularity.scale_shape(torch.Size(shape))


REFUSED: list[tuple[str, Tensor, dict[str, Any]]] = [
    ("x.dtype", torch.ones(2, 128).double(), {"granularity": TENSOR}),
    ("multiples of 128", torch.ones(2, 100), {"granularity": block(1, 128)}),
    ("multiples of 16", torch.ones(()), {"granularity": block(1, 16)}),
    ("blocks need a matrix", torch.ones(2, 2, 128), {"granularity": block(128, 128)}),
    ("scale_dtype", torch.ones(2, 128), {"granularity": ROW, "scale_dtype": torch.float16}),
    ("scale_dtype", torch.ones(2, 128), {"granularity": TENSOR, "scale_dtype": E8M0}),
]


@pytest.mark.parametrize(("message", "x", "options"), REFUSED)
def test_what_cannot_be_done_is_refused(message: str, x: Tensor, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(x, fmt=E4M3, **options)


@pytest.mark.parametrize("size", [0, 1, 24, -16])
def test_blocks_are_powers_of_two(size: int) -> None:
    with pytest.raises(ValueError, match=f"block=1x{size}"):
        block(1, size)


def fused_multiply_add() -> Callable[[float, float, float], float]:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fmaf.restype = ctypes.c_float
    library.fmaf.argtypes = [ctypes.c_float] * 3
    return library.fmaf


FMA = fused_multiply_add()


def markstein(x: float, scale: float) -> float:
    """What the kernels' `quotient` does, an operation a line, each rounded to fp32."""
    shift = 2.0**64 if scale < 2.0**-62 else 2.0**-64 if scale > 2.0**62 else 1.0
    numbers = torch.tensor([x, scale, shift])
    divisor = (numbers[1] * numbers[2]).item()
    minus_r = (-1 / torch.tensor(divisor)).item()
    minus_x = (numbers[0] * -numbers[2]).item()
    q = (torch.tensor(minus_x) * torch.tensor(minus_r)).item()
    q = FMA(FMA(q, divisor, minus_x), minus_r, q)
    return FMA(FMA(q, divisor, minus_x), minus_r, q)


normal = st.floats(2.0**-126, 2.0**127, width=32)


@settings(max_examples=1000)
@given(x=normal, scale=normal, negative=st.booleans())
@example(x=2.0**-126, scale=2.0**-126, negative=True)
@example(x=1.9999998807907104, scale=1.9999997615814209, negative=False)
def test_the_kernels_division_is_rounded_correctly_where_codes_depend_on_it(
    x: float, scale: float, negative: bool
) -> None:
    # Below 2^-18 every quotient gives the code of zero; from 2^127 on it may pass fp32's end.
    x = -x if negative else x
    expected = (torch.tensor(x) / torch.tensor(scale)).item()
    actual = markstein(x, scale)
    if 2.0**-18 <= abs(expected) < 2.0**127:
        assert actual == expected
    elif abs(expected) < 2.0**-18:
        assert abs(actual) < 2.0**-17 and math.copysign(1, actual) == math.copysign(1, x)
    else:
        assert math.isnan(actual) or abs(actual) > E5M2.max


@pytest.mark.parametrize("x", [0.0, -0.0])
def test_the_kernels_division_keeps_the_sign_of_zero(x: float) -> None:
    assert math.copysign(1, markstein(x, 3.0)) == math.copysign(1, x)


@pytest.mark.parametrize(
    ("x", "scale"),
    [(math.inf, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, math.nan), (1e38, 1e-5)],
)
def test_the_kernels_division_gives_nan_for_what_is_not_finite(x: float, scale: float) -> None:
    assert math.isnan(markstein(x, scale))
    q = quantize_ref(torch.tensor([x]), fmt=E4M3, granularity=TENSOR, scale=torch.tensor(scale))
    assert q.codes.float().isnan().all()


def compiled(granularity: Granularity, x: torch.dtype, fmt: Fp8Format, *, e8m0: bool) -> Any:
    """The kernel as launched for a matrix of 4096 x 4096."""
    if granularity in (block(1, 16), block(1, 128)):
        return compiled_row_blocks(granularity, x, fmt, e8m0=e8m0)
    tile = module._tile(4096, 4096, granularity)
    pointer = POINTER[fmt.dtype]
    arguments = {"x_ptr": POINTER[x], "code_ptr": pointer, "scale_ptr": "*u8" if e8m0 else "*fp32"}
    given, whole = granularity == TENSOR, granularity == block(128, 128)
    return compile_sm90(
        module._quantize_kernel,
        arguments | {"M": "i32", "K": "i64"},
        {"GIVEN": given, "WHOLE": whole, "TOP": fmt.max, "E8M0": e8m0}
        | {"ROWS": tile["ROWS"], "COLUMNS": tile["COLUMNS"]},
        aligned=("M", "K"),
        num_warps=tile["num_warps"],
    )


def compiled_row_blocks(
    granularity: Granularity, x: torch.dtype, fmt: Fp8Format, *, e8m0: bool
) -> Any:
    assert granularity.columns is not None
    tile = module._row_block_tile(granularity.columns)
    return compile_sm90(
        module._quantize_row_blocks_kernel,
        {"x_ptr": POINTER[x], "code_ptr": POINTER[fmt.dtype], "blocks": "i32"}
        | {"scale_ptr": "*u8" if e8m0 else "*fp32"},
        {"TOP": fmt.max, "E8M0": e8m0} | tile,
        aligned=("blocks",),
        num_warps=tile["WARPS"],
    )


@both
@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_for_sm90_moves_all_elements_in_16_byte_accesses(
    fmt: Fp8Format, granularity: Granularity, dtype: torch.dtype
) -> None:
    kernel = compiled(granularity, dtype, fmt, e8m0=False)
    bytes_a_thread = module.THREAD * (dtype.itemsize + 1)
    assert access_bytes(kernel).count(16) == bytes_a_thread // 16
    assert "f64" not in kernel.asm["ptx"]


@pytest.mark.parametrize("granularity", GRANULARITIES[1:], ids=str)
def test_kernel_with_e8m0_scales_compiles_for_sm90(granularity: Granularity) -> None:
    compiled(granularity, torch.bfloat16, E4M3, e8m0=True)


@pytest.mark.parametrize("granularity", [ROW, block(128, 128)], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, E8M0])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def interpreted_scales_equal_the_reference(
    granularity: Granularity, scale_dtype: torch.dtype, bad: float | None
) -> None:
    x = random(9, 130, 384)
    x[20, 150] = x[20, 150] if bad is None else bad
    x[128:] = 0
    expected = quantize_ref(x, fmt=E4M3, granularity=granularity, scale_dtype=scale_dtype)
    scale = torch.empty(granularity.scale_shape(x.shape), dtype=scale_dtype)
    module._launch(x, scale, E4M3, granularity)
    torch.testing.assert_close(
        scale.float(), expected.scale.float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("shape", [(130, 384), (5, 100), (1, 1)])
def interpreted_codes_are_those_of_the_quotients(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    codes = module._launch(x, torch.tensor(0.5), E4M3, TENSOR)
    # The interpreter rounds to FP8 wrongly, never by more than a factor of two.
    ratio = codes.float() / (x / 0.5)
    assert ((ratio >= 0.5) & (ratio <= 2) | (x.abs() < 0.01)).all()


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)
