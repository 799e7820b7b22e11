"""Whole steps of several layouts on the GPUs of one machine, the most important ones first.

`end-to-end` measures each row, and its columns mean the same here. Rows of coatlm also have what
`coatlm plan` predicts for this GPU: `predicted_tokens_per_s`, `predicted_gib`, and `speed_ratio`
and `memory_ratio`, which are predicted / measured. The layout called "planned" is the one that the
planner ranks first. Rows of weak scaling use the number of GPUs in their name.

With gpus=1 the rows are models of 0.5B to 14B parameters, with the output layer in BF16 and with
its gradients in FP8, and the first ones of weak scaling. Rows called "parts" run without CUDA
graphs and divide a step into output layer, GEMMs, attention, other kernels and update; `alone_ms`
is the time that the planner predicts for each of them without overlap, in this order.

Options: gpus=2 (1 to 8 GPUs of this machine) steps=5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from coatlm.config import LAYOUT, Config
from coatlm.model.decide import Gpu, cluster_of
from coatlm.model.layouts import describe, predicted, ranked
from coatlm.model.memory import GIB
from coatlm.model.step_time import Cluster
from tools.benchmarks import end_to_end

OPTIONS = ("gpus", "steps")
LEAST, MOST = 2, 8  # GPUs of a row that does not say how many
COAT, TE, FSDP = "coatlm coat, optim coat-lean", "megatron+te delayed", "fsdp2 torchao"
FP8 = {"precision.scaling": "delayed", "parallel.main_grads": "bf16"}
LLAMA_3_8B = {"model": "8b", "vocab": "128256", "model.kv_heads": "8", "seq": "8192", "mbs": "1"}
LLAMA_2_7B = {"model": "7b", "seq": "2048", "mbs": "4", "microbatches": "4"}
LLAMA_2_13B = {"model": "13b", "seq": "2048", "mbs": "2", "microbatches": "4"}
CODE_LLAMA_34B = {"model": "34b", "model.kv_heads": "8", "seq": "2048", "mbs": "1"}
QWEN_05B = {"model": "0.5b", "vocab": "151936", "seq": "1024", "mbs": "32", "model.kv_heads": "2"}
QWEN_05B |= {"model.qkv_bias": "true", "model.tie_embeddings": "true"}
QWEN = {"vocab": "151936", "seq": "1024", "model.qkv_bias": "true"}
ONE_GPU = {  # name -> options; steps take up to 14 s
    "0.5B": QWEN_05B | {"microbatches": "16", "train.cuda_graphs": "true"},
    "1.5B": QWEN
    | {"model": "qwen-1.5b", "mbs": "16", "microbatches": "16", "train.cuda_graphs": "true"}
    | {"model.kv_heads": "2", "model.tie_embeddings": "true"},
    "3B": QWEN
    | {"model": "qwen-3b", "mbs": "16", "microbatches": "8", "model.kv_heads": "2"}
    | {"model.tie_embeddings": "true"},
    "8B of 2048 tokens": LLAMA_3_8B
    | {"seq": "2048", "mbs": "2", "microbatches": "8", "optim.recipe": "coat-24"},
    "8B of 8192 tokens": LLAMA_3_8B
    | {"microbatches": "8", "optim.recipe": "coat-24", "train.logits": "save"},
    "7B": QWEN
    | {"model": "qwen-7b", "mbs": "8", "microbatches": "16", "model.kv_heads": "4"}
    | {"optim.recipe": "coat-24"},
    "14B": QWEN
    | {"model": "qwen-14b", "mbs": "4", "microbatches": "32", "model.kv_heads": "8"}
    | {"optim.offload": "states"},
}
PARTS = ("output_layer", "gemms", "attention", "elementwise", "update")  # of StepTime
TP2 = {"parallel.tp": "2", "parallel.sequence_parallel": "true"}
ZERO_3 = {"parallel.zero": "3", "parallel.weight_gather": "fp8"}


class LayoutRow(NamedTuple):
    """A row: its name, that of the row of `end-to-end`, and the options of it."""

    name: str
    row: str
    options: Mapping[str, str]
    gpus: int | None = None  # None: all
    least: int = LEAST  # GPUs
    most: int = MOST  # GPUs
    planned: bool = False  # in the layout that the planner ranks first


def runs() -> Iterator[LayoutRow]:
    """All rows in the order of their importance."""
    large = {**LLAMA_3_8B, "microbatches": "16"}
    yield LayoutRow("8B of 8192 tokens, ZeRO-1", COAT, large)
    yield LayoutRow("8B of 8192 tokens, planned", COAT, large, planned=True)
    yield LayoutRow("8B of 8192 tokens, megatron+te delayed", TE, large)
    for mbs in ("4", "2"):
        traced = LLAMA_2_7B | {"mbs": mbs, "microbatches": "1", "trace": "1"}
        yield LayoutRow(f"7B, microbatch {mbs}, traced", COAT, traced)
    yield LayoutRow(
        "7B, microbatch 4, megatron+te delayed",
        TE,
        LLAMA_2_7B | {"microbatches": "1", "trace": "1"},
    )
    yield LayoutRow("7B, ZeRO-1", COAT, LLAMA_2_7B)
    yield LayoutRow("7B, ZeRO-3", COAT, LLAMA_2_7B | ZERO_3)
    yield LayoutRow("7B, fsdp2 torchao", FSDP, LLAMA_2_7B | {"mbs": "2", "microbatches": "8"})
    yield LayoutRow("7B, TP2", COAT, LLAMA_2_7B | TP2)
    yield LayoutRow("7B, TP2, 2 chunks", COAT, LLAMA_2_7B | TP2 | {"parallel.tp_chunks": "2"})
    fp8 = {"parallel.tp_comm_reduce": "fp8"}
    yield LayoutRow("7B, TP2, FP8 sums", COAT, LLAMA_2_7B | TP2 | fp8)
    yield LayoutRow(
        "7B, PP2", COAT, LLAMA_2_7B | {"parallel.pp": "2", "mbs": "2", "microbatches": "8"}
    )
    long = LLAMA_2_7B | {"seq": "16384", "mbs": "1", "microbatches": "2"}
    yield LayoutRow("7B of 16384 tokens, ZeRO-1", COAT, long)
    for way in ("a2a", "p2p", "all_gather"):
        options = long | {"parallel.cp": "2", "parallel.cp_comm": way}
        yield LayoutRow(f"7B of 16384 tokens, CP2 by {way}", COAT, options)
    yield LayoutRow("13B, ZeRO-3", COAT, LLAMA_2_13B | ZERO_3)
    yield LayoutRow("13B, TP2", COAT, LLAMA_2_13B | TP2)
    yield LayoutRow("13B, planned", COAT, LLAMA_2_13B, planned=True)
    giant = CODE_LLAMA_34B | {"microbatches": "4"}
    yield LayoutRow("34B, ZeRO-3", COAT, giant | ZERO_3, least=8)
    yield LayoutRow("34B, planned", COAT, giant, least=8, planned=True)
    for name, options in ONE_GPU.items():
        for layer in ("fp8-gradients", "bf16"):
            one = options | {"precision.output_layer": layer}
            yield LayoutRow(f"{name}, output layer {layer}", COAT, one, gpus=1, least=1, most=1)
        parts = options | {"precision.output_layer": "fp8-gradients", "trace": "1"}
        parts |= {"microbatches": "2", "train.cuda_graphs": "false"}
        yield LayoutRow(f"{name}, parts", COAT, parts, gpus=1, least=1, most=1)
    for count in (1, 2, 4, 8):
        yield LayoutRow(f"7B, weak scaling to {count}", COAT, LLAMA_2_7B, count, count)
        small = QWEN_05B | {"microbatches": "4"}
        yield LayoutRow(f"0.5B, weak scaling to {count}", COAT, small, count, count)


def rows(options: dict[str, str]) -> list[str]:
    """The names of the rows that this number of GPUs can run. Raises ValueError for others."""
    count = gpus(options)
    return [run.name for run in runs() if run.least <= count <= run.most]


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs. Raises ValueError outside of 1 to 8."""
    count = int(options.get("gpus", LEAST))
    if not 1 <= count <= MOST:
        raise ValueError(f"gpus={count}: 1 to {MOST} GPUs of one machine")
    return count


