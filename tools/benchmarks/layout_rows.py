"""The rows of `bench layouts`: whole steps of a model in a layout, the most important ones first.

The order is that on two GPUs; on more of them, rows that need four or more come first. Rows of
coatlm have the formats of the preset `fp8` and BF16 gradients, if they do not say others. Their
peers are megatron-core with TransformerEngine and FSDP2, which are data-parallel only, and for
other layouts TransformerEngine's layers in coatlm's trainer, with fp32 states, gradients and sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

LEAST, MOST = 2, 8  # GPUs of a row that does not say how many
COAT, TE_LAYERS = "coatlm coat, optim coat-lean", "coatlm te-delayed"
TE, FSDP = "megatron+te delayed", "fsdp2 torchao"
COAT_LEAN = "coatlm coat-lean, optim coat-lean"
OURS = COAT, COAT_LEAN
FP8 = {"precision.scaling": "delayed", "parallel.main_grads": "bf16"}
FP8 |= {"precision.output_layer": "fp8-gradients"}
FP32_SUMS = {"parallel.grad_comm": "fp32"}
LLAMA_3_8B = {"model": "8b", "vocab": "128256", "model.kv_heads": "8", "seq": "8192", "mbs": "1"}
LLAMA_2_7B = {"model": "7b", "seq": "2048", "mbs": "4", "microbatches": "4"}
LLAMA_2_13B = {"model": "13b", "seq": "2048", "mbs": "2", "microbatches": "4"}
CODE_LLAMA_34B = {"model": "34b", "model.kv_heads": "8", "seq": "2048", "mbs": "1"}
QWEN_05B = {"model": "0.5b", "vocab": "151936", "seq": "1024", "mbs": "32", "model.kv_heads": "2"}
QWEN_05B |= {"model.qkv_bias": "true", "model.tie_embeddings": "true"}
QWEN = {"vocab": "151936", "seq": "1024", "model.qkv_bias": "true"}
FEW = {"warmup": "1", "steps": "2"}  # of up to 52 s each
ONE_GPU = {  # name -> options; 524,288 tokens per step, fewer of 8B
    "0.5B": QWEN_05B | {"microbatches": "16", "train.cuda_graphs": "true"},
    "1.5B": QWEN
    | {"model": "qwen-1.5b", "mbs": "16", "microbatches": "32", "train.cuda_graphs": "true"}
    | {"model.kv_heads": "2", "model.tie_embeddings": "true"},
    "3B": QWEN
    | {"model": "qwen-3b", "mbs": "16", "microbatches": "32", "model.kv_heads": "2"}
    | {"model.tie_embeddings": "true", **FEW},
    "8B of 2048 tokens": LLAMA_3_8B
    | {"seq": "2048", "mbs": "2", "microbatches": "4", "optim.recipe": "coat-24"},
    "8B of 8192 tokens": LLAMA_3_8B
    | {"microbatches": "8", "optim.recipe": "coat-24", "train.logits": "save"},
    "7B": QWEN
    | {"model": "qwen-7b", "mbs": "8", "microbatches": "64", "model.kv_heads": "4"}
    | {"optim.recipe": "coat-24", **FEW},
    "14B": QWEN
    | {"model": "qwen-14b", "mbs": "4", "microbatches": "128", "model.kv_heads": "8"}
    | {"optim.offload": "states", **FEW},
}
EXACT = LLAMA_3_8B | {"microbatches": "8"}  # coat-lean states have exact fp32 master weights
ALONE = LLAMA_3_8B | {"seq": "2048", "mbs": "2", "microbatches": "1", "optim.recipe": "coat-24"}
TRACED = {"trace": "1"}
TP2 = {"parallel.tp": "2", "parallel.sequence_parallel": "true"}
GRAPHS = {"train.cuda_graphs": "true"}  # without them the host limits TP2 of FP8 layers
PP2 = {"parallel.pp": "2", "mbs": "2", "microbatches": "8"}
LONG = LLAMA_2_7B | {"seq": "16384", "mbs": "1", "microbatches": "2"}
LONGEST = {"seq": "131072", "mbs": "1", "microbatches": "1", "train.recompute": "full"}
ONE = {"warmup": "1", "steps": "1"}  # a step of the longest samples takes a minute and more
TESTS = {  # tests/multigpu/test_NAME.py -> seconds
    "wire": 60,
    "reduction": 120,
    "fp8_gather": 90,
    "layer_gather": 90,
    "layouts": 180,
    "graphs": 120,
    "hang": 60,
}
ZERO_3 = {"parallel.zero": "3", "parallel.weight_gather": "fp8"}


class LayoutRow(NamedTuple):
    """A row: its name, that of the row of `end-to-end`, and the options of it.

    Instead of a row of `end-to-end` it may have a command and the seconds that this takes.
    """

    name: str
    row: str
    options: Mapping[str, str]
    gpus: int | None = None  # None: all
    least: int = LEAST  # GPUs
    most: int = MOST  # GPUs
    planned: bool = False  # in the layout that the planner ranks first
    command: tuple[str, ...] = ()
    seconds: float = 0.0


def runs() -> Iterator[LayoutRow]:
    """All rows in the order of their importance."""
    yield from _layouts()
    yield from _reductions()
    yield from _large()
    yield from _on_four_or_more()
    yield from _on_one()
    for count in (1, 2, 4, 8):
        yield LayoutRow(f"7B, weak scaling to {count}", COAT, LLAMA_2_7B, count, count)
        small = QWEN_05B | {"microbatches": "4"}
        yield LayoutRow(f"0.5B, weak scaling to {count}", COAT, small, count, count)
    yield from _commands()


def _layouts() -> Iterator[LayoutRow]:
    """Layouts of a 7B model with their exposed communication, and the peers of each."""
    for chunks in ("1", "2", "4"):
        options = LLAMA_2_7B | TP2 | GRAPHS | TRACED | {"parallel.tp_chunks": chunks}
        most = MOST if chunks == "1" else 2
        yield LayoutRow(f"7B, TP2, tp_chunks {chunks}, traced", COAT, options, most=most)
    options = LLAMA_2_7B | TP2 | GRAPHS | TRACED | {"parallel.tp_comm_reduce": "fp8"}
    yield LayoutRow("7B, TP2, FP8 sums, traced", COAT, options)
    yield LayoutRow("7B, TP2, te-delayed", TE_LAYERS, LLAMA_2_7B | TP2)
    for way, most in (("a2a", MOST), ("p2p", MOST), ("all_gather", 2)):
        options = LONG | TRACED | {"parallel.cp": "2", "parallel.cp_comm": way}
        yield LayoutRow(f"7B of 16384 tokens, CP2 by {way}, traced", COAT, options, most=most)
    for kind in ("bf16", "fp8"):
        name = f"7B of 16384 tokens, CP2 by a2a, coat-lean with {kind} keys, traced"
        options = LONG | TRACED | {"parallel.cp": "2", "parallel.cp_comm_kv": kind}
        yield LayoutRow(name, COAT_LEAN, options, most=2)
    name = "7B of 16384 tokens, CP2, te-delayed"
    yield LayoutRow(name, TE_LAYERS, LONG | {"parallel.cp": "2"})
    yield LayoutRow("7B of 16384 tokens, ZeRO-1", COAT, LONG)
    yield LayoutRow("7B, ZeRO-1", COAT, LLAMA_2_7B)
    for gather, most in (("fp8", MOST), ("bf16", 2)):
        options = LLAMA_2_7B | TRACED | ZERO_3 | {"parallel.weight_gather": gather}
        yield LayoutRow(f"7B, ZeRO-3, {gather} weights, traced", COAT, options, most=most)
    yield LayoutRow("7B, fsdp2 torchao", FSDP, LLAMA_2_7B | {"mbs": "2", "microbatches": "8"})
    yield LayoutRow("7B, PP2, traced", COAT, LLAMA_2_7B | PP2 | TRACED)
    yield LayoutRow("7B, PP2, te-delayed", TE_LAYERS, LLAMA_2_7B | PP2)
    options = LLAMA_2_7B | LONGEST | ONE | {"parallel.cp": "2"}
    yield LayoutRow("7B of 131072 tokens, CP2", COAT, options, most=2)


def _reductions() -> Iterator[LayoutRow]:
    """Scales that ranks share, from the gradients or from the steps before."""
    one = LLAMA_2_7B | {"mbs": "2", "microbatches": "1"}
    for comm, scale in (("fp8-nccl", "block"), ("fp8-a2a", "tensor")):
        for scaling in ("current", "delayed"):
            options = one | {
                "parallel.grad_comm": comm,
                "parallel.grad_comm_scale": scale,
                "parallel.grad_comm_scaling": scaling,
            }
            what = comm if scale == "block" else f"{comm} with tensor scales"
            yield LayoutRow(f"7B, {what}, {scaling}", COAT, options, most=2)


def _on_four_or_more() -> Iterator[LayoutRow]:
    large = LLAMA_3_8B | {"microbatches": "16"}
    yield LayoutRow("8B of 8192 tokens, planned", COAT, large, least=4, planned=True)
    yield LayoutRow("8B of 8192 tokens, ZeRO-1", COAT, large, least=4)
    yield LayoutRow("8B of 8192 tokens, megatron+te delayed", TE, large, least=4)
    yield LayoutRow("8B of 8192 tokens, fsdp2 torchao", FSDP, large, least=4)
    for mbs in ("4", "2"):
        options = LLAMA_2_7B | {"mbs": mbs, "microbatches": "1"} | TRACED
        yield LayoutRow(f"7B, microbatch {mbs}, megatron+te delayed", TE, options, least=4)
        options |= GRAPHS
        yield LayoutRow(f"7B, microbatch {mbs}, CUDA graphs, traced", COAT, options, least=4)
        options |= {"parallel.weight_gather": "fp8"}
        name = f"7B, microbatch {mbs}, CUDA graphs, fp8 weights, traced"
        yield LayoutRow(name, COAT, options, least=4)
    yield LayoutRow("13B, TP2, te-delayed", TE_LAYERS, LLAMA_2_13B | TP2, least=4)
    giant = CODE_LLAMA_34B | {"microbatches": "4"}
    yield LayoutRow("34B, ZeRO-3", COAT, giant | ZERO_3, least=8)
    yield LayoutRow("34B, planned", COAT, giant, least=8, planned=True)


def _large() -> Iterator[LayoutRow]:
    yield LayoutRow("13B, ZeRO-3", COAT, LLAMA_2_13B | ZERO_3)
    yield LayoutRow("13B, TP2", COAT, LLAMA_2_13B | TP2 | GRAPHS)
    yield LayoutRow("13B, planned", COAT, LLAMA_2_13B, planned=True)


def _on_one() -> Iterator[LayoutRow]:
    for name, options in ONE_GPU.items():
        for layer in ("fp8-gradients", "bf16"):
            one = options | {"precision.output_layer": layer}
            yield LayoutRow(f"{name}, output layer {layer}", COAT, one, gpus=1, least=1, most=1)
        parts = options | {"precision.output_layer": "fp8-gradients", "trace": "1"}
        parts |= {"microbatches": "2", "train.cuda_graphs": "false"}
        yield LayoutRow(f"{name}, parts", COAT, parts, gpus=1, least=1, most=1)
    for name, row, options in (
        ("8B of 8192 tokens, exact master", COAT, EXACT),
        ("8B of 8192 tokens, exact master, coat-lean", COAT_LEAN, EXACT),
        ("8B of 2048 tokens, one microbatch", COAT, ALONE),
        ("8B of 2048 tokens, updated in backward", COAT, ALONE | {"train.update": "backward"}),
    ):
        yield LayoutRow(name, row, options, gpus=1, least=1, most=1)


def _commands() -> Iterator[LayoutRow]:
    """Last, because a hang of NCCL takes all of a row's time limit."""
    words = (sys.executable, "tools/bench.py", "reduce")
    yield LayoutRow("bench reduce", "", {}, command=words, seconds=90.0)
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    for name, seconds in TESTS.items():
        file = f"tests/multigpu/test_{name}.py"
        yield LayoutRow(file, "", {}, command=(*words, file), seconds=seconds)
