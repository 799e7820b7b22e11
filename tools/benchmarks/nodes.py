"""Two nodes with a slow link between them: the exchange of gradients in one level and in two.

Two nodes of two ranks each (gloo, CPU) are network namespaces of this machine with a link of their
own (`two_nodes`). Rows:

    link             the round trip of one byte, a median, and the rate of one TCP stream
    exchange N MiB   a reduce-scatter of N MiB of fp32 gradients per rank
    step             the step of a small model, until all weights have been all-gathered

The last two have one record per way, and the ways take turns. `codes` only sends what `fp8-a2a`
sends, without packing, unpacking or adding. `bf16` is gloo's own sum, which has one level. `ms` is
the median over repetitions of the time of the slowest rank, `link_mb` the median of the bytes that
the node of rank 0 sends over the link, counted by the kernel, and `least_ms` what these bytes need:
link_mb / rate + latency. `times` is `ms` of two levels over that of one.

The link shares the CPU cores with the ranks, so rates above some hundred Mbit/s are only reached on
a machine with a core to spare: compare the row `link` with the rate. Needs root.

Options: mbit=1000 (rate, each way) latency_us=1000 (each way) mib=1,16,64 reps=20 steps=10
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.config import Config, make_config
from coatlm.config.load import override
from coatlm.data.batches import Microbatch
from coatlm.fp8.formats import E4M3, SCALE_BLOCK
from coatlm.fp8.payload_layout import Layout
from coatlm.parallel.collectives import Comm, Traffic
from coatlm.parallel.exchange import Fp8Exchange, Levels
from coatlm.parallel.groups import Groups, make_groups
from coatlm.parallel.wire import Plain, Reduction, Sum, Tensors, Wire
from coatlm.train.setup import Launch, quiet_megatron, start_processes
from coatlm.train.step import Trainer
from tools.benchmarks.ranks import send_record
from tools.benchmarks.two_nodes import NEEDS, measure_link, run_on_nodes, sent, two_nodes

OPTIONS = ("mbit", "latency_us", "mib", "reps", "steps")
SIZES = "1,16,64"
LOCAL, NODES = 2, 2  # ranks per node, nodes
WARMUP = 2
PINGS, STREAM = 50, 64 << 20  # round trips, bytes
VOCAB = 257
SECTIONS: dict[str, Any] = {  # of the row `step`: 5.5M parameters
    "model": {"layers": 2, "hidden": 512, "heads": 8, "ffn": 1024},
    "data": {"text": ["-"], "tokenizer": "byte", "seq_len": 64},
    "precision": {"recipe": "bf16"},
    "train": {"micro_batch": 1, "global_batch": LOCAL * NODES},
}
Ways = Mapping[str, Callable[[], object]]


def rows(options: dict[str, str]) -> list[str]:
    """The link, the sizes, and a training step. Raises ValueError for invalid sizes."""
    sizes = options.get("mib", SIZES).split(",")
    for size in sizes:
        if not (size.isdecimal() and len(size) <= 4 and 1 <= int(size) <= 1024):
            raise ValueError(f"mib={size}: whole numbers of MiB from 1 to 1024")
    return ["link", *(f"exchange {size} MiB" for size in sizes), "step"]


def gpus(options: dict[str, str]) -> int:
    """No GPU is needed."""
    return 0


def measure(row: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """Measure a row on two nodes of their own. Raises RuntimeError if there can be none."""
    rate, latency = rate_and_latency(options)
    with two_nodes(rate, latency) as nodes:
        if nodes is None:
            raise RuntimeError(f"nodes: needs {NEEDS}")
        if row == "link":
            ping, stream = measure_link(nodes, pings=PINGS, size=STREAM)
            mbit = round(8e-6 * STREAM / stream)
            return [{"ping_ms": round(1000 * ping, 2), "stream_mbit": mbit}]
        words = [row, json.dumps(options)]
        found = run_on_nodes(nodes, __name__, words, local=LOCAL)
    return table(found, rate, latency)


def rate_and_latency(options: Mapping[str, str]) -> tuple[float, float]:
    """The rate of the link in bits per second, and its latency in seconds."""
    return 1e6 * int(options.get("mbit", 1000)), 1e-6 * int(options.get("latency_us", 1000))


def table(
    found: Mapping[str, tuple[float, float]], rate: float, latency: float
) -> list[dict[str, Any]]:
    """One record per way, from its seconds and the bytes that a node sends over the link."""
    records = []
    for way, (seconds, nbytes) in found.items():
        record: dict[str, Any] = {"way": way, "link_mb": round(nbytes / 1e6, 3)}
        record["least_ms"] = round(1000 * (8 * nbytes / rate + latency), 1)
        record["ms"] = round(1000 * seconds, 1)
        one_level = found.get(way.replace("two levels", "one level"))
        if one_level is not None and way.endswith("two levels"):
            record["times"] = round(seconds / one_level[0], 2)
        records.append(record)
    return records


def work(row: str, options: dict[str, str]) -> None:
    """Measure a row in one of the ranks; rank 0 sends seconds and bytes of each way."""
    launch = Launch.from_environment()
    start_processes(launch)
    if row == "step":
        found = in_turn(steps(launch), int(options.get("steps", 10)))
    else:
        found = in_turn(exchanges(int(row.split()[1]) << 18), int(options.get("reps", 20)))
    if launch.rank == 0:
        send_record(found)
    dist.barrier()
    os._exit(0)  # without the seconds that the teardown of process groups takes


def in_turn(ways: Ways, reps: int) -> dict[str, tuple[float, float]]:
    """Median seconds of the slowest rank, and median bytes that this node sends over the link."""
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(reps + WARMUP):
        for way, call in ways.items():
            before = sent()  # before the barrier, which the other rank of the node may leave first
            dist.barrier()
            begin = time.perf_counter()
            call()
            slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.barrier()
            nbytes = sent() - before
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number >= WARMUP:
                samples[way].append((slowest.item(), nbytes))
    return {
        way: (statistics.median(t for t, _ in found), statistics.median(n for _, n in found))
        for way, found in samples.items()
    }


def exchanges(values: int) -> Ways:
    """The ways to sum `values` fp32 gradients of each rank."""
    traffic = Traffic()
    world = dist.group.WORLD
    assert world is not None
    comm, levels = Comm(world, traffic, "grad"), two_levels(traffic)
    grads = torch.randn(values, generator=torch.Generator().manual_seed(comm.rank))
    shard = values // comm.size
    tensors = Tensors.of([values], values // SCALE_BLOCK, grads.device)

    def reduce(wire: Wire) -> Tensor:
        out = torch.empty(shard)
        job = Sum(grads, out, (shard,) * comm.size, tensors, whole=False)
        Reduction(wire.steps(job, comm), None).wait()
        return out

    payloads = Layout(shard, E4M3, scaled=True).empty(comm.size, device=grads.device)
    received = torch.empty_like(payloads)
    sums, sums_received = payloads[:NODES].clone(), received[:NODES].clone()

    def in_two_levels() -> None:
        levels.inside.all_to_all(received, payloads).wait()
        levels.across.all_to_all(sums_received, sums).wait()

    return {
        "codes, one level": lambda: comm.all_to_all(received, payloads).wait(),
        "codes, two levels": in_two_levels,
        "fp8-a2a, one level": lambda: reduce(Fp8Exchange()),
        "fp8-a2a, two levels": lambda: reduce(Fp8Exchange(levels=levels)),
        "bf16, one level": lambda: reduce(Plain(torch.bfloat16)),
    }


def two_levels(traffic: Traffic) -> Levels:
    """The process groups of this rank inside its node and across the nodes."""
    ranks = torch.arange(NODES * LOCAL).view(NODES, LOCAL)
    node, local = divmod(dist.get_rank(), LOCAL)
    inside = [dist.new_group(members) for members in ranks.tolist()]
    across = [dist.new_group(members) for members in ranks.T.tolist()]
    return Levels(Comm(inside[node], traffic, "grad"), Comm(across[local], traffic, "grad"))


def steps(launch: Launch) -> Ways:
    """Steps of one model whose gradients are exchanged in different ways."""
    quiet_megatron()
    config = make_config(SECTIONS)
    groups = make_groups(config.parallel, first_on_node=launch.rank - launch.local_rank)
    assert groups.node is not None and groups.node.size() == LOCAL
    single = replace(groups, node=None, nodes=None)
    bf16 = make_config(override(SECTIONS, ["parallel.grad_comm=bf16"]))
    generator = torch.Generator().manual_seed(launch.rank)
    ids = torch.randint(VOCAB, (1, config.data.seq_len + 1), generator=generator)
    ones = torch.ones(1, config.data.seq_len)
    batch = Microbatch(tokens=ids[:, :-1], labels=ids[:, 1:], loss_mask=ones, document_bounds=None)

    def step(trainer: Trainer) -> None:
        trainer.train_step(trainer.place([batch]), 1e-4)
        for chunk in trainer.chunks:
            chunk.finish_param_sync()

    def way(config: Config, groups: Groups) -> Callable[[], None]:
        trainer = Trainer(config, groups, VOCAB)
        return lambda: step(trainer)

    return {
        "fp8-a2a, one level": way(config, single),
        "fp8-a2a, two levels": way(config, groups),
        "bf16, one level": way(bf16, single),
    }


if __name__ == "__main__":
    work(sys.argv[1], json.loads(sys.argv[2]))
