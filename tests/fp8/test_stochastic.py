"""Stochastic rounding: Philox against published vectors, means, neighbors, kernels simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from coatlm.config.recipes import BLOCKS_16
from coatlm.fp8 import (
    amax,
    emit,
    launch,
    loaders,
    rope_quantize,
    scaling,
    stochastic,
    swiglu_quantize,
    swiglu_tiles,
    tiles,
    transpose,
)
from coatlm.fp8.formats import E4M3, E5M2, FORMATS, Fp8Format, decode_table
from coatlm.fp8.gemm import padded_rows
from coatlm.fp8.launch import Matrix, Placed, empty_codes, matrix_source
from coatlm.fp8.producers import save_blocks
from coatlm.fp8.saved_blocks import parts_of
from coatlm.fp8.stochastic import bits_ref, stochastic_ref, words_ref
from coatlm.kernels.rope import rope_frequencies, rope_tables
from tests.fp8.gluon_on_cpu import simulated
from tests.fp8.gluon_on_cpu import tile as simulated_tile
from tests.fp8.sm90 import flushes_subnormals, launches_compiled

NOISE = torch.tensor([-123456789, 17, 5, 2], dtype=torch.int32)
CODE = (amax, emit, loaders, rope_quantize, scaling, stochastic, swiglu_tiles, tiles)
both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])


@pytest.fixture
def kernels() -> Iterator[None]:
    with simulated(*CODE):
        yield


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # of the Random123 library, for philox4x32 with 7 rounds
        ("0 0 0 0", "0 0", "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "5207ddc2 45165e59 4d8ee751 8c52f662",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_words_are_those_of_philox(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (torch.tensor(int(word, 16)) for word in counter.split())
    noise = torch.stack([*(torch.tensor(int(word, 16)) for word in key.split()), c2, c3])
    words = words_ref(noise.int(), c0, c1)  # int32, as on the device
    assert [f"{int(word):08x}" for word in words] == expected.split()


def neighbors(x: Tensor, fmt: Fp8Format) -> tuple[Tensor, Tensor]:
    """The largest number of the format at most |x| and the smallest at least |x|."""
    numbers = decode_table(fmt)[:128]
    numbers = numbers[numbers.isfinite()].sort().values
    at = torch.searchsorted(numbers, x.abs(), right=True)
    below = numbers[at - 1]
    return below, torch.where(below == x.abs(), below, numbers[at.clamp(max=len(numbers) - 1)])


def values(fmt: Fp8Format) -> Tensor:
    """Normal, subnormal and negative numbers, and those of the format, [64, 48]."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(-20, 9, (64, 48), generator=generator)
    x = torch.randn(64, 48, generator=generator) * 2.0**spread
    table = decode_table(fmt)
    exact = table[table.isfinite()][:144]
    x[:3] = exact.view(3, 48)
    return x.clamp(-fmt.max, fmt.max)


@both
def test_a_code_is_a_neighbor_and_a_number_of_the_format_stays(fmt: Fp8Format) -> None:
    x = values(fmt)
    y = stochastic_ref(x, NOISE, fmt)
    assert torch.equal(y, fmt.encode(y).float())
    below, above = neighbors(x, fmt)
    assert ((y.abs() == below) | (y.abs() == above)).all()
    assert (y * x >= 0).all()
    assert torch.equal(y[:3], x[:3])
    between = below < above
    went_up = (y.abs() == above)[between].float()
    fraction = ((x.abs() - below) / (above - below))[between]
    assert abs((went_up - fraction).mean().item()) < 5 * 0.5 / math.sqrt(len(went_up))


@both
def test_the_mean_of_codes_is_the_number(fmt: Fp8Format) -> None:
    """The mean of 4096 draws is off by less than 5 deviations; most nearest codes are not."""
    x, draws = values(fmt)[:16], 4096
    total, count = torch.zeros_like(x), 0
    noise = NOISE.clone()
    for step in range(draws):
        noise[2] = step
        total += stochastic_ref(x, noise, fmt)
        count += 1
    below, above = neighbors(x, fmt)
    gap = above - below
    up = (x.abs() - below) / torch.where(gap > 0, gap, 1.0)
    allowed = 5 * gap * (up * (1 - up) / count).sqrt() + 2.0**-15 * gap + 2.0**-20 * x.abs()
    off = (total / count - x).abs()
    assert (off <= allowed).all()
    assert ((fmt.encode(x).float() - x).abs() > allowed).float().mean() > 0.5


