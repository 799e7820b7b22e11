"""The FP8 number system on a GPU: the bits of the CPU, tensors over 2^31 elements, no host read.

Casts and quantization are bit-equal to the reference. Expansion uses the hardware's approximate lg2
and ex2, good to 2^-22; the fp32 rounding of logarithms up to 2^5 weighs 2^-19, and up to k = 16
times that in t. A code is thus decided differently where t is within 2^-14 of a boundary; codes lie
2^-3 apart in t, so 2 * 2^-14 / 2^-3 = 1e-3 of them may be the next one. k16 <= 255 of a span of
logarithms off by 2^-18 may be the next one in 255 * 2^-18 * 2 = 2e-3 of the blocks.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.fp8.expand import (
    M_E4M3,
    V_E4M3,
    Expanded,
    Expansion,
    expand_dequantize,
    expand_dequantize_ref,
    expand_quantize,
    expand_quantize_ref,
)
from coatlm.fp8.formats import E4M3, E5M2, SCALE_BLOCK, Fp8Format, cast, decode_table
from coatlm.fp8.qtensor import ROW, TENSOR, Granularity, QTensor, block
from coatlm.fp8.quantize import _launch, quantize, quantize_ref
from coatlm.fp8.scaling import current_scale, scale_ref, tensor_scale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

OVER_INT32 = 2**31 + 2**20  # elements
E8M0 = torch.float8_e8m0fnu
GRANULARITIES = [TENSOR, ROW, block(1, 8), block(1, 16), block(1, 128), block(128, 128)]
STATES = [
    M_E4M3,
    V_E4M3,
    Expansion(E4M3, signed=True, k16_max=16),
    Expansion(E5M2, signed=False),
]
both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
every = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
states = pytest.mark.parametrize("how", STATES, ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bits = (t.cpu().reshape(-1).view(torch.uint8) for t in (actual, expected))
    assert torch.equal(*bits)


def same(actual: QTensor, expected: QTensor) -> None:
    """Codes bit for bit; scales bit for bit, any NaN for any other."""
    same_bits(actual.codes, expected.codes)
    scale, expected_scale = actual.scale.cpu().float(), expected.scale.float()
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)


def mixed(rows: int, columns: int) -> Tensor:
    """Numbers of every size, with zeros of both signs; small, large and zero blocks."""
    x = torch.randn(rows, columns) * torch.exp(3 * torch.randn(rows, columns))
    x[:, ::7] = 0.0
    x[:, 3::11] *= -0.0
    x[0] = 0.0
    x[rows // 2] *= 2.0**-110
    x[rows - 1] *= 2.0**90
    return x


def all_bf16() -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@both
@pytest.mark.parametrize("overflow", ["saturate", "propagate"])
def test_cast_has_the_bits_of_the_cpu(fmt: Fp8Format, overflow: Any) -> None:
    values = decode_table(fmt)
    values = values[values.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-math.inf, math.inf)]
    edge = torch.tensor([fmt.overflow, -fmt.overflow, math.inf, -math.inf, math.nan, 3e38])
    x = torch.cat([ties, *near, edge, all_bf16().float(), torch.randn(10**6) * fmt.max / 2])
    same_bits(cast(x.cuda(), fmt, overflow=overflow), cast(x, fmt, overflow=overflow))


@both
@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(512, 1024), (333, 384), (1, 128), (130, 4096), (208, 640)])
def test_quantize_has_the_bits_of_the_reference(
    fmt: Fp8Format, granularity: Granularity, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = mixed(*shape).to(dtype)
    x = x if dtype != torch.float16 else x.clamp(-60000, 60000)
    options: dict[str, Any] = {"fmt": fmt, "granularity": granularity}
    same(quantize(x.cuda(), **options), quantize_ref(x, **options))


@pytest.mark.parametrize("granularity", GRANULARITIES[1:], ids=str)
def test_e8m0_scales_have_the_bits_of_the_reference(granularity: Granularity) -> None:
    x = mixed(300, 512).bfloat16()
    options: dict[str, Any] = {"fmt": E4M3, "granularity": granularity, "scale_dtype": E8M0}
    same(quantize(x.cuda(), **options), quantize_ref(x, **options))


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_are_seen_as_in_the_reference(granularity: Granularity, bad: float) -> None:
    x = torch.randn(256, 512)
    x[130, 77] = bad
    same(
        quantize(x.cuda(), fmt=E4M3, granularity=granularity),
        quantize_ref(x, fmt=E4M3, granularity=granularity),
    )


@both
@pytest.mark.parametrize("exponent", [-126, -100, -63, -62, -10, 0, 7, 62, 63, 100])
def test_every_bf16_value_divided_by_a_given_scale_has_the_bits_of_the_reference(
    fmt: Fp8Format, exponent: int
) -> None:
    x = all_bf16()
    # Within one part in 2^24 of fp32's end, the quotient may or may not count as infinite.
    for mantissa in [1.0, 1.5, 2 - 2.0**-23, *(1 + torch.rand(20)).tolist()]:
        scale = torch.tensor(mantissa * 2.0**exponent)
        keep = ((x.double() / scale.double()).abs() - 2.0**128).abs() > 2.0**104
        codes = _launch(x[keep].cuda(), scale.cuda(), fmt, TENSOR)
        actual = QTensor(codes, scale.cuda(), TENSOR, fmt)
        same(actual, quantize_ref(x[keep], fmt=fmt, granularity=TENSOR, scale=scale))


def test_a_view_that_is_not_contiguous_or_not_aligned_is_quantized_as_its_copy() -> None:
    x = torch.randn(257, 1025, device="cuda").bfloat16()
    unaligned = x.flatten()[1 : 1 + 256 * 1024].view(256, 1024)
    for view in (x[1:, 1:], x[1:, 1:].t(), unaligned):
        copy = view.contiguous().cpu()
        for granularity in (TENSOR, ROW, block(1, 16)):
            options: dict[str, Any] = {"fmt": E4M3, "granularity": granularity}
            same(quantize(view, **options), quantize_ref(copy, **options))


@pytest.mark.parametrize("columns", [1, 100, 8192, 65536])
def test_rows_of_any_length_have_the_bits_of_the_reference(columns: int) -> None:
    x = torch.randn(5, columns)
    options: dict[str, Any] = {"fmt": E4M3, "granularity": ROW}
    same(quantize(x.cuda(), **options), quantize_ref(x, **options))


def test_a_row_longer_than_a_program_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 65536"):
        quantize(torch.ones(1, 65537, device="cuda"), fmt=E4M3, granularity=ROW)


@both
@pytest.mark.parametrize("n", [1, 127, 2**17, 2**24 + 3])
def test_scales_have_the_bits_of_the_reference(fmt: Fp8Format, n: int) -> None:
    x = torch.randn(n).bfloat16()
    same_bits(current_scale(x.cuda(), fmt), current_scale(x, fmt))
    same_bits(tensor_scale(x.cuda().float().abs(), fmt), tensor_scale(x.float().abs(), fmt))
    amax = torch.cat([x.float().abs(), torch.tensor([0.0, 1e-45, 3e38])])
    same_bits(scale_ref(amax.cuda(), fmt), scale_ref(amax, fmt))


def test_the_scale_of_a_tensor_with_a_nan_is_nan() -> None:
    x = mixed(100, 1024)
    x[7, 200] = math.nan
    assert current_scale(x.cuda(), E4M3).isnan()


@every
def test_quantize_over_2_31_elements_has_the_bits_of_its_last_rows(
    granularity: Granularity,
) -> None:
    x = torch.zeros(OVER_INT32 // 4096, 4096, device="cuda", dtype=torch.bfloat16)
    last = slice(x.shape[0] // 128 * 128 - 256, None)
    x[last].normal_()
    q = quantize(x, fmt=E4M3, granularity=granularity)
    expected = quantize_ref(x[last].cpu(), fmt=E4M3, granularity=granularity)
    same_bits(q.codes[last], expected.codes)
    assert not q.codes[: last.start].view(torch.uint8).any()


@every
def test_quantize_reads_nothing_back_and_runs_in_a_cuda_graph(granularity: Granularity) -> None:
    x = torch.randn(256, 512, device="cuda")
    expected = quantize(x, fmt=E4M3, granularity=granularity)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = quantize(x, fmt=E4M3, granularity=granularity)
    q.codes.view(torch.uint8).zero_()
    graph.replay()
    same(q, QTensor(expected.codes.cpu(), expected.scale.cpu(), granularity, E4M3))


def moment(how: Expansion, n: int) -> Tensor:
    """Log-normal blocks, each of its own size and spread, some with zeros or all of them zero."""
    blocks = -(-n // SCALE_BLOCK)
    x = torch.exp(torch.randn(blocks, SCALE_BLOCK) * 3 * torch.rand(blocks, 1))
    x *= 2.0 ** torch.randint(-60, 30, (blocks, 1))
    x[::5, ::9] = 0.0
    x[3::50] = 0.0
    x[4::50] = 0.25
    x[5::50, 0] = 1e-40
    x = x.flatten()[:n]
    return x * torch.randn(n).sign() if how.signed else x


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """The number of codes between two codes: codes are in the order of their magnitudes."""
    order = [t.cpu().view(torch.uint8).int() & 0x7F for t in (a, b)]
    return (order[0] - order[1]).abs()


@states
def test_expand_encodes_as_the_reference_but_for_few_neighboring_codes(how: Expansion) -> None:
    x = moment(how, 20000 * SCALE_BLOCK)
    actual, expected = expand_quantize(x.cuda(), how), expand_quantize_ref(x, how)
    k_steps = (actual.k16.cpu().int() - expected.k16.int()).abs()
    assert k_steps.max() <= 1 and (k_steps > 0).float().mean() < 2e-3
    same_k = k_steps == 0
    torch.testing.assert_close(
        actual.log2_scale.cpu()[same_k], expected.log2_scale[same_k], rtol=0, atol=2.0**-15
    )
    steps = steps_apart(actual.codes, expected.codes).view(-1, SCALE_BLOCK)[same_k]
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 1e-3


@states
def test_expand_decodes_as_the_reference(how: Expansion) -> None:
    state = expand_quantize_ref(moment(how, 1000 * SCALE_BLOCK + 17), how)
    actual = expand_dequantize(Expanded(*(part.cuda() for part in state)), how).cpu()
    expected = expand_dequantize_ref(state, how)
    # The exponent of the result, up to 2^6, is an fp32 number: 2^-18 of it, twice, and ex2.
    torch.testing.assert_close(actual, expected, rtol=2.0**-15, atol=2.0**-126)
    assert torch.equal(actual == 0, expected == 0)
    assert torch.equal(actual.signbit(), expected.signbit())


@states
@pytest.mark.parametrize("n", [1, 100, 128, 129, 1000])
def test_expand_round_trip_of_any_size_is_that_of_the_reference(how: Expansion, n: int) -> None:
    x = moment(how, n)
    actual = expand_dequantize(expand_quantize(x.cuda(), how), how).cpu()
    expected = expand_dequantize_ref(expand_quantize_ref(x, how), how)
    close = torch.isclose(actual, expected, rtol=2.0**-14, atol=0)
    assert close.float().mean() >= 1 - 2 / n  # one code of few may be the next one
    assert torch.equal(actual == 0, expected == 0)


@states
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_makes_its_block_nan_on_the_gpu_too(how: Expansion, bad: float) -> None:
    x = moment(how, 3 * SCALE_BLOCK)
    x[SCALE_BLOCK + 5] = bad
    state = expand_quantize(x.cuda(), how)
    assert state.log2_scale.isnan().tolist() == [False, True, False]
    decoded = expand_dequantize(state, how).view(3, SCALE_BLOCK)
    assert decoded[1].isnan().all() and decoded[[0, 2]].isfinite().all()


def test_bytes_of_zero_decode_to_zero_on_the_gpu_too() -> None:
    codes = torch.zeros(300, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    k16, scale = torch.zeros(3, device="cuda", dtype=torch.uint8), torch.zeros(3, device="cuda")
    assert not expand_dequantize(Expanded(codes, k16, scale), M_E4M3).any()


def test_expand_over_2_31_elements_has_the_values_of_its_last_blocks() -> None:
    x = torch.zeros(OVER_INT32, device="cuda")
    x[-1000:].normal_()
    state = expand_quantize(x, M_E4M3)
    tail = x[-1024:].cpu()
    decoded = expand_dequantize(state, M_E4M3)
    expected = expand_dequantize_ref(expand_quantize_ref(tail, M_E4M3), M_E4M3)
    assert torch.isclose(decoded[-1024:].cpu(), expected, rtol=2.0**-14).float().mean() > 0.99
    assert not decoded[:-1024].any()


@states
def test_blocks_of_denormals_are_zeros_as_in_the_reference(how: Expansion) -> None:
    """Moments of a weight that is no longer used decay through fp32's denormals to zero."""
    x = torch.zeros(4, SCALE_BLOCK)
    x[0] = 1e-39  # nothing but denormals
    x[1, :5] = 3e-45
    x[2] = torch.logspace(-44, -30, SCALE_BLOCK)  # some of them
    x[3] = 1.1754943508222875e-38  # the smallest normal
    state = expand_quantize(x.cuda(), how)
    decoded = expand_dequantize(state, how).cpu().view_as(x)
    expected = expand_dequantize_ref(expand_quantize_ref(x, how), how)
    assert not decoded[:2].any()
    torch.testing.assert_close(decoded, expected, rtol=0.13, atol=0)  # a code of E5M2 at most
