"""Dynamic Range Expansion: optimizer states in FP8 (COAT, arXiv 2410.19313, section 4, appendix A).

A state is cut into G blocks of E = 128 consecutive elements, of which the last may be shorter. A
block stores one code per element, one byte k16 = 16 k and one fp32 L, the log2 of its scale: 133
bytes for 128 elements.

    k = round(16 log2(R) / log2(max|x| / min|x|)) / 16        L = log2(max|x|) - log2(MAX) / k
    encode  c = cast(sign(x) 2^t), t = k (log2|x| - L)        decode  x = sign(c) 2^(log2|c|/k + L)

The largest element of a block becomes MAX and the smallest MAX / R. The arithmetic is fp32 in
log2: one logarithm and one exponential per element in each direction, and no scale can underflow.

R, the rounding of k and the bounds of k were chosen by the error of the update that they leave,
||u' - u|| / ||u|| with u = mhat / (sqrt(vhat) + eps), over steps 21 to 200 of AdamW on simulated
gradients, with states encoded at every step. The magnitudes of the gradients inside a block are
log-normal with sigma 0.5 (narrow) or 1.5 (wide):

    m and v                                narrow, beta2 .95   .999      wide .95   .999
    E4M3, not expanded                     .065                .078      77         119
    E4M3, R and k of the published kernel  .0395               .0469     .0710      .0910
    E4M3, R of the paper, k >= 1           .0382               .0481     79         121
    M_E4M3, V_E4M3 but for k >= 1          .0370               .0452     .162       .174
    M_E4M3, v in E5M2                      .0377               .0477     .0699      .0924
    M_E4M3, V_E4M3                         .0371               .0452     .0687      .0904

- Where v is rounded to zero and m is not, the update is m / eps, which causes the errors of 77 and
  more. An unsigned state (v) therefore never rounds a non-zero value to zero.
- R is the paper's 448 * 512 for m. In the moments of a small transformer its error is 13 % lower
  than with the published kernel's 448 * 448 / 2. The update is divided by sqrt(v), so relative
  errors of v count for all elements: its R ends at the smallest normal number, where the format
  begins to lose precision. tools/study_ranges.py compares other ends after few and many steps.
- k is rounded to nearest. If k is rounded down, the smallest element of a block decodes to less
  than it was, and shrinks again at every step: .112 instead of .048 for the paper's k at
  beta2 = .999.
- 1 <= k < 16 for m. Some blocks of v are wider than R. Compressing them with k >= 1/2 costs all of
  their elements precision, while k >= 1 would lift the smallest ones to MAX / R. E5M2 covers that
  range without compression.
- L is fp32. An fp16 L that is rounded up saves 2 bytes per block, but then the largest element is
  not exact and grows a little at every step: .077 instead of .045 at beta2 = .999.

Zeros and subnormal fp32 values become zero and are left out of min|x|, which would otherwise be
zero. A block that holds a NaN or an infinity has L = NaN, and all of it decodes to NaN. States
start as zero bytes, which decode to zeros.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import BLOCK_ELEMENTS, E4M3, SCALE_BLOCK, SMALLEST, Fp8Format

K_STEPS = 16  # k16 = K_STEPS * k
BLOCK = 32  # scale blocks per program


@dataclass(frozen=True)
class Expansion:
    """How one moment is stored. Kernels take the object as a constexpr.

    Raises ValueError unless 1 <= k16_min <= k16_max <= 255.
    """

    fmt: Fp8Format
    signed: bool  # False: x >= 0, and non-zero values are never rounded to zero
    k16_min: int = 16  # lower bound of k16, for the widest blocks
    k16_max: int = 255  # upper bound, for blocks of equal elements; 16 is plain FP8

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
        """log2(R), the range that a block is expanded to."""
        smallest = self.fmt.smallest_subnormal if self.signed else self.fmt.smallest_normal
        return math.log2(self.fmt.max / smallest)


M_E4M3 = Expansion(E4M3, signed=True)
V_E4M3 = Expansion(E4M3, signed=False, k16_min=8)


class Expanded(NamedTuple):
    """A stored state of n elements in G = ceil(n / 128) blocks."""

    codes: Tensor  # FP8, the shape of x
    k16: Tensor  # uint8[G]
    log2_scale: Tensor  # fp32[G], L


def expand_quantize_ref(x: Tensor, how: Expansion) -> Expanded:
    """The definition of `expand_quantize`. x of any shape is taken as flat."""
    n = x.numel()
    blocks = -(-n // SCALE_BLOCK)
    x_GE = torch.nn.functional.pad(x.float().flatten(), (0, blocks * SCALE_BLOCK - n)).view(
        -1, SCALE_BLOCK
    )
    a_GE = x_GE.abs()
    a_GE = torch.where(a_GE < SMALLEST, 0.0, a_GE)  # NaN stays
    high = a_GE.amax(1)
    low = torch.where(a_GE > 0, a_GE, torch.inf).amin(1)
    k16, log2_scale = _block_parameters_ref(high, low, how)
    y_GE = torch.exp2((k16 / K_STEPS)[:, None] * (a_GE.log2() - log2_scale[:, None]))
    if how.signed:
        y_GE = torch.copysign(y_GE, x_GE)
    else:
        lost = (a_GE > 0) & (y_GE < how.fmt.smallest_subnormal)
        y_GE = torch.where(lost, how.fmt.smallest_subnormal, y_GE)
    codes = how.fmt.encode(y_GE).flatten()[:n].view(x.shape)
    return Expanded(codes, k16.to(torch.uint8), log2_scale)


def _block_parameters_ref(high: Tensor, low: Tensor, how: Expansion) -> tuple[Tensor, Tensor]:
    """16 k and L, both fp32[G], from the largest and the smallest non-zero |x| of each block."""
    span = (high.log2() - low.log2()).clamp(min=0.5)  # where k16 is k16_max anyway
    k16 = (K_STEPS * how.log2_range / span + 0.5).floor().clamp(how.k16_min, how.k16_max)
    k16 = torch.where(high < torch.inf, k16, how.k16_min)
    log2_scale = high.log2() - how.log2_max * (K_STEPS / k16)
    log2_scale = torch.where(high > 0, log2_scale, 0.0)
    return k16, torch.where(high < torch.inf, log2_scale, torch.nan)


def expand_dequantize_ref(state: Expanded, how: Expansion) -> Tensor:
    """The definition of `expand_dequantize`."""
    n = state.codes.numel()
    c = how.fmt.decode(state.codes).flatten()
    c_GE = torch.nn.functional.pad(c, (0, -n % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
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
    """Largest |x| and smallest non-zero |x| of each block -> 16 k and L, all fp32 of one shape.

    `high` is 0 for a block of zeros, whose `low` has no effect, and NaN or Inf if x has one.
    """
    log2_high = _lg2(high)
    span = tl.maximum(log2_high - _lg2(low), 0.5)
    k16 = tl.floor(HOW.log2_range * 16.0 / span + 0.5)
    k16 = tl.minimum(tl.maximum(k16, HOW.k16_min), HOW.k16_max)
    finite = high < float("inf")
    k16 = tl.where(finite, k16, HOW.k16_min)
    log2_scale = tl.where(high > 0, log2_high - HOW.log2_max * (16.0 / k16), 0.0)
    return k16, tl.where(finite, log2_scale, float("nan"))


@triton.jit
def expand_power(x, k, log2_scale, HOW: tl.constexpr):
    """sign(x) 2^t of each element, to be cast to codes. k and L broadcast against x."""
    a = tl.abs(x)
    y = _ex2(k * (_lg2(a) - log2_scale))
    if HOW.signed:
        return _with_sign_of(y, x)
    smallest: tl.constexpr = HOW.fmt.smallest_subnormal
    return tl.where((a >= 1.1754943508222875e-38) & (y < smallest), smallest, y)


@triton.jit
def expand_value(c, inverse_k, log2_scale, HOW: tl.constexpr):
    """Decode fp32 values of codes. 1 / k and L broadcast against them."""
    a = _ex2(_lg2(tl.abs(c)) * inverse_k + log2_scale)
    return _with_sign_of(a, c) if HOW.signed else a


@triton.jit
def expand_block(x_GE, HOW: tl.constexpr):
    """fp32 [G, 128] -> 16 k and L, fp32 [G]."""
    bits = x_GE.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # as integers, NaN > Inf > any number
    high = tl.max(bits, 1)
    # lg2 flushes subnormals
    high = tl.where(high < 0x00800000, 0, high).to(tl.float32, bitcast=True)
    # Bits below the smallest normal wrap around to large integers, which the minimum leaves out.
    low = tl.min((bits - 0x00800000).to(tl.uint32, bitcast=True), 1) + 0x00800000
    return expand_parameters(high, low.to(tl.float32, bitcast=True), HOW)


@triton.jit
def expand_encode(x_GE, HOW: tl.constexpr):
    """fp32 [G, 128] -> FP8 codes [G, 128], k16 uint8 [G], L fp32 [G]."""
    k16, log2_scale = expand_block(x_GE, HOW)
    y = expand_power(x_GE, (k16 * 0.0625)[:, None], log2_scale[:, None], HOW)
    return y.to(HOW.fmt.triton_dtype), k16.to(tl.uint8), log2_scale


@triton.jit
def expand_decode(code_GE, k16_G, log2_scale_G, HOW: tl.constexpr):
    """FP8 codes [G, 128], k16 uint8 [G], L fp32 [G] -> fp32 [G, 128]."""
    inverse_k = 16.0 / k16_G.to(tl.float32)
    return expand_value(code_GE.to(tl.float32), inverse_k[:, None], log2_scale_G[:, None], HOW)


@triton.jit
def _quantize_kernel(
    x_ptr,
    code_ptr,
    k16_ptr,
    log2_scale_ptr,
    n,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = block[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    code, k16, log2_scale = expand_encode(x, HOW)
    tl.store(code_ptr + at, code, mask=at < n)
    tl.store(k16_ptr + block, k16, mask=block * BLOCK_ELEMENTS < n)
    tl.store(log2_scale_ptr + block, log2_scale, mask=block * BLOCK_ELEMENTS < n)


@triton.jit
def _dequantize_kernel(
    code_ptr,
    k16_ptr,
    log2_scale_ptr,
    x_ptr,
    n,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = block[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    code = tl.load(code_ptr + at, mask=at < n)
    k16 = tl.load(k16_ptr + block, mask=block * BLOCK_ELEMENTS < n)
    log2_scale = tl.load(log2_scale_ptr + block, mask=block * BLOCK_ELEMENTS < n)
    x = expand_decode(code, k16, log2_scale, HOW)
    tl.store(x_ptr + at, x, mask=at < n)


def expand_quantize(x: Tensor, how: Expansion) -> Expanded:
    """Encode x, of any shape and floating type.

    lg2 and ex2 of the kernel are approximate: its codes may differ from those of the reference by
    one step where t is within 1e-4 of a rounding boundary.
    """
    if not x.is_cuda:
        return expand_quantize_ref(x, how)
    x = x.contiguous()
    blocks = triton.cdiv(x.numel(), SCALE_BLOCK)
    state = Expanded(
        torch.empty_like(x, dtype=how.fmt.dtype),
        torch.empty(blocks, dtype=torch.uint8, device=x.device),
        torch.empty(blocks, dtype=torch.float32, device=x.device),
    )
    if blocks:
        grid = (triton.cdiv(blocks, BLOCK),)
        _quantize_kernel[grid](x, *state, x.numel(), how, BLOCK)
    return state


def expand_dequantize(state: Expanded, how: Expansion) -> Tensor:
    """Decode a state that was encoded with the same `how` to fp32, in the shape of its codes."""
    if not state.codes.is_cuda:
        return expand_dequantize_ref(state, how)
    x = torch.empty_like(state.codes, dtype=torch.float32)
    if x.numel():
        grid = (triton.cdiv(state.k16.numel(), BLOCK),)
        _dequantize_kernel[grid](*state, x, x.numel(), how, BLOCK)
    return x
