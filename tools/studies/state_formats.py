"""The storage formats that `tools/study_states.py` compares, and DE8, which only the study uses.

DE8, the 8-bit dynamic exponent (Dettmers et al. 2022, arXiv 2110.02861, section 1.3), covers
[-1, 1]: a code has a sign bit, z zero bits, a one, and f = 6 - z bits j; without the sign bit
f = 7 - z. The values are 0, 1 and +-10^-z (0.1 + 0.9 (j + 1/2) / 2^f) for z = 0..6. Here codes
number the values in ascending order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from coatlm.fp8.expand import (
    M_E4M3,
    V_E4M3,
    Expansion,
    expand_dequantize,
    expand_dequantize_ref,
    expand_quantize,
    expand_quantize_ref,
)
from coatlm.fp8.formats import E4M3, E5M2, Fp8Format


@dataclass(frozen=True)
class DynamicExponent:
    """DE8 as a value; the codes are uint8."""

    signed: bool
    max: float = 1.0
    dtype: torch.dtype = torch.uint8

    @property
    def smallest_normal(self) -> float:
        return float(self.positive()[0])

    @property
    def smallest_subnormal(self) -> float:
        return self.smallest_normal

    def positive(self) -> Tensor:
        """The positive values below 1, fp64, ascending: 127 with a sign bit, 254 without."""
        f_of_z = [(6 if self.signed else 7) - z for z in range(6, -1, -1)]
        decades = [
            10.0 ** -(6 - i) * (0.1 + 0.9 * (torch.arange(2**f, dtype=torch.float64) + 0.5) / 2**f)
            for i, f in enumerate(f_of_z)
        ]
        return torch.cat(decades)

    def table(self) -> Tensor:
        """The value of each code, fp32[256] on the CPU, ascending."""
        positive = self.positive()
        negative = -positive.flip(0) if self.signed else positive[:0]
        ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
        return torch.cat([negative, ends[:1], positive, ends[1:]]).float()

    def midpoints(self) -> Tensor:
        """The midpoints between neighboring values, fp32[255] on the CPU."""
        table = self.table()
        return (table[1:] + table[:-1]) / 2

    def encode(self, x: Tensor) -> Tensor:
        """uint8 codes of fp32 values: the number of midpoints below x, so that ties round down."""
        return torch.searchsorted(self.midpoints().to(x.device), x.contiguous()).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The fp32 values of codes, exact."""
        return self.table().to(codes.device)[codes.int()]


@dataclass(frozen=True)
class PublishedKernel(Expansion):
    """Expansion with the published kernel's range, which it uses for both moments."""

    @property
    def log2_range(self) -> float:
        return math.log2(448 * 448 / 2)


def plain(fmt: Fp8Format) -> Expansion:
    """Storage without expansion, k = 1. `signed` also for v, so that small values become zero."""
    return Expansion(fmt, signed=True, k16_max=16)


def de8(*, signed: bool) -> Fp8Format:
    """DE8, typed as an FP8 format.

    The references of `fp8.expand` accept it, because they only use the limits, `encode` and
    `decode` of a format; the kernels do not.
    """
    return cast(Fp8Format, DynamicExponent(signed=signed))


def round_trip(x: Tensor, how: Expansion) -> Tensor:
    """fp32: x, encoded in a format and decoded."""
    if isinstance(how.fmt, Fp8Format):
        return expand_dequantize(expand_quantize(x, how), how)
    return expand_dequantize_ref(expand_quantize_ref(x, how), how)


PUBLISHED = PublishedKernel(E4M3, signed=True, k16_min=1)
V_E5M2 = Expansion(E5M2, signed=False)
DE8_M, DE8_V = de8(signed=True), de8(signed=False)
M_FORMATS = {
    "E4M3": plain(E4M3),
    "E4M3 + Expand": M_E4M3,
    "E5M2": plain(E5M2),
    "E5M2 + Expand": Expansion(E5M2, signed=True),
    "DE8": plain(DE8_M),
    "DE8 + Expand": Expansion(DE8_M, signed=True),
    "published kernel": PUBLISHED,
}
V_FORMATS = {
    "E4M3": plain(E4M3),
    "E4M3 + Expand": V_E4M3,
    "E5M2": plain(E5M2),
    "E5M2 + Expand": V_E5M2,
    "DE8": plain(DE8_V),
    "DE8 + Expand": Expansion(DE8_V, signed=False, k16_min=V_E4M3.k16_min),
    "paper's rule": M_E4M3,
    "published kernel": PUBLISHED,
}
TABLE_1 = ("E4M3", "E4M3 + Expand", "E5M2", "E5M2 + Expand")
TABLE_8 = (("E4M3 + Expand", "DE8", "DE8 + Expand"), (*TABLE_1, "DE8", "DE8 + Expand"))
RULES = (  # rows without the paper's: for m it is M_E4M3
    ("E4M3 + Expand", "published kernel"),
    ("E4M3 + Expand", "paper's rule", "published kernel"),
)
