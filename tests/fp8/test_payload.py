"""Payloads: rounding errors against the eps of the format, views, NaN, and compiled kernels."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coatlm.fp8 import payload as module
from coatlm.fp8.formats import E3M4, E4M3, E5M2, SCALE_BLOCK, Coding
from coatlm.fp8.payload import pack, unpack
from coatlm.fp8.payload_layout import Layout, Own, Shared
from coatlm.fp8.qtensor import TENSOR, block
from coatlm.fp8.quantize import quantize
from coatlm.fp8.scaling import current_scale
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90

every = pytest.mark.parametrize("fmt", [E4M3, E5M2, E3M4], ids=lambda fmt: fmt.name)
seeds = st.integers(0, 2**32 - 1)
CPU = torch.device("cpu")


def gradients(seed: int, *shape: int) -> Tensor:
    """Normal values whose size differs from block to block by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator).unflatten(-1, (-1, SCALE_BLOCK))
    size = torch.randn(*x.shape[:-1], 1, generator=generator)
    return (x * torch.exp(3 * size)).flatten(-2)


def travel(x: Tensor, layout: Layout, shared: Shared | None = None, **options: Any) -> Tensor:
    """x as the other side sees it, fp32."""
    payloads = layout.empty(*x.shape[:2], device=CPU)
    pack(x, payloads, layout=layout, shared=shared, **options)
    y = torch.empty(x.shape)
    unpack(payloads[None], y, layout=layout, shared=shared)
    return y


@every
@settings(max_examples=20)
@given(seed=seeds)
def test_a_value_is_off_by_half_a_spacing_of_its_block(fmt: Coding, seed: int) -> None:
    x = gradients(seed, 3, 2, 5 * SCALE_BLOCK)
    y = travel(x, Layout(x.shape[-1], fmt, scaled=True))
    scale = x.abs().unflatten(-1, (-1, SCALE_BLOCK)).amax(-1, keepdim=True) / fmt.max
    error = ((y - x).abs().unflatten(-1, (-1, SCALE_BLOCK)) / scale).flatten(-2)
    units = (x.abs().unflatten(-1, (-1, SCALE_BLOCK)) / scale).flatten(-2)
    twice = 2**-6 if fmt is E3M4 else 2**-10  # E3M4 rounds to fp16 before
    bound = fmt.eps / 2 * units.clamp(min=fmt.smallest_normal) * (1 + twice)
    assert (error <= bound).all()


@pytest.mark.parametrize(("fmt", "bound"), [(E4M3, 0.027), (E5M2, 0.054), (E3M4, 0.0135)])
def test_relative_error_of_normal_gradients(fmt: Coding, bound: float) -> None:
    # E4M3 rounds to 4 significant bits: uniform over a spacing, about 2^-4 / sqrt(12) * 1.4
    x = torch.randn(1, 1, 1 << 18, generator=torch.Generator().manual_seed(0))
    y = travel(x, Layout(x.shape[-1], fmt, scaled=True))
    assert 0.9 * bound < (y - x).norm() / x.norm() < bound


@settings(max_examples=10)
@given(seed=seeds)
def test_a_shared_scale_with_division_makes_the_codes_of_a_gemm(seed: int) -> None:
    x = gradients(seed, 1, 1, 8 * SCALE_BLOCK).bfloat16()
    shared = Shared(current_scale(x, E4M3)[None], torch.zeros(1, 1, 8, dtype=torch.int32))
    layout = Layout(8 * SCALE_BLOCK, E4M3, scaled=False)
    payloads = layout.empty(1, 1, device=CPU)
    pack(x, payloads, layout=layout, shared=shared, divide=True)
    expected = quantize(x, fmt=E4M3, granularity=TENSOR)
    assert torch.equal(payloads[..., : x.numel()], expected.codes.view(torch.uint8))


def test_values_are_multiplied_with_the_rounded_inverse_unless_told_to_be_divided() -> None:
    """With S = 1.3 the two differ: fp32 values beside the middle between two codes."""
    scale = torch.tensor([1.3])
    codes = E4M3.decode(torch.arange(0x08, 0x7E, dtype=torch.uint8).view(E4M3.dtype))
    middle = (codes[:-1] + codes[1:]) / 2 * scale
    near = torch.cat([middle, *(middle.nextafter(torch.tensor(to)) for to in (0.0, 1e9))])
    x = torch.nn.functional.pad(near, (0, -len(near) % SCALE_BLOCK))[None, None]
    by_inverse, by_division = (
        E4M3.encode(y).view(torch.uint8) for y in (x * (1 / scale), x / scale)
    )
    assert not torch.equal(by_inverse, by_division)
    layout = Layout(x.shape[-1], E4M3, scaled=False)
    shared = Shared(scale, torch.zeros(1, 1, layout.blocks, dtype=torch.int32))
    payloads = layout.empty(1, 1, device=CPU)
    for options, expected in (({}, by_inverse), ({"divide": True}, by_division)):
        pack(x, payloads, layout=layout, shared=shared, **options)
        assert torch.equal(payloads, expected)


