"""What rounding to FP8 may do to a tensor, for tests."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from coatlm.fp8.formats import E4M3, INT8, Fp8Format
from coatlm.fp8.qtensor import QTensor

NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FP32 = 1e-5  # relative: fp32 arithmetic of a few operations and sums of a few hundred terms


def assert_rounded(actual: QTensor, exact: Tensor, *, relative: float = 0.0) -> None:
    """Each value is within half a spacing of the exact one (fp64), as codes under its scale.

    `relative`: an error that the values had before they were rounded.
    """
    fmt, scale = actual.fmt, actual.granularity.spread(actual.scale.double(), actual.shape)
    error = (actual.dequantize().double() - exact).abs()
    allowed = (fmt.eps / 2 + relative + FP32) * exact.abs() + scale * fmt.smallest_subnormal / 2
    assert (error <= allowed * (1 + FP32)).all()


def assert_powers_of_two_that_fit(scale: Tensor, amax: Tensor, fmt: Fp8Format = E4M3) -> None:
    """amax / scale (fp64) is within the upper half of the format: nothing saturates or is wasted.

    The mantissa of MAX is 1.75, so that the last power of two below is 0.875 of MAX apart.
    """
    scale = scale.double()
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    largest = amax.double() / scale / fmt.max
    assert (largest <= 1 + FP32).all()
    assert (largest > 0.5 - FP32).all()


def numpy_codes(x: Tensor, fmt: Fp8Format) -> Tensor:
    """Bytes of fp32 values by ml_dtypes, which must be in range."""
    codes = x.numpy().astype(NUMPY[fmt.name]).view(np.uint8)
    return torch.from_numpy(codes)


def bytes_of(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def assert_padded_transpose(transposed: Tensor, direct: Tensor) -> None:
    """[K, M'] holds [M, K], and zero codes beyond M."""
    m = direct.shape[0]
    assert transposed.shape == (direct.shape[1], -(-m // 16) * 16)
    assert torch.equal(bytes_of(transposed)[:, :m], bytes_of(direct).t())
    assert not bytes_of(transposed)[:, m:].any()


def assert_rotated_codes(
    made: QTensor, wanted: QTensor, *, apart: float = 1e-3, scales: float = 1e-5
) -> None:
    """INT8 codes differ by one at most, and no more than a share `apart` of them do."""
    torch.testing.assert_close(made.scale.cpu(), wanted.scale, rtol=scales, atol=0)
    difference = (made.codes.cpu().int() - wanted.codes.int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() < apart
    assert made.fmt == wanted.fmt == INT8


def assert_same_blocks(made: QTensor | None, wanted: QTensor | None) -> None:
    """Both are None, or have the same codes and the same one-byte scales."""
    assert (made is None) is (wanted is None)
    if made is not None and wanted is not None:
        assert torch.equal(bytes_of(made.codes.cpu()), bytes_of(wanted.codes))
        assert torch.equal(bytes_of(made.scale.cpu()), bytes_of(wanted.scale))
