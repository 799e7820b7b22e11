"""Keys and values as bytes: what they decode to, again and again, and what attention saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from coatlm.fp8.attention import Packed, SavedInFp8
from coatlm.fp8.formats import E4M3
from coatlm.fp8.kv_bytes import decode, decode_to_save, encode
from coatlm.fp8.qtensor import block
from coatlm.fp8.quantize import quantize

S, B, G, D = 24, 2, 3, 32
sizes = pytest.mark.parametrize("size", [16, 32])


def keys() -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(S, B, G, D) * 10.0 ** torch.randint(-5, 5, (S, B, G, 1))).bfloat16()


@sizes
def test_the_bytes_are_the_codes_and_scales_that_attention_saves(size: int) -> None:
    x, e8m0 = keys(), torch.float8_e8m0fnu
    made = quantize(x, fmt=E4M3, granularity=block(1, size), scale_dtype=e8m0)
    sent = encode(x, size)
    assert sent.shape == (S, B, G, D + D // size) and sent.is_contiguous()
    assert torch.equal(sent[..., :D], made.codes.view(torch.uint8))
    assert torch.equal(sent[..., D:], made.scale.view(torch.uint8))
    assert torch.equal(decode(sent, D, torch.bfloat16), made.dequantize(torch.bfloat16))


@sizes
def test_tokens_and_heads_can_be_split_before_or_after_encoding(size: int) -> None:
    x = keys()
    for piece in ((slice(3, 9),), (slice(None), slice(None), slice(1, 3))):
        assert torch.equal(encode(x[piece], size), encode(x, size)[piece])


def test_every_decoded_block_is_encoded_to_the_same_values() -> None:
    """All positive codes, each with each possible largest code of its block, at two scales."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    largest = codes[codes >= 224]  # a smaller amax has a smaller scale
    blocks = torch.stack([codes.expand(len(largest), -1), largest[:, None].expand(-1, 127)], -1)
    blocks = blocks.where(blocks <= largest[:, None, None], 0.0)
    for scale in (2.0**-70, 2.0**9):
        x = (blocks * scale).bfloat16()
        assert torch.equal(decode(encode(x, 2), 2, torch.bfloat16), x)


def test_attention_saves_the_codes_that_were_received_and_prefixes_as_views_of_them() -> None:
    sent = encode(keys(), 16)
    saved, pack = [], SavedInFp8._pack

    class Watching(SavedInFp8):
        def _pack(self, x: torch.Tensor) -> object:
            saved.append(pack(self, x))
            return saved[-1]

    q = torch.randn(S, B, G, D).bfloat16().requires_grad_()
    with Watching(16):
        k = decode_to_save(sent, D, torch.bfloat16)
        for rows in (S, S // 2):
            parts = (x[:rows].permute(1, 2, 0, 3) for x in (q, k, k))
            F.scaled_dot_product_attention(*parts, is_causal=True)
    packed = [held for x in saved if isinstance(held := getattr(x, "held", None), Packed)]
    exact = [k[: p.codes.shape[0]].permute(1, 2, 0, 3) for p in packed]
    found = [p for p, x in zip(packed, exact, strict=True) if torch.equal(p.unpack(), x)]
    assert {p.codes.shape[0] for p in found} == {S, S // 2}
    assert len({p.codes.codes.data_ptr() for p in found}) == 1
    for p in found:
        rows = sent[: p.codes.shape[0]]
        assert torch.equal(p.codes.codes.view(torch.uint8), rows[..., :D])
        assert torch.equal(p.codes.scale.view(torch.uint8), rows[..., D:])
