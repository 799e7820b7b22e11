"""The gradient of the QKV projection in FP8 against autograd of the split that forward makes."""

import math

import pytest
import torch
from torch import Tensor

from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.qtensor import TENSOR
from coatlm.fp8.rope_quantize import join_quantize
from coatlm.kernels.rope import rope_frequencies, rope_tables
from tests.fp8.bounds import (
    assert_padded_transpose,
    assert_powers_of_two_that_fit,
    assert_rounded,
    bytes_of,
)

G, QUERIES, D = 2, 3, 32  # key heads, query heads of each, elements per head
both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def gradients(s: int, b: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """dq, dk, dv [S, B, heads, D]; cos, sin [S, D/2]."""
    torch.manual_seed(0)
    parts = [torch.randn(s, b, heads, D).to(dtype) for heads in (G * QUERIES, G, G)]
    return *parts, *rope_tables(torch.arange(s), rope_frequencies(D, 100.0))


def split64(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, W] by autograd through the split and the rotation as complex products."""
    s, b = dq.shape[:2]
    qkv = torch.zeros(s, b, G, QUERIES + 2, D, dtype=torch.float64, requires_grad=True)
    first, second = qkv[..., : QUERIES + 1, :].chunk(2, -1)
    turn = torch.complex(cos.double(), sin.double())[:, None, None, None]
    turned = torch.complex(first, second) * turn
    turned = torch.cat([turned.real, turned.imag], -1)
    q, k, v = turned[..., :QUERIES, :], turned[..., QUERIES, :], qkv[..., QUERIES + 1, :]
    grads = (dq.double().unflatten(2, (G, QUERIES)), dk.double(), dv.double())
    (joined,) = torch.autograd.grad((q, k, v), qkv, grads)
    return joined.flatten(2).flatten(0, 1)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("s", "b"), [(8, 2), (37, 1), (5, 3)])
def test_codes_are_the_gradient_of_autograd_rounded_once(
    s: int, b: int, dtype: torch.dtype, fmt: Fp8Format
) -> None:
    parts = gradients(s, b, dtype)
    made = join_quantize(*parts, fmt=fmt)
    exact = split64(*parts)
    assert made.direct.granularity == made.transposed.granularity == TENSOR
    assert_rounded(made.direct, exact)
    assert_powers_of_two_that_fit(made.direct.scale, exact.abs().amax(), fmt)
    assert_padded_transpose(made.transposed.codes, made.direct.codes)
    assert made.transposed.scale is made.direct.scale


def test_strided_gradients_give_the_codes_of_contiguous_ones() -> None:
    dq, dk, dv, cos, sin = gradients(9, 2)
    expected = join_quantize(dq, dk, dv, cos, sin, fmt=E5M2)
    dq = dq.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)  # heads before tokens
    dv = dv.transpose(2, 3).contiguous().transpose(2, 3)  # heads are not contiguous
    actual = join_quantize(dq, dk, dv, cos, sin, fmt=E5M2)
    assert torch.equal(bytes_of(actual.direct.codes), bytes_of(expected.direct.codes))


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_reaches_every_code(part: int, bad: float) -> None:
    parts = gradients(9, 2)
    parts[part][3, 1, 0, 7] = bad
    made = join_quantize(*parts, fmt=E5M2)
    assert made.direct.codes.float().isnan().all()
    assert made.transposed.codes.float()[:, :18].isnan().all()
    assert not bytes_of(made.transposed.codes)[:, 18:].any()
