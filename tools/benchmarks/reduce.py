"""Reduce-scatter of gradients over all local GPUs: milliseconds, relative error, bytes per element.

Rows: an all-to-all of one byte per element alone, NCCL's sums in fp32 and BF16, FP8-LM's sum, and
coatlm's FP8 exchange from BF16 and from fp32 gradients, with all kernels. Rows with `delayed` know
the scales, as with parallel.grad_comm_scaling=delayed, and only collect the next amaxes; other rows
of FP8-LM's sum and those with `tensor` and `bucket` first read the gradients for them. `ms` is the
device time; the device is busy with other work first, as in backward, so that the host has issued
everything before it starts. `host_ms` is the time that the host takes to issue it. All rows share
the processes, one per GPU.

Options: values=268435456 ranks=N reps=20, pieces=2^24,2^25,... for rows of FP8 exchange at other
piece sizes, whole=1 for all-reduces.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.formats import E3M4, E4M3
from coatlm.fp8.scaling import scale_ref
from coatlm.fp8.segments import largest_magnitudes
from coatlm.parallel.collectives import Comm, Traffic
from coatlm.parallel.exchange import Fp8Exchange
from coatlm.parallel.groups import high_priority
from coatlm.parallel.wire import Fp8Sum, Plain, Reduction, Sum, Tensors, Wire
from tools.benchmarks.ranks import run_ranks, send_record

OPTIONS = ("values", "ranks", "reps", "pieces", "whole")
VALUES = 1 << 28
FP32, BF16 = torch.float32, torch.bfloat16
WIRES: dict[str, tuple[Wire, torch.dtype]] = {  # row -> format, dtype of the gradients
    "nccl fp32": (Plain(FP32), FP32),
    "nccl bf16": (Plain(BF16), BF16),
    "nccl bf16 from fp32": (Plain(BF16), FP32),
    "fp8-nccl from bf16": (Fp8Sum(), BF16),
    "fp8-nccl from fp32": (Fp8Sum(), FP32),
    "fp8-a2a from bf16": (Fp8Exchange(), BF16),
    "fp8-a2a from fp32": (Fp8Exchange(), FP32),
    "fp8-a2a e3m4 from bf16": (Fp8Exchange(E3M4), BF16),
    "fp8-a2a e3m4 from fp32": (Fp8Exchange(E3M4), FP32),
    "fp8-a2a tensor from bf16": (Fp8Exchange(scaling="tensor"), BF16),
    "fp8-a2a bucket from bf16": (Fp8Exchange(scaling="bucket"), BF16),
    "fp8-nccl delayed from bf16": (Fp8Sum(), BF16),
    "fp8-a2a tensor delayed from bf16": (Fp8Exchange(scaling="tensor"), BF16),
}
DELAYED = {name for name in WIRES if " delayed " in name}  # their scales are given, not measured
TOGETHER = "; "  # between the names of rows, which are measured in the same processes
WARMUP = 5
AHEAD = 8_000_000  # device cycles by which the host is ahead: some milliseconds


def rows(options: dict[str, str]) -> list[str]:
    """The rows; the first, the exchange alone, is the lower bound of the FP8 exchanges."""
    pieces = [
        f"fp8-a2a from {t}, pieces of {size}" for size in sizes(options) for t in ("bf16", "fp32")
    ]
    return ["wire alone", *WIRES, *pieces]


def sizes(options: dict[str, str]) -> list[int]:
    """Elements of `pieces`, each a number or 2^k."""
    found = []
    for text in filter(None, options.get("pieces", "").split(",")):
        exponent = text.removeprefix("2^")
        if not exponent.isdecimal() or len(exponent) > (10 if exponent == text else 2):
            raise ValueError(f"pieces={text}: a number of elements, or 2^k with k below 100")
        found.append(int(text) if exponent == text else 2 ** int(exponent))
    return found


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs needed; with `ranks` and `values`, CPU processes sum over gloo."""
    return 0 if {"ranks", "values"} <= options.keys() else 2


