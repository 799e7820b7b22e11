"""The table that a dry run prints."""

from __future__ import annotations

import pytest

from coatlm.config import ConfigError
from coatlm.model import memory as mem
from coatlm.model.memory import GIB, fallback_bytes, peak_bytes, replaced
from coatlm.model.plan import plan
from tests.model.shapes import LLAMA2_7B, config


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
    c = config({"vocab": 128256}, seq_len=4096, train={"micro_batch": 4})
    (line,) = [line for line in plan(c, 1).splitlines() if line.startswith("  all logits")]
    saving = replaced(c, train={"logits": "save"})
    more = (peak_bytes(saving, 128256, 1) - peak_bytes(c, 128256, 1)) / GIB
    assert more > 0 and f"{more:.3f}" in line
    text = plan(saving, 1)
    assert "all of them" in text and "all logits" not in text


def test_plan_names_the_memory_of_cuda_graphs() -> None:
    lines = plan(config(train={"cuda_graphs": True}), 1).splitlines()
    assert any(line.startswith("  cuda graphs") for line in lines)
    assert not any("cuda graphs" in line for line in plan(config(), 1).splitlines())


def test_plan_names_what_a_layer_that_falls_back_adds_and_what_all_add() -> None:
    c = config(precision={"recipe": "coat", "guard": "fallback"})
    (line,) = [line for line in plan(c, 1).splitlines() if line.startswith("  fallback")]
    one, every = (
        fallback_bytes(c, layers, stage=0, data_parallel=1) / GIB
        for layers in ([1], range(1, c.model.layers + 1))
    )
    assert f"{one:.3f}" in line and line.endswith(f"of all {every:.3f}")
    assert "fallback" not in plan(config(precision={"recipe": "coat", "guard": "warn"}), 1)