def test_bits_that_are_cut_off_below_the_random_ones_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all 2^16 random numbers, as many round up as the fraction says, in units of 2^-16."""
    every_n = torch.arange(65536)[None, :]
    monkeypatch.setattr(stochastic, "bits_ref", lambda *_, **__: every_n)
    for part, up in ((1000.0, 1000), (1000.25, 1000), (1000.75, 1001)):
        x = torch.full((1, 65536), 4 + part / 65536)
        assert stochastic_ref(x, NOISE, E5M2).sum().item() == 4 * 65536 + up


@both
def test_what_is_too_large_or_not_finite_is_as_in_rounding_to_nearest(fmt: Fp8Format) -> None:
    special = [math.nan, math.inf, -math.inf, 1.01 * fmt.max, -1e30, fmt.max, 0.0, -0.0]
    x = torch.tensor(special).repeat(8, 1)
    bits = x.view(torch.int32)  # NaNs: one whose upper bits are those of infinity, the largest one
    bits[::2, 0], bits[1::4, 0] = 0x7F800001, 0x7FFFFFFF
    codes = fmt.encode(stochastic_ref(x, NOISE, fmt)).view(torch.uint8)
    assert torch.equal(codes, fmt.encode(x).view(torch.uint8))


@both
def test_the_rounding_of_kernels_is_that_of_the_reference(
    fmt: Fp8Format, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With numbers of all sizes, each with the random bits around those from which it goes up."""
    size = torch.logspace(math.log2(fmt.max) - 40, math.log2(fmt.max) + 2, 2048, base=2.0)
    size = torch.cat([size, torch.tensor([math.inf, math.nan, 0.0, fmt.max])])
    spacing = size.clamp(fmt.smallest_normal, fmt.max).log2().floor().exp2()
    spacing *= 2.0**-fmt.mantissa_bits
    edge = (1 - (size / spacing).frac().nan_to_num()) * 65536
    n = (edge[:, None] + torch.arange(-2, 3)).long().clamp(0, 65535).repeat(2, 1)
    x = torch.cat([size, -size])[:, None].repeat(1, 5)
    monkeypatch.setattr(stochastic, "bits_ref", lambda *_, **__: n)
    wanted = fmt.encode(stochastic_ref(x, NOISE, fmt)).view(torch.uint8)
    tiles_xn = map(simulated_tile, (x.numpy(), n.int().numpy()))
    made = stochastic.stochastic.fn(*tiles_xn, fmt.triton_dtype)
    codes = fmt.encode(torch.from_numpy(np.array(made))).view(torch.uint8)
    assert torch.equal(codes, wanted)
    assert (wanted[:, 0] != wanted[:, 4]).float().mean() > 0.5


def test_bits_depend_on_place_key_step_and_microbatch_and_are_uniform() -> None:
    n = bits_ref(NOISE, 256, 96)
    for i in range(4):
        other = NOISE.clone()
        other[i] += 1
        assert (bits_ref(other, 256, 96) == n).float().mean() < 1e-3
    assert torch.equal(bits_ref(NOISE, 255, 40), n[:255, :40])
    counts = torch.bincount(n.flatten() >> 12, minlength=16) / n.numel()
    assert (counts - 1 / 16).abs().max() < 5 * math.sqrt(1 / 16 / n.numel())
    centered = n.float() - n.float().mean()
    for axis in (0, 1):
        related = (centered * centered.roll(1, axis)).mean() / centered.square().mean()
        assert abs(related) < 5 / math.sqrt(n.numel())


def test_columns_that_share_a_word_take_its_halves() -> None:
    quads = torch.arange(2)[:, None]
    pairs, shared = bits_ref(NOISE, 8, 96), bits_ref(NOISE, 8, 96, halves=16)
    words = torch.stack(words_ref(NOISE, quads, torch.arange(96)), 1).flatten(0, 1)
    for upper in (0, 1):
        half = words >> 16 * upper & 0xFFFF
        assert torch.equal(pairs[:, upper::2], half[:, :48])
        for block in range(3):
            start = 32 * block
            places = slice(start + 16 * upper, start + 16 * upper + 16)
            assert torch.equal(shared[:, places], half[:, start : start + 16])


@both
def test_the_kernel_for_a_matrix_has_the_bits_of_the_reference(
    fmt: Fp8Format, kernels: None
) -> None:
    x, scale = torch.randn(37, 160).bfloat16(), torch.tensor(2.0**-7)
    x[3:5] *= torch.tensor([[2.0**-24], [2.0**-14]])  # zeros of both signs, subnormal numbers
    wanted = transpose.quantize_ref(x, scale, fmt=fmt, row=None, column=None, noise=NOISE)
    codes, codes_t = empty_codes(x, fmt, fmt, 48)
    source, size, tile = matrix_source(x)
    launch.launch_emit(
        loaders.load_matrix,
        source,
        (Matrix(codes, codes_t, scale),),
        (Placed(0, fmt),),
        (37, 48, 160),
        tile,
        options=size,
        noise=NOISE,
    )
    for actual, expected in ((codes, wanted.direct), (codes_t, wanted.transposed)):
        assert actual is not None
        assert torch.equal(actual.view(torch.uint8), expected.codes.view(torch.uint8))
    nearest = transpose.quantize_both(x, scale, fmt=fmt).direct.codes
    moved = (nearest.float() != wanted.direct.codes.float()).float().mean()
    assert 0.2 < moved < 0.3  # the mean distance to the nearest code is a quarter of the spacing


