"""Scales for FP8: x / S fills the format when S = amax / MAX, amax = max|x| (COAT section 3).

    current     S from the amax of this tensor
    two stages  the same S (Group Scaling, COAT section 5.2): the kernel that computes x also writes
                the amax of each 1 x G elements, and stage 2 reads only these
    delayed     S from the amaxes of earlier steps, known before x is: delayed.py

The rules of a scale, wherever it is computed: S = 2^margin amax / MAX, rounded once; 1 where amax
= 0; not below 2^-126, the smallest normal; not finite where x has a NaN or an infinity. An E8M0
scale is the next power of two in one byte (OCP MX), 0xFF where it is not finite.

The activation flow also scales by powers of two, in fp32 where a GEMM reads them. Such a scale
changes no bit of a mantissa: x / S = x * (1 / S) is exact, codes * S is exact in BF16, and a number
that stays normal has the same relative error as under any other scale.

No function here waits for the device. The plain float maxima of GPUs and of NCCL drop a NaN if the
other operand is a number. Kernels therefore use max.NaN (`larger`); atomics and all-reduces compare
the bits of |x| as integers, where NaN > Inf > every number.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import SMALLEST, Coding, Fp8Format
from coatlm.fp8.stochastic import stochastic_ref
from coatlm.kernels.norm import processors

BLOCK, WARPS = 2048, 4  # elements per iteration of `_amax_kernel`: 32 bytes of BF16 per thread
PROGRAMS_PER_SM = 16  # of `_amax_kernel`
STAGE_TWO = 16384  # most amaxes that one program reduces


def scale_ref(
    amax: Tensor, fmt: Coding, *, margin: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The definition: the scale of every amax, same shape, fp32 or float8_e8m0fnu.

    Raises ValueError for other dtypes.
    """
    # A tensor as divisor: by a Python number, torch multiplies with its reciprocal on GPUs.
    scale = amax.float() / torch.full_like(amax, fmt.max * 2.0**-margin, dtype=torch.float32)
    scale = torch.where(scale < SMALLEST, SMALLEST, scale)
    scale = torch.where(amax == 0, 1.0, scale)
    if dtype == torch.float32:
        return scale
    if dtype == torch.float8_e8m0fnu:
        exponent = (scale.abs().view(torch.int32).long() + 0x7FFFFF) >> 23
        return exponent.clamp(max=255).to(torch.uint8).view(dtype)
    raise ValueError(f"dtype={dtype}: scales are torch.float32 or torch.float8_e8m0fnu")


def power_of_two_ref(amax: Tensor, fmt: Fp8Format, *, margin: int = 0) -> Tensor:
    """The definition: `scale_ref` in fp32, rounded up to a power of two; Inf if not finite."""
    scale = scale_ref(amax, fmt, margin=margin, dtype=torch.float8_e8m0fnu).float()
    return torch.where(scale.isnan(), torch.inf, scale)


def scaled_codes_ref(
    x: Tensor,
    scale: Tensor,
    fmt: Fp8Format,
    *,
    noise: Tensor | None = None,
    halves: int | None = None,
) -> Tensor:
    """The definition: codes of x / S, both fp32; S broadcasts. NaN where S is not finite.

    `noise` and `halves`: for stochastic rounding of x[M, K] (stochastic.py).
    """
    quotient = x / torch.where(scale.isfinite(), scale, torch.nan)
    if noise is not None:
        quotient = stochastic_ref(quotient, noise, fmt, halves=halves)
    return fmt.encode(quotient)


def raise_amax_ref(amax: Tensor | None, x: Tensor) -> None:
    """The definition: raise amax, fp32 [], to the largest |x|; NaN where either is NaN.

    Does nothing where `amax` is None.
    """
    if amax is not None:
        amax.copy_(torch.maximum(amax, x.abs().amax().float()))


def top_exponent(fmt: Fp8Format) -> int:
    """The n in MAX = 1.75 * 2^n: 8 for E4M3, 15 for E5M2."""
    return round(math.log2(fmt.max / 1.75))


def block_amax_ref(x: Tensor, size: int) -> Tensor:
    """The definition: fp32[..., K / size], the largest |x| of each `size` elements of a row."""
    return x.float().abs().unflatten(-1, (-1, size)).amax(-1)


