"""Attention of context-parallel ranks to one another's keys, in pieces that fast kernels compute.

As in ring attention (arXiv 2310.01889), a rank attends to the keys and values of one other rank at
a time while those of the next rank arrive, and merges the outputs by their log-sum-exp
(coatlm/kernels/attention_pieces.py). Of R ranks, rank r holds the chunks r and 2 R - 1 - r of 2 R.

    step 0          its queries, in the order of the sequence, attend to its own keys: causal
    steps 1 to R-1  source = (r - step) mod R: if it is smaller than r, all queries attend to the
                    source's first chunk; if larger, the second chunk of queries to both chunks

Later keys are not visible to any of the queries, so a step after the first is one attention without
a mask, and all steps are the same work for all ranks. Keys go directly to the ranks that attend to
them, not around a ring: a rank sends its first chunk to larger ranks and both to smaller ones.

For backward only this rank's q, k, v, output and log-sum-exp are saved; the exchange is repeated.
The gradients of a source's keys and values travel back while the next piece is computed. They are
rounded to the dtype of k once; the owner sums them, and a rank its shares of dq, in fp32.

Shapes: S tokens of this rank, B samples, N query heads, G key and value heads, D elements per head;
T of a source's tokens. Keys and values travel as one tensor [T, 2, B, G, D]; in FP8 as the bytes of
coatlm/fp8/kv_bytes.py, X of them per head. Those that forward sends are what is saved, and backward
sends them again. A rank attends to its own keys and values as other ranks decode them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from coatlm.fp8.kv_bytes import decode, encode
from coatlm.kernels.attention_merge import merge_, wide_dtype
from coatlm.kernels.attention_pieces import (
    AttendedKeys,
    attend_piece,
    piece_backend,
    piece_gradients,
)
from coatlm.parallel.collectives import swap

Received = Callable[[], Tensor]  # waits


class _How(TypedDict):
    """Options of every piece."""

    scale: float | None
    backend: str


class ContextPeers(Protocol):
    """The ranks of a context-parallel group as this rank sees them."""

    rank: int
    size: int

    def swap(self, x_X: Tensor, *, to: int, source: int, rows: int) -> Received:
        """Start to send x to the rank `to` and to receive `rows` such rows from `source`."""


class GroupPeers:
    """The ranks of a process group. All of them swap at the same time, in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def swap(self, x_X: Tensor, *, to: int, source: int, rows: int) -> Received:
        received_X = x_X.new_empty(rows, *x_X.shape[1:])
        work = swap(x_X, received_X, to=to, source=source, group=self.group)

        def finish() -> Tensor:
            work.wait()
            return received_X

        return finish


def visible_keys(rank: int, source: int, tokens: int) -> int:
    """How many of the first of a source's `tokens` keys a rank attends to."""
    return tokens // 2 if source < rank else tokens


def first_query(rank: int, source: int, tokens: int) -> int:
    """The first of a rank's `tokens` queries that attends to keys of the source."""
    return 0 if source < rank else tokens // 2


def zigzag_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    group: dist.ProcessGroup,
    *,
    scale: float | None,
    backend: str | None,
    block_size: int | None = None,
) -> Tensor:
    """Causal attention [S, B, N, D] of the chunks of this rank, differentiable in q, k and v.

    `backend` is one of attention_pieces.py; None is the first that accepts the inputs. On a GPU,
    fp32 inputs and heads above 256 have no kernel, and their pieces materialize probabilities.
    `block_size`: send k and v in FP8 with a scale per so many elements, and save them so.
    """
    backend, peers = backend or piece_backend(q_SBND, k_SBGD, v_SBGD), GroupPeers(group)
    return _ZigzagAttention.apply(q_SBND, k_SBGD, v_SBGD, peers, scale, backend, block_size)


class _ZigzagAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        peers: ContextPeers,
        scale: float | None,
        backend: str,
        block_size: int | None,
    ) -> Tensor:
        sent = None
        if block_size is not None:
            sent = encode(torch.stack((k_SBGD, v_SBGD), dim=1), block_size)
            k_SBGD, v_SBGD = _opened(sent, q_SBND)
        merged = attend_to_peers(
            q_SBND, k_SBGD, v_SBGD, peers, scale=scale, backend=backend, sent_S2BGX=sent
        )
        keys = (k_SBGD, v_SBGD) if sent is None else (sent,)
        ctx.save_for_backward(q_SBND, merged.o_SBND, merged.lse_BNS, *keys, *merged.state)
        ctx.peers, ctx.scale, ctx.backend, ctx.codes = peers, scale, backend, sent is not None
        return merged.o_SBND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_SBND: Tensor) -> tuple[Tensor | None, ...]:
        q, o, lse, *rest = ctx.saved_tensors
        sent = rest.pop(0) if ctx.codes else None
        k, v, *state = rest if sent is None else (*_opened(sent, q), *rest)
        grads = gradients_of_peers(
            *(do_SBND, q, k, v, AttendedKeys(o, lse, tuple(state)), ctx.peers),
            scale=ctx.scale,
            backend=ctx.backend,
            sent_S2BGX=sent,
        )
        return *grads, None, None, None, None


