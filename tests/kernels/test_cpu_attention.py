"""Attention on a CPU by documents and blocks of queries, against the definition with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coatlm.kernels import cpu_gemms
from coatlm.kernels.attention_pieces import attend_piece, piece_gradients
from coatlm.kernels.cpu_attention import additive_mask, rectangles
from coatlm.kernels.document_attention import document_attention, visible_keys

T, B, N, G, D = 700, 2, 4, 2, 16
# documents of 1 to 280 tokens and of a whole sample; bounds that are repeated are padding
LONG = torch.tensor(
    [
        [[0, 5, 130, 410, 411, 600, 700, 700, 700], [0, 256, 384, 512, 640, 641, 699, 700, 700]],
        [[0, 700, 700, 700, 700, 700, 700, 700, 700], [0, 1, 2, 3, 4, 131, 132, 260, 700]],
    ],
    dtype=torch.int32,
)
documents = pytest.mark.parametrize("bounds", [None, *LONG], ids=["none", "many", "whole"])
# one key, fewer and more than the queries of a call, about a document, more than a sample
windows = pytest.mark.parametrize("window", [None, 1, 100, 127, 128, 129, 250, 800])
# the last of them are the two chunks of a rank under context parallelism
chunks = pytest.mark.parametrize(("queries", "keys"), [(T, T), (300, T), (100, 500)])


def drawn(
    queries: int, keys: int, kv_heads: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """q, k and v [B, S or T, heads, D], and the gradient of the output."""
    torch.manual_seed(0)
    sizes = [(queries, N), (keys, kv_heads), (keys, kv_heads), (queries, N)]
    *qkv, dout = (torch.randn(B, n, heads, D).to(dtype) for n, heads in sizes)
    return [x.requires_grad_() for x in qkv], dout


def results(
    qkv: list[Tensor], dout: Tensor, *bounds: Tensor | None, **options: Any
) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    out = document_attention(*qkv, *bounds, **options)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


@documents
@windows
@chunks
def test_calls_together_have_the_mask_of_the_definition(
    queries: int, keys: int, window: int | None, bounds: Tensor | None
) -> None:
    visible = torch.zeros(B, queries, keys, dtype=torch.int32)
    for call in rectangles(bounds, B, queries, keys, window):
        size = call.queries.stop - call.queries.start, call.keys.stop - call.keys.start
        mask = additive_mask(call, window, torch.float32)
        assert (mask is None) == call.causal
        if mask is None:  # the operator's own rule: as many keys as queries
            assert size[0] == size[1]
            mask = torch.full(size, -torch.inf).triu(1)
        else:
            assert size[0] <= 128 and size[1] <= (keys if window is None else 128 + window - 1)
        assert mask.shape == size and set(mask.unique().tolist()) <= {0.0, -torch.inf}
        visible[call.samples, call.queries, call.keys] += (mask == 0).int()
    expected = visible_keys(bounds, queries, keys, window, visible.device)[:, 0]
    assert torch.equal(visible, expected.int().expand_as(visible))


@pytest.mark.parametrize(("bounds", "window"), [(None, 100), (LONG[0], None), (LONG[0], 128)])
def test_few_calls_have_a_mask(bounds: Tensor | None, window: int | None) -> None:
    calls = list(rectangles(bounds, B, T, T, window))
    masked = [call for call in calls if not call.causal]
    if bounds is None:  # 700 queries of both samples, 128 at a time
        assert len(masked) == len(calls) == 6 and calls[0].samples == slice(B)
    else:  # 6 documents of one sample and 7 of the other; of those, 3 are longer than 128
        assert len(calls) - len(masked) == 13
        assert len(masked) == (0 if window is None else 2 + 1 + 1)  # of 280, 189 and 256 tokens


@documents
@pytest.mark.parametrize("window", [None, 1, 100, 250])
@chunks
@pytest.mark.parametrize("kv_heads", [N, G, 1])
def test_output_and_gradients_are_those_of_the_definition(
    kv_heads: int, queries: int, keys: int, window: int | None, bounds: Tensor | None
) -> None:
    qkv, dout = drawn(queries, keys, kv_heads, torch.float32)
    options: dict[str, Any] = {"window": window, "scale": 0.3}
    expected = results(qkv, dout, bounds, **options, backend="reference")
    for found, wanted in zip(results(qkv, dout, bounds, **options), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # sums in fp32


class BackwardDtypes(TorchDispatchMode):
    """The dtypes of the tensors that torch's backward of attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "flash_attention_for_cpu_backward" in str(func):
            self.found |= {x.dtype for x in args[:5]}  # do, q, k, v, o
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("native", [True, False])
def test_backward_in_bf16_is_computed_in_fp32_where_the_cpu_has_no_instructions_for_bf16(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_gemms, "multiplies_bf16", lambda: native)
    qkv, dout = drawn(T, T, G, torch.bfloat16)
    with BackwardDtypes() as dtypes:
        results(qkv, dout, LONG[0])
    assert dtypes.found == {torch.bfloat16 if native else torch.float32}
    do, q, k, v = (x.detach().transpose(0, 1) for x in (dout, *qkv))
    options: dict[str, Any] = {"scale": None, "causal": True, "backend": "cpu"}
    merged = attend_piece(q, k, v, **options)
    with BackwardDtypes() as dtypes:
        found = piece_gradients(do, q, k, v, merged, **options)
    assert dtypes.found == {torch.bfloat16 if native else torch.float32}
    exact = [x.detach().float().requires_grad_() for x in qkv]
    expected = results(exact, dout.float(), None, backend="reference")[1:]
    for gradient, wanted in zip(found, expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.transpose(0, 1).float() - wanted).norm() <= 2**-7 * wanted.norm()