@triton.jit
def larger(a, b):
    """The maximum of two fp32 tiles; NaN where either is. One instruction: max.NaN.f32."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_of(x, AXIS: tl.constexpr):
    """Largest |x| along an axis of an fp32 tile; NaN if one of them is."""
    return tl.reduce(tl.abs(x), AXIS, larger)


@triton.jit
def scale_of(amax, TOP: tl.constexpr, E8M0: tl.constexpr):
    """`scale_ref` in fp32; TOP = MAX. With E8M0: `power_of_two_ref`."""
    scale = tl.div_rn(amax, TOP)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    scale = tl.where(amax == 0, 1.0, scale)
    if E8M0:
        exponent = (scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23
        scale = (tl.minimum(exponent, 255) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def exponent_of(amax, TOP: tl.constexpr):
    """Biased exponent of the power-of-two scale for fp32 amax, int32; 255 where it is not finite.

    Both formats end at 1.75 * 2^TOP (TOP: see `top_exponent`), so the scale's exponent is that of
    the next 1.75 * 2^n above amax, less TOP.
    """
    bits = amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - TOP, 1)
    exponent = tl.where(bits == 0, 127, exponent)
    return tl.where(bits >= 0x7F800000, 255, exponent)


@triton.jit
def power_of_two(exponent):
    """fp32 from a biased exponent; 255 gives Inf."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power_of_two(exponent):
    """1 / `power_of_two`; NaN for 255, so that all codes of the block become NaN."""
    bits = tl.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, n, BLOCK: tl.constexpr):
    """One amax per program, of every `num_programs`-th BLOCK of elements."""
    program, at = tl.program_id(0), tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(program.to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        x = tl.load(x_ptr + first + at, mask=at < n - first, other=0.0)
        largest = larger(largest, tl.abs(x.to(tl.float32)))
    tl.store(amax_ptr + program, amax_of(largest, 0))


@triton.jit
def _tensor_scale_kernel(
    amax_ptr, scale_ptr, n, TOP: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    amax = amax_of(tl.load(amax_ptr + at, mask=at < n, other=0.0), 0)
    tl.store(scale_ptr, scale_of(amax, TOP, POWER))


@triton.jit
def _scales_kernel(
    amax_ptr, scale_ptr, n, TOP: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < n, other=0.0)
    tl.store(scale_ptr + at, scale_of(amax, TOP, POWER), mask=at < n)


def _few_amaxes(x: Tensor) -> Tensor:
    """fp32[programs]: amaxes that together cover a CUDA tensor."""
    programs = min(triton.cdiv(x.numel(), BLOCK), PROGRAMS_PER_SM * processors(x.device))
    amax = torch.empty(programs, dtype=torch.float32, device=x.device)
    _amax_kernel[(programs,)](x, amax, x.numel(), BLOCK, num_warps=WARPS)
    return amax


def tensor_scale(amax: Tensor, fmt: Fp8Format, *, power_of_two: bool = False) -> Tensor:
    """Stage 2: the scale [] of the tensor whose amaxes (fp32, any shape, not empty) these are."""
    if not amax.is_cuda:
        return (power_of_two_ref if power_of_two else scale_ref)(amax.amax(), fmt)
    amax = amax.contiguous()
    if amax.numel() > STAGE_TWO:
        amax = _few_amaxes(amax)
    scale = torch.empty((), dtype=torch.float32, device=amax.device)
    block = triton.next_power_of_2(amax.numel())
    _tensor_scale_kernel[(1,)](amax, scale, amax.numel(), fmt.max, power_of_two, block, num_warps=8)
    return scale


def scales_of(amax: Tensor, fmt: Fp8Format, *, power_of_two: bool = False) -> Tensor:
    """The scale of every amax (fp32 [n]), fp32 [n]."""
    if not amax.is_cuda:
        return (power_of_two_ref if power_of_two else scale_ref)(amax, fmt)
    scale, n = torch.empty_like(amax), amax.numel()
    _scales_kernel[(triton.cdiv(n, BLOCK),)](amax, scale, n, fmt.max, power_of_two, BLOCK)
    return scale


def current_scale(x: Tensor, fmt: Fp8Format, *, power_of_two: bool = False) -> Tensor:
    """The scale [] of x from its own amax: both stages, one read of x."""
    if not x.numel():
        return torch.ones((), device=x.device)
    amax = _few_amaxes(x.contiguous()) if x.is_cuda else x.float().abs()
    return tensor_scale(amax, fmt, power_of_two=power_of_two)
