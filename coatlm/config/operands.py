"""The 8-bit format of a tensor, as data: scale granularity, and `Operand`, an operand of a GEMM.

recipes.py combines operands to recipes. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

FormatName = Literal["e4m3", "e5m2", "int8"]
Scaling = Literal["current", "delayed", "forward"]
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Granularity:
    """Scale granularity: blocks of `rows` x `columns` elements share a scale; None means all.

    granularity     elements per scale         shape of the scales of x[..., K]; rows > 1: x[M, K]
    TENSOR          the whole tensor           []
    ROW             one row                    [..., 1]
    block(1, G)     G elements of a row        [..., K / G]
    block(R, C)     R rows x C columns         [ceil(M / R), K / C]
    """

    rows: int | None
    columns: int | None

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of a tensor. Raises ValueError unless rows are whole blocks."""
        if self.columns is None:
            return () if self.rows is None else (*shape[:-1], 1)
        if not shape or shape[-1] % self.columns:
            raise ValueError(f"shape={tuple(shape)}: rows must be multiples of {self.columns} long")
        columns = shape[-1] // self.columns
        if self.rows == 1:
            return (*shape[:-1], columns)
        if self.rows is None or len(shape) != 2:
            raise ValueError(f"shape={tuple(shape)}: blocks need a matrix")
        return (-(-shape[0] // self.rows), columns)

    def spread(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        """Repeat scales so that they broadcast against a tensor of `shape`."""
        if self.columns is not None:
            scale = scale.repeat_interleave(self.columns, -1)
        if self.rows not in (None, 1):
            scale = scale.repeat_interleave(self.rows, 0)[: shape[0]]
        return scale


TENSOR = Granularity(None, None)
ROW = Granularity(1, None)


def block(rows: int, columns: int) -> Granularity:
    """Blocks of `rows` x `columns` elements: powers of two, columns > 1; else raises ValueError."""
    if columns < 2 or rows < 1 or columns & (columns - 1) or rows & (rows - 1):
        raise ValueError(f"block={rows}x{columns}: powers of two, with at least 2 columns")
    return Granularity(rows, columns)


@dataclass(frozen=True)
class Operand:
    """The FP8 format of a tensor: an operand of a GEMM, or saved for backward.

    `scaling` is the source of the scale: "current" is the amax of the tensor itself, "delayed" the
    amaxes of earlier steps, "forward" the largest scale that forward computed for the same tensor
    (of "int8" the one that E4M3 has for it); backward then quantizes with it what it has of the
    tensor: the dequantized codes of forward, the saved tensor, or the recomputed one. "delayed" and
    "forward" are for TENSOR only. With `power_of_two` a scale is the power of two at or above
    amax / MAX, else amax / MAX in fp32. `rounding`: of the codes, to the nearest or up or down at
    random (fp8/stochastic.py). "int8" is for forward's GEMMs alone: integers of rotated rows, with
    the scale amax / 127 (fp8/int8.py).
    """

    fmt: FormatName
    granularity: Granularity
    scaling: Scaling = "current"
    power_of_two: bool = True
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.scaling != "current" and self.granularity != TENSOR:
            raise ValueError(
                f"scaling={self.scaling}: one scale per tensor, not {self.granularity}"
            )
        if self.rounding != "nearest" and (self.granularity != TENSOR or not self.power_of_two):
            raise ValueError(
                f"rounding={self.rounding}: for one power-of-two scale per tensor, not for {self}"
            )
        if self.fmt == "int8" and (self.granularity, self.power_of_two) != (ROW, False):
            raise ValueError(f"fmt=int8: scales are amax / 127 per row, not {self}")

    @property
    def bytes_per_element(self) -> float:
        """Bytes per element of a tensor saved in blocks of one row, its share of a scale included.

        A scale takes 1 byte if it is a power of two, else 4.
        """
        assert self.granularity.columns is not None
        return 1 + (1 if self.power_of_two else 4) / self.granularity.columns