def measure(names: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """Measure the rows with as many processes as there are GPUs (or `ranks`)."""
    ranks = int(options.get("ranks", torch.cuda.device_count() or 2))
    if ranks < 2:
        raise RuntimeError("needs two GPUs")
    found = run_ranks(__name__, [names, json.dumps(options)], ranks)
    return [{"row": row, **record} for row, record in found.items()]


def work(names: str, options: dict[str, str]) -> None:
    """Measure the rows in one of several processes; rank 0 sends the results, by row."""
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    comm = Comm(dist.new_group(pg_options=high_priority()), Traffic(), "grad")
    found = {row: one(row, options, comm, device) for row in names.split(TOGETHER)}
    if comm.rank == 0:
        send_record(found)
    dist.destroy_process_group()


def one(row: str, options: dict[str, str], comm: Comm, device: torch.device) -> dict[str, Any]:
    """Measure a row on this rank."""
    values = int(options.get("values", VALUES))
    reps = int(options.get("reps", 20))
    traffic = comm.traffic
    result: dict[str, Any] = {"gpus": comm.size, "values": values}
    if row == "wire alone":
        sent = torch.zeros(values, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        times = milliseconds(lambda: comm.all_to_all(received, sent).wait(), reps)
        traffic.sent.clear()
        comm.all_to_all(received, sent).wait()
    else:
        times, error = sums(row, values, reps, comm, device, whole="whole" in options)
        result["relative_error"] = round(error, 5)
    legs = 2 if "whole" in options else 1
    each = sum(traffic.sent.values()) / (values * (comm.size - 1) / comm.size) / legs
    return result | times | {"bytes_an_element_and_leg": round(each, 4)}


def sums(
    row: str, values: int, reps: int, comm: Comm, device: torch.device, *, whole: bool
) -> tuple[dict[str, float], float]:
    """The times and the relative error of a format; leaves the traffic of one sum in `comm`."""
    kind, _, size = row.partition(", pieces of ")
    wire, dtype = WIRES[kind]
    if size:
        wire = Fp8Exchange(piece=int(size))
    stream = torch.cuda.Stream(priority=-1) if device.type == "cuda" else None
    grads = gradients(comm.rank, values, device).to(dtype)
    part = values // comm.size
    tensors = Tensors.of([values // 64] * 64, values // 128, device)
    tensors.mu.fill_(1.0 / comm.size)
    own = slice(comm.rank * part, (comm.rank + 1) * part)
    out = grads if whole else grads[own]  # in place, as in training
    job = Sum(grads, out, (part,) * comm.size, tensors, whole=whole)
    if kind in DELAYED:
        amax = largest_magnitudes(grads, tensors.owner, len(tensors.mu))
        comm.all_reduce(amax, dist.ReduceOp.MAX).wait()
        tensors.scale = scale_ref(2 * amax.view(torch.float32), E4M3)
        tensors.amax = torch.zeros_like(amax)

    def reduce() -> None:
        Reduction(wire.steps(job, comm), stream).wait()

    reduce()
    exact = torch.zeros(part, dtype=torch.float64, device=device)
    for rank in range(comm.size):
        exact += gradients(rank, values, device).to(dtype)[own].double()
    got = grads[own].double()
    error = torch.stack([(got - exact).square().sum(), exact.square().sum()])
    dist.all_reduce(error)
    times = milliseconds(reduce, reps)
    comm.traffic.sent.clear()
    reduce()
    return times, float((error[0] / error[1]).sqrt())


def gradients(rank: int, values: int, device: torch.device) -> Tensor:
    """Normal fp32 values with a log-normal scale per 4096 elements, as gradients of a model."""
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(values, generator=generator, device=device).view(-1, 4096)
    same = torch.Generator(device).manual_seed(1234)
    return (x * torch.randn(len(x), 1, generator=same, device=device).exp() * 1e-3).view(-1)


def milliseconds(call: Callable[[], object], reps: int) -> dict[str, float]:
    """Medians over `reps`, of the slowest rank each time: `ms` and, on a GPU, `host_ms`."""
    on_gpu = torch.cuda.is_available()
    found = []
    for number in range(reps + WARMUP):
        dist.barrier()
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD)
            begin.record()
        start = time.perf_counter()
        call()
        elapsed = [1000 * (time.perf_counter() - start)]
        if on_gpu:
            end.record()
            torch.cuda.synchronize()
            elapsed.insert(0, begin.elapsed_time(end))
        slowest = torch.tensor(elapsed, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if number >= WARMUP:
            found.append(slowest.tolist())
    medians = (round(statistics.median(times), 3) for times in zip(*found, strict=True))
    return dict(zip(("ms", "host_ms"), medians, strict=False))


if __name__ == "__main__":
    work(sys.argv[1], json.loads(sys.argv[2]))
