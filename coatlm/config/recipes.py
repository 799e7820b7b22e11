"""The FP8 recipes of layers, as values: which operands their GEMMs take, what backward finds saved.

A layer has four linears, and a linear three GEMMs (x input, W weight, y output; T tokens):

    forward   y = x W^T         sums over the input features
    dgrad     dx = dy W         sums over the output features
    wgrad     dW = dy^T x       sums over the tokens

Hopper's FP8 tensor cores take both operands with the summed axis last, so a tensor that enters two
GEMMs is needed as it is and transposed: x and x^T, W and W^T, dy and dy^T. An `Operand` says how
one of the six is held in FP8. Its granularity counts along the rows of the operand as the GEMM
takes it: ROW for x^T [features, T] is a scale per feature.

RECIPES is the one list of recipes. A new row that combines what is there needs nothing else: the
values of `precision.recipe`, validation, the memory planner and the benchmarks read the table. The
configuration needs no torch, and neither does this module; coatlm.fp8.operand makes operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

FormatName = Literal["e4m3", "e5m2"]
Scaling = Literal["current", "delayed", "forward"]
GemmName = Literal["forward", "dgrad", "wgrad"]


@dataclass(frozen=True)
class Granularity:
    """Which elements share a scale: `rows` x `columns` of a matrix, None being all of them.

    granularity     elements of a scale        scale of x[..., K], or with rows > 1 of x[M, K]
    TENSOR          the whole tensor           []
    ROW             one row                    [..., 1]
    block(1, G)     G elements of a row        [..., K / G]
    block(R, C)     R rows x C columns         [ceil(M / R), K / C]
    """

    rows: int | None
    columns: int | None

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of a tensor. Raises ValueError where blocks do not divide it."""
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
        """The scales as a tensor that broadcasts against one of this shape."""
        if self.columns is not None:
            scale = scale.repeat_interleave(self.columns, -1)
        if self.rows not in (None, 1):
            scale = scale.repeat_interleave(self.rows, 0)[: shape[0]]
        return scale


TENSOR = Granularity(None, None)
ROW = Granularity(1, None)


def block(rows: int, columns: int) -> Granularity:
    """`rows` x `columns` elements. Raises ValueError unless both are powers of two, columns > 1."""
    if columns < 2 or rows < 1 or columns & (columns - 1) or rows & (rows - 1):
        raise ValueError(f"block={rows}x{columns}: powers of two, with at least 2 columns")
    return Granularity(rows, columns)


@dataclass(frozen=True)
class Operand:
    """How one tensor is held in FP8: as an operand of a GEMM, or saved for backward.

    `scaling`: "current" is by the amaxes of the tensor itself, "delayed" by those of earlier steps
    (TENSOR alone), "forward" by the largest of the scales that forward found for the same tensor:
    the codes of forward are then decoded and cast again, with one scale.
    With `power_of_two` a scale is the power of two at or above amax / MAX, else amax / MAX in fp32.
    """

    fmt: FormatName
    granularity: Granularity
    scaling: Scaling = "current"
    power_of_two: bool = True

    def __post_init__(self) -> None:
        if self.scaling != "current" and self.granularity != TENSOR:
            raise ValueError(
                f"scaling={self.scaling}: one scale per tensor, not {self.granularity}"
            )
