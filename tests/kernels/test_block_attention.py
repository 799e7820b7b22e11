"""Attention by blocks of queries, against the definition with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.fp8.attention import SavedInFp8
from coatlm.kernels.block_attention import BLOCK, spans
from coatlm.kernels.document_attention import document_attention, first_keys, visible_keys
from tests.kernels.test_cpu_attention import LONG, B, D, G, N, Sizes, T, drawn, results

documents = pytest.mark.parametrize("bounds", [None, LONG[0]], ids=["none", "many"])
softcaps = pytest.mark.parametrize("softcap", [None, 2.0])


@documents
@pytest.mark.parametrize("window", [None, 1, 100, 128, 250, 800])
@pytest.mark.parametrize(("queries", "keys"), [(T, T), (300, T), (100, 500)])
def test_spans_have_each_query_once_and_all_its_keys(
    queries: int, keys: int, window: int | None, bounds: Tensor | None
) -> None:
    visible = visible_keys(bounds, queries, keys, window, torch.device("cpu"))[:, 0]
    at = 0
    for rows, columns in spans(queries, keys, window):
        assert rows.start == at and 0 < rows.stop - rows.start <= BLOCK
        assert columns.stop - columns.start <= (keys if window is None else BLOCK + window - 1)
        assert visible[:, rows].sum() == visible[:, rows, columns].sum()
        at = rows.stop
    assert at == queries


@documents
@softcaps
@pytest.mark.parametrize("window", [None, 100, 250])
@pytest.mark.parametrize(("queries", "kv_heads"), [(T, N), (300, G), (T, 1)])
def test_output_and_gradients_are_those_of_the_definition(
    queries: int, kv_heads: int, window: int | None, softcap: float | None, bounds: Tensor | None
) -> None:
    qkv, dout = drawn(queries, T, kv_heads, torch.float32)
    options: dict[str, Any] = {"window": window, "softcap": softcap, "scale": 0.3}
    expected = results(qkv, dout, bounds, **options, backend="reference")
    found = results(qkv, dout, bounds, **options, backend="blocks")
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)  # sums in fp32


@documents
@softcaps
def test_bf16_is_the_result_in_fp32_rounded_once(
    softcap: float | None, bounds: Tensor | None
) -> None:
    """But for backward's use of the rounded output, dx = p (dp - sum do o): 2^-9 of the sum."""
    qkv, dout = drawn(300, T, G, torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in qkv]
    options: dict[str, Any] = {"softcap": softcap, "backend": "blocks"}
    out, *grads = results(qkv, dout, bounds, **options)
    expected, *wanted = results(exact, dout.float(), bounds, **options)
    assert torch.equal(out, expected.bfloat16())
    assert torch.equal(grads[2], wanted[2].bfloat16())  # of v, which needs no output
    for gradient, want in zip(grads[:2], wanted[:2], strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.float() - want).norm() <= 2**-7 * want.norm()


def test_fp64_is_the_definition_in_fp64() -> None:
    qkv, dout = drawn(300, T, G, torch.float64)
    expected = results(qkv, dout, LONG[0], backend="reference")
    for found, wanted in zip(results(qkv, dout, LONG[0], backend="blocks"), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@documents
def test_no_tensor_has_an_element_for_each_pair_of_positions(bounds: Tensor | None) -> None:
    qkv, dout = drawn(T, T, G, torch.float32)
    with Sizes() as sizes:
        results(qkv, dout, bounds, softcap=2.0)
    assert sizes.largest == B * N * BLOCK * (T // BLOCK * BLOCK)  # the last whole block's logits
    with Sizes() as sizes:
        results(qkv, dout, bounds, softcap=2.0, backend="reference")
    assert sizes.largest == B * N * T * T


def test_what_is_computed_does_not_depend_on_the_documents() -> None:
    """As a CUDA graph asks for: no bound is read, and other bounds give other results."""
    qkv, _ = drawn(T, T, G, torch.float32)
    positions = torch.arange(T, dtype=torch.int32)
    assert not torch.equal(first_keys(LONG[0], positions), first_keys(LONG[1], positions))
    inputs = [*(x.detach() for x in qkv), LONG[0].clone()]
    with torch.no_grad(), torch._subclasses.FakeTensorMode() as mode:  # no number can be read
        fake = [mode.from_tensor(x) for x in inputs]
        out = document_attention(*fake[:3], fake[3], window=100, softcap=2.0, backend="blocks")
    assert out.shape == (B, T, N, D)


def test_q_k_v_and_the_output_are_saved_in_fp8_where_that_is_asked_for() -> None:
    qkv, _ = drawn(T, T, G, torch.bfloat16)
    with SavedInFp8(D) as saved:
        out = document_attention(*qkv, LONG[0], softcap=2.0)
        saved.know(*qkv, out)
    held = [holder.held for holder in saved.holders]
    assert [type(x).__name__ for x in held] == ["Packed"] * 4
