"""Dynamic Range Expansion: optimizer states in FP8 (COAT, arXiv 2410.19313, section 4 and appendix A).

G groups of E = 128 consecutive elements; the last one may be shorter. A group stores one FP8 code an
element, one byte k16 = 16 k and one fp32 L, the log2 of its scale: 133 bytes for 128 elements.

    encode   c = cast(sign(x) 2^t),  t = k (log2|x| - L)       decode   x = sign(c) 2^(log2|c| / k + L)
    k = round(16 log2(R) / log2(max|x| / min|x|)) / 16         L = log2(max|x|) - log2(MAX) / k

so that the group's largest element becomes MAX and its smallest MAX / R. All of it is fp32, in log2:
one logarithm and one exponential an element in each direction, and no scale that could underflow.

Chosen by measurement, as the relative error of m / sqrt(v) after 200 steps of simulated AdamW whose
states are encoded at every step (beta2 0.95, 0.999; gradient scales within a group spread by e^1.5):

    states                                                   beta2 0.95    0.999
    m and v E4M3, no expansion                               52.9          155
    m and v E4M3, k of the published kernel                  0.071         0.091
    m and v E4M3 as in the paper, k >= 1                     51.7          161
    M_E4M3 with V_E5M2                                       0.070         0.092
    M_E4M3 with V_E4M3                                       0.069         0.090

- A v that becomes 0 while m does not gives an update m / eps: the numbers above 50. Hence an unsigned
  state (v) never rounds a non-zero value to zero. And R: for m all of MAX / smallest subnormal, 448 *
  512 as in the paper (13% less error than 448 * 448 / 2 of the published kernel, on moments of a
  small transformer); for v, which divides, MAX / smallest normal, where relative error is uniform.
- k is rounded to nearest. Rounded down, a group's smallest element decodes to less than it was, again
  at every step: with beta2 = 0.999 and a spread of e^0.5 the error is 0.112 instead of 0.048.
- 1 <= k < 16. Groups wider than R exist (rarely used elements): V_E5M2 has a range of 2^29.8 for them,
  V_E4M3 one of 2^14.8 and goes down to k = 1/2 instead, which is nearly the same set of values.

Zeros, and subnormal fp32 values with them, become zero and do not enter the minimum: they would make
it 0 and k meaningless. A group with a NaN or an infinity has L = NaN and decodes to NaN throughout.
All bytes zero decode to zero, so that is how a state starts.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import E4M3, E5M2, DynamicExponent, Fp8Format, cast

GROUP = 128  # elements that share k and L
K_STEPS = 16  # k16 = K_STEPS * k
SMALLEST = 2.0**-126  # smallest normal fp32
BLOCK = 32  # groups a program


@dataclass(frozen=True)
class Expansion:
    """How one moment is stored. Kernels take it whole, as a constexpr.

    Raises ValueError unless 1 <= k16_min <= k16_max <= 255.
    """

    fmt: Fp8Format | DynamicExponent
    signed: bool  # False: x >= 0, and what is not zero stays so
    k16_min: int = 16  # 16 k of groups wider than R
    k16_max: int = 255  # 16 k of groups of equal elements; 16 here and above: plain FP8, no expansion

    def __post_init__(self) -> None:
        if not 1 <= self.k16_min <= self.k16_max <= 255:
            raise ValueError(
                f"k16_min={self.k16_min}, k16_max={self.k16_max}: 1 <= k16_min <= k16_max <= 255"
            )

    @property
    def log2_max(self) -> float:
        return math.log2(self.fmt.max)

    @property
    def log2_range(self) -> float:
        """log2(R): what a group's range is expanded to."""
        smallest = self.fmt.smallest_subnormal if self.signed else self.fmt.smallest_normal
        return math.log2(self.fmt.max / smallest)


M_E4M3 = Expansion(E4M3, signed=True)
V_E5M2 = Expansion(E5M2, signed=False)
V_E4M3 = Expansion(E4M3, signed=False, k16_min=8)


class Expanded(NamedTuple):
    """A stored state of n elements in G = ceil(n / 128) groups."""

    codes: Tensor  # FP8, the shape of x
    k16: Tensor  # uint8[G]
    log2_scale: Tensor  # fp32[G], L


