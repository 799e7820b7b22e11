"""Attention that saves FP8: exact forward, what is saved, gradients against exact tensors."""

import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coatlm.fp8.attention import (
    Packed,
    SavedInFp8,
    _Holder,
    attend_saving_fp8,
    dequantize_blocks,
    memory_order,
)
from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import block
from coatlm.fp8.quantize import quantize
from tests.fp8.bounds import assert_rounded

S, B, N, D = 24, 2, 4, 32
E8M0 = torch.float8_e8m0fnu
sizes = pytest.mark.parametrize("size", [16, 32])


def tensors(kv_heads: int = N) -> list[Tensor]:
    """q, k, v [S, B, heads, D] and the gradient of the output."""
    torch.manual_seed(0)
    shapes = [(S, B, heads, D) for heads in (N, kv_heads, kv_heads)] + [(S, B, N * D)]
    return [torch.randn(shape).bfloat16() for shape in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def gradients(parts: list[Tensor], size: int, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    """The gradients of q, k and v; with `size` 0 exact tensors are saved for backward."""
    *qkv, dout = parts
    qkv = [x.clone().requires_grad_() for x in qkv]
    if size:
        out, _ = attend_saving_fp8(lambda: attend(*qkv, mask), size, *qkv)
    else:
        out = attend(*qkv, mask)
    return torch.autograd.grad(out, qkv, dout)


@sizes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoded_blocks_are_codes_times_scales_exactly(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(S, B, N, D) * 10.0 ** torch.randint(-5, 5, (S, B, N, 1))
    made = quantize(x.bfloat16(), fmt=E4M3, granularity=block(1, size), scale_dtype=E8M0)
    scale = made.granularity.spread(made.scale.double(), made.shape)
    assert torch.equal(dequantize_blocks(made, dtype).double(), made.codes.double() * scale)


@sizes
@pytest.mark.parametrize("kv_heads", [N, 2, 1])
def test_the_output_is_exact_and_its_saved_form_is_within_half_a_spacing(
    size: int, kv_heads: int
) -> None:
    q, k, v, _ = tensors(kv_heads)
    q.requires_grad_()
    out, saved = attend_saving_fp8(lambda: attend(q, k, v), size, q, k, v)
    assert torch.equal(out, attend(q, k, v))
    assert saved.scale.dtype == E8M0
    assert saved.scale.numel() == out.numel() // size
    assert saved.shape == out.shape
    assert_rounded(saved, out.detach().double())


@sizes
@pytest.mark.parametrize("kv_heads", [N, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_off_by_the_rounding_of_what_is_saved(
    size: int, kv_heads: int, masked: bool
) -> None:
    # q, k, v and the output, each off by 2^-4 / sqrt(3) of its norm: errors add in squares. Logits
    # of order one turn theirs into as large a part of the probabilities.
    parts = tensors(kv_heads)
    mask = torch.ones(S, S, dtype=torch.bool).tril() if masked else None
    limit = math.sqrt(4 / 3) * 2.0**-4
    for actual, exact in zip(gradients(parts, size, mask), gradients(parts, 0, mask), strict=True):
        error = (actual.double() - exact.double()).norm() / exact.double().norm()
        assert 0 < error <= limit


@pytest.mark.parametrize("length", [S, D], ids=["", "as long as head_dim"])
def test_every_tensor_of_attention_is_saved_once_and_masks_are_left_alone(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []
    pack = SavedInFp8._pack
    monkeypatch.setattr(
        SavedInFp8, "_pack", lambda self, x: saved.append(pack(self, x)) or saved[-1]
    )
    mask = torch.zeros(B, 1, length, length).bfloat16()
    q, k, v = (torch.randn(length, B, N, D).bfloat16().requires_grad_() for _ in range(3))
    out, o = attend_saving_fp8(lambda: attend(q, k, v, mask), 16, q, k, v)
    held = [x if isinstance(x, Tensor) else x.held for x in saved]
    made = {x.codes.codes.data_ptr(): x.codes for x in held if isinstance(x, Packed)}
    assert len(made) == 4
    assert o.codes.data_ptr() in made
    exact = [x for x in held if isinstance(x, Tensor)]
    largest = max(x.untyped_storage().nbytes() for x in exact)
    assert largest <= max(mask.nbytes, 4 * B * N * length)  # the mask; a statistic per row
    assert any(x.data_ptr() == mask.data_ptr() for x in exact)
    for x in (q, k, v, out):
        assert all(tensor.data_ptr() != x.data_ptr() for tensor in exact)


def test_a_tensor_comes_back_in_the_order_of_its_memory() -> None:
    x = torch.randn(B, N, S, D).bfloat16().permute(2, 0, 1, 3).requires_grad_()
    assert [x.stride(dim) for dim in memory_order(x)] == sorted(x.stride(), reverse=True)
    with SavedInFp8(16, x):
        y = x * x
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    back = (dx / 2).detach()
    assert back.stride() == x.stride()
    dense = x.detach().permute(1, 2, 0, 3)
    made = quantize(dense, fmt=E4M3, granularity=block(1, 16), scale_dtype=E8M0)
    assert torch.equal(back.permute(1, 2, 0, 3), made.dequantize(torch.bfloat16))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(S, B, N, D),
        torch.randn(S * B, N * D).bfloat16(),
        torch.randn(B, N, S, S).bfloat16(),
        torch.randn(B, N, D, D).bfloat16(),
    ],
    ids=["fp32", "two dimensions", "probabilities", "as wide as a head"],
)
def test_what_is_not_a_tensor_of_attention_in_16_bits_is_saved_as_it_is(x: Tensor) -> None:
    x.requires_grad_()
    known = (x,) if x.dtype == torch.float32 or x.dim() == 2 else ()
    with SavedInFp8(16, *known) as saved:
        y = x * x
    assert not saved.packed
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 2 * x)


@pytest.mark.parametrize("names", ["q", "qkv", "qkvo"])
def test_attention_without_a_backward_pass_frees_what_it_saved(names: str) -> None:
    q, k, v, _ = tensors()
    q.requires_grad_()
    gc.collect()
    others = holders()  # of tests before this one, which something still refers to
    attend_saving_fp8(lambda: attend(q, k, v), 16, q, k, v, names=names)
    gc.collect()
    assert len(holders()) == len(others)


def holders() -> list[_Holder]:
    return [x for x in gc.get_objects() if type(x) is _Holder]
