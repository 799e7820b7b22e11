"""Gradient formats: how a bucket is summed over its process group of R ranks.

    Plain                   cast, one collective sum in fp32 or BF16, cast back
    Fp8Sum                  FP8-LM (arXiv 2310.18313, section 3.1): codes = cast(mu s g) with one
                            scale s per tensor, the same on all ranks; one collective sum in FP8,
                            divided by mu s
    exchange.Fp8Exchange    an all-to-all of FP8 codes, summed in fp32

Fp8Sum rounds after every addition and may saturate; `fp8lm_scaling` adjusts mu so that it rarely
does. Gloo cannot sum FP8: with it the ranks exchange codes and round after each addition
themselves.

The method `steps` of a format is a generator that sums one bucket: it starts collectives and yields
the handles to wait for. `Reduction` runs it: on a GPU all of it at once, on a stream other than the
compute stream, so that the host never waits; on a CPU up to the first wait, and the rest when the
result is needed.

The ranks agree on scales on the device. The fp32 bits of amax are all-reduced as integers, whose
order is NaN > Inf > numbers; a sum is NaN or Inf if the value of any rank was. With delayed scaling
(`reduction_scales`) they agree after the step, on the scales of the next one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.formats import E4M3, SCALE_BLOCK, Coding, Fp8Format, cast
from coatlm.fp8.payload import pack, unpack
from coatlm.fp8.payload_layout import Layout, Shared
from coatlm.fp8.scaling import scale_ref
from coatlm.fp8.segments import count_saturated, largest_magnitudes
from coatlm.parallel.collectives import Comm, Pending

Steps = Generator[Pending, None, None]


@dataclass(eq=False)
class Tensors:
    """The tensors of a bucket: the owner of each block, and the state of Fp8Sum per tensor."""

    owner: Tensor  # int32 [n / 128]: the tensor that each block belongs to
    mu: Tensor  # fp32 [T]
    values: Tensor  # int64 [T]: elements, without padding
    saturated: Tensor  # int64 [T]: sums at +-MAX of this rank's shard since mu was adjusted
    nonfinite: Tensor  # bool [T]: whether there was NaN or Inf since mu was adjusted
    # of delayed scaling (`reduction_scales`):
    scale: Tensor | None = None  # fp32 [T], shared by all ranks; None: current scaling
    amax: Tensor | None = None  # int32 [T]: bits of the largest |value| that this rank encoded

    @classmethod
    def of(cls, sizes: Sequence[int], blocks: int, device: torch.device) -> Tensors:
        """T tensors of `sizes` elements in `blocks` blocks; each tensor starts with a block."""
        counts = torch.tensor([-(-size // SCALE_BLOCK) for size in sizes])
        counts[-1] += blocks - counts.sum()  # padding
        owner = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts)
        return cls(
            owner.to(device),
            torch.ones(len(sizes), device=device),
            torch.tensor(list(sizes)).to(device),
            torch.zeros(len(sizes), dtype=torch.int64, device=device),
            torch.zeros(len(sizes), dtype=torch.bool, device=device),
        )


@dataclass(frozen=True, eq=False)
class Sum:
    """One bucket to be summed into `out`: all of its elements, or this rank's shard."""

    grads: Tensor  # [n], fp32 or BF16
    out: Tensor  # [n] or [sizes[rank]]; may be (a part of) `grads`
    sizes: tuple[int, ...]  # elements of each rank's shard, multiples of 128
    tensors: Tensors
    whole: bool  # an all-reduce: every rank receives all sums; else a reduce-scatter
    add: bool = False  # add the sums to `out`


class Wire(Protocol):
    """A gradient format. `automatic`: it uses FP8-LM's mu, which is adjusted after every step."""

    @property
    def automatic(self) -> bool: ...
    def steps(self, job: Sum, comm: Comm) -> Steps: ...


