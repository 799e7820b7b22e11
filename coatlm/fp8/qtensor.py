"""A quantized tensor: x = codes * scale, with one scale for each granule of elements.

    granularity     granule                      scale of x[..., K] or, for BLOCK, of x[M, K]
    TENSOR          the whole tensor             []
    ROW             one row                      [..., 1]
    group(G)        G elements of a row          [..., K / G]
    BLOCK           128 rows x 128 columns       [ceil(M / 128), K / 128]

Groups run along the last axis and never across tokens (COAT section 5.1, figure 4a).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coatlm.fp8.formats import Fp8Format


@dataclass(frozen=True)
class Granularity:
    """Which elements share a scale: `rows` x `columns` of x as a matrix, None being all of them."""

    rows: int | None
    columns: int | None

    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Shape of the scales of a tensor of this shape. Raises ValueError if it has none."""
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

    def spread(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """The scales as a tensor that broadcasts against one of this shape."""
        if self.columns is not None:
            scale = scale.repeat_interleave(self.columns, -1)
        if self.rows not in (None, 1):
            scale = scale.repeat_interleave(self.rows, 0)[: shape[0]]
        return scale


TENSOR = Granularity(None, None)
ROW = Granularity(1, None)
BLOCK = Granularity(128, 128)


def group(size: int) -> Granularity:
    """`size` consecutive elements of a row. Raises ValueError unless it is a power of two > 1."""
    if size < 2 or size & (size - 1):
        raise ValueError(f"size={size}: a group is a power of two of elements, at least 2")
    return Granularity(1, size)


@dataclass(frozen=True, eq=False)
class QTensor:
    """Codes with their scales, and, if it was asked for, the transposed codes as a second copy."""

    codes: Tensor  # fmt.dtype, [..., K], contiguous
    scale: Tensor  # fp32 or float8_e8m0fnu, granularity.scale_shape(codes.shape)
    granularity: Granularity
    fmt: Fp8Format
    codes_t: Tensor | None = None  # fmt.dtype, [K, M], contiguous

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        parts = (self.codes, self.scale, self.codes_t)
        return sum(part.nbytes for part in parts if part is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """codes * scale, multiplied in fp32 and rounded once to `dtype`."""
        scale = self.granularity.spread(self.scale.float(), self.shape)
        return (self.codes.float() * scale).to(dtype)
