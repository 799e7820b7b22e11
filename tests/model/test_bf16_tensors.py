"""Single tensors of a layer in BF16: only their GEMMs change; all together are the operands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.config import Config, make_config
from coatlm.config.recipes import ATTENTION, OperandName
from coatlm.model.bf16_tensors import LINEARS, SAVED_AS, alone, names_in, tensor_of
from coatlm.model.coat_layer import change_layers, flows_of
from coatlm.model.fits import peak_with, tensor_bytes
from coatlm.model.flow_gemms import Flow
from coatlm.model.memory import peak_bytes
from coatlm.model.numerics import TENSORS, watched
from coatlm.train.step import Trainer
from tests.model.shapes import DATA, TINY
from tests.model.test_bf16_operands import EXACT, OPERANDS, ORDER, saved_of
from tests.model.test_flow import build, equal, run, run_config

GEMM_TENSORS = [name for name in TENSORS if name not in SAVED_AS]
ENDS = {  # of a tensor's name -> which operands it is, the first and the second of two GEMMs
    "input": {"forward": 0, "wgrad": 1},
    "output": {"forward": 0, "wgrad": 1},
    "weight": {"forward": 1, "dgrad": 1},
    "grad": {"dgrad": 0, "wgrad": 0},
}


def changed(recipe: str, names: list[str], **options: Any) -> tuple[Config, Any]:
    """A model of one layer with these tensors in BF16."""
    c = run_config(recipe, **options)
    model = build(c)
    change_layers(model.decoder.layers, (), [f"1/{name}" for name in names])
    return c, model


@pytest.mark.parametrize("recipe", EXACT)
def test_all_tensors_of_a_kind_are_that_operand_of_the_recipe_bit_by_bit(
    recipe: str, megatron: None
) -> None:
    kinds: dict[tuple[str, ...], list[str]] = {
        ("forward.activation", "wgrad.activation"): ["input", "output"],
        ("forward.weight", "dgrad.weight"): ["weight"],
        ("dgrad.gradient", "wgrad.gradient"): ["grad"],
        (*OPERANDS, *saved_of(recipe)): ["input", "output", "weight", "grad", "saved"],
    }
    plain = run(run_config(recipe))
    for operands, ends in kinds.items():
        names = [name for name in TENSORS if name.rpartition("_")[2] in ends]
        c = run_config(recipe, precision={"bf16_operands": list(operands)})
        found = run(*changed(recipe, names))
        assert equal(found, run(c)) and not equal(found, plain)


@pytest.mark.parametrize("tensor", GEMM_TENSORS)
def test_one_tensor_in_bf16_changes_the_operands_of_two_gemms_and_no_other(
    tensor: str, megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands: list[tuple[Any, Any]] = []
    multiply = Flow._multiply

    def note(flow: Flow, name: Any, a: Any, b: Any, **options: Any) -> Tensor:
        operands.append((a, b))
        return multiply(flow, name, a, b, **options)

    monkeypatch.setattr(Flow, "_multiply", note)
    run(*changed("coat", [tensor]))
    linear, end = tensor.split("_")
    linear = "proj" if linear == "attention" else linear
    expected = {(gemm, linear, side) for gemm, side in ENDS[end].items()}
    found = {
        (*at, side)
        for at, both in zip(ORDER, operands, strict=True)
        for side, operand in enumerate(both)
        if isinstance(operand, Tensor)
    }
    assert found == expected


def test_every_operand_of_a_linear_has_a_tensor_and_every_tensor_has_operands() -> None:
    names = {tensor_of(linear, operand) for linear in LINEARS for operand in OPERANDS}
    assert names | SAVED_AS.keys() == set(TENSORS) and len(names) == 12


def test_each_norm_input_is_saved_in_bf16_alone(megatron: None) -> None:
    """What one norm saves enters its own gradients and those before it, not the other's."""
    plain = run(run_config("coat"))
    found = {name: run(*changed("coat", [name])) for name in ("norm1_saved", "norm2_saved")}
    moved = {
        name: {key for key in plain if not torch.equal(plain[key], results[key])}
        for name, results in found.items()
    }
    qkv, fc1 = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
    assert moved["norm1_saved"] == {qkv, "input_layernorm.weight", "dx"}
    assert moved["norm2_saved"] == set(plain) - {"y", "mlp.linear_fc2.weight"}
    assert fc1 in moved["norm2_saved"]


def test_codes_that_no_gemm_takes_are_not_saved(megatron: None) -> None:
    """fp8-linear saves the codes of linear inputs, which wgrad in BF16 does not read."""
    _, model = changed("fp8-linear", ["fc2_input", "attention_output"])
    (flow,) = flows_of(model.decoder.layers).values()
    assert {name for name in LINEARS if flow.saves_input(name)} == {"qkv", "fc1"}


def test_numerics_measure_what_is_still_in_fp8(megatron: None) -> None:
    names = ["norm2_saved", "qkv_input", "fc1_weight", "proj_grad"]
    c, model = changed("coat", names)
    with watched(flows_of(model.decoder.layers)) as probes:
        run(c, model)
    assert set(probes[1].sums) == set(TENSORS) - {*names, *(f"{x}_saved" for x in ATTENTION)}


