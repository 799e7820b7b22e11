"""Backends of attention within documents against the definition on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.config import make_config
from coatlm.fp8.attention import Packed, SavedInFp8, attend_saving_fp8
from coatlm.kernels.document_attention import FOR_GPUS, default_backend, document_attention
from coatlm.model.rotary import RotaryTables, rotary_tables
from tests.model.test_memory import tensors_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
B, T, N = 2, 700, 4
BOUNDS = [[0, 5, 130, 420, 600, 700, 700], [0, 256, 384, 512, 640, 641, 700]]
# both round to BF16 (2^-9), in other places: probabilities, outputs, and their gradients
RELATIVE = 2.0**-6
fast = pytest.mark.parametrize("backend", FOR_GPUS)


def drawn(queries: int, kv_heads: int, head_dim: int, layout: str) -> tuple[list[Tensor], Tensor]:
    """q, k and v [B, S or T, heads, D], and the gradient of the output; `layout` is of memory."""
    torch.manual_seed(0)
    sizes = [(queries, N), (T, kv_heads), (T, kv_heads), (queries, N)]
    *qkv, dout = (
        torch.randn(B, n, h, head_dim, device="cuda", dtype=torch.bfloat16)
        if layout == "bsnd"
        else torch.randn(n, B, h, head_dim, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
        for n, h in sizes
    )
    return [x.requires_grad_() for x in qkv], dout


def results(qkv: list[Tensor], dout: Tensor, **options: Any) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    out = document_attention(*qkv, **options)
    return [out, *torch.autograd.grad(out, qkv, dout)]


def bounds_of(documents: bool) -> Tensor | None:
    return torch.tensor(BOUNDS, dtype=torch.int32, device="cuda") if documents else None


def assert_near(found: list[Tensor], expected: list[Tensor], dout: Tensor) -> None:
    """`least`: gradients of q and k of a token that sees only itself are zero but for rounding."""
    least = 2.0**-20 * dout.float().norm()
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.shape == wanted.shape
        assert (actual.float() - wanted.float()).norm() <= RELATIVE * wanted.float().norm() + least


@fast
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    ("queries", "kv_heads", "head_dim", "layout"),
    [(T, N, 128, "bsnd"), (T, 2, 64, "sbnd"), (300, 1, 128, "sbnd"), (300, 2, 64, "bsnd")],
)
def test_a_backend_computes_the_definition(
    backend: str,
    documents: bool,
    window: int | None,
    queries: int,
    kv_heads: int,
    head_dim: int,
    layout: str,
) -> None:
    qkv, dout = drawn(queries, kv_heads, head_dim, layout)
    exact = [x.detach().float().requires_grad_() for x in qkv]
    options: dict[str, Any] = {"bounds_BE": bounds_of(documents), "window": window, "scale": 0.1}
    expected = results(exact, dout.float(), **options, backend="reference")
    assert_near(results(qkv, dout, **options, backend=backend), expected, dout)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 100])
def test_a_soft_cap_is_computed_by_the_default_backend(documents: bool, window: int | None) -> None:
    qkv, dout = drawn(T, 2, 128, "bsnd")
    exact = [x.detach().float().requires_grad_() for x in qkv]
    options: dict[str, Any] = {"bounds_BE": bounds_of(documents), "window": window, "softcap": 2.0}
    expected = results(exact, dout.float(), **options, backend="reference")
    assert_near(results(qkv, dout, **options), expected, dout)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("queries", [T, 300])
def test_fp32_needs_less_memory_than_the_definition_with_its_mask(
    queries: int, window: int | None, softcap: float | None
) -> None:
    """cuBLAS adds in fp32, and a soft cap's definition has fp32 logits: sums differ in order."""
    qkv, dout = drawn(queries, 2, 64, "bsnd")
    qkv, dout = [x.detach().float().requires_grad_() for x in qkv], dout.float()
    options: dict[str, Any] = {"bounds_BE": bounds_of(True), "window": window, "softcap": softcap}
    assert default_backend(qkv[0], softcap) == "blocks"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = results(qkv, dout, **options)
    peak = torch.cuda.max_memory_allocated() - before
    expected = results(qkv, dout, **options, backend="reference")
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    del found, expected
    torch.cuda.reset_peak_memory_stats()
    results(qkv, dout, **options | {"softcap": 2.0}, backend="reference")
    assert peak < torch.cuda.max_memory_allocated() - before  # it has B x N x S x T elements


@pytest.mark.parametrize("backend", [*FOR_GPUS, "blocks"])
def test_documents_are_those_of_a_replayed_graph_s_inputs(backend: str) -> None:
    """The bounds are read on the GPU: other documents need no other graph."""
    qkv, _ = drawn(T, 2, 64, "bsnd")
    first, second = (
        torch.tensor(rows, dtype=torch.int32).cuda() for rows in (BOUNDS, BOUNDS[::-1])
    )
    static = first.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        document_attention(*qkv, static, backend=backend)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = document_attention(*qkv, static, backend=backend)
    for bounds in (first, second):
        static.copy_(bounds)
        graph.replay()
        with torch.no_grad():
            expected = document_attention(*qkv, bounds, backend=backend)
        assert torch.equal(out, expected)


def test_angles_of_documents_are_those_of_a_replayed_graph_s_inputs() -> None:
    documents = {"reset_attention_mask": True, "reset_position_ids": True}
    config = make_config({"data": {"text": "unused", "seq_len": T, **documents}})
    tables = RotaryTables(config, cp_rank=0, cp_size=1)
    static = torch.tensor(BOUNDS, dtype=torch.int32).cuda()
    tables.of_documents(static, T)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tables.of_documents(static, T)
    for bounds in (BOUNDS, BOUNDS[::-1]):
        static.copy_(torch.tensor(bounds))
        graph.replay()
        starts = [max(b for b in row if b <= i) for row in bounds for i in range(T)]
        positions = torch.arange(T).repeat(B) - torch.tensor(starts)
        # the tables are computed on the host, where another place in a vector may round otherwise
        expected = rotary_tables(config, positions).cuda()
        torch.testing.assert_close(found, expected, rtol=0, atol=2**-23)


@fast
def test_its_tensors_are_saved_in_fp8_and_gradients_are_off_by_their_rounding(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, dout = drawn(T, 2, 64, "bsnd")
    bounds = bounds_of(True)
    saved: list[Any] = []
    pack = SavedInFp8._pack
    monkeypatch.setattr(
        SavedInFp8, "_pack", lambda self, x: saved.append(pack(self, x)) or saved[-1]
    )

    def attend() -> Tensor:
        return document_attention(*qkv, bounds, backend=backend).flatten(2)

    out, _ = attend_saving_fp8(attend, 16, *qkv)
    packed = [x.held for x in saved if not isinstance(x, Tensor) and isinstance(x.held, Packed)]
    assert len({x.codes.codes.data_ptr() for x in packed}) == 4
    sixteen = [part for x in saved for part in tensors_in(x) if part.dtype == torch.bfloat16]
    assert not sixteen
    exact = results(qkv, dout, bounds_BE=bounds, backend=backend)
    assert torch.equal(out, exact[0].flatten(2))
    for actual, wanted in zip(
        torch.autograd.grad(out, qkv, dout.flatten(2)), exact[1:], strict=True
    ):
        # as in tests/fp8/test_attention.py, and what the backend itself rounds
        error = (actual.float() - wanted.float()).norm() / wanted.float().norm()
        assert 0 < error <= (4 / 3) ** 0.5 * 2.0**-4 + RELATIVE