def test_own_scales_are_those_of_1x128_blocks() -> None:
    x = gradients(1, 2, 2, 4 * SCALE_BLOCK)
    layout = Layout(4 * SCALE_BLOCK, E4M3, scaled=True)
    payloads = layout.empty(2, 2, device=CPU)
    pack(x, payloads, layout=layout)
    scales = payloads[..., 4 * SCALE_BLOCK : 4 * SCALE_BLOCK + 16].contiguous().view(torch.float32)
    assert torch.equal(scales, quantize(x, fmt=E4M3, granularity=block(1, 128)).scale)


def test_the_sum_over_sources_is_added_to_what_is_there_in_any_view() -> None:
    layout = Layout(2 * SCALE_BLOCK, E4M3, scaled=True)
    x = gradients(2, 3, 8 * SCALE_BLOCK).view(3, 2, 2, 2 * SCALE_BLOCK)
    payloads = layout.empty(3, 2, 2, device=CPU)
    for source, packed in zip(x, payloads, strict=True):
        pack(source.transpose(0, 1), packed, layout=layout)
    whole = torch.ones(8 * SCALE_BLOCK)
    unpack(payloads, whole.view(2, 2, -1).transpose(0, 1), layout=layout, add=True)
    each = torch.stack([travel(source, layout) for source in x])
    torch.testing.assert_close(whole, 1 + each.sum(0).flatten(), rtol=2**-21, atol=2**-21)


def test_own_values_take_the_place_of_a_source_unrounded() -> None:
    layout = Layout(2 * SCALE_BLOCK, E4M3, scaled=True)
    x = gradients(3, 3, 8 * SCALE_BLOCK).view(3, 2, 2, 2 * SCALE_BLOCK)
    payloads = layout.empty(3, 2, 2, device=CPU)
    for number, packed in enumerate(payloads):
        pack(x[number], packed, layout=layout)
    payloads[1] = 0x7F  # NaN: this source is not read
    y = x[1].clone()
    unpack(payloads, y, layout=layout, own=Own(y, 1))
    expected = travel(x[0], layout) + travel(x[2], layout) + x[1]
    torch.testing.assert_close(y, expected, rtol=2**-21, atol=0.0)


def test_a_shared_scale_is_looked_up_by_the_block_in_the_view() -> None:
    owner = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3], dtype=torch.int32)
    shared = Shared(torch.tensor([1.0, 2.0, 4.0, 8.0]), owner.view(2, 2, 2).transpose(0, 1))
    x = shared.scale[owner.long()].repeat_interleave(SCALE_BLOCK) * 3
    view = x.view(2, 2, -1).transpose(0, 1)
    layout = Layout(2 * SCALE_BLOCK, E4M3, scaled=False)
    payloads = layout.empty(2, 2, device=CPU)
    pack(view, payloads, layout=layout, shared=shared)
    assert torch.equal(payloads, cast_of(3.0).expand_as(payloads))
    assert torch.equal(travel(view, layout, shared), view)


def test_values_beyond_a_shared_scale_saturate_and_raise_the_amax_of_their_tensor() -> None:
    owner = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3], dtype=torch.int32)
    amax = torch.tensor([1.0, 1.0, 9.0, 0.0]).view(torch.int32)
    shared = Shared(torch.ones(4), owner.view(2, 2, 2).transpose(0, 1), amax)
    x = torch.ones(8, SCALE_BLOCK)
    x[1, 3], x[2, 5], x[5, 0], x[7, 9] = -1000.0, 2.0, torch.inf, torch.nan
    view = x.view(2, 2, -1).transpose(0, 1)
    y = travel(view, Layout(2 * SCALE_BLOCK, E4M3, scaled=False), shared).transpose(0, 1)
    expected = x.clamp(-448, 448)
    expected[[5, 7]] = torch.nan
    torch.testing.assert_close(y.reshape(8, -1), expected, rtol=0, atol=0, equal_nan=True)
    found = amax.view(torch.float32)
    assert found[:3].tolist() == [1000.0, 2.0, torch.inf] and bool(found[3].isnan())