def test_a_change_forgets_the_tensors_of_before_and_resets_cuda_graphs(megatron: None) -> None:
    _, model = changed("coat", ["fc2_input"])
    resets: list[None] = []
    graphs = SimpleNamespace(reset=lambda: resets.append(None))
    trainer: Any = SimpleNamespace(
        _layers=lambda: model.decoder.layers, step_graph=graphs, graphs=graphs
    )
    (flow,) = flows_of(model.decoder.layers).values()
    assert flow.bf16_tensors == {"fc2_input"}
    Trainer.change_layers(trainer, (), ["1/qkv_grad", "2/fc1_grad", "11/fc1_grad"])
    assert flow.bf16_tensors == {"qkv_grad"} and len(resets) == 2


@pytest.mark.parametrize(
    ("precision", "parallel", "expected"),
    [
        ({"recipe": "coat"}, {}, {"fc2_input", "gate_up_saved"}),
        ({"recipe": "coat"}, {"tp": 2}, {"gate_up_saved"}),
        ({"recipe": "coat-paper"}, {}, {"gate_up_saved"}),
    ],
)
def test_operands_need_one_rank_per_layer_and_scales_that_are_powers_of_two(
    precision: dict[str, Any], parallel: dict[str, Any], expected: set[str]
) -> None:
    c = make_config({"model": TINY | {"ffn": 96}, "precision": precision, "parallel": parallel})
    assert {name for name in ("fc2_input", "gate_up_saved") if alone(c, name)} == expected


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_what_attention_saves_is_in_bf16_alone_unless_it_is_sent_so(kind: str) -> None:
    parallel = {"cp": 2, "cp_comm_kv": kind}
    precision = {"recipe": "coat-lean"}
    c = make_config({"model": TINY | {"ffn": 96}, "precision": precision, "parallel": parallel})
    for tensor in ("k_saved", "v_saved"):
        assert alone(c, tensor) == (kind == "bf16")
    assert alone(c, "q_saved") and alone(c, "o_saved") and alone(c, "gate_up_saved")


def test_keys_name_the_tensors_of_a_layer() -> None:
    keys = {"1/fc2_input", "11/fc1_input", "1/norm1_saved", "2/qkv_grad"}
    assert names_in(keys, 1) == {"fc2_input", "norm1_saved"} and names_in(keys, 3) == frozenset()


def sized(**sections: Any) -> Config:
    sizes = TINY | {"layers": 4, "hidden": 64, "ffn": 96}
    sections = {"precision": {"recipe": "coat"}} | sections
    return make_config({"model": sizes, "data": DATA | {"seq_len": 32}, **sections})


def test_a_saved_tensor_takes_a_byte_less_a_share_of_a_scale_more_per_element() -> None:
    c = sized()
    tokens, at = c.train.micro_batch * 32, {"stage": 0, "data_parallel": 1}
    gate_up = tensor_bytes(c, ["2/gate_up_saved"], **at)
    assert gate_up == tokens * 2 * 96 * 15 / 16
    norms = tensor_bytes(c, ["2/norm1_saved", "2/norm2_saved"], **at)
    assert norms == tokens * 2 * 64 * 15 / 16
    keys = ["2/gate_up_saved", "3/gate_up_saved"]
    assert tensor_bytes(c, keys, **at) == 2 * gate_up
    full = sized(train={"recompute": "full"})
    assert tensor_bytes(full, keys, **at) == gate_up
    assert peak_with(c, 128, 1, [], keys) == peak_bytes(c, 128, 1) + 2 * gate_up


def test_a_stage_grows_by_its_own_layers_once_per_microbatch_in_flight() -> None:
    one = tensor_bytes(sized(), ["3/gate_up_saved"], stage=0, data_parallel=1)
    for vpp, holder, flying in ((1, 1, 1), (1, 0, 2), (2, 0, 5 / 2)):
        c = sized(parallel={"pp": 2, "vpp": vpp}, train={"global_batch": 8 * 8, "micro_batch": 8})
        layer = 3 if holder or vpp == 2 else 1
        keys = [f"{layer}/gate_up_saved"]
        more = [tensor_bytes(c, keys, stage=stage, data_parallel=1) for stage in (0, 1)]
        assert more[holder] == one / sized().train.micro_batch * 8 * flying
        assert more[1 - holder] == 0


def test_a_layer_in_bf16_as_a_whole_grows_by_none_of_its_tensors() -> None:
    c = sized(precision={"recipe": "coat", "bf16_layers": [1, 0]})
    assert tensor_bytes(c, ["1/gate_up_saved", "1/fc2_input"], stage=0, data_parallel=1) == 0


def test_operands_in_bf16_share_the_temporaries_of_one_gemm() -> None:
    c = sized()
    tokens, at = c.train.micro_batch * 32, {"stage": 0, "data_parallel": 1}
    largest = 10 * (tokens * 64 + 2 * 96 * 64 + tokens * 2 * 96)
    assert tensor_bytes(c, ["2/fc2_input"], **at) == largest
    assert tensor_bytes(c, ["2/fc2_input", "3/qkv_grad"], **at) == largest
    operands: list[OperandName] = ["forward.weight"]
    already = sized(precision={"recipe": "coat", "bf16_operands": operands})
    assert tensor_bytes(already, ["2/fc2_input"], **at) == 0
