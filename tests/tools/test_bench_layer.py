"""`tools/bench.py layer` on a CPU: its smoke run, its reference, and how it fails."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coatlm.kernels import activation, norm, rope
from tools import bench
from tools.benchmarks import end_to_end, layer, layer_profile, row_process
from tools.benchmarks.layer_stacks import LayerShape

ROOT = Path(__file__).resolve().parents[2]
SMOKE = {"smoke": "1", "steps": "1", "batch": "2"}
HIDDEN, FFN, HEADS = 64, 176, 2
EPS_BF16, EPS_FP32 = 2.0**-8, 2.0**-24
Record = dict[str, Any]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """The records of one smoke run by row, as written to the file."""
    out = tmp_path_factory.mktemp("bench") / "layer.json"
    command = [sys.executable, "tools/bench.py", "layer", "--smoke", "--graph", "--out", str(out)]
    options = ["steps=1", "batch=2", "also=te bf16,coatlm coat,coatlm coat delayed"]
    subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True)
    return {record["row"]: record for record in json.loads(out.read_text())["layer"]}


def test_smoke_measures_every_row_in_time_and_memory(records: dict[str, Record]) -> None:
    for row in set(layer.SMOKE_ROWS) - {"roofline"}:
        found = records[row]
        assert 0 < found["forward_ms"] < found["ms"]
        assert found["launch_ms"] > 0
        assert found["act_u"] == pytest.approx(found["act_b_per_token"] / (2 * HIDDEN), abs=0.01)
        assert found["weight_copies_mib"] == 0


def test_fp32_layer_equals_the_plain_torch_layer_in_output_and_all_gradients(
    records: dict[str, Record],
) -> None:
    names = ("y", "dx", "qkv", "proj", "fc1", "fc2", "norm1", "norm2")
    errors = {name: records["coatlm fp32"][f"err_{name}"] for name in names}
    assert max(errors.values()) < 16 * EPS_FP32, errors  # roundings of a few sums of 64 to 176


def test_bf16_layer_errs_by_roundings_of_bf16(records: dict[str, Record]) -> None:
    found = records["coatlm bf16"]
    for name in ("y", "dx", "qkv", "proj", "fc1", "fc2", "norm1", "norm2"):
        assert EPS_BF16 / 16 < found[f"err_{name}"] < 4 * EPS_BF16


def test_bf16_layer_holds_what_accounting_by_hand_says(records: dict[str, Record]) -> None:
    """Both norms' inputs and outputs, q, k, v, o; gate, up and their product: 16H + 6F in BF16.

    In fp32 both norms' 1/rms and attention's logarithm of each head's sum.
    """
    found = records["coatlm bf16"]["act_b_per_token"]
    assert found == 16 * HIDDEN + 6 * FFN + 2 * 4 + 4 * HEADS


def test_delayed_scales_of_a_step_before_cost_no_accuracy_and_hold_no_bytes_per_token(
    records: dict[str, Record],
) -> None:
    current, delayed = records["coatlm coat"], records["coatlm coat delayed"]
    assert delayed["err_y"] == current["err_y"]
    # gradients of a layer at its start are small next to the residual's: some are subnormal
    assert delayed["err_fc1"] == pytest.approx(current["err_fc1"], rel=0.05)
    assert delayed["act_b_per_token"] == current["act_b_per_token"]


def test_roofline_is_gemms_attention_and_traffic(records: dict[str, Record]) -> None:
    found = records["roofline"]
    parts = [found[f"{kind}_ms"] for kind in ("gemm", "attention", "elementwise")]
    assert min(parts) > 0
    assert found["roofline_ms"] == pytest.approx(sum(parts), abs=0.01)


def test_traffic_of_coats_flow_is_counted_in_bytes() -> None:
    shape = LayerShape(hidden=16, ffn=32, heads=1, seq=8, batch=2)
    assert layer_profile.elementwise_bytes(shape) == 16 * (70 * 16 + 16 * 32) + 4 * (
        4 * 16 * 16 + 3 * 16 * 32
    )


def test_profile_splits_the_step_and_names_its_kernels() -> None:
    (found, *kernels) = layer.measure("torch eager", {**SMOKE, "profile": "1"})
    assert min(found["gemm_ms"], found["attention_ms"], found["elementwise_ms"]) > 0
    assert {"aten::mm", "aten::silu"} <= {record["kernel"] for record in kernels}
    assert all(record["table"] == "kernels" and record["launches"] > 0 for record in kernels)


def test_summary_compares_coat_with_the_fastest_fp8_peer() -> None:
    at = {"hidden": 4096, "seq": 2048}
    found = layer.summary(
        [
            {"row": "te bf16", **at, "ms": 9.0, "act_b_per_token": 5},  # not FP8
            {"row": "te delayed", **at, "ms": 12.0, "act_b_per_token": 5},
            {"row": "te current", **at, "ms": 11.0, "act_b_per_token": 6, "graph_ms": 10.5},
            {"row": "torchao tensorwise", **at, "missing": "not installed"},
            {"row": "coatlm coat", **at, "ms": 10.0, "act_b_per_token": 4},
            {"row": "coatlm coat", **at, "table": "kernels", "kernel": "k"},
        ]
    )
    cells = {line["row"]: line["4096:2048"] for line in found}
    assert cells["te current"] == "11.0; 10.5; 6"
    assert cells["fastest FP8 peer / coatlm coat"] == 1.1


def test_a_graph_without_a_gpu_says_so(records: dict[str, Record]) -> None:
    assert records["coatlm bf16"]["graph_ms"] == "needs a GPU"


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="the peer is installed"
)
def test_a_peer_that_is_not_installed_is_named_and_costs_no_other_row(
    records: dict[str, Record],
) -> None:
    assert "transformer_engine" in records["te bf16"]["missing"]
    assert all("missing" not in records[row] for row in layer.SMOKE_ROWS)


def test_a_recipe_that_the_configuration_does_not_know_is_missing_with_the_reason() -> None:
    (found,) = layer.measure("coatlm bf16", {**SMOKE, "precision.recipe": "fp7"})
    assert "precision.recipe='fp7'" in found["missing"]
    assert (found["row"], found["hidden"], found["seq"]) == ("coatlm bf16", 64, 32)


def test_a_shape_that_fails_leaves_the_others_in() -> None:
    found = list(layer.measure("torch eager", {**SMOKE, "shapes": "64:16,64:32", "steps": "1"}))
    assert [record["seq"] for record in found] == [16, 32]
    (broken,) = layer.measure("torch eager", {**SMOKE, "grads": "fp7"})
    assert broken["missing"] == "ValueError: grads=fp7: fp32 or bf16"


@pytest.fixture(scope="module")
def said() -> list[str]:
    """The lines of a process of its own: coatlm's layers start a process group."""
    script = """if True:
        import gc, weakref
        from tools.benchmarks.layer import errors
        from tools.benchmarks.layer_stacks import LayerShape, coatlm_stack
        shape = LayerShape(hidden=64, ffn=176, heads=2, seq=16, batch=1)
        stack = coatlm_stack("coatlm bf16", shape, 2)
        x, dy = stack.inputs(1)
        stack.step(x, dy)
        weights = [weakref.ref(weight) for weight in stack.parameters]
        del stack
        gc.collect()
        print("left", sum(weight() is not None for weight in weights), "of", len(weights))
        shape = shape._replace(heads=8, shared=4)
        stack = coatlm_stack("coatlm fp32", shape, 1)
        print(stack.weights()["qkv"].shape[0])
        found = errors(stack, shape).items()
        print(max(error for name, error in found if not name.endswith("branch")))
    """
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def test_a_stack_that_is_dropped_leaves_no_weights_behind(said: list[str]) -> None:
    assert said[0] == "left 0 of 12"


