"""A quantized tensor: x = codes * scale, with one scale per block of elements.

`Granularity` says which elements share a scale (coatlm/config/recipes.py): the whole tensor, a row,
1 x G elements of a row, or blocks of rows x columns. Blocks of a saved activation run along its
last axis and never across tokens (COAT section 5.1, figure 4a).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coatlm.config.operands import ROW, TENSOR, Granularity, block
from coatlm.fp8.formats import Fp8Format, RotatedInt8
from coatlm.fp8.rotation import rotate

__all__ = ["ROW", "TENSOR", "Granularity", "QTensor", "block"]


@dataclass(frozen=True, eq=False)
class QTensor:
    """Codes with their scales."""

    codes: Tensor  # fmt.dtype, [..., K], contiguous
    scale: Tensor  # fp32 or float8_e8m0fnu, granularity.scale_shape(codes.shape)
    granularity: Granularity
    fmt: Fp8Format | RotatedInt8

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return self.codes.nbytes + self.scale.nbytes

    def rows(self, piece: slice) -> "QTensor":
        """Consecutive rows of a matrix, a view. They begin where a block of rows begins."""
        size, scale = self.granularity.rows, self.scale
        if size is not None:
            assert piece.start % size == 0
            scale = scale[piece.start // size : -(-piece.stop // size)]
        return QTensor(self.codes[piece], scale, self.granularity, self.fmt)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """codes * scale, multiplied in fp32 and rounded once to `dtype`; rotated back for INT8."""
        values = self.codes.float() * self.granularity.spread(self.scale.float(), self.shape)
        return (rotate(values) if isinstance(self.fmt, RotatedInt8) else values).to(dtype)
