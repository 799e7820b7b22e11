"""Tokens per second and peak memory of whole training steps: coatlm, megatron-core + TE, FSDP2.

Random tokens; a step is forward, backward, gradient norm, clipping and the update. The peers are
megatron-core's training stack (megatron_peer.py) and FSDP2 (fsdp_peer.py). Nothing waits for the
device between steps: a step's time is that between the ends of two updates, `host_ms` the minimum
time of the host to launch one. `peak_gib` is the peak of tensors, `reserved_gib` the allocator's
memory at the end, `device_gib` the device memory in use then, including NCCL and CUDA.

With gpus=N a row runs on N data-parallel processes, with ZeRO-1 on both sides and overlapped
gradient reduction and weight all-gather; tokens per second are per GPU, and the peak is that of the
rank with the highest. Ranks that share samples (parallel.cp, parallel.tp of coatlm's rows) do
`microbatches` times as many steps of forward and backward as there are such ranks, so that each GPU
computes as many tokens per step as with data parallelism alone.
trace=1 adds values per step from a trace of rank 0: `comm_ms`, time with communication,
`exposed_ms`, communication without other kernels, and `idle_ms`, no kernels. Tracing slows the
host, so `idle_ms` is too large. Without CUDA graphs there is also the kernels' time by part of a
step: `output_layer_ms`, `gemm_ms`, `attention_ms`, `elementwise_ms`, and the norm, clipping and
update. trace=DIR also stores the traces of all ranks in DIR.

Options: model=3b mbs=4 seq=2048 microbatches=1 (per step) steps=8 warmup=3 (steps before those that
are measured, at least 1, and 3 with CUDA graphs) layers=N also=ROW,... (of COATLM,
megatron_peer.ROWS and fsdp_peer.ROWS). For coatlm's rows optim=adamw-fp32,coat-lean, zero=1,3,
tp_chunks=1,2 and cp_comm=a2a,p2p,all_gather (each row runs with each of these as optim.recipe,
parallel.zero, parallel.tp_chunks and parallel.cp_comm; the default is adamw-fp32, as the peer's, 1,
1 and auto), graphs=none,microbatch,step (train.cuda_graphs, and with `microbatch` none of whole
steps; default: none), vocab=32000 and dotted options of a run, such as parallel.main_grads=bf16.
With data.reset_attention_mask=true samples consist of documents of document=500 tokens.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coatlm.config.recipes import RECIPES as FLOW_RECIPES
from coatlm.model.fits import with_fitting
from coatlm.platform import gpu_memory
from tools.benchmarks import fsdp_peer, megatron_peer
from tools.benchmarks.layer_stacks import LayerShape
from tools.benchmarks.overlap import trace_values
from tools.benchmarks.ranks import StartedRanks, send_record, wait_to_measure
from tools.benchmarks.updates import record_updates, update_ms

SHAPES = {  # hidden, layers, heads, ffn
    "125m": (768, 12, 12, 2048),
    "0.5b": (896, 24, 14, 4864),
    "1b": (2048, 16, 16, 5504),
    "3b": (3072, 28, 24, 8192),
    "7b": (4096, 32, 32, 11008),
    "8b": (4096, 32, 32, 14336),
    "13b": (5120, 40, 40, 13824),
    "34b": (8192, 48, 64, 22016),
    "qwen-1.5b": (1536, 28, 12, 8960),
    "qwen-3b": (2048, 36, 16, 11008),
    "qwen-7b": (3584, 28, 28, 18944),
    "qwen-14b": (5120, 48, 40, 13824),
}
OPTIONS = (
    "model",
    "mbs",
    "seq",
    "microbatches",
    "steps",
    "warmup",
    "layers",
    "gpus",
    "trace",
    "also",
    "optim",
    "document",
    "zero",
    "tp_chunks",
    "cp_comm",
    "graphs",
    "vocab",
    "SECTION.KEY",
)
VOCAB = 32000
WARMUP = 3  # steps, the default of warmup=
COATLM = {  # row -> model.spec, precision.recipe
    "coatlm local bf16": ("local", "bf16"),
    "coatlm te bf16": ("te", "bf16"),
    "coatlm te-delayed": ("te", "te-delayed"),
    "coatlm te-current": ("te", "te-current"),
    **{f"coatlm {name}": ("local", name) for name in FLOW_RECIPES},
}

VARIED = ("optim", "zero", "tp_chunks", "cp_comm", "graphs")  # ", KEY VALUE" in a row's name


def rows(options: dict[str, str]) -> list[str]:
    """The rows, peers and coatlm alternating, so that a drift of the machine affects both."""
    also = [name for name in options.get("also", "").split(",") if name]
    names = ["megatron+te bf16", "coatlm te bf16", "coatlm local bf16"]
    names += ["megatron+te delayed", "coatlm coat", "coatlm coat-lean", *also]
    for key in VARIED:
        values = (
            [f", {key} {value}" for value in options[key].split(",")] if key in options else [""]
        )
        names = [
            row
            for name in names
            for row in ([name + v for v in values] if name.startswith("coatlm") else [name])
        ]
    return names


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return int(options.get("gpus", 1))


def ready(row: str, options: dict[str, str]) -> Callable[[], dict[str, Any]]:
    """What measures the row; with several GPUs processes that start here, import and wait."""
    if gpus(options) == 1:
        return partial(measure_here, row, options)
    words = [row, *(f"{name}={value}" for name, value in options.items())]
    return StartedRanks(__name__, words, gpus(options))


def measure(row: str, options: dict[str, str]) -> dict[str, Any]:
    """Median step time, tokens per second and peak memory of one row on `gpus` processes."""
    return ready(row, options)()


def measure_here(row: str, options: dict[str, str]) -> dict[str, Any]:
    """Measure the row in this process, which may be one of several ranks."""
    *size, microbatches = sizes_of(options)
    if row in megatron_peer.ROWS or row in fsdp_peer.ROWS:
        step, optimizer, sent = *peer_step(row, options), dict
    else:
        config, vocab = run_config(row, options)
        document = int(options.get("document", 500))
        step, optimizer, sent = coatlm_step(
            config,
            *size,
            microbatches,
            document,
            vocab=vocab,
            whole_steps=whole_steps(row),
        )
    updates = [] if in_backward(options) else record_updates(optimizer)
    ends, host, loss, warm = [], [], 0.0, warmup(options)
    for number in range(int(options.get("steps", 8)) + warm):
        if number == warm - 1:  # the step in which train.cuda_graphs=true captures
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step()
        host.append(time.perf_counter() - start)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
    torch.cuda.synchronize()
    pairs = itertools.pairwise(ends[warm - 1 :])
    times = [begin.elapsed_time(end) / 1000 for begin, end in pairs]
    seconds = statistics.median(times)
    free, total = torch.cuda.mem_get_info()
    memory = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), total - free
    peak = torch.tensor([*(bytes_ / 2**30 for bytes_ in memory), seconds], device="cuda")
    dist.all_reduce(peak, dist.ReduceOp.MAX)  # all ranks trace the same number of steps
    parts = {}
    if "trace" in options:
        file = Path(options["trace"]) / f"rank{dist.get_rank()}.json.gz"
        keep = None if options["trace"] == "1" else file
        parts = trace_values(step, float(peak[3]), keep, by_part=not captures(row, options))
    return {
        "step_ms": round(1000 * seconds, 1),
        "host_ms": round(1000 * min(host[warm:]), 1),
        "tokens_per_s": round(size[0] * size[1] * microbatches / seconds),
        "peak_gib": round(float(peak[0]), 1),
        "reserved_gib": round(float(peak[1]), 1),
        "device_gib": round(float(peak[2]), 1),
        "spread": round((max(times) - min(times)) / seconds, 3),
        "loss": round(float(loss), 4),
        **parts,
        **update_ms(updates[warm:]),  # without tracing
        **sent(),
    }


def warmup(options: dict[str, str]) -> int:
    """The number of steps before those that are measured."""
    return int(options.get("warmup", WARMUP))


def sizes_of(options: dict[str, str]) -> tuple[int, int, int]:
    """Samples of a microbatch, their tokens, microbatches per step."""
    return (
        int(options.get("mbs", 4)),
        int(options.get("seq", 2048)),
        int(options.get("microbatches", 1)),
    )


def shape_of(options: dict[str, str]) -> tuple[int, int, int, int]:
    """hidden, layers, heads, ffn."""
    hidden, layers, heads, ffn = SHAPES[options.get("model", "3b")]
    return hidden, int(options.get("layers", layers)), heads, ffn


def run_config(row: str, options: dict[str, str]) -> tuple[Any, int]:
    """The configuration of a row of coatlm with these options, and its vocabulary."""
    mbs, seq, microbatches = sizes_of(options)
    samples = int(options.get("gpus", 1)) * mbs * microbatches
    overrides = [f"{name}={value}" for name, value in options.items() if "." in name]
    overrides = [f"train.global_batch={samples}", *overrides]
    config = coatlm_config(row, shape_of(options), mbs, seq, overrides)
    return config, int(options.get("vocab", VOCAB))


def captures(row: str, options: dict[str, str]) -> bool:
    """Whether CUDA graphs launch the row's kernels."""
    return whole_steps(row) is not None or options.get("train.cuda_graphs") == "true"


