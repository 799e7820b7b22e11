"""Layouts and variants whose layers compute in FP8, and the cases that are compared."""

from __future__ import annotations

from typing import Any

# One process with the microbatches of pipeline- and data-parallel ranks, on which FP8 scales depend
FOUR_SAMPLES = "single, 4 samples"
FLOW_LAYOUTS: dict[str, dict[str, Any]] = {
    FOUR_SAMPLES: {},
    "dp2 zero2": {"zero": 2},
    "tp2, split": {"tp": 2, "tp_chunks": 2},
    "tp2 sp, split": {"tp": 2, "sequence_parallel": True, "tp_chunks": 2},
    "tp2 sp, fp8 sums": {"tp": 2, "sequence_parallel": True, "tp_comm_reduce": "fp8"},
    "tp2 sp, fp8 sums, split": {
        **{"tp": 2, "sequence_parallel": True, "tp_comm_reduce": "fp8", "tp_chunks": 2}
    },
    "tp2 pp2, split": {"tp": 2, "pp": 2, "sequence_parallel": True, "tp_chunks": 2},
    "tp2 cp2, split": {"tp": 2, "cp": 2, "sequence_parallel": True, "tp_chunks": 2},
    "cp2, fp8 keys": {"cp": 2, "cp_comm_kv": "fp8"},
    "cp2 gathered, fp8 keys": {"cp": 2, "cp_comm": "all_gather", "cp_comm_kv": "fp8"},
    "cp2 by peers, fp8 keys": {"cp": 2, "cp_comm": "p2p", "cp_comm_kv": "fp8"},
    "tp2 cp2, fp8 keys": {"tp": 2, "cp": 2, "sequence_parallel": True, "cp_comm_kv": "fp8"},
    "tp4 sp": {"tp": 4, "sequence_parallel": True},
    "tp4 sp, split": {"tp": 4, "sequence_parallel": True, "tp_chunks": 4},
}
DELAYED = {"precision": {"scaling": "delayed"}}  # the first of three steps calibrates
DEEP = {"model": {"layers": 4}}  # two stages of two chunks; other FP8 runs have two layers
FP8_OUTPUT = {"precision": {"output_layer": "fp8"}}
FLOW_VARIANTS: dict[str, dict[str, Any]] = {
    "deep": DEEP,
    "deep, saved FP8 weights": DEEP | {"precision": {"keep_weights": True}},
    "saved inputs": {"precision": {"keep_linear_inputs": True}},
    "blocks": {"model": {"hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 256}},
    "fp8 output": FP8_OUTPUT,
    "fp8 output, tied": FP8_OUTPUT | {"model": {"tie_embeddings": True}},
    "fp8 output gradients": {"precision": {"output_layer": "fp8-gradients"}},
    "delayed": DELAYED,
    "blocks, recompute": {
        "model": {"hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 256},
        "train": {"recompute": "full"},
    },
    "four kv heads": {"model": {"kv_heads": 4, "ffn": 128}},
    "deep, delayed": DEEP | DELAYED,
    "deep, delayed, recompute": DEEP | DELAYED | {"train": {"recompute": "full"}},
}
FLOW_CASES: dict[int, list[tuple[str, str, str]]] = {
    2: [
        *((layout, "plain", "coat") for layout in ("tp2", "tp2 sp", "pp2", "dp2 zero1", "cp2")),
        *(("tp2 sp", v, "coat-lean") for v in ("qwen", "documents", "recompute", "tied")),
        ("tp2 sp", "plain", "fp8-linear"),
        *(("cp2", v, "coat-lean") for v in ("documents", "mha")),
        *(("cp2 gathered", v, "coat-lean") for v in ("plain", "documents", "positions")),
        *(("cp2 by peers", v, "coat-lean") for v in ("plain", "mha", "recompute")),
        ("cp2 by peers", "plain", "coat"),
        ("pp2", "documents", "coat-lean"),
        ("dp2 zero2", "plain", "coat"),
        ("dp2 zero2", "recompute", "coat-lean"),
        ("pp2 vpp2", "deep, saved FP8 weights", "coat"),
        *((layout, "delayed", "coat") for layout in ("tp2", "tp2 sp", "dp2 zero1", "cp2")),
        ("pp2", "delayed", "coat"),
        ("pp2 vpp2", "deep, delayed, recompute", "coat"),
        *((layout, "plain", "coat-paper") for layout in ("tp2", "tp2 sp", "pp2", "cp2")),
        *((layout, "plain", "rowwise") for layout in ("tp2", "tp2 sp", "pp2", "cp2")),
        *((layout, "blocks", "fp8-block") for layout in ("tp2", "tp2 sp", "pp2", "cp2")),
        *((layout, "plain", "coat-int8") for layout in ("tp2", "tp2 sp", "pp2", "cp2")),
        ("tp2 sp", "recompute", "coat-lean-int8"),
        ("tp2 sp", "delayed", "coat-paper"),
        ("tp2 sp", "saved inputs", "rowwise"),
        *((layout, "fp8 output, tied", "bf16") for layout in ("tp2 sp", "pp2", "dp2 zero3")),
        ("cp2", "fp8 output", "coat"),
        ("tp2 sp", "fp8 output gradients", "coat"),
        ("dp2 zero2", "recompute", "rowwise"),
    ],
    4: [
        ("tp2 cp2", "plain", "coat-lean"),
        ("tp2 pp2", "plain", "coat"),
        ("tp2 pp2", "delayed", "coat"),
        ("tp4 sp", "four kv heads", "coat"),
        *(("cp4", "plain", recipe) for recipe in ("coat", "coat-lean")),
    ],
}
# GEMMs that are split and overlap with collectives; each is compared with its layout, not split
SPLIT_CASES: dict[int, list[tuple[str, str, str]]] = {
    2: [
        ("tp2, split", "plain", "coat"),
        ("tp2 sp, split", "delayed", "coat"),
        *(("tp2 sp, split", v, "coat-lean") for v in ("qwen", "documents", "recompute")),
        *(("tp2 sp, split", "plain", r) for r in ("fp8-linear", "coat-int8", "coat-paper")),
        ("tp2 sp, split", "blocks", "fp8-block"),
        ("tp2 sp, split", "saved inputs", "rowwise"),
    ],
    4: [
        ("tp2 pp2, split", "delayed", "coat"),
        ("tp2 cp2, split", "plain", "coat-lean"),
        ("tp4 sp, split", "four kv heads", "coat"),
    ],
}
# partial sums that travel in FP8, and what they are compared with
SUM_CASES: list[tuple[str, str, str]] = [
    ("tp2 sp", "blocks", "coat"),
    *(("tp2 sp, fp8 sums", "blocks", recipe) for recipe in ("coat", "fp8-block")),
    ("tp2 sp, fp8 sums", "blocks, recompute", "coat"),
    ("tp2 sp, fp8 sums, split", "blocks", "coat"),
]
# Keys and values that travel in FP8. Forward rounds them as backward does anyway, by 0.027 on
# average. Attention averages these errors over tokens, so that they are no larger than those that
# FLOW_RELATIVE (test_fp8_parity.py) allows: measured are 9.3e-5 for losses and 1.2e-3 for norms.
KEY_CASES: dict[int, list[tuple[str, str, str]]] = {
    2: [
        *(("cp2, fp8 keys", v, "coat-lean") for v in ("plain", "mha", "documents")),
        *(("cp2 gathered, fp8 keys", v, "coat-lean") for v in ("plain", "mha", "documents")),
        *(("cp2 by peers, fp8 keys", v, "coat-lean") for v in ("plain", "mha", "recompute")),
    ],
    4: [("tp2 cp2, fp8 keys", "plain", "coat-lean")],
}
