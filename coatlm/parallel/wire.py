"""How gradients travel: the formats in which a bucket is summed over its group of R ranks.

    Plain     cast, one sum by the library in fp32 or BF16, cast back
    Fp8Sum    FP8-LM (arXiv 2310.18313, section 3.1): codes = cast(mu s g) with one scale s for a
              tensor on all ranks, one sum by the library in FP8, divided by mu s
    exchange.Fp8Exchange    codes travel, sums are fp32

Fp8Sum rounds after every addition and may saturate; mu, by which it keeps away from that, is halved
after a step where more than 1e-5 of a tensor's sums are +-MAX, and else grows by 2^(1/1000), up to
1. Gloo has no FP8: there the ranks exchange codes and round after each addition themselves.

A format's `steps` is a generator over one bucket: it starts collectives and yields what it must
wait for. `Reduction` runs it: on a GPU at once, on a stream beside the one that computes, where
waiting costs the host nothing; on a CPU up to its first wait, the rest when the result is wanted.

Nothing is agreed on the host. A largest magnitude that ranks agree on travels as the bits of an
integer, where NaN > Inf > numbers; a sum is not finite where the value of any rank was not.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.formats import E4M3, SCALE_BLOCK, Fp8Format, cast
from coatlm.fp8.payload import Layout, Shared, pack, unpack
from coatlm.fp8.scaling import scale_ref
from coatlm.fp8.segments import count_saturated, largest_magnitudes
from coatlm.parallel.collectives import Comm, Pending

Steps = Generator[Pending, None, None]
SATURATED = 1e-5  # share of sums at +-MAX from which mu is halved
GROWTH = 2.0 ** (1 / 1000)  # of mu in a step without
SMALLEST_MU = 2.0**-20


@dataclass(eq=False)
class Tensors:
    """Which tensor each group of a bucket belongs to, and what Fp8Sum knows of the tensors."""

    owner: Tensor  # int32 [n / 128]
    mu: Tensor  # fp32 [T]
    values: Tensor  # int64 [T]: elements, without padding
    saturated: Tensor  # int64 [T]: sums at +-MAX since the last adjustment, this rank's part
    nonfinite: Tensor  # bool [T]: a sum since the last adjustment had NaN or Inf

    @classmethod
    def of(cls, sizes: Sequence[int], groups: int, device: torch.device) -> Tensors:
        """T tensors of `sizes` elements, one behind the other from multiples of 128 on."""
        counts = torch.tensor([-(-size // SCALE_BLOCK) for size in sizes])
        counts[-1] += groups - counts.sum()  # padding
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
    """One bucket to be summed: `out` gets the sum of all elements, or of this rank's part."""

    grads: Tensor  # [n], fp32 or BF16
    out: Tensor  # [n] or [sizes[rank]]; may be (a part of) `grads`
    sizes: tuple[int, ...]  # elements of each rank's part, multiples of 128
    tensors: Tensors
    whole: bool  # everyone gets everything
    add: bool = False  # to what `out` holds


class Wire(Protocol):
    """A format; `automatic`: it has a mu to adjust after a step."""

    @property
    def automatic(self) -> bool: ...
    def steps(self, job: Sum, comm: Comm) -> Steps: ...


class Reduction:
    """A sum under way; see the module's docstring."""

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
        """The current stream goes on when the sum is there."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        while self.pending is not None:
            self.pending.wait()
            self.pending = next(self.steps, None)


@dataclass(frozen=True)
class Plain:
    """The library's sum in `dtype`."""

    dtype: torch.dtype
    automatic: bool = False

    def steps(self, job: Sum, comm: Comm) -> Steps:
        data = job.grads.to(self.dtype)  # the same memory where the types are equal
        if job.whole:
            yield comm.all_reduce(data)
            total = data
        else:
            yield comm.reduce_scatter(data, job.sizes)
            total = data.split(list(job.sizes))[comm.rank]
        _finish(job, total)


@dataclass(frozen=True)
class Fp8Sum:
    """FP8-LM's sum, with a scale and a mu for each tensor."""

    fmt: Fp8Format = E4M3
    automatic: bool = True

    def steps(self, job: Sum, comm: Comm) -> Steps:
        tensors, n = job.tensors, job.grads.numel()
        amax = largest_magnitudes(job.grads, tensors.owner, len(tensors.mu))
        yield comm.all_reduce(amax, dist.ReduceOp.MAX)
        scale = scale_ref(amax.view(torch.float32), self.fmt) / tensors.mu
        tensors.nonfinite.logical_or_(~scale.isfinite())
        layout = Layout(n, self.fmt, scaled=False)
        codes = layout.empty(1, 1, device=job.grads.device)
        shared = Shared(scale, tensors.owner[None, None])
        pack(job.grads[None, None], codes, layout=layout, shared=shared)
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
        """What NCCL does, through uint8: add in FP8 around the ring. Fills in this rank's part."""
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


def adjust_mu(tensors: Sequence[Tensors], saturated: Tensor, nonfinite: Tensor) -> None:
    """Set mu of the tensors of all buckets for the next step, and start new counts.

    `saturated` fp32 [all T] are the shares of sums at +-MAX, `nonfinite` bool [all T] says in whose
    sums there was NaN or Inf; both are the same on all ranks. Such a step is skipped, so these
    tensors keep their mu.
    """
    mu = torch.cat([each.mu for each in tensors])
    adjusted = torch.where(saturated > SATURATED, mu / 2, mu * GROWTH).clamp(SMALLEST_MU, 1.0)
    adjusted = torch.where(nonfinite, mu, adjusted)
    sizes = [len(each.mu) for each in tensors]
    torch._foreach_copy_([each.mu for each in tensors], adjusted.split(sizes))
    torch._foreach_zero_([each.saturated for each in tensors])
    torch._foreach_zero_([each.nonfinite for each in tensors])


def _finish(job: Sum, total: Tensor) -> None:
    """Bring a sum to where it is wanted, unless it stands there already."""
    if job.add:
        job.out.add_(total)
    elif total.data_ptr() != job.out.data_ptr():
        job.out.copy_(total)
