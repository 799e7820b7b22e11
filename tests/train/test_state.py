"""state.json is checked before a run goes on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coatlm.train.checkpoint import CheckpointError
from coatlm.train.find_checkpoint import saved_config
from coatlm.train.state import read_run_state

GOOD: dict[str, Any] = {
    "step": 5,
    "tokens": 640,
    "updates": 5,
    "skipped": 0,
    "skipped_in_row": 0,
    "left_out": [[10, 14]],
    "spikes": {"values": [[1.0, 2], [0.5, 0.25]], "count": 2},
    "guard": {
        **{"mode": "operand", "in_bf16": [2], "tensors": ["3/fc2_input", "12/norm1_saved"]},
        **{"suspected": [], "reported": ["3/fc2_input"]},
    },
    "tokenizer": "byte",
    "flat_groups": {"w": [[{"key": "w", "rows": 3}]]},
    "automatic_scales": {"w": 1.0},
    "gradient_amaxes": {"0": {"attention": [0.0, 1.5]}},
    "reduction_amaxes": {"w": [1.5, 0.0]},
    "samples": 80,
    "data": [{"documents": 3, "tokens": 1000, "weight": 1.0, "sha256": "ab"}],
    "window": [2.5],
    "config": {
        "model": {},
        "optim": {},
        "data": {"seq_len": 8, "tokenizer": "byte"},
        "train": {"global_batch": 16},
        "checkpoint": {"resume": "auto"},
    },
}


def written(directory: Path, state: dict[str, Any]) -> Path:
    (directory / "state.json").write_text(json.dumps(state))
    return directory


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_run_state(written(tmp_path, GOOD)) == GOOD


def test_a_guard_from_before_single_tensors_fell_back_is_read(tmp_path: Path) -> None:
    guard = {name: value for name, value in GOOD["guard"].items() if name != "tensors"}
    state = GOOD | {"guard": guard}
    assert read_run_state(written(tmp_path, state)) == state


def test_the_joint_tensor_of_q_k_v_and_o_is_read_in_older_checkpoints(tmp_path: Path) -> None:
    """In the guard's state as it is; in the configuration as the four names."""
    old = GOOD | {"guard": GOOD["guard"] | {"tensors": ["3/attention_saved"]}}
    assert read_run_state(written(tmp_path, old)) == old
    precision = {"recipe": "coat-lean", "bf16_operands": ["saved.attention", "dgrad.weight"]}
    c = saved_config(tmp_path, {"config": {"precision": precision}})
    four = tuple(f"saved.{name}" for name in "qkvo")
    assert c.precision.bf16_operands == ("dgrad.weight", *four)


@pytest.mark.parametrize("key", ["step", "updates", "skipped", "tokenizer", "config"])
def test_a_key_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    state = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(CheckpointError, match=rf"state.json is damaged \({key}: Field required"):
        read_run_state(written(tmp_path, state))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "5"),
        ("step", -1),
        ("step", 5.0),
        ("updates", None),
        ("skipped", True),
        ("left_out", [[1, 2, 3]]),
        ("left_out", {"1": 2}),
        ("spikes", {"values": []}),
        ("guard", GOOD["guard"] | {"tensors": ["fc2_input"]}),
        ("guard", GOOD["guard"] | {"tensors": ["3/fc3_input"]}),
        ("guard", GOOD["guard"] | {"tensors": ["0/fc2_input"]}),
        ("guard", GOOD["guard"] | {"tensors": ["3/fc2_input\n"]}),
        ("guard", GOOD["guard"] | {"tensors": [f"{'9' * 5000}/fc2_input"]}),
        ("tokenizer", 7),
        ("flat_groups", [1]),
        ("automatic_scales", {"w": "1"}),
        ("gradient_amaxes", {"0": [1.0]}),
        ("reduction_amaxes", {"w": 1.0}),
        ("config", []),
        ("config", {"model": {}, "optim": None, "data": {}}),
        ("config", GOOD["config"] | {"optim": {"recipe": "coat-leaner"}}),
    ],
)
def test_a_value_of_another_type_is_named_in_one_line(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_run_state(written(tmp_path, GOOD | {key: value}))
    message = str(caught.value)
    assert f"state.json is damaged ({key}" in message
    assert "\n" not in message and len(message) < 400