def test_values_of_the_skipped_part_raise_no_amax() -> None:
    amax = torch.zeros(2, dtype=torch.int32)
    owner = torch.tensor([0, 1], dtype=torch.int32).view(2, 1, 1)
    layout = Layout(SCALE_BLOCK, E4M3, scaled=False)
    shared = Shared(torch.ones(2), owner, amax)
    payloads = layout.empty(2, 1, device=CPU)
    pack(torch.full((2, 1, SCALE_BLOCK), 3.0), payloads, layout=layout, shared=shared, skip=1)
    assert amax.view(torch.float32).tolist() == [3.0, 0.0]


def test_the_sign_of_zero_arrives() -> None:
    x = torch.full((1, 1, SCALE_BLOCK), -0.0)
    assert travel(x, Layout(SCALE_BLOCK, E4M3, scaled=True)).signbit().all()


def cast_of(value: float) -> Tensor:
    return torch.tensor(value).to(torch.float8_e4m3fn).view(torch.uint8)


@every
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_finite_is_nan_in_the_sum(
    fmt: Coding, bad: float, dtype: torch.dtype
) -> None:
    layout = Layout(2 * SCALE_BLOCK, fmt, scaled=True)
    x = torch.ones(1, 1, 2 * SCALE_BLOCK, dtype=dtype)
    x[0, 0, 7] = bad
    y = travel(x, layout)
    assert y[..., :SCALE_BLOCK].isnan().all() and y[..., SCALE_BLOCK:].eq(1).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_a_shared_scale_that_is_not_finite_makes_every_code_nan(fmt: Coding) -> None:
    layout = Layout(SCALE_BLOCK, fmt, scaled=False)
    for bad in (torch.nan, torch.inf):
        shared = Shared(torch.tensor([bad]), torch.zeros(1, 1, 1, dtype=torch.int32))
        assert travel(torch.ones(1, 1, SCALE_BLOCK), layout, shared).isnan().all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 2.0**-126, 3.0e38])
def test_zeros_and_the_ends_of_fp32_stay_finite(value: float) -> None:
    y = travel(torch.full((1, 1, SCALE_BLOCK), value), Layout(SCALE_BLOCK, E4M3, scaled=True))
    assert y.isfinite().all()
    torch.testing.assert_close(y, torch.full_like(y, value), rtol=2**-4, atol=2**-136)


def test_a_payload_takes_132_bytes_for_128_elements() -> None:
    assert Layout(1 << 20, E4M3, scaled=True).nbytes / (1 << 20) == 132 / 128
    assert Layout(SCALE_BLOCK, E4M3, scaled=True).nbytes == 144  # on multiples of 16
    assert Layout(SCALE_BLOCK, E4M3, scaled=False).nbytes == SCALE_BLOCK


@pytest.mark.parametrize(
    ("x", "scaled", "message"),
    [
        (torch.zeros(1, 1, SCALE_BLOCK, dtype=torch.float16), True, "x.dtype=torch.float16"),
        (torch.zeros(1, 1, 64), True, "n % 128 == 0"),
        (torch.zeros(2, 1, SCALE_BLOCK), True, "payloads"),
        (torch.zeros(1, 1, 2 * SCALE_BLOCK)[..., ::2], True, "strides"),
        (torch.zeros(1, 1, SCALE_BLOCK), False, "scales are either"),
    ],
)
def test_bad_input_is_refused(x: Tensor, scaled: bool, message: str) -> None:
    layout = Layout(x.shape[-1], E4M3, scaled=scaled)
    with pytest.raises(ValueError, match=message):
        pack(x, layout.empty(1, 1, device=CPU), layout=layout)


def test_a_target_and_own_values_that_do_not_fit_are_refused() -> None:
    layout = Layout(SCALE_BLOCK, E4M3, scaled=True)
    payloads, y = layout.empty(2, 1, 1, device=CPU), torch.zeros(1, 1, SCALE_BLOCK)
    with pytest.raises(ValueError, match=r"x\.dtype=torch\.float16"):
        unpack(payloads, y.half(), layout=layout)
    with pytest.raises(ValueError, match=r"x \[1, 2, 128\]|payloads \[2, 1, 1, 144\]"):
        unpack(payloads, y, layout=layout, own=Own(torch.zeros(1, 2, SCALE_BLOCK), 0))


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_that_begin_between_multiples_of_128_are_refused(dim: int) -> None:
    x = torch.zeros(3 * SCALE_BLOCK).as_strided((2, 2, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK, 1))
    strides = [SCALE_BLOCK, SCALE_BLOCK, 1]
    strides[dim] = SCALE_BLOCK - 16
    layout = Layout(SCALE_BLOCK, E4M3, scaled=True)
    with pytest.raises(ValueError, match="strides"):
        pack(x.as_strided(x.shape, strides), layout.empty(2, 2, device=CPU), layout=layout)


