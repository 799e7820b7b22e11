"""Attention within documents, windows and soft caps, against formulas in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.fp8.attention import SavedInFp8
from coatlm.kernels.document_attention import (
    BLOCK,
    _flex_attention,
    block_mask,
    cumulative_lengths,
    document_attention,
    first_keys,
    visible_keys,
)

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


@documents
@windows
def test_attention_of_the_last_queries_is_a_part_of_that_of_all(
    window: int | None, bounds: Tensor | None
) -> None:
    q, k, v = drawn()
    whole = document_attention(q, k, v, bounds, window=window)
    for end in (10, S):
        part = document_attention(q[:, 6:end], k[:, :end], v[:, :end], bounds, window=window)
        torch.testing.assert_close(part, whole[:, 6:end])


def test_cumulative_lengths_are_those_of_every_document_of_every_sample() -> None:
    whole, same = cumulative_lengths(BOUNDS, S, S)
    assert torch.equal(whole, same)
    assert whole.tolist() == [0, 1, 9, 20, 24, 37, 48, 48, 48]
    # queries 8 to 15 of keys 0 to 15: documents before have keys only, documents behind nothing
    queries, keys = cumulative_lengths(BOUNDS, 8, 16)
    assert queries.tolist() == [0, 0, 1, 8, 8, 13, 16, 16, 16]
    assert keys.tolist() == [0, 1, 9, 16, 16, 29, 32, 32, 32]
    assert queries.dtype == keys.dtype == torch.int32


LONG = torch.tensor(
    [[0, 5, 130, 420, 600, 700, 700], [0, 256, 384, 512, 640, 641, 700]], dtype=torch.int32
)


@pytest.mark.parametrize("bounds", [None, LONG], ids=["one document", "documents"])
@pytest.mark.parametrize("window", [None, 1, 100, 400])
@pytest.mark.parametrize("queries", [700, 300])
def test_the_blocks_of_flex_are_those_with_a_visible_key(
    queries: int, window: int | None, bounds: Tensor | None
) -> None:
    keys, rows = 700, -(-queries // BLOCK)
    positions = torch.arange(keys - queries, keys, dtype=torch.int32)
    mask = block_mask(first_keys(bounds, positions, window), keys)
    visible = visible_keys(bounds, queries, keys, window, positions.device)[:, 0]
    padded = torch.zeros(visible.shape[0], rows * BLOCK, 6 * BLOCK, dtype=torch.bool)
    padded[:, :queries, :keys] = visible
    blocks = padded.unflatten(1, (rows, BLOCK)).unflatten(3, (6, BLOCK)).transpose(2, 3)
    assert torch.equal(mask.to_dense()[:, 0].bool(), blocks.flatten(3).any(3))
    padded[:, queries:] = True  # queries behind the last are not computed
    blocks = padded.unflatten(1, (rows, BLOCK)).unflatten(3, (6, BLOCK)).transpose(2, 3)
    assert mask.full_kv_num_blocks is not None
    assert torch.equal(mask.full_kv_num_blocks[:, 0].long(), blocks.flatten(3).all(3).sum(2))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, 2.0)])
def test_flex_traces_to_the_definition(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as for a GPU, and run by torch's operators in place of a generated kernel."""
    traced = torch.compile(_flex_attention, dynamic=False, fullgraph=True, backend="aot_eager")
    module = "coatlm.kernels.document_attention"
    monkeypatch.setattr(f"{module}._compiled_flex_attention", lambda: traced)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, heads, D) for n, heads in ((300, N), (700, G), (700, G)))
    options: dict[str, Any] = {"window": window, "softcap": softcap, "scale": 0.5}
    actual, expected = (
        document_attention(q, k, v, LONG, **options, backend=name) for name in ("flex", "reference")
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_flash_is_called_with_packed_samples_and_refuses_a_soft_cap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its arguments on a GPU; the operator itself has no CPU kernel."""
    calls: list[tuple[Any, ...]] = []

    def recorded(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor]:
        calls.append((q, *args, options))
        return (torch.zeros_like(q),)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", recorded)
    q, k, v = drawn()
    out = document_attention(q, k, v, BOUNDS, window=5, backend="flash")
    assert out.shape == q.shape
    packed_q, packed_k, _, at_q, at_k, most_q, most_k, *_, options = calls[0]
    assert packed_q.data_ptr() == q.data_ptr() and packed_q.shape == (B * S, N, D)
    assert packed_k.data_ptr() == k.data_ptr() and packed_k.shape == (B * S, G, D)
    assert at_q.tolist() == at_k.tolist() == cumulative_lengths(BOUNDS, S, S)[0].tolist()
    assert (most_q, most_k) == (S, S)
    assert (options["window_size_left"], options["window_size_right"]) == (4, 0)
    document_attention(q, k, v, window=5, backend="flash")
    assert calls[1][0] is q and calls[1][3] is None
    with pytest.raises(ValueError, match=r"softcap=2.0: backend flash has no soft cap"):
        document_attention(q, k, v, BOUNDS, softcap=2.0, backend="flash")


def test_tensors_of_attention_within_documents_are_saved_in_fp8() -> None:
    q, k, v = (x.bfloat16().requires_grad_() for x in drawn())
    with SavedInFp8(16) as saved:
        out = document_attention(q, k, v, BOUNDS)
    assert torch.equal(out, document_attention(q, k, v, BOUNDS))
    addresses = {x.data_ptr() for x in (q, k, v, out)}
    assert saved.packed.keys() == addresses