def whole_steps(row: str) -> bool | None:
    """Whether the row asks for graphs of whole steps, or of microbatches; None if for neither."""
    return {"step": True, "microbatch": False}.get(row.rpartition("graphs ")[2])


def in_backward(options: dict[str, str]) -> bool:
    """Whether the row updates in backward, so that the time of an update is not known."""
    return options.get("train.update") == "backward"


def random_tokens(mbs: int, seq: int, rank: int, vocab: int = VOCAB) -> Callable[[], torch.Tensor]:
    """Draw [mbs, seq + 1] tokens per call, the same for every row, different on each data rank."""
    generator = torch.Generator("cuda").manual_seed(rank)
    return lambda: torch.randint(0, vocab, (mbs, seq + 1), device="cuda", generator=generator)


def coatlm_config(
    row: str, shape: tuple[int, ...], mbs: int, seq: int, overrides: Sequence[str] = ()
) -> Any:
    """The configuration of a row of coatlm. Raises ConfigError for unknown keys."""
    from coatlm.config import make_config, override

    hidden, layers, heads, ffn = shape
    name, *given = row.split(", ")
    varied = dict(word.split(" ") for word in given)
    spec, recipe = COATLM[name]
    sections = {
        "model": {"spec": spec, "hidden": hidden, "layers": layers, "heads": heads, "ffn": ffn},
        "data": {"text": ["-"], "seq_len": seq},
        "parallel": {
            "zero": int(varied.get("zero", 1)),
            "tp_chunks": int(varied.get("tp_chunks", 1)),
            "cp_comm": varied.get("cp_comm", "auto"),
        },
        "precision": {"recipe": recipe},
        "optim": {"recipe": varied.get("optim", "adamw-fp32"), "lr": 1e-4},
        "train": {
            "micro_batch": mbs,
            "global_batch": mbs,
            "cuda_graphs": varied.get("graphs", "none") != "none",
        },
    }
    return make_config(override(sections, overrides))