def test_query_heads_share_keys_in_the_plain_layer_as_in_coatlms(said: list[str]) -> None:
    """Output and gradients in fp32 of 8 query heads of 8 elements with 2 key heads."""
    assert said[1] == str((8 + 2 * 2) * 8)
    assert float(said[2]) < 16 * EPS_FP32


def test_a_peer_is_measured_once_a_process() -> None:
    layer.peer.cache_clear()
    shape = LayerShape(64, 176, 2, 16, 1)
    first = layer.peer("torch eager", shape, steps=1)
    assert layer.peer("torch eager", shape, steps=1) is first
    assert "act_b_per_token" not in first[0]  # one sample cannot be halved


def test_gradients_written_over_others_are_those_added_to_zeros(records: dict[str, Record]) -> None:
    options = ["smoke=1", "steps=1", "batch=2", "first=1", "also=coatlm coat"]
    ((found,),) = bench.run_benchmark("layer", ["coatlm coat"], options)
    errors = [key for key in found if key.startswith("err_")]
    assert len(errors) == 10
    assert all(found[key] == records["coatlm coat"][key] for key in errors)


def test_an_unknown_hidden_size_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden is one of 4096, 2048, 64"):
        layer.shapes({"shapes": "4096:4096,1024:2048"})


def test_default_shapes_are_those_of_llama_2() -> None:
    assert layer.shapes({})[0] == LayerShape(hidden=4096, ffn=11008, heads=32, seq=4096, batch=4)
    assert layer.shapes({})[-1] == LayerShape(hidden=2048, ffn=5504, heads=16, seq=2048, batch=4)


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ("Traceback\nValueError: a\n", "ValueError: a"),
        ("torch.OutOfMemoryError: CUDA\n[W1 x.cpp] Warning: y", "torch.OutOfMemoryError: CUDA"),
        ("[rank0]: RuntimeError: b\n[rank0]:[W1 x.cpp] Warning: y", "[rank0]: RuntimeError: b"),
        ("Killed", "Killed"),
        ("", "no output"),
    ],
)
def test_the_reason_of_a_missing_row_is_its_exception(errors: str, reason: str) -> None:
    assert row_process.last_error(errors) == reason