@documents
@pytest.mark.parametrize("window", [None, 100, 250])
@pytest.mark.parametrize("queries", [T, 300])
@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_within_its_rounding_of_the_definition_in_fp32(
    native: bool,
    queries: int,
    window: int | None,
    bounds: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_gemms, "multiplies_bf16", lambda: native)
    qkv, dout = drawn(queries, T, G, torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in qkv]
    expected = results(exact, dout.float(), bounds, window=window, backend="reference")
    for found, wanted in zip(results(qkv, dout, bounds, window=window), expected, strict=True):
        assert found.dtype == torch.bfloat16
        # probabilities, the output and its gradients are rounded to 2^-9, those of keys once
        assert (found.float() - wanted).norm() <= 2**-7 * wanted.norm()


def test_shares_of_the_gradients_of_keys_are_added_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gemms, "multiplies_bf16", lambda: True)  # else no share is rounded
    (q, k, v), dout = drawn(500, T, G, torch.bfloat16)
    sums = [torch.zeros(x.shape) for x in (k, v)]
    for first in range(0, 500, 128):  # the queries of a call, alone
        last = min(first + 128, 500)
        part = [x.detach().requires_grad_() for x in (q[:, first:last], k[:, : 200 + last])]
        values = v[:, : 200 + last].detach().requires_grad_()
        shares = results([*part, values], dout[:, first:last], None)[2:]
        for total, share in zip(sums, shares, strict=True):
            total[:, : 200 + last] += share.float()
    for found, total in zip(results([q, k, v], dout, None)[2:], sums, strict=True):
        assert torch.equal(found, total.bfloat16())


def test_a_head_may_have_any_strides() -> None:
    (q, k, v), dout = drawn(T, T, G, torch.float32)
    expected = results([q, k, v], dout, LONG[0])
    strided = [x.detach().mT.contiguous().mT.requires_grad_() for x in (q, k, v)]
    assert strided[0].stride(-1) == N and torch.equal(strided[0], q)
    for gradient in (dout, dout.mT.contiguous().mT):
        for found, wanted in zip(results(strided, gradient, LONG[0]), expected, strict=True):
            assert torch.equal(found, wanted)


class Sizes(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize(
    ("bounds", "window", "queries"),
    [(LONG[0], None, T), (LONG[0], 100, T), (None, 100, T), (LONG[1], None, 500)],
)
def test_no_tensor_has_an_element_for_each_pair_of_positions(
    bounds: Tensor | None, window: int | None, queries: int
) -> None:
    """The largest are q, and masks of 128 x T where keys precede the queries."""
    qkv, dout = drawn(queries, T, G, torch.float32)
    with Sizes() as sizes:
        results(qkv, dout, bounds, window=window)
    assert B * queries * N * D <= sizes.largest <= max(B * queries * N * D, 128 * T)
    with Sizes() as sizes:
        results(qkv, dout, bounds, window=window, backend="reference")
    assert sizes.largest >= queries * T


def test_a_soft_cap_takes_blocks_and_is_refused_by_the_backend_of_a_cpu() -> None:
    (q, k, v), _ = drawn(T, T, G, torch.float32)
    capped = document_attention(q, k, v, LONG[0], softcap=0.5)
    expected = document_attention(q, k, v, LONG[0], softcap=0.5, backend="blocks")
    assert torch.equal(capped, expected)
    with pytest.raises(ValueError, match=r"softcap=0.5: backend=cpu has no soft cap"):
        document_attention(q, k, v, LONG[0], softcap=0.5, backend="cpu")