def test_the_kernel_for_swiglu_has_the_codes_of_the_reference(kernels: None) -> None:
    m, f = 37, 128
    da, x, one = torch.randn(m, f).bfloat16(), torch.randn(m, 2 * f).bfloat16(), torch.tensor(0.5)
    saved = save_blocks(x, BLOCKS_16)
    assert saved is not None
    wanted = swiglu_quantize.swiglu_backward_quantize_ref(
        da, saved, one, E5M2, True, None, None, NOISE
    )
    plain = swiglu_quantize.swiglu_backward_quantize_ref(da, saved, one, E5M2, True, None, None)
    elements, exponents, size = parts_of(saved)
    gradient = Matrix(*empty_codes(torch.empty(m, 2 * f), E5M2, E5M2, 48), wanted.dx.scale)
    a = Matrix(None, empty_codes(torch.empty(m, f), E4M3, E4M3, 48)[1], one)
    launch.launch_emit(
        swiglu_tiles.load_gradient,
        (da, elements, exponents),
        (gradient, a),
        (Placed(0, E5M2, 2, 0), Placed(0, E5M2, 2, 1), Placed(1, E4M3)),
        (m, padded_rows(m), f),
        swiglu_quantize.TILE._replace(inner=16),
        options=(size, True),
        noise=NOISE,
    )
    assert wanted.a_t is not None and plain.a_t is not None
    assert torch.equal(plain.a_t.codes.float(), wanted.a_t.codes.float())  # is not a gradient
    pairs = (gradient.codes, wanted.dx), (gradient.codes_t, wanted.dx_t), (a.codes_t, wanted.a_t)
    for actual, expected in pairs:
        assert actual is not None
        different = actual.float() != expected.codes.float()
        assert different.float().mean() < 1e-3  # exponentials differ in their last bits


def test_the_kernel_for_qkv_has_the_codes_of_the_reference(kernels: None) -> None:
    s, b, kv_heads, queries, half = 19, 2, 2, 3, 40
    parts = [
        torch.randn(s, b, n, 2 * half).bfloat16() for n in (kv_heads * queries, kv_heads, kv_heads)
    ]
    tables = rope_tables(torch.arange(s), rope_frequencies(2 * half, 100.0))
    wanted = rope_quantize.join_quantize_ref(*parts, *tables, E5M2, None, None, NOISE)
    width = kv_heads * (queries + 2) * 2 * half
    codes, codes_t = empty_codes(torch.empty(s * b, width), E5M2, E5M2, padded_rows(s * b))
    launch.launch_emit(
        rope_quantize.load_joined,
        (*parts, *tables, b, *(x.stride()[:3] for x in parts)),
        (Matrix(codes, codes_t, wanted.direct.scale),),
        (Placed(0, E5M2), Placed(0, E5M2, further=half)),
        (s * b, padded_rows(s * b), width),
        rope_quantize.tile_of(half),
        options=(queries + 2, half),
        noise=NOISE,
    )
    for actual, expected in ((codes, wanted.direct), (codes_t, wanted.transposed)):
        assert actual is not None
        assert (actual.float() != expected.codes.float()).float().mean() < 1e-3


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_the_kernels_compile_for_sm90_without_local_memory(fmt: Fp8Format) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    m, k, noise = 1024, 512, meta(4, dtype=torch.int32)
    one, saved_dtype = meta(dtype=torch.float32), torch.float8_e8m0fnu
    exponents = meta(m, 2 * k // 16, dtype=saved_dtype).view(torch.uint8)
    x, codes = meta(m, k), Matrix(*empty_codes(meta(m, k), fmt, fmt, m), one)
    source, size, tile = matrix_source(x)
    with launches_compiled(emit) as made:
        launch.launch_emit(
            *(loaders.load_matrix, source, (codes,), (Placed(0, fmt),), (m, m, k), tile),
            options=size,
            amax=one,
            noise=noise,
        )
        gradient = Matrix(*empty_codes(meta(m, 2 * k), fmt, fmt, m), one)
        a = Matrix(None, empty_codes(x, None, E4M3, m)[1], one)
        launch.launch_emit(
            swiglu_tiles.load_gradient,
            (x, meta(m, 2 * k, dtype=E4M3.dtype), exponents),
            (gradient, a),
            (Placed(0, fmt, 2, 0), Placed(0, fmt, 2, 1), Placed(1, E4M3)),
            (m, m, k),
            swiglu_quantize.TILE,
            options=(16, True),
            amax=one,
            noise=noise,
        )
        parts = [meta(m, 1, heads, 128) for heads in (4, 2, 2)]
        table = meta(m, 64, dtype=torch.float32)
        strides = [part.stride()[:3] for part in parts]
        joined = Matrix(*empty_codes(meta(m, 8 * 128), fmt, fmt, m), one)
        launch.launch_emit(
            rope_quantize.load_joined,
            (*parts, table, table, 1, *strides),
            (joined,),
            (Placed(0, fmt), Placed(0, fmt, further=64)),
            (m, m, 8 * 128),
            rope_quantize.tile_of(64),
            options=(4, 64),
            noise=noise,
        )
    assert len(made) == 3
    for kernel in made:
        assert "mul.hi.u32" in kernel.asm["ptx"] or "mul.wide.u32" in kernel.asm["ptx"]
        assert not flushes_subnormals(kernel)
        assert ".local" not in kernel.asm["ptx"]
