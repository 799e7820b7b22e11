"""Attention within documents, windows and soft caps, against formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from coatlm.fp8.document_attention import document_attention

S, B, N, G, D = 24, 2, 4, 2, 16
BOUNDS = torch.tensor([[0, 1, 9, 20, 24], [0, 13, 24, 24, 24]], dtype=torch.int32)
documents = pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["one document", "documents"])
windows = pytest.mark.parametrize("window", [None, 1, 5, S])


def drawn(*, kv_heads: int = G) -> list[Tensor]:
    """q, k and v, [B, S, heads, D] in fp32, with logits that a cap of 2 bends."""
    torch.manual_seed(0)
    return [2 * torch.randn(B, S, heads, D) for heads in (N, kv_heads, kv_heads)]


def formula(
    qkv: list[Tensor], bounds: Tensor | None, window: int | None, softcap: float | None
) -> Tensor:
    """Each query by itself, in fp64."""
    q, k, v = (x.double() for x in qkv)
    out = torch.zeros_like(q)
    for b in range(B):
        starts = [0] if bounds is None else bounds[b].tolist()
        for i in range(S):
            first = max(start for start in starts if start <= i)
            first = first if window is None else max(first, i - window + 1)
            for n in range(N):
                g = n * k.shape[2] // N
                logits = k[b, first : i + 1, g] @ q[b, i, n] / math.sqrt(D)
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                out[b, i, n] = logits.softmax(0) @ v[b, first : i + 1, g]
    return out


@documents
@windows
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kv_heads", [N, G, 1])
def test_attention_is_the_formula(
    kv_heads: int, softcap: float | None, window: int | None, bounds: Tensor | None
) -> None:
    qkv = drawn(kv_heads=kv_heads)
    out = document_attention(*qkv, bounds, window=window, softcap=softcap)
    expected = formula(qkv, bounds, window, softcap)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)  # sums in fp32
