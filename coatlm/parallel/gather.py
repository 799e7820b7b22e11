"""Weights from their owners to everyone: as they are, or as the FP8 codes that GEMMs make of them.

A linear layer with per-tensor current scaling computes with cast(w / S), S = amax / 448. Its result
does not change if that cast is done before the weights travel:

    amax      of each rank's part of a tensor; the ranks agree on the largest
    codes     cast(w / S), one byte an element, gathered; S is known to everyone
    weights   bf16(code * S) on arrival

A GEMM that casts these again finds the same amax, as the largest code is 448 and 448 S, rounded to
BF16, is amax; and the same codes, as rounding to BF16 moves code * S by 2^-9 of its value at most
while codes lie 2^-4 apart. The owner keeps its part as it is: the optimizer updates the exact
weight, of which the GEMM makes the same codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.payload import GROUP, Layout, Shared, pack, unpack
from coatlm.fp8.scaling import scale_ref
from coatlm.parallel.buckets import Bucket
from coatlm.parallel.collectives import Comm
from coatlm.parallel.wire import Reduction, Steps, largest_magnitudes


def gather_as_stored(buckets: Sequence[Bucket], comm: Comm) -> None:
    """Start to gather each bucket's weights in place."""
    for bucket in buckets:
        bucket.gather = comm.all_gather(bucket.weights, bucket.sizes)


def gather_fp8(buckets: Sequence[Bucket], comm: Comm, stream: torch.cuda.Stream | None) -> None:
    """Start to gather each bucket's weights as FP8, with one agreement on all scales."""
    if not buckets:
        return
    counts = [len(bucket.tensors.mu) for bucket in buckets]
    device = buckets[0].weights.device
    amax = torch.zeros(sum(counts), dtype=torch.int32, device=device)

    def agree() -> Steps:
        torch.cat([_largest(bucket) for bucket in buckets], out=amax)
        yield comm.all_reduce(amax, dist.ReduceOp.MAX)

    agreed = Reduction(agree(), stream)
    if stream is None:
        agreed.wait()
    for bucket, part in zip(buckets, amax.split(counts), strict=True):
        bucket.gather = Reduction(_steps(bucket, part, comm), stream)


def _largest(bucket: Bucket) -> Tensor:
    begin, end = bucket.owned
    owner = bucket.tensors.owner[begin // GROUP : end // GROUP]
    return largest_magnitudes(bucket.weights[begin:end], owner, len(bucket.tensors.mu))


def _steps(bucket: Bucket, amax: Tensor, comm: Comm) -> Steps:
    begin, end = bucket.owned
    scale = scale_ref(amax.view(torch.float32), E4M3)
    codes = torch.empty(len(bucket.weights), dtype=torch.uint8, device=bucket.weights.device)

    def part(first: int, last: int) -> tuple[Layout, Shared]:
        owner = bucket.tensors.owner[first // GROUP : last // GROUP]
        return Layout(last - first, E4M3, scaled=False), Shared(scale, owner[None, None])

    layout, shared = part(begin, end)
    mine = codes[begin:end][None, None]
    pack(bucket.weights[begin:end][None, None], mine, layout=layout, shared=shared, divide=True)
    yield comm.all_gather(codes, bucket.sizes)
    for first, last in ((0, begin), (end, len(codes))):
        layout, shared = part(first, last)
        arrived = codes[first:last].view(1, 1, 1, -1)
        unpack(arrived, bucket.weights[first:last][None, None], layout=layout, shared=shared)
