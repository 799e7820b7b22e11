"""All-gather of weights: in their own dtype, or as the FP8 codes that a GEMM casts them to.

A linear layer in FP8 computes with cast(w / S). Its result does not change if that cast is done
before the all-gather:

    amax      largest |w| of each row or tensor in this rank's shard; all-reduce with MAX
    codes     cast(w / S), one byte per element, all-gathered; every rank derives S from amax
    weights   bf16(code * S) of the received codes

The owner does not round its shard: the optimizer updates the exact weight, which the GEMM casts to
the same codes. S is the scale that the layer uses, with one of two granularities:

Row-wise and a power of two in most recipes of the FP8 flow. `fp8/weight_rows.py` has the casts and
shows why a layer derives the same scales and codes from the received weights. Its backward
transposes the codes of forward, so they are the same as well (`fp8/transpose.py`).

Tensor-wise and amax / 448 with `coat-paper` and TransformerEngine's current scaling. A GEMM that
casts the received weights finds the same amax: the largest code is 448, and 448 S, rounded to BF16,
is amax. It finds the same codes: rounding to BF16 moves code * S by at most 2^-9 of its value,
while codes are 2^-4 apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8 import weight_rows
from coatlm.fp8.formats import E4M3, SCALE_BLOCK
from coatlm.fp8.payload import pack, unpack
from coatlm.fp8.payload_layout import Layout, Shared
from coatlm.fp8.scaling import scale_ref
from coatlm.fp8.segments import largest_magnitudes
from coatlm.parallel.buckets import Bucket
from coatlm.parallel.collectives import Comm
from coatlm.parallel.wire import Reduction, Steps

RangeCast = Callable[[Tensor, int, int], None]  # (codes uint8 [n], begin, end)


def gather(
    buckets: Sequence[Bucket], comm: Comm, stream: torch.cuda.Stream | None
) -> Iterator[None]:
    """Start the in-place all-gather of one bucket's weights after another; yield after each start.

    A single all-reduce of the amax of all FP8 buckets precedes the first of them.
    """
    amaxes: dict[Bucket, Tensor] = {}
    for bucket in buckets:
        if bucket.fp8:
            amaxes = amaxes or _reduce_amax([b for b in buckets if b.fp8], comm, stream)
            bucket.gather = Reduction(_steps(bucket, amaxes[bucket], comm), stream)
        else:
            bucket.gather = comm.all_gather(bucket.weights, bucket.sizes)
        yield


def gather_shard(bucket: Bucket, comm: Comm, amaxes: dict[Bucket, Tensor]) -> Steps:
    """All-gather `weights` of one bucket from the ranks' `shard`s, at ZeRO stage 3.

    `amaxes` has the amaxes of FP8 buckets that were all-gathered since the last update, and gets
    those of this one.
    """
    bucket.weights[slice(*bucket.owned)].copy_(bucket.shard)
    if not bucket.fp8:
        yield comm.all_gather(bucket.weights, bucket.sizes)
        return
    if bucket not in amaxes:
        amax = _largest(bucket)
        yield comm.all_reduce(amax, dist.ReduceOp.MAX)
        amaxes[bucket] = amax
    yield from _steps(bucket, amaxes[bucket], comm)


def _reduce_amax(
    buckets: Sequence[Bucket], comm: Comm, stream: torch.cuda.Stream | None
) -> dict[Bucket, Tensor]:
    """The amax of each row or tensor as integer bits, by bucket; computed on `stream` on a GPU.

    The results are allocated on `stream` as well. The allocator would let kernels of the current
    stream reuse its memory once the last all-gather is issued, before it has run.
    """
    counts = [len(b.tensors.mu) if b.rows is None else b.rows.count for b in buckets]
    found: list[Tensor] = []

    def reduce_amax() -> Steps:
        amax = torch.cat([_largest(bucket) for bucket in buckets])
        found.extend(amax.split(counts))
        yield comm.all_reduce(amax, dist.ReduceOp.MAX)

    reduction = Reduction(reduce_amax(), stream)
    if stream is None:
        reduction.wait()
    return dict(zip(buckets, found, strict=True))


def _largest(bucket: Bucket) -> Tensor:
    """The amax of each row or tensor in this rank's shard, as integer bits."""
    begin, end = bucket.owned
    if bucket.rows is not None:
        return weight_rows.row_amax(bucket.weights, bucket.rows, begin, end)
    owner = bucket.tensors.owner[begin // SCALE_BLOCK : end // SCALE_BLOCK]
    return largest_magnitudes(bucket.weights[begin:end], owner, len(bucket.tensors.mu))


def _steps(bucket: Bucket, amax: Tensor, comm: Comm) -> Steps:
    begin, end = bucket.owned
    codes = torch.empty(len(bucket.weights), dtype=torch.uint8, device=bucket.weights.device)
    encode, decode = (_by_tensor if bucket.rows is None else _by_row)(bucket, amax)
    encode(codes, begin, end)
    yield comm.all_gather(codes, bucket.sizes)
    decode(codes, 0, begin)
    decode(codes, end, len(codes))


def _by_row(bucket: Bucket, amax: Tensor) -> tuple[RangeCast, RangeCast]:
    rows, weights = bucket.rows, bucket.weights
    assert rows is not None

    def encode(codes: Tensor, begin: int, end: int) -> None:
        weight_rows.encode_rows(weights, codes, amax, rows, begin, end)

    def decode(codes: Tensor, begin: int, end: int) -> None:
        weight_rows.decode_rows(codes, weights, amax, rows, begin, end)

    return encode, decode


def _by_tensor(bucket: Bucket, amax: Tensor) -> tuple[RangeCast, RangeCast]:
    scale, weights = scale_ref(amax.view(torch.float32), E4M3), bucket.weights

    def part(begin: int, end: int) -> tuple[Layout, Shared]:
        owner = bucket.tensors.owner[begin // SCALE_BLOCK : end // SCALE_BLOCK]
        return Layout(end - begin, E4M3, scaled=False), Shared(scale, owner[None, None])

    def encode(codes: Tensor, begin: int, end: int) -> None:
        layout, shared = part(begin, end)
        mine = codes[begin:end][None, None]
        pack(weights[begin:end][None, None], mine, layout=layout, shared=shared, divide=True)

    def decode(codes: Tensor, begin: int, end: int) -> None:
        layout, shared = part(begin, end)
        arrived = codes[begin:end].view(1, 1, 1, -1)
        unpack(arrived, weights[begin:end][None, None], layout=layout, shared=shared)

    return encode, decode