def measure(row: str, options: dict[str, str]) -> dict[str, Any]:
    """The record of `end-to-end`, with the layout and its prediction in rows of coatlm."""
    (run,) = (run for run in runs() if run.name == row)
    count = run.gpus or gpus(options)
    device = torch.cuda.get_device_properties(0)
    cluster = cluster_of(Gpu(device.name, device.total_memory), count, count)
    asked = end_to_end_options(run, count, cluster) | {"steps": options.get("steps", "5")}
    found = {"gpus": count, **end_to_end.measure(run.row, asked)}
    if run.row != COAT:
        return found
    config, vocab = end_to_end.run_config(run.row, asked)
    found["layout"] = describe(config, count)
    return found if cluster is None else found | compared(found, config, vocab, cluster)


def end_to_end_options(run: LayoutRow, count: int, cluster: Cluster | None) -> dict[str, str]:
    """The options of `end-to-end` for a row. Raises ValueError if a layout is to be planned and the
    planner has no rates of the GPU, or if no layout fits.
    """
    options = {**FP8, **run.options, "gpus": str(count)}
    if not run.planned:
        return options
    if cluster is None:
        raise ValueError(f"{run.name}: the planner has no rates of this GPU")
    config, vocab = end_to_end.run_config(run.row, options)
    choice = next(ranked(config, vocab, cluster), None)
    if choice is None:
        raise ValueError(f"{run.name}: no layout fits {count} x {cluster.rates.gpu}")
    chosen = choice.config.model_dump(mode="json")
    layout = {f"{a}.{b}": str(chosen[a][b]).lower() for a, b in LAYOUT}
    size, samples = choice.config.train.micro_batch, choice.config.train.global_batch
    assert isinstance(size, int)
    if samples % (count * size):
        raise ValueError(f"{run.name}: {samples} samples are no whole microbatches of {size}")
    microbatches = samples // (count * size)
    return options | layout | {"mbs": str(size), "microbatches": str(microbatches)}


def compared(
    found: Mapping[str, Any], config: Config, vocab: int, cluster: Cluster
) -> dict[str, Any]:
    """What the planner predicts of a step, and the ratios of that to what was measured."""
    choice = predicted(config, vocab, cluster)
    speed, gib = choice.forecast.tokens_per_s, choice.peak / GIB
    time = choice.forecast.time
    alone = {}
    if "output_layer_ms" in found:
        alone["alone_ms"] = " ".join(f"{1000 * getattr(time, part):.1f}" for part in PARTS)
    return alone | {
        "predicted_tokens_per_s": round(speed),
        "speed_ratio": round(speed / found["tokens_per_s"], 3),
        "predicted_gib": round(gib, 1),
        "memory_ratio": round(gib / found["peak_gib"], 3),
    }