@pytest.mark.parametrize(
    "owner", [torch.zeros(1, 1, 3), torch.zeros(1, 2, 2), torch.zeros(1, 1, 4)[..., ::2]], ids=str
)
def test_owners_that_do_not_fit_are_refused(owner: Tensor) -> None:
    layout = Layout(2 * SCALE_BLOCK, E4M3, scaled=False)
    shared = Shared(torch.ones(1), owner.int() if owner.is_contiguous() else owner)
    with pytest.raises(ValueError, match=r"owner .*: \[1, 1, 2\], contiguous rows"):
        pack(
            torch.ones(1, 1, 2 * SCALE_BLOCK),
            layout.empty(1, 1, device=CPU),
            layout=layout,
            shared=shared,
        )


def test_e3m4_with_a_scale_that_does_not_travel_is_refused() -> None:
    with pytest.raises(ValueError, match="fmt=e3m4 needs scaled=True"):
        Layout(SCALE_BLOCK, E3M4, scaled=False)


INTEGERS = ("blocks", "outer_stride", "inner_stride", "bytes_each")
OWN = ("own_outer_stride", "own_inner_stride")
OWNER = ("owner_outer_stride", "owner_inner_stride")


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3.dtype, E5M2.dtype, E3M4.dtype], ids=str)
@pytest.mark.parametrize("shared", ["", "current", "delayed"])
@pytest.mark.parametrize("divide", [False, True])
def test_pack_compiles_for_sm90_with_vector_accesses(
    source: torch.dtype, fmt: torch.dtype, shared: str, divide: bool
) -> None:
    pointers = {"x_ptr": POINTER[source], "code_ptr": POINTER[fmt]}
    absent: dict[str, None] = {"scale_ptr": None}
    if shared:
        pointers |= {"shared_ptr": "*fp32", "owner_ptr": "*i32"}
    else:
        pointers, absent = (
            pointers | {"scale_ptr": "*fp32"},
            {"shared_ptr": None, "owner_ptr": None},
        )
    if shared == "delayed":
        pointers["amax_ptr"] = "*i32"
    else:
        absent["amax_ptr"] = None
    compiled = compile_sm90(
        module._pack_kernel,
        pointers | dict.fromkeys((*INTEGERS, *OWNER, "inner", "skip"), "i32"),
        {
            "TOP": E4M3.max,
            "LARGEST": module.LARGEST,
            "DIVIDE": divide,
            "ROWS": module.ROWS,
            **absent,
        },
        aligned=INTEGERS,
        num_warps=module.WARPS,
    )
    assert ("atom" in compiled.asm["ptx"]) == (shared == "delayed")
    each = 4096 // 128  # elements per thread: loads of x, stores of codes
    assert access_bytes(compiled).count(16) == each * source.itemsize // 16 + each // 16


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3.dtype, E3M4.dtype], ids=str)
@pytest.mark.parametrize("sources", [2, 8])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_unpack_compiles_for_sm90_with_vector_accesses(
    target: torch.dtype, fmt: torch.dtype, sources: int, shared: bool, add: bool
) -> None:
    pointers = {"code_ptr": POINTER[fmt], "y_ptr": POINTER[target], "own_ptr": POINTER[target]}
    absent = {"scale_ptr": None} if shared else {"shared_ptr": None, "owner_ptr": None}
    pointers |= {"shared_ptr": "*fp32", "owner_ptr": "*i32"} if shared else {"scale_ptr": "*fp32"}
    integers = (*INTEGERS, *OWN, "source_bytes")
    compiled = compile_sm90(
        module._unpack_kernel,
        pointers | dict.fromkeys((*integers, *OWNER, "inner", "skip"), "i32"),
        {"SOURCES": sources, "ADD": add, "ROWS": module.ROWS, **absent},
        aligned=integers,
        num_warps=module.WARPS,
    )
    assert access_bytes(compiled).count(16) >= 4096 * target.itemsize // (128 * 16)
    if sources == 2:  # a sum that begins with +0 loses the sign of -0
        assert not re.search(r"(add|fma)\S*\s.*0f00000000", compiled.asm["ptx"])