class Reduction:
    """A reduction in flight: runs the `steps` of a format; see the module's docstring."""

    def __init__(self, steps: Steps, stream: torch.cuda.Stream | None) -> None:
        self.steps, self.pending = steps, None
        self.done: torch.cuda.Event | None = None
        if stream is None:
            self.pending = next(steps, None)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for pending in steps:
                pending.wait()
            self.done = stream.record_event()

    def wait(self) -> None:
        """Wait for the result; on a GPU, let the current stream wait for it."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        while self.pending is not None:
            self.pending.wait()
            self.pending = next(self.steps, None)


def shared_scales(
    job: Sum, comm: Comm, fmt: Coding, *, per_bucket: bool = False
) -> Generator[Pending, None, Tensor]:
    """The scales fp32 [T] that all ranks share: delayed ones, or those of an all-reduced amax.

    `per_bucket`: current scales are all that of the bucket's amax.
    """
    tensors = job.tensors
    if tensors.scale is not None:
        return tensors.scale
    amax = largest_magnitudes(job.grads, tensors.owner, len(tensors.mu))
    yield comm.all_reduce(amax, dist.ReduceOp.MAX)
    if per_bucket:
        amax = amax.amax().repeat(len(amax))
    return scale_ref(amax.view(torch.float32), fmt)


@dataclass(frozen=True)
class Plain:
    """The collective library's own sum, in `dtype`."""

    dtype: torch.dtype
    automatic: bool = False

    def steps(self, job: Sum, comm: Comm) -> Steps:
        data = job.grads.to(self.dtype)  # no copy if the dtypes are equal
        if job.whole:
            yield comm.all_reduce(data)
            total = data
        else:
            yield comm.reduce_scatter(data, job.sizes)
            total = data.split(list(job.sizes))[comm.rank]
        _finish(job, total)


@dataclass(frozen=True)
class Fp8Sum:
    """FP8-LM's collective sum of codes, with a scale and a mu per tensor."""

    fmt: Fp8Format = E4M3
    automatic: bool = True

    def steps(self, job: Sum, comm: Comm) -> Steps:
        tensors, n = job.tensors, job.grads.numel()
        scale = (yield from shared_scales(job, comm, self.fmt)) / tensors.mu
        layout = Layout(n, self.fmt, scaled=False)
        codes = layout.empty(1, 1, device=job.grads.device)
        shared = Shared(scale, tensors.owner[None, None], tensors.amax)
        pack(job.grads[None, None], codes, layout=layout, shared=shared)
        known = scale if tensors.amax is None else tensors.amax.view(torch.float32)
        tensors.nonfinite.logical_or_(~known.isfinite())
        begin, end = 0, n
        if job.grads.is_cuda:
            flat = codes.view(-1).view(self.fmt.dtype)
            yield comm.all_reduce(flat) if job.whole else comm.reduce_scatter(flat, job.sizes)
        else:
            yield from self._sum_codes(codes.view(-1), job, comm)
        if not job.whole:
            begin = sum(job.sizes[: comm.rank])
            end = begin + job.sizes[comm.rank]
        total = codes.view(-1)[begin:end]
        owner = tensors.owner[begin // SCALE_BLOCK : end // SCALE_BLOCK]
        count_saturated(total, owner, tensors.saturated, self.fmt)
        part = Layout(end - begin, self.fmt, scaled=False)
        shared = Shared(scale, owner[None, None])
        y = job.out[None, None]
        unpack(total.view(1, 1, 1, -1), y, layout=part, shared=shared, add=job.add)

    def _sum_codes(self, codes: Tensor, job: Sum, comm: Comm) -> Steps:
        """Sum codes as NCCL's ring does: round after each addition. Fills this rank's shard."""
        own = job.sizes[comm.rank]
        received = codes.new_empty(own * comm.size)
        sizes = [own] * comm.size
        yield comm.all_to_all(received, codes, received_sizes=sizes, sent_sizes=job.sizes)
        parts = received.view(comm.size, own).view(self.fmt.dtype).float()
        total = parts[0]
        for part in parts[1:]:
            total = cast(total + part, self.fmt).float()
        mine = codes.split(list(job.sizes))[comm.rank]
        mine.copy_(total.to(self.fmt.dtype).view(torch.uint8))
        if job.whole:
            yield comm.all_gather(codes, job.sizes)


def _finish(job: Sum, total: Tensor) -> None:
    """Add or copy a sum to `job.out`, unless it was computed in place."""
    if job.add:
        job.out.add_(total)
    elif total.data_ptr() != job.out.data_ptr():
        job.out.copy_(total)
