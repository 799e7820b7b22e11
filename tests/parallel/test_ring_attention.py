"""Attention in pieces against one softmax, rank by rank in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.data.context_parallel import zigzag_positions
from coatlm.kernels.attention_pieces import (
    piece_backend,
)
from coatlm.parallel.ring_attention import Received, attend_to_peers, gradients_of_peers

# sums of some dozens of numbers of about one in another order
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}
SHAPES = {  # samples, tokens, heads, kv_heads, head_dim, scale
    "a key per query": (2, 24, 3, 3, 8, None),
    "grouped": (1, 48, 6, 2, 16, 0.3),
    "one key head": (3, 24, 4, 1, 5, None),
}


class Alone:
    """Other ranks whose packed keys and values are known, and the gradients that they send.

    `returned[source, to]` are those gradients; those that are missing are zeros, which serves to
    compute what this rank sends: `returned` gets it.
    """

    def __init__(
        self, rank: int, kv_RS2BGD: list[Tensor], returned: dict[tuple[int, int], Tensor]
    ) -> None:
        self.rank, self.size, self.kv_RS2BGD = rank, len(kv_RS2BGD), kv_RS2BGD
        self.returned = returned

    def swap(self, x_X: Tensor, *, to: int, source: int, rows: int) -> Received:
        """Keys and values of `source`, if it gets this rank's, else gradients."""
        received = self.kv_RS2BGD[source][:rows]
        if not torch.equal(x_X, self.kv_RS2BGD[self.rank][: len(x_X)]):
            self.returned[self.rank, to] = x_X
            received = self.returned.get((source, self.rank), torch.zeros_like(received))
            assert len(received) == rows
        return lambda: received


def whole(q_TBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, scale: float | None) -> Tensor:
    """Causal attention by one softmax, with torch's own backward."""
    fold = q_TBND.shape[2] // k_TBGD.shape[2]
    k, v = (x.repeat_interleave(fold, dim=2) for x in (k_TBGD, v_TBGD))
    scale = q_TBND.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * torch.einsum("sbnd,tbnd->bnst", q_TBND, k)
    above = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    p = logits.masked_fill(above, -torch.inf).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", p, v)


def inputs(shape: str, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """q, k, v of whole samples and the gradient of the output."""
    samples, tokens, heads, kv_heads, head_dim, _ = SHAPES[shape]
    torch.manual_seed(0)
    return [
        2 * torch.randn(tokens, samples, n, head_dim, dtype=dtype, device=device)
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def by_ranks(q: Tensor, k: Tensor, v: Tensor, do: Tensor, ranks: int, **how: Any) -> list[Tensor]:
    """The output and the gradients of q, k and v, computed by one rank after the other."""
    places = [zigzag_positions(len(q), rank, ranks).to(q.device) for rank in range(ranks)]
    kv = [torch.stack((k[at], v[at]), dim=1) for at in places]
    found = [torch.empty_like(x) for x in (q, q, k, v)]
    returned: dict[tuple[int, int], Tensor] = {}
    for _ in range(2):  # the second time with the gradients of the first
        for rank, at in enumerate(places):
            peers, own = Alone(rank, kv, returned), [x[at] for x in (q, k, v)]
            merged = attend_to_peers(*own, peers, **how)
            grads = gradients_of_peers(do[at], *own, merged, peers, **how)
            for whole_one, part in zip(found, (merged.o_SBND, *grads), strict=True):
                whole_one[at] = part
    return found


@pytest.mark.parametrize("backend", ["cpu", "matmul"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_compute_attention_and_its_gradients(
    shape: str, ranks: int, dtype: torch.dtype, backend: str
) -> None:
    q, k, v, do = inputs(shape, dtype)
    scale = SHAPES[shape][-1]
    found = by_ranks(q, k, v, do, ranks, scale=scale, backend=backend)
    leaves = (q, k, v) = [x.requires_grad_() for x in (q, k, v)]
    out = whole(q, k, v, scale)
    expected = [out, *torch.autograd.grad(out, leaves, do)]
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=20 * TOLERANCE[dtype])


def test_a_cpu_has_one_backend() -> None:
    q, k, v, _ = inputs("grouped", torch.float32)
    assert piece_backend(q, k, v) == "cpu"
