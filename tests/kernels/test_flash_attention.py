"""FlashAttention-2 with repeatable gradients, with stand-ins on a CPU for torch's two operators.

tests/gpu/test_attention_backends.py has the operators themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import deterministic

from coatlm.fp8.attention import Packed, SavedInFp8, attend_saving_fp8
from coatlm.kernels.flash_attention import flash_attention

B, S, N, G, D = 2, 48, 4, 2, 16


class Operators:
    """torch's operators of FlashAttention-2 in PyTorch; `modes` has the modes they were run in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modes: list[tuple[str, int, bool]] = []
        self.broken = False
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", self.forward)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", self.backward)

    def note(self, what: str) -> None:
        mode = torch.get_deterministic_debug_mode()
        self.modes.append((what, mode, deterministic.fill_uninitialized_memory))

    def forward(self, *args: Any, scale: float | None) -> tuple[Tensor, ...]:
        q, k, v, no_queries, no_keys, *rest = args
        assert (no_queries, no_keys, rest) == (None, None, [S, S, 0.0, True, False])
        self.note("forward")
        scale = D**-0.5 if scale is None else scale
        logits = torch.einsum("bsgnd,btgd->bgnst", q.unflatten(2, (G, -1)).float(), k.float())
        above = torch.ones(S, S, dtype=torch.bool).triu(1)
        lse = (scale * logits).masked_fill(above, -torch.inf).logsumexp(-1).flatten(1, 2)
        seed, offset = torch.tensor([1, 2]), torch.tensor(3)
        return reference(q, k, v, scale).detach(), lse, seed, offset, torch.empty(0)

    def backward(self, *args: Any, scale: float | None) -> tuple[Tensor, ...]:
        do, q, k, v, o, lse, no_queries, no_keys, *rest, seed, offset = args
        assert (no_queries, no_keys, rest) == (None, None, [S, S, 0.0, True])
        assert o.shape == do.shape and lse.shape == (B, N, S)
        assert seed.tolist() == [1, 2] and offset.item() == 3
        self.note("backward")
        if self.broken:
            raise RuntimeError("no kernel")
        with torch.enable_grad():
            qkv = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(reference(*qkv, scale), qkv, do)


def reference(q_BSND: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSGD, v_BSGD))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Operators:
    return Operators(monkeypatch)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    *qkv, do = (torch.randn(B, S, heads, D, dtype=dtype) for heads in (N, G, G, N))
    return [x.requires_grad_() for x in qkv], do


@pytest.mark.parametrize("scale", [None, 0.3])
def test_output_and_gradients_are_those_of_causal_attention(
    operators: Operators, scale: float | None
) -> None:
    qkv, do = inputs()
    q, k, v = qkv
    out, expected = flash_attention(q, k, v, scale=scale), reference(q, k, v, scale)
    assert torch.equal(out, expected)
    found = torch.autograd.grad(out, qkv, do)
    assert all(map(torch.equal, found, torch.autograd.grad(expected, qkv, do)))


@pytest.mark.parametrize("before", [0, 1])
def test_only_backward_runs_in_torch_s_deterministic_mode_which_fills_no_memory(
    operators: Operators, before: int
) -> None:
    qkv, do = inputs()
    torch.set_deterministic_debug_mode(before)
    try:
        torch.autograd.grad(flash_attention(*qkv), qkv, do)
        after = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    finally:
        torch.set_deterministic_debug_mode(0)
    assert operators.modes == [("forward", before, True), ("backward", 2, False)]
    assert after == (before, True)


def test_the_mode_is_restored_after_an_error(operators: Operators) -> None:
    qkv, do = inputs()
    operators.broken = True
    with pytest.raises(RuntimeError, match="no kernel"):
        torch.autograd.grad(flash_attention(*qkv), qkv, do)
    assert (torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory) == (
        0,
        True,
    )


def test_q_k_v_and_the_output_are_saved_in_fp8_once_each(
    operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, do = inputs(torch.bfloat16)
    saved: list[Any] = []
    pack = SavedInFp8._pack
    monkeypatch.setattr(
        SavedInFp8, "_pack", lambda self, x: saved.append(pack(self, x)) or saved[-1]
    )
    out, codes = attend_saving_fp8(lambda: flash_attention(*qkv).flatten(2), 16, *qkv)
    held = [x if isinstance(x, Tensor) else x.held for x in saved]
    packed = [x for x in held if isinstance(x, Packed)]
    assert len({x.codes.codes.data_ptr() for x in packed}) == len(packed) == 4
    assert codes.codes.data_ptr() in {x.codes.codes.data_ptr() for x in packed}
    assert [x.dtype for x in held if isinstance(x, Tensor)] == [torch.float32] + 2 * [torch.int64]
    exact = torch.autograd.grad(flash_attention(*qkv).flatten(2), qkv, do.flatten(2))
    for actual, wanted in zip(torch.autograd.grad(out, qkv, do.flatten(2)), exact, strict=True):
        # q, k, v and the output are each off by 2^-4 / sqrt(3) at most; errors add in squares
        error = (actual.float() - wanted.float()).norm() / wanted.float().norm()
        assert 0 < error <= (4 / 3) ** 0.5 * 2.0**-4
