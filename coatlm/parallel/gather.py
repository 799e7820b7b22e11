"""Weights from their owners to everyone: as they are, or as the FP8 codes that GEMMs make of them.

A linear layer in FP8 computes with cast(w / S). Its result does not change if that cast is done
before the weights travel:

    amax      of each rank's part of what has a scale; the ranks agree on the largest
    codes     cast(w / S), one byte an element, gathered; S is known to everyone
    weights   bf16(code * S) on arrival

The owner keeps its part as it is: the optimizer updates the exact weight, of which the GEMM makes
the same codes. S is that of the layers:

A row, a power of two, in the FP8 flow; `fp8/weight_rows.py` has the casts and shows why a layer
makes the same scales and codes of what arrives. Its backward takes the codes of forward, and hence
the same too (`fp8/transpose.py`).

A tensor, amax / 448, with TransformerEngine's current scaling. A GEMM that casts what arrives
finds the same amax, as the largest code is 448 and 448 S, rounded to BF16, is amax; and the same
codes, as rounding to BF16 moves code * S by 2^-9 of its value at most while codes lie 2^-4 apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8 import weight_rows
from coatlm.fp8.formats import E4M3, SCALE_BLOCK
from coatlm.fp8.payload import Layout, Shared, pack, unpack
from coatlm.fp8.scaling import scale_ref
from coatlm.fp8.segments import largest_magnitudes
from coatlm.parallel.buckets import Bucket
from coatlm.parallel.collectives import Comm
from coatlm.parallel.wire import Reduction, Steps

Cast = Callable[[Tensor, int, int], None]  # of codes uint8 [n], elements [begin, end)


def gather(
    buckets: Sequence[Bucket], comm: Comm, stream: torch.cuda.Stream | None
) -> Iterator[None]:
    """Every step starts to gather the weights of the next bucket, in place.

    One agreement on the scales of all that travel as FP8 goes before the first of them.
    """
    amaxes: dict[Bucket, Tensor] = {}
    for bucket in buckets:
        if bucket.fp8:
            amaxes = amaxes or _agree([b for b in buckets if b.fp8], comm, stream)
            bucket.gather = Reduction(_steps(bucket, amaxes[bucket], comm), stream)
        else:
            bucket.gather = comm.all_gather(bucket.weights, bucket.sizes)
        yield


def _agree(
    buckets: Sequence[Bucket], comm: Comm, stream: torch.cuda.Stream | None
) -> dict[Bucket, Tensor]:
    """Bits of the largest |w| of each row or tensor of each bucket; on a GPU, behind `stream`.

    They are allocated on `stream`, which alone reads them: what computes meanwhile would be given
    their memory as soon as the last gather is issued, before it has run.
    """
    counts = [len(b.tensors.mu) if b.rows is None else b.rows.count for b in buckets]
    found: list[Tensor] = []

    def agree() -> Steps:
        amax = torch.cat([_largest(bucket) for bucket in buckets])
        found.extend(amax.split(counts))
        yield comm.all_reduce(amax, dist.ReduceOp.MAX)

    agreed = Reduction(agree(), stream)
    if stream is None:
        agreed.wait()
    return dict(zip(buckets, found, strict=True))


def _largest(bucket: Bucket) -> Tensor:
    """Bits of the largest |w| of this rank's part of each row or tensor."""
    begin, end = bucket.owned
    if bucket.rows is not None:
        return weight_rows.largest(bucket.weights, bucket.rows, begin, end)
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


def _by_row(bucket: Bucket, amax: Tensor) -> tuple[Cast, Cast]:
    rows, weights = bucket.rows, bucket.weights
    assert rows is not None

    def encode(codes: Tensor, begin: int, end: int) -> None:
        weight_rows.encode(weights, codes, amax, rows, begin, end)

    def decode(codes: Tensor, begin: int, end: int) -> None:
        weight_rows.decode(codes, weights, amax, rows, begin, end)

    return encode, decode


def _by_tensor(bucket: Bucket, amax: Tensor) -> tuple[Cast, Cast]:
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
