"""The table that a dry run prints."""

from __future__ import annotations

from typing import Any

import pytest

from coatlm.config import Config, ConfigError
from coatlm.model import memory as mem
from coatlm.model.fits import tensor_bytes
from coatlm.model.memory import GIB, fallback_bytes, peak_bytes, replaced
from coatlm.model.numerics import TENSORS
from coatlm.model.plan import plan, simpler
from tests.model.shapes import LLAMA2_7B, config

AT = {"stage": 0, "data_parallel": 1}


def test_plan_of_llama2_7b_on_64_ranks() -> None:
    c = config(
        {**LLAMA2_7B},
        seq_len=4096,
        parallel={"tp": 2, "pp": 2, "vpp": 4, "cp": 2, "sequence_parallel": True},
        train={"global_batch": 256, "micro_batch": 1, "steps": 1000},
    )
    lines = plan(c, 64).splitlines()
    table = {line.split()[0]: line for line in lines}
    assert "6,738,415,616 (6.74 G)" in table["parameters"]
    assert "64 = tp 2 x pp 2 x cp 2 x dp 8" in table["ranks"]
    assert "16 layers per stage, 4 chunks of 4" in table["stages"]
    assert "1,048,576 tokens = 256 samples x 4096; microbatches: 32 of 1" in table["step"]
    assert "1,000 steps, 1.05 G tokens" in table["run"]
    # 6 * (32 * 202,375,168 + 4096 * 32000) + 6 * 32 * 4096 * 4096 = 42.86e9
    assert "42.9 GFLOP per token, 44.9 PFLOP per step, 44.9 EFLOP in total" in table["compute"]
    assert "stage 0, the highest peak" in table["memory"]
    rank = mem.rank_bytes(c, 32000, stage=0, data_parallel=8)
    assert f"{rank.total / 2**30:.3f}" in table["sum"]
    assert rank.weights == 2 * (16 * (202_375_168 // 2 + 2 * 4096) + 4096 * 16000)


def test_plan_without_world_size_takes_the_fewest_ranks() -> None:
    text = plan(config(parallel={"tp": 2, "pp": 2}))
    assert "4 = tp 2 x pp 2 x cp 1 x dp 1" in text


def test_plan_refuses_a_world_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="3 processes cannot hold"):
        plan(config(parallel={"tp": 2}), 3)


def sentences(config: Config, ranks: int, **keys: str) -> list[str]:
    """The sentences at the start of a plan, one per item, without line breaks."""
    text = plan(config, ranks, **keys)
    head = text[: text.index("\nmodel  ")].replace("\n  ", " ")
    return head.splitlines()


def test_a_plan_begins_with_what_is_trained_in_which_formats() -> None:
    train = {"global_batch": 64, "micro_batch": 2, "steps": 1000}
    c = config(LLAMA2_7B, seq_len=2048, preset="fp8", train=train)
    what, formats, _ = sentences(c, 8)
    assert what == (
        "run trains 6.74 G parameters for 1,000 steps of 131,072 tokens, 131 M in total. "
        "Tokens attend to all earlier ones."
    )
    separate = replaced(c, data={"reset_attention_mask": True})
    assert sentences(separate, 8)[0].endswith(" total. Tokens attend to their own document.")
    restarted = replaced(separate, data={"reset_position_ids": True})
    assert sentences(restarted, 8)[0].endswith(" own document, where positions begin at 0.")
    assert formats == (
        "Formats (preset fp8): layers have FP8 GEMMs and save norm inputs, gate and up in FP8 "
        "(coat, delayed scales); weights and optimizer states take 6.08 bytes per parameter "
        "(coat-lean); gradients are accumulated in fp32 and summed over ranks in FP8 (fp8-a2a)."
    )


def test_formats_of_no_preset_are_told_without_one() -> None:
    _, formats, layout = sentences(config(), 1)
    assert formats == (
        "Formats: layers have BF16 GEMMs; weights and optimizer states take 14 bytes per parameter "
        "(adamw-fp32); gradients are accumulated in fp32."
    )
    assert layout.startswith("Layout: one rank. Estimated peak of a rank: ")


def test_an_fp8_output_layer_is_named() -> None:
    c = config(precision={"output_layer": "fp8"})
    assert "layers have BF16 GEMMs; the output layer has FP8 GEMMs; weights" in sentences(c, 1)[1]
    c = config(precision={"output_layer": "fp8-gradients"})
    assert "; the output layer has FP8 GEMMs in backward; weights" in sentences(c, 1)[1]


@pytest.mark.parametrize(
    ("begin", "imports"),
    [
        ({"resume": "converted/model", "weights_only": True}, True),
        ({"resume": "hf:/models/llama"}, True),
        ({"resume": "hf:hf://owner/llama"}, True),
        ({"resume": "hf://owner/run", "weights_only": True}, True),
        ({"resume": "hf://owner/run"}, False),  # a checkpoint, with optimizer states and the step
        ({"resume": "converted/model"}, False),
        ({}, False),
    ],
)
def test_the_source_of_weights_is_named_unless_a_whole_checkpoint_is_resumed(
    begin: dict[str, Any], imports: bool
) -> None:
    said = sentences(config(checkpoint=begin), 1)[0]
    assert (f" from the weights of {begin.get('resume')} for " in said) == imports
    assert imports or " parameters for " in said


def test_a_plan_says_what_the_layout_saves_and_what_the_device_has() -> None:
    c = config(
        LLAMA2_7B,
        seq_len=4096,
        parallel={"tp": 2, "sequence_parallel": True, "pp": 2},
        train={"global_batch": 64, "micro_batch": 1, "recompute": "full"},
    )
    peaks = {
        "tp": mem.peak_bytes(
            mem.replaced(c, parallel={"tp": 1, "sequence_parallel": False}), 32000, 4
        ),
        "pp": mem.peak_bytes(mem.replaced(c, parallel={"pp": 1}), 32000, 4),
        "zero": mem.peak_bytes(mem.replaced(c, parallel={"zero": 0}), 32000, 2),
        "recompute": mem.peak_bytes(mem.replaced(c, train={"recompute": "none"}), 32000, 2),
    }
    gib = {name: f"{size / GIB:.1f}" for name, size in peaks.items()}
    layout = sentences(c, 8, device="the 79.6 GiB of GPU 0 (H100)")[-1]
    assert layout == (
        "Layout: each layer over 2 ranks (tp), the layers over 2 pipeline stages (pp), the batch "
        "over 2 replicas (dp), the optimizer states over 2 ranks (zero=1). Estimated peak of a "
        f"rank: {mem.peak_bytes(c, 32000, 2) / GIB:.1f} GiB of the 79.6 GiB of GPU 0 (H100); with "
        f"tp=1 {gib['tp']}, pp=1 {gib['pp']}, zero=0 {gib['zero']}, recompute=none "
        f"{gib['recompute']}."
    )


def test_a_layout_that_shares_less_has_no_option_of_what_it_does_not_share() -> None:
    tp, cp = {"tp": 2, "sequence_parallel": True}, {"cp": 2}
    for name, usual, changed in (
        ("tp", tp, {"tp_comm_reduce": "fp8", "tp_chunks": 2}),
        ("cp", cp, {"cp_comm_kv": "fp8", "cp_comm": "all_gather"}),
    ):
        peaks = [
            dict(
                simpler(
                    config(LLAMA2_7B, seq_len=4096, parallel=p, precision={"recipe": "coat-lean"}),
                    32000,
                    1,
                )
            )
            for p in (usual, usual | changed)
        ]
        assert peaks[0][f"{name}=1"] == peaks[1][f"{name}=1"]


def test_the_choice_and_the_expectation_follow_the_layout_before_the_tables() -> None:
    *before, layout = sentences(config(), 1)
    told = sentences(config(), 1, chosen="Chosen: this.", expected="Expected: that.")
    assert told == [*before, layout, "Chosen: this.", "Expected: that."]
    assert layout.startswith("Layout: ")


def test_plan_of_a_pipeline_has_a_line_per_stage_that_sums_up() -> None:
    c = config({"layers": 8}, parallel={"pp": 4}, train={"micro_batch": 1})
    *_, header, a, b, c_, d = plan(c, 4).splitlines()
    assert header.split()[0] == "stage" and header.split()[-1] == "sum"
    assert [int(line.split()[0]) for line in (a, b, c_, d)] == [0, 1, 2, 3]


def test_plan_says_which_of_logits_and_backward_counts() -> None:
    lines = plan(config({"vocab": 128256}), 1).splitlines()
    said = [line for line in lines if "not in the sum: not live" in line]
    assert len(said) == 1 and said[0].split()[0] == "backward"


def test_plan_says_what_saved_logits_add_or_that_they_are_in_the_sum() -> None:
    c = config({"vocab": 128256}, seq_len=4096, train={"micro_batch": 4, "logits": "auto"})
    (line,) = [line for line in plan(c, 1).splitlines() if line.startswith("  all logits")]
    saving = replaced(c, train={"logits": "save"})
    more = (peak_bytes(saving, 128256, 1) - peak_bytes(c, 128256, 1)) / GIB
    assert more > 0 and f"{more:.3f}" in line
    text = plan(saving, 1)
    assert "all of them" in text and "all logits" not in text
    recomputed = config({"vocab": 128256}, train={"logits": "recompute"})
    assert "all logits" not in plan(recomputed, 1)


def test_plan_names_the_memory_of_cuda_graphs() -> None:
    lines = plan(config(train={"cuda_graphs": True}), 1).splitlines()
    assert any(line.startswith("  cuda graphs") for line in lines)
    assert not any("cuda graphs" in line for line in plan(config(), 1).splitlines())


def test_plan_names_what_a_layer_adds_whose_tensors_fall_back() -> None:
    """Or the whole layer, where not every tensor can alone."""
    c = config(precision={"recipe": "coat", "guard": "operand"})
    (line,) = [line for line in plan(c, 1).splitlines() if line.startswith("  fallback")]
    sizes = [
        tensor_bytes(c, [f"{n}/{name}" for n in layers for name in TENSORS], **AT) / GIB
        for layers in ([1], range(1, c.model.layers + 1))
    ]
    assert f"{sizes[0]:.3f}" in line and line.endswith(f"of all {sizes[1]:.3f}")
    assert "whose tensors all fall back" in line
    paper = config(precision={"recipe": "coat-paper", "guard": "operand"})
    (line,) = [line for line in plan(paper, 1).splitlines() if line.startswith("  fallback")]
    assert line.endswith(f"of all {fallback_bytes(paper, range(1, 5), **AT) / GIB:.3f}")


def test_plan_names_what_a_layer_that_falls_back_adds_and_what_all_add() -> None:
    c = config(precision={"recipe": "coat", "guard": "fallback"})
    (line,) = [line for line in plan(c, 1).splitlines() if line.startswith("  fallback")]
    one, every = (
        fallback_bytes(c, layers, stage=0, data_parallel=1) / GIB
        for layers in ([1], range(1, c.model.layers + 1))
    )
    assert f"{one:.3f}" in line and line.endswith(f"of all {every:.3f}")
    assert "fallback" not in plan(config(precision={"recipe": "coat", "guard": "warn"}), 1)