def attend_to_peers(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    peers: ContextPeers,
    *,
    scale: float | None,
    backend: str,
    sent_S2BGX: Tensor | None = None,
) -> AttendedKeys:
    """The output of this rank's queries over the keys of all ranks, and its log-sum-exp.

    `sent_S2BGX`: the bytes that k and v were decoded from, if ranks send each other FP8.
    """
    tokens, how = len(q_SBND), _How(scale=scale, backend=backend)
    kv_S2BGX = _packed(k_SBGD, v_SBGD, k_SBGD.dtype) if sent_S2BGX is None else sent_S2BGX
    arriving = _arriving(kv_S2BGX, peers, 1)
    own = attend_piece(q_SBND, k_SBGD, v_SBGD, causal=True, **how)
    # of two ranks, each query is merged once at most, in fp32 whatever the dtype of o
    dtype = wide_dtype(q_SBND) if peers.size > 2 else q_SBND.dtype
    o, lse = own.o_SBND.to(dtype), own.lse_BNS
    for step in range(1, peers.size):
        kv = arriving()
        if step + 1 < peers.size:
            arriving = _arriving(kv_S2BGX, peers, step + 1)
        first = first_query(peers.rank, (peers.rank - step) % peers.size, tokens)
        piece = attend_piece(q_SBND[first:], *_opened(kv, q_SBND), causal=False, **how)
        merge_(o[first:], lse[..., first:], piece.o_SBND, piece.lse_BNS)
    return AttendedKeys(o.to(q_SBND.dtype).contiguous(), lse, own.state)


def gradients_of_peers(
    do_SBND: Tensor,
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    merged: AttendedKeys,
    peers: ContextPeers,
    *,
    scale: float | None,
    backend: str,
    sent_S2BGX: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q, k and v, given the result of `attend_to_peers`."""
    tokens, how = len(q_SBND), _How(scale=scale, backend=backend)
    kv_S2BGX = _packed(k_SBGD, v_SBGD, k_SBGD.dtype) if sent_S2BGX is None else sent_S2BGX
    arriving, returning = _arriving(kv_S2BGX, peers, 1), None
    dq, dk, dv = piece_gradients(do_SBND, q_SBND, k_SBGD, v_SBGD, merged, causal=True, **how)
    dq = dq.to(wide_dtype(q_SBND))
    sum_S2BGD = _packed(dk, dv, wide_dtype(k_SBGD))
    del dk, dv  # and below: what is in memory at the peak is in model/layer_memory.py
    for step in range(1, peers.size):
        source, to = (peers.rank - step) % peers.size, (peers.rank + step) % peers.size
        kv = arriving()
        if step + 1 < peers.size:
            arriving = _arriving(kv_S2BGX, peers, step + 1)
        else:
            del kv_S2BGX, arriving
        first = first_query(peers.rank, source, tokens)
        seen = AttendedKeys(merged.o_SBND[first:], merged.lse_BNS[..., first:], merged.state)
        k, v = _opened(kv, q_SBND)
        do, q = do_SBND[first:], q_SBND[first:]
        share, dk, dv = piece_gradients(do, q, k, v, seen, causal=False, **how)
        del kv, k, v, seen
        dq[first:] += share
        del share
        if returning is not None:
            _add_first_(sum_S2BGD, returning())
        part = _packed(dk, dv, k_SBGD.dtype)
        del dk, dv
        rows = visible_keys(to, peers.rank, tokens)
        returning = peers.swap(part, to=source, source=to, rows=rows)
        del part
    assert returning is not None  # there are other ranks
    _add_first_(sum_S2BGD, returning())
    del returning
    dk, dv = sum_S2BGD.to(k_SBGD.dtype).unbind(1)
    return dq.to(q_SBND.dtype), dk, dv


def _arriving(kv_S2BGX: Tensor, peers: ContextPeers, step: int) -> Received:
    """Start the exchange of a step: this rank sends to the rank `step` above it."""
    to, source = (peers.rank + step) % peers.size, (peers.rank - step) % peers.size
    sent = kv_S2BGX[: visible_keys(to, peers.rank, len(kv_S2BGX))]
    rows = visible_keys(peers.rank, source, len(kv_S2BGX))
    return peers.swap(sent, to=to, source=source, rows=rows)


def _opened(kv_T2BGX: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [T, B, G, D] of what was received, in the dtype of `like` and with its D."""
    if kv_T2BGX.dtype == torch.uint8:
        kv_T2BGX = decode(kv_T2BGX, like.shape[-1], like.dtype)
    k_TBGD, v_TBGD = kv_T2BGX.unbind(1)
    return k_TBGD, v_TBGD


def _packed(k_TBGD: Tensor, v_TBGD: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values, or their gradients, as one contiguous tensor [T, 2, B, G, D] of a dtype."""
    tokens, *sizes = k_TBGD.shape
    packed = k_TBGD.new_empty((tokens, 2, *sizes), dtype=dtype)
    packed[:, 0], packed[:, 1] = k_TBGD, v_TBGD
    return packed


def _add_first_(sum_S2BGD: Tensor, part_T2BGD: Tensor) -> None:
    """Add gradients of the first T tokens."""
    sum_S2BGD[: len(part_T2BGD)] += part_T2BGD
