"""8-bit float formats: E4M3, E5M2 (Micikevicius et al. 2022, arXiv 2209.05433; OCP OFP8 1.0), E3M4.

An FP8 code has a sign bit s, E exponent bits e and M mantissa bits m; with b = 2^(E-1) - 1 it is

    (-1)^s 2^(e-b) (1 + m/2^M)      where e > 0   (normal)
    (-1)^s 2^(1-b) (m/2^M)          where e = 0   (subnormal, zero)

E4M3 has no infinity, and NaN is the code whose bits of e and m are all set; the largest number is
448 = 0x7E. E5M2 follows IEEE 754: e = 31 is Inf (m = 0) or NaN; the largest number is 57344 = 0x7B.

`cast` rounds to nearest, ties to even, and preserves the sign of zero. Values out of range are
defined here, because torch's casts above MAX differ between versions:

    input                                overflow="saturate"    overflow="propagate"
    |x| > MAX that rounds to MAX         +-MAX                  +-MAX
    |x| > MAX that rounds beyond MAX     +-MAX                  E4M3 +-NaN, E5M2 +-Inf
    +-Inf                                NaN                    E4M3 +-NaN, E5M2 +-Inf
    NaN of either sign                   NaN                    NaN

NaN is the code 0x7F, -NaN (E4M3) 0xFF, +-Inf (E5M2) 0x7C and 0xFC. Only finite values saturate: the
SAT mode of OFP8 and the hardware's conversion turn an infinity into MAX, which hides the overflow.

E3M4 has b = 15 as fp16 has, and neither NaN nor Inf; the largest number is 31 / 4096 = 0x7F. It is
meant for values that have a scale: the scale can be NaN in place of the code.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import triton.language as tl
from torch import Tensor

Overflow = Literal["saturate", "propagate"]
SCALE_BLOCK = 128  # consecutive elements of states and gradients that share a scale
BLOCK_ELEMENTS = tl.constexpr(SCALE_BLOCK)  # SCALE_BLOCK as kernels read it
ALIGNMENT = 16  # elements of rows, and bytes of pointers: for GEMMs and 16-byte accesses
SMALLEST = 2.0**-126  # smallest normal fp32
EXPONENT = 0x7F800000  # the exponent bits of fp32: all set in NaN and Inf
NAN_CODE = 0x7F  # the code that `cast` writes for any NaN
SOURCES = (torch.float32, torch.bfloat16, torch.float16)  # fp64 would be rounded twice


@dataclass(frozen=True)
class Fp8Format:
    """An FP8 format: its dtypes and constants."""

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    max: float  # largest finite value
    overflow: float  # smallest fp32 that rounds beyond `max`
    has_inf: bool

    @property
    def triton_dtype(self) -> tl.dtype:
        return tl.float8e5 if self.has_inf else tl.float8e4nv

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The spacing at 1: rounding changes a normal number by at most eps / 2 of its value."""
        return 2.0**-self.mantissa_bits

    def encode(self, x: Tensor) -> Tensor:
        """The codes of fp32 values: `cast` with overflow="saturate"."""
        return cast(x, self)

    def decode(self, codes: Tensor) -> Tensor:
        """The fp32 values of codes, exact."""
        return codes.float()


# The tie above MAX goes to the even mantissa: 464, half way from 448 to 480, becomes 448;
# 61440, half way from 57344 to 65536, overflows.
E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 4, 3, 448.0, 464.0 + 2.0**-15, has_inf=False)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 5, 2, 57344.0, 61440.0, has_inf=True)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}


def decode_table(fmt: Fp8Format) -> Tensor:
    """The value of each code by the formula above, fp32[256] on the CPU."""
    code = torch.arange(256, dtype=torch.int32)
    e = (code >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    fraction = (code & (2**fmt.mantissa_bits - 1)) * fmt.eps
    value = torch.where(
        e > 0, torch.ldexp(1.0 + fraction, e - fmt.bias), fraction * fmt.smallest_normal
    )
    infinite = torch.tensor(fmt.has_inf) & (fraction == 0)
    special = torch.where(infinite, torch.inf, torch.nan)
    value = torch.where(value > fmt.max, special, value)
    return torch.where(code < 128, value, -value)


def cast(x: Tensor, fmt: Fp8Format, *, overflow: Overflow = "saturate") -> Tensor:
    """x in FP8, in the same shape; the table above defines values out of range.

    Takes fp32, BF16 or FP16 on any device and gives the same bits everywhere. Raises ValueError for
    other types: a float64 would be rounded twice, 17 + 2^-30 first to 17 and then down to 16.
    """
    if x.dtype not in SOURCES:
        raise ValueError(f"x.dtype={x.dtype}: casts to FP8 start from {SOURCES}")
    if overflow not in get_args(Overflow):
        raise ValueError(f"overflow={overflow!r}: one of {get_args(Overflow)}")
    x32 = x.float()
    code = x32.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    if overflow == "saturate":
        special = (x32.view(torch.int32) & EXPONENT) == EXPONENT  # isfinite() reads x four times
        return code.masked_fill(special, NAN_CODE).view(fmt.dtype)
    code = code + (x32.abs() >= fmt.overflow).to(torch.uint8)  # the code after MAX
    return code.masked_fill(x32.isnan(), NAN_CODE).view(fmt.dtype)


@dataclass(frozen=True)
class ShortFloat:
    """The E3M4 format. Its codes are uint8, because no device has it; all devices have fp16.

    The fp16 bits of a code's value are the code's sign, two zeros, its other seven bits and six
    zeros, also for subnormal numbers. `encode` rounds to fp16 and then to these bits, both times to
    nearest, ties to even. Values beyond MAX saturate, and so does NaN.
    """

    name: str = "e3m4"
    dtype: torch.dtype = torch.uint8
    max: float = 31 / 4096
    smallest_normal: float = 2.0**-14
    eps: float = 2.0**-4

    def encode(self, x: Tensor) -> Tensor:
        """uint8 codes of fp32 values."""
        half = x.abs().half().view(torch.int16).int()
        code = ((half + 31 + ((half >> 6) & 1)) >> 6).clamp(max=0x7F)
        return (code | (x.signbit().int() << 7)).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The fp32 values of codes, exact."""
        code = codes.int()
        half = ((code & 0x7F) << 6) | ((code & 0x80) << 8)
        return half.to(torch.int16).view(torch.float16).float()


E3M4 = ShortFloat()
Coding = Fp8Format | ShortFloat  # a format of payloads


@dataclass(frozen=True)
class RotatedInt8:
    """8-bit integers from -127 to 127 of rotated rows (int8.py): code * scale is x H, not x.

    A row's scale, amax / 127, is not finite where the row is not; its codes are then any integers.
    """

    name: str = "int8"
    dtype: torch.dtype = torch.int8
    max: float = 127.0

    def encode(self, x: Tensor) -> Tensor:
        """Codes of fp32 values: rounded to nearest, ties to even; NaN becomes 0."""
        return x.round().clamp(-self.max, self.max).nan_to_num(0.0).to(self.dtype)


INT8 = RotatedInt8()
