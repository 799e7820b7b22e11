"""Kernels of norms, SwiGLU, RoPE and products of vectors on a GPU: against references, beyond 2^31.

Tolerance of a kernel against its fp32 reference: half a unit in the last place for the one rounding
of the result (EPS / 2 relative), and for the fp32 arithmetic, whose approximate exponentials and
divisions are good to a few 2^-23, 1e-5 of the largest value.
"""

from typing import get_args

import pytest
import torch
from torch import Tensor

from coatlm.kernels import activation, norm
from coatlm.kernels import rope as rope_module
from coatlm.kernels.activation import Activation, swiglu, swiglu_backward_ref, swiglu_ref
from coatlm.kernels.indexed_rows import (
    add_gathered_,
    add_gathered_ref,
    add_scattered_,
    add_scattered_ref,
)
from coatlm.kernels.norm import rms_norm, rms_norm_backward_ref, rms_norm_ref
from coatlm.kernels.outer_product import add_outer_, add_outer_ref
from coatlm.kernels.rope import rope, rope_frequencies, rope_ref, rope_tables, split_qkv_rope

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float32]
OVER_INT32 = 2**31 + 2**20  # elements


def close(actual: Tensor, expected: Tensor) -> None:
    """`expected` is fp32 and not rounded; see the module's docstring for the tolerance."""
    rtol = torch.finfo(actual.dtype).eps / 2 * 1.01
    atol = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(actual.float(), expected, rtol=rtol, atol=atol)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def tables(tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    inv_freq = rope_frequencies(head_dim, 500000.0).cuda()
    return rope_tables(torch.arange(tokens, device="cuda"), inv_freq)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(300, 4, 4096), (300, 4, 3072), (40, 16384), (50, 4, 32, 128), (999, 64), (7, 200)]
)
def test_rms_norm_equals_its_reference(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x, dy = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    weight = (1 + 0.1 * randn(shape[-1])).to(weight_dtype)
    y, rstd = rms_norm_ref(x.float(), weight.float(), EPS)
    dx, dweight = rms_norm_backward_ref(dy.float(), x.float(), weight.float(), rstd)
    actual = rms_norm(x.requires_grad_(), weight.requires_grad_(), EPS)
    close(actual, y)
    actual.backward(dy)
    close(x.grad, dx)
    close(weight.grad, dweight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [8192, 11008, 704, 333])
@pytest.mark.parametrize("kind", get_args(Activation))
def test_swiglu_and_geglu_equal_their_references(
    kind: Activation, half: int, dtype: torch.dtype
) -> None:
    x, dy = 3 * randn(300, 4, 2 * half), randn(300, 4, half, dtype=dtype)
    x[0, 0, :half] = 30.0  # sigmoid of it is 1, of the next 0
    x[0, 1, :half] = -30.0
    x = x.to(dtype).requires_grad_()
    y = swiglu(x, kind)
    y.backward(dy)
    close(y, swiglu_ref(x.detach().float(), kind))
    close(x.grad, swiglu_backward_ref(dy.float(), x.detach().float(), kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "queries"), [(128, 8, 4), (64, 12, 1), (80, 3, 5)]
)
def test_split_qkv_rope_equals_its_reference(
    head_dim: int, kv_heads: int, queries: int, dtype: torch.dtype
) -> None:
    cos, sin = tables(257, head_dim)
    qkv = randn(257, 3, kv_heads, (queries + 2) * head_dim, dtype=dtype)
    expected = rope_module.split_qkv_rope_ref(qkv.float(), cos, sin, queries, head_dim)
    qkv.requires_grad_()
    actual = split_qkv_rope(qkv, cos, sin, queries_per_kv_head=queries, head_dim=head_dim)
    for part, definition in zip(actual, expected, strict=True):
        assert part.is_contiguous()
        close(part, definition)
    # gradients as attention returns them: [b, n, s, d] in memory, or without contiguous heads
    grads = [randn(3, x.shape[2], 257, head_dim, dtype=dtype).permute(2, 0, 1, 3) for x in actual]
    grads[2] = grads[2].transpose(2, 3).contiguous().transpose(2, 3)
    torch.autograd.backward(actual, grads)
    close(qkv.grad, rope_module.join_qkv_rope_ref(*(g.float() for g in grads), cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_of_a_strided_tensor_and_its_backward_equal_the_reference(dtype: torch.dtype) -> None:
    cos, sin = tables(257, 128)
    x = randn(3, 12, 257, 128, dtype=dtype).permute(2, 0, 1, 3).requires_grad_()
    dy = randn(257, 3, 12, 128, dtype=dtype)
    y = rope(x, cos, sin)
    (dx,) = torch.autograd.grad(y, x, dy)
    close(y, rope_ref(x.detach().float(), cos, sin))
    close(dx, rope_ref(dy.float(), cos, -sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (300, 896), (257, 4100)])
def test_the_product_of_two_vectors_is_added_as_in_the_reference(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrix, column, row = randn(*shape, dtype=dtype), randn(shape[0]), randn(shape[1]).bfloat16()
    expected = add_outer_ref(matrix.clone().float(), column, row)
    close(add_outer_(matrix, column, row), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "entries", "columns"), [(1, 5, 16), (700, 3, 4100), (9000, 40000, 512)]
)
def test_rows_are_added_by_index_as_in_the_references(
    tokens: int, entries: int, columns: int, dtype: torch.dtype
) -> None:
    of_tokens, of_entries = randn(tokens, columns), randn(entries, columns)
    index, factor = torch.randint(-1, entries, (tokens,), device="cuda"), randn(tokens)
    index[torch.rand(tokens, device="cuda") < 0.5] = entries // 2  # of half of the tokens
    rows = of_entries.bfloat16()
    expected = add_gathered_ref(of_tokens.clone(), factor, rows, index)
    close(add_gathered_(of_tokens.clone(), factor, rows, index), expected)
    into, rows = of_entries.to(dtype), of_tokens.bfloat16()
    expected = add_scattered_ref(into.clone().float(), factor, rows, index)
    made = add_scattered_(into.clone(), factor, rows, index)
    close(made, expected)
    for _ in range(3):
        assert torch.equal(add_scattered_(into.clone(), factor, rows, index), made)


def test_kernels_index_beyond_31_bits() -> None:
    """The last rows of tensors of over 2^31 elements equal the reference of those rows."""
    hidden, last = 4096, slice(-3, None)
    rows = OVER_INT32 // hidden
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    x[last] = randn(3, hidden, dtype=torch.bfloat16)
    weight = torch.ones(hidden, device="cuda")
    matrix, column = x.clone(), randn(rows)
    expected = add_outer_ref(x[last].float(), column[last], weight)
    close(add_outer_(matrix, column, weight)[last], expected)
    index = torch.full((rows,), -1, device="cuda")
    index[last] = torch.arange(rows - 3, rows, device="cuda").flip(0)
    one = x[last].float() + column[last, None] * x[last].flip(0).float()
    close(add_gathered_(matrix.copy_(x), column, x, index)[last], one)
    other = x[last].float() + (column[last, None] * x[last].float()).flip(0)
    close(add_scattered_(matrix.copy_(x), column, x, index)[last], other)
    del matrix
    y, rstd = norm._launch_forward(x, weight, EPS)
    close(y[last], rms_norm_ref(x[last].float(), weight, EPS)[0])
    dy = y.roll(1, -1)  # not y: what is proportional to x has no gradient but rounding
    dx, _ = norm._launch_backward(dy, x, weight, rstd)
    close(dx[last], rms_norm_backward_ref(dy[last].float(), x[last].float(), weight, rstd[last])[0])
    del dy
    close(activation._launch_forward(x)[last], swiglu_ref(x[last].float()))
    dx = activation._launch_backward(y[:, : hidden // 2], x)
    close(dx[last], swiglu_backward_ref(y[last, : hidden // 2].float(), x[last].float()))
    del y, dx
    qkv = x.view(rows, 1, 8, 512)
    cos, sin = tables(rows, 128)
    q, k, v = split_qkv_rope(qkv, cos, sin, queries_per_kv_head=2, head_dim=128)
    expected = rope_module.split_qkv_rope_ref(qkv[last].float(), cos[last], sin[last], 2, 128)
    for part, definition in zip((q, k, v), expected, strict=True):
        close(part[last], definition)
    joined = rope_module._join_on_gpu(q, k, v, cos, sin)[last].float()
    # two roundings of BF16 and a rotation between them, on a pair of elements
    torch.testing.assert_close(joined, qkv[last].float(), rtol=0, atol=2**-7 * 4)