def test_rows_that_begin_after_the_budget_are_left_out() -> None:
    (found,) = bench.run_benchmark("layer", ["torch eager"], ["smoke=1"], 0.0)
    assert found == [{"row": "torch eager", "missing": "no time left"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quantize", "--profile"], "profile=1: quantize takes shapes="),
        (["reduce", "gpus=4"], "gpus=4: reduce takes values=, ranks="),
        (["reduce", "whole"], "whole: reduce takes"),
        (["memory", "parallel.tp=2"], "parallel.tp=2: memory takes model="),
        (["reduce", "--only", "nothing"], "--only nothing: no row of reduce contains that"),
        (["reduce", "--only", "nccl", "reps=3"], "--only reps=3: no row of reduce contains that"),
    ],
)
def test_what_a_benchmark_does_not_take_is_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    with pytest.raises(SystemExit):
        bench.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_30_256", "attention"),
        ("nvjet_sm90_qqtst_128x256_128x6_2x1_v_bz_TNT", "gemm"),
        ("sm90_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n_tilesize128x128x128", "gemm"),
        (
            "triton_red_fused__scaled_mm__scaled_dot_product_cudnn_attention_abs_max_0",
            "elementwise",
        ),
        ("void transformer_engine::rope_kernel<float>(float const*, int)", "elementwise"),
        ("_swiglu_kernel", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "elementwise"),
    ],
)
def test_a_kernel_is_told_by_its_name(kernel: str, kind: str) -> None:
    assert layer_profile.kind(kernel, layer_profile.BYTES[""]) == kind


def test_a_known_kernel_is_elementwise_whatever_its_name_contains() -> None:
    assert layer_profile.kind("_attention_codes", {"_attention_codes": lambda shape: 1.0}) == (
        "elementwise"
    )


def test_every_kernel_with_known_bytes_exists() -> None:
    for kernel in layer_profile.BYTES[""]:
        assert any(hasattr(module, kernel) for module in (activation, norm, rope)), kernel


def test_times_by_kind_add_up() -> None:
    kernels = [
        {"kind": "gemm", "kernel_ms": 2.0},
        {"kind": "attention", "kernel_ms": 1.0},
        {"kind": "gemm", "kernel_ms": 0.5},
    ]
    assert layer_profile.split(kernels) == {
        "gemm_ms": 2.5,
        "attention_ms": 1.0,
        "elementwise_ms": 0.0,
    }


def test_the_table_of_kernels_stands_apart(capsys: pytest.CaptureFixture[str]) -> None:
    bench.print_table([{"row": "a", "ms": 1}, {"table": "kernels", "row": "a", "kernel": "k"}])
    kernels, records = capsys.readouterr().out.split("| row | ms |")
    assert "kernels:" in kernels and "| a | k |" in kernels
    assert "| a | 1 |" in records


def test_end_to_end_runs_coatlm_with_each_optimizer_asked_for_and_peers_once() -> None:
    rows = end_to_end.rows({"optim": "adamw-fp32,coat-lean"})
    assert rows.count("megatron+te delayed") == 1
    assert [row for row in rows if "local" in row] == [
        "coatlm local bf16, optim adamw-fp32",
        "coatlm local bf16, optim coat-lean",
    ]
    assert "coatlm coat" in end_to_end.rows({})
    rows = end_to_end.rows({"optim": "coat-lean", "zero": "1,3", "also": "fsdp2 bf16"})
    assert rows.count("fsdp2 bf16") == 1
    assert [row for row in rows if "local" in row] == [
        "coatlm local bf16, optim coat-lean, zero 1",
        "coatlm local bf16, optim coat-lean, zero 3",
    ]


def test_end_to_end_row_becomes_its_run() -> None:
    config = end_to_end.coatlm_config(
        "coatlm local bf16, optim coat-lean, zero 1, graphs step",
        (64, 2, 2, 176),
        mbs=4,
        seq=32,
        overrides=["parallel.main_grads=bf16"],
    )
    assert (config.optim.recipe, config.parallel.main_grads) == ("coat-lean", "bf16")
    assert (config.parallel.zero, config.train.cuda_graphs) == (1, True)
    assert (config.model.layers, config.train.micro_batch) == (2, 4)