def expand_quantize_ref(x: Tensor, how: Expansion) -> Expanded:
    """The definition; x of any shape counts as flat."""
    n = x.numel()
    groups = -(-n // GROUP)
    x_GE = torch.nn.functional.pad(x.float().flatten(), (0, groups * GROUP - n)).view(-1, GROUP)
    a_GE = x_GE.abs()
    a_GE = torch.where(a_GE < SMALLEST, 0.0, a_GE)  # NaN stays
    high = a_GE.amax(1)
    low = torch.where(a_GE > 0, a_GE, torch.inf).amin(1)
    k16, log2_scale = _group_parameters_ref(high, low, how)
    y_GE = torch.exp2((k16 / K_STEPS)[:, None] * (a_GE.log2() - log2_scale[:, None]))
    if how.signed:
        y_GE = torch.copysign(y_GE, x_GE)
    else:
        lost = (a_GE > 0) & (y_GE < how.fmt.smallest_subnormal)
        y_GE = torch.where(lost, how.fmt.smallest_subnormal, y_GE)
    if isinstance(how.fmt, DynamicExponent):
        codes = how.fmt.nearest(y_GE)
    else:
        codes = cast(y_GE, how.fmt)
    codes = codes.flatten()[:n].view(x.shape)
    return Expanded(codes, k16.to(torch.uint8), log2_scale)


def _group_parameters_ref(high: Tensor, low: Tensor, how: Expansion) -> tuple[Tensor, Tensor]:
    """16 k and L, both fp32[G], from the largest and the smallest non-zero |x| of each group."""
    span = (high.log2() - low.log2()).clamp(min=1.0)  # below 1, k is k16_max anyway
    k16 = (K_STEPS * how.log2_range / span + 0.5).floor().clamp(how.k16_min, how.k16_max)
    k16 = torch.where(high < torch.inf, k16, how.k16_min)
    log2_scale = high.log2() - how.log2_max * (K_STEPS / k16)
    log2_scale = torch.where(high > 0, log2_scale, 0.0)
    return k16, torch.where(high < torch.inf, log2_scale, torch.nan)


def expand_dequantize_ref(state: Expanded, how: Expansion) -> Tensor:
    """The definition of decoding, with the `how` of encoding: fp32 in the shape of the codes."""
    n = state.codes.numel()
    if isinstance(how.fmt, DynamicExponent):
        value = how.fmt.table().to(state.codes.device)[state.codes.flatten().int()]
    else:
        value = state.codes.flatten().float()
    c_GE = torch.nn.functional.pad(value, (0, -n % GROUP)).view(-1, GROUP)
    inverse_k = K_STEPS / state.k16.float()
    a_GE = torch.exp2(c_GE.abs().log2() * inverse_k[:, None] + state.log2_scale[:, None])
    a_GE = torch.where(a_GE < SMALLEST, 0.0, a_GE)
    return torch.copysign(a_GE, c_GE).flatten()[:n].view(state.codes.shape)


@triton.jit
def _lg2(x):
    # One instruction with 2^-22 of absolute error; tl.log2 is a software routine of twenty.
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _ex2(x):
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _with_sign_of(a, x):
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (a.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def expand_parameters(high, low, HOW: tl.constexpr):
    """Largest |x| and smallest non-zero |x| of each group -> 16 k and L, all fp32 of one shape.

    `high` is 0 for a group of zeros (then `low` is not looked at) and NaN or Inf where x has one.
    """
    log2_high = _lg2(high)
    span = tl.maximum(log2_high - _lg2(low), 1.0)
    k16 = tl.floor(HOW.log2_range * 16.0 / span + 0.5)
    k16 = tl.minimum(tl.maximum(k16, HOW.k16_min), HOW.k16_max)
    finite = high < float("inf")
    k16 = tl.where(finite, k16, HOW.k16_min)
    log2_scale = tl.where(high > 0, log2_high - HOW.log2_max * (16.0 / k16), 0.0)
    return k16, tl.where(finite, log2_scale, float("nan"))


@triton.jit
def expand_power(x, k, log2_scale, HOW: tl.constexpr):
    """sign(x) 2^t, elementwise: what a cast turns into codes. k and L broadcast against x."""
    a = tl.abs(x)
    y = _ex2(k * (_lg2(a) - log2_scale))
    if HOW.signed:
        return _with_sign_of(y, x)
    smallest: tl.constexpr = HOW.fmt.smallest_subnormal
    return tl.where((a >= 1.1754943508222875e-38) & (y < smallest), smallest, y)


@triton.jit
def expand_value(c, inverse_k, log2_scale, HOW: tl.constexpr):
    """x of fp32 code values, elementwise; 1 / k and L broadcast against them."""
    a = _ex2(_lg2(tl.abs(c)) * inverse_k + log2_scale)
    return _with_sign_of(a, c) if HOW.signed else a


@triton.jit
def expand_group(x_GE, HOW: tl.constexpr):
    """fp32 [groups, 128] -> 16 k and L, fp32 [groups]."""
    bits = x_GE.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as integers NaN > Inf > any number
    high = tl.max(bits, 1).to(tl.float32, bitcast=True)
    # Less than the smallest normal wraps around to the top, so that the minimum passes it over.
    low = tl.min((bits - 0x00800000).to(tl.uint32, bitcast=True), 1) + 0x00800000
    return expand_parameters(high, low.to(tl.float32, bitcast=True), HOW)


@triton.jit
def expand_encode(x_GE, HOW: tl.constexpr):
    """fp32 [groups, 128] -> FP8 codes [groups, 128], k16 uint8 [groups], L fp32 [groups]."""
    k16, log2_scale = expand_group(x_GE, HOW)
    y = expand_power(x_GE, (k16 * 0.0625)[:, None], log2_scale[:, None], HOW)
    return y.to(HOW.fmt.triton_dtype), k16.to(tl.uint8), log2_scale


@triton.jit
def expand_decode(code_GE, k16_G, log2_scale_G, HOW: tl.constexpr):
    """The inverse: FP8 [groups, 128], uint8 [groups], fp32 [groups] -> fp32 [groups, 128]."""
    inverse_k = 16.0 / k16_G.to(tl.float32)
    return expand_value(code_GE.to(tl.float32), inverse_k[:, None], log2_scale_G[:, None], HOW)


@triton.jit
def _nearest(y, midpoint_ptr):
    # The number of the 255 midpoints below y, bit by bit from the highest.
    code = tl.zeros(y.shape, tl.int32)
    for bit in tl.static_range(8):
        ahead = code + (128 >> bit)
        code = tl.where(tl.load(midpoint_ptr + ahead - 1) < y, ahead, code)
    return code.to(tl.uint8)


@triton.jit
def _quantize_kernel(
    x_ptr,
    code_ptr,
    k16_ptr,
    log2_scale_ptr,
    midpoint_ptr,  # None unless DE8
    n,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    if midpoint_ptr is None:
        code, k16, log2_scale = expand_encode(x, HOW)
    else:
        k16, log2_scale = expand_group(x, HOW)
        y = expand_power(x, (k16 * 0.0625)[:, None], log2_scale[:, None], HOW)
        code = _nearest(y, midpoint_ptr)
    tl.store(code_ptr + at, code, mask=at < n)
    tl.store(k16_ptr + group, k16.to(tl.uint8), mask=group * 128 < n)
    tl.store(log2_scale_ptr + group, log2_scale, mask=group * 128 < n)


@triton.jit
def _dequantize_kernel(
    code_ptr,
    k16_ptr,
    log2_scale_ptr,
    table_ptr,  # None unless DE8
    x_ptr,
    n,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    code = tl.load(code_ptr + at, mask=at < n)
    k16 = tl.load(k16_ptr + group, mask=group * 128 < n)
    log2_scale = tl.load(log2_scale_ptr + group, mask=group * 128 < n)
    if table_ptr is None:
        x = expand_decode(code, k16, log2_scale, HOW)
    else:
        value = tl.load(table_ptr + code.to(tl.int32), mask=at < n)
        inverse_k = 16.0 / k16.to(tl.float32)
        x = expand_value(value, inverse_k[:, None], log2_scale[:, None], HOW)
    tl.store(x_ptr + at, x, mask=at < n)


def expand_quantize(x: Tensor, how: Expansion) -> Expanded:
    """x (any shape, floating) -> its state. The kernel's codes may differ from the reference's by
    one step where t is within 1e-4 of a rounding boundary: its lg2 and ex2 are approximate.
    """
    if not x.is_cuda:
        return expand_quantize_ref(x, how)
    x = x.contiguous()
    groups = triton.cdiv(x.numel(), GROUP)
    state = Expanded(
        torch.empty_like(x, dtype=how.fmt.dtype),
        torch.empty(groups, dtype=torch.uint8, device=x.device),
        torch.empty(groups, dtype=torch.float32, device=x.device),
    )
    if groups:
        de8 = how.fmt if isinstance(how.fmt, DynamicExponent) else None
        midpoints = de8.midpoints().to(x.device) if de8 else None
        grid = (triton.cdiv(groups, BLOCK),)
        _quantize_kernel[grid](x, *state, midpoints, x.numel(), how, BLOCK)
    return state


def expand_dequantize(state: Expanded, how: Expansion) -> Tensor:
    """The fp32 values of a state that was encoded with `how`, in the shape of its codes."""
    if not state.codes.is_cuda:
        return expand_dequantize_ref(state, how)
    x = torch.empty_like(state.codes, dtype=torch.float32)
    if x.numel():
        de8 = how.fmt if isinstance(how.fmt, DynamicExponent) else None
        table = de8.table().to(x.device) if de8 else None
        grid = (triton.cdiv(state.k16.numel(), BLOCK),)
        _dequantize_kernel[grid](*state, table, x, x.numel(), how, BLOCK)
    return x