def coatlm_step(
    config: Any,
    mbs: int,
    seq: int,
    microbatches: int = 1,
    document: int = 500,
    *,
    vocab: int = VOCAB,
    whole_steps: bool | None = None,
) -> tuple[Callable[[], Any], Any, Callable[[], dict[str, int]]]:
    """A step of coatlm's trainer, its optimizer, and a function for the bytes that a step sent.

    `whole_steps`: as in `Trainer`.
    """
    from coatlm.data.batches import Microbatch, document_bounds
    from coatlm.parallel.groups import make_groups
    from coatlm.train.setup import Launch, quiet_megatron, start_processes
    from coatlm.train.step import Trainer

    quiet_megatron()
    start_processes(Launch.from_environment())
    groups = make_groups(config.parallel)
    decided = with_fitting(config, vocab, groups.dp.size(), gpu_memory())
    trainer = Trainer(decided, groups, vocab, whole_steps=whole_steps)
    draw = random_tokens(mbs, seq, trainer.groups.dp.rank(), vocab)
    count = microbatches * dist.get_world_size() // trainer.groups.dp.size()
    mask = torch.ones(mbs, seq, device="cuda")
    bounds = None
    if config.data.reset_attention_mask:
        bounds = document_bounds((torch.arange(seq) // document).expand(mbs, -1)).cuda()

    def batch() -> Microbatch:
        tokens = draw()
        return Microbatch(
            tokens=tokens[:, :-1].contiguous(),
            labels=tokens[:, 1:].contiguous(),
            loss_mask=mask,
            document_bounds=bounds,
        )

    def step() -> Any:
        return trainer.train_step(trainer.place([batch() for _ in range(count)]), 1e-4)[0]

    return step, trainer.optimizer, lambda: trainer.comm_bytes


def peer_step(row: str, options: dict[str, str]) -> tuple[Callable[[], Any], Any]:
    """A step of a peer, and its optimizer. Raises ValueError for options of coatlm alone."""
    work = {key for key in options if key.startswith(("model.", "data.", "train.recompute"))}
    for key in work - {"model.kv_heads"}:
        raise ValueError(f"{key}={options[key]}: peers are measured without it")
    mbs, seq, microbatches = sizes_of(options)
    hidden, layers, heads, ffn = shape_of(options)
    vocab, kv_heads = int(options.get("vocab", VOCAB)), int(options.get("model.kv_heads", heads))
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"model.kv_heads={kv_heads}: must divide model.heads={heads}")
    make: Callable[..., tuple[Callable[[], Any], Any]] = fsdp_peer.fsdp_step
    if row in megatron_peer.ROWS:
        make = megatron_peer.megatron_step
        megatron_peer.provide_fused_weight_gradient()
    from coatlm.train.setup import Launch, start_processes

    start_processes(Launch.from_environment())
    sizes = LayerShape(hidden, ffn, heads, seq, mbs, shared=heads // kv_heads)
    draw = random_tokens(mbs, seq, dist.get_rank(), vocab)
    return make(row, sizes, layers, vocab, draw, microbatches)


def main() -> None:
    """Run one process of a row with several GPUs, under torchrun."""
    row, *words = sys.argv[1:]
    if row.startswith("coatlm"):
        import coatlm.train.step  # noqa: F401
    wait_to_measure()
    found = measure_here(row, dict(word.split("=", 1) for word in words))
    if dist.get_rank() == 0:
        send_record(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
