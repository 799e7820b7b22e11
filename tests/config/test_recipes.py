"""The table of FP8 recipes, and what the section `precision` of a run makes of a row."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest

from coatlm.config import ConfigError, Precision, load_config, make_config, read_mapping
from coatlm.config.model import PrecisionRecipe
from coatlm.config.operands import ROW, TENSOR, Operand, block
from coatlm.config.recipes import (
    COAT,
    PRECISION_RECIPES,
    RECIPES,
    Bf16Name,
    FlowRecipe,
    OperandName,
    fp8_weight_recipes,
)
from tests.distributed import ROOT

names = pytest.mark.parametrize("name", sorted(RECIPES))


def recipe(name: str, **options: Any) -> FlowRecipe:
    return Precision(recipe=name, **options).flow_recipe()


@names
def test_without_options_a_recipe_is_its_row(name: str) -> None:
    assert recipe(name) == RECIPES[name]
    assert Precision(recipe=name).flow
    assert not Precision(recipe="bf16").flow


def test_the_configuration_takes_the_recipes_of_the_table() -> None:
    assert get_args(PrecisionRecipe) == PRECISION_RECIPES
    assert set(RECIPES) < set(PRECISION_RECIPES)


def test_the_table_needs_no_torch() -> None:
    code = "import sys, coatlm.config.recipes; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("coat", (64, None)), ("coat-lean", (64, 64))],
)
def test_a_group_size_is_for_what_is_saved_in_blocks(
    name: str, sizes: tuple[int | None, int | None]
) -> None:
    saved = recipe(name, group_size=64).saved
    found = (saved.gate_up, saved.o)
    assert tuple(x and x.granularity.columns for x in found) == sizes
    assert saved.norm_input == saved.gate_up
    assert saved.q == saved.k == saved.v == saved.o


@names
@pytest.mark.parametrize("keep", [True, False])
def test_linear_inputs_are_saved_as_asked(name: str, keep: bool) -> None:
    if keep and RECIPES[name].rotated:
        match = "saved.linear_input: int8 codes of linear inputs have no use in wgrad"
        with pytest.raises(ValueError, match=match):
            recipe(name, keep_linear_inputs=keep)
        match = f"keep_linear_inputs=true with precision.recipe={name}: must be null or false"
        with pytest.raises(ConfigError, match=match):
            make_config({"precision": {"recipe": name, "keep_linear_inputs": True}})
        return
    saved = recipe(name, keep_linear_inputs=keep).saved
    assert (saved.linear_input, saved.projection_input) == (keep, keep)


def test_formats_accumulation_and_weights_are_those_asked_for() -> None:
    made = recipe("coat", grad_format="e4m3", fast_accumulation=("wgrad",), keep_weights=True)
    assert (made.dgrad.gradient.fmt, made.wgrad.gradient.fmt) == ("e4m3", "e4m3")
    assert (made.fast, made.keep_weights) == ({"wgrad"}, True)
    default = recipe("coat")
    assert (default.dgrad.gradient.fmt, default.keep_weights) == ("e5m2", False)
    assert default.fast == {"forward", "dgrad"}
    assert recipe("rowwise").dgrad.gradient.fmt == "e4m3"
    assert recipe("rowwise", grad_format="e5m2").wgrad.gradient.fmt == "e5m2"


@pytest.mark.parametrize("name", ["coat", "coat-paper"])
def test_delayed_scales_of_gradients_are_powers_of_two(name: str) -> None:
    made = recipe(name, scaling="delayed")
    for gradient in (made.dgrad.gradient, made.wgrad.gradient):
        assert gradient == Operand("e5m2", TENSOR, "delayed")
    assert made.forward == RECIPES[name].forward


def test_a_margin_is_for_delayed_scales() -> None:
    with pytest.raises(ConfigError, match=r"delayed_margin=2 needs precision\.scaling=delayed"):
        make_config({"precision": {"recipe": "coat", "delayed_margin": 2}})
    with pytest.raises(ConfigError, match=r"delayed_margin=16"):
        precision = {"recipe": "coat", "delayed_margin": 16, "scaling": "delayed"}
        make_config({"precision": precision})


@pytest.mark.parametrize("name", ["coat-rowgrad", "rowwise", "fp8-block"])
def test_delayed_scaling_is_refused_without_one_scale_per_gradient(name: str) -> None:
    others = "coat-lean, coat-int8, coat-lean-int8, coat-paper"
    match = rf"precision\.scaling=delayed .*precision\.recipe={name} .*{others}"
    with pytest.raises(ConfigError, match=match):
        make_config({"precision": {"recipe": name, "scaling": "delayed"}})


BLOCK_SIZES = {"hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 512}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"hidden": 192}}, r"model\.hidden=192 .*fp8-block=128"),
        ({"model": {"ffn": 320}}, r"model\.ffn/tp=320 .*fp8-block=128"),
        ({"model": {"ffn": 384}, "parallel": {"tp": 2}}, r"model\.ffn/tp=192 .*fp8-block=128"),
        ({"model": {"heads": 6, "kv_heads": 2}}, r"model\.heads\*head_dim/tp=192 "),
        ({"model": {"kv_heads": 2}}, r"model\.\(heads \+ 2\*kv_heads\)\*head_dim/tp=384 "),
        ({"data": {"text": "x", "seq_len": 30}}, r"micro_batch\*data\.seq_len/cp=30 "),
    ],
)
def test_blocks_of_128_elements_are_whole(sections: dict[str, Any], message: str) -> None:
    model = BLOCK_SIZES | sections.pop("model", {})
    if "kv_heads" in message:
        model |= {"heads": 4, "kv_heads": 1, "head_dim": 32}
        message = r"model\.\(heads \+ 2\*kv_heads\)\*head_dim/tp=192 "
    train = {"micro_batch": 1, "global_batch": 1}
    precision = {"recipe": "fp8-block"}
    make_config({"model": BLOCK_SIZES, "precision": precision, "train": train})
    with pytest.raises(ConfigError, match=message):
        make_config({"precision": precision, "train": train, "model": model, **sections})


def test_blocks_refuse_a_choice_of_accumulation() -> None:
    precision = {"recipe": "fp8-block", "fast_accumulation": ["forward"]}
    with pytest.raises(ConfigError, match=r"precision\.fast_accumulation=\['forward'\]"):
        make_config({"model": BLOCK_SIZES, "precision": precision})


def test_weights_are_gathered_as_fp8_where_their_codes_do_not_change() -> None:
    assert fp8_weight_recipes() == (
        *("te-current", "fp8-linear", "coat", "coat-lean", "coat-rowgrad", "coat-paper"),
    )
    for name in ("rowwise", "fp8-block"):
        with pytest.raises(ConfigError, match=rf"weight_gather=fp8 .* precision\.recipe={name}"):
            make_config(
                {
                    "model": BLOCK_SIZES,
                    "precision": {"recipe": name},
                    "parallel": {"weight_gather": "fp8"},
                }
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dgrad": replace(COAT.dgrad, gradient=Operand("e4m3", TENSOR))}, "the same"),
        (
            {"forward": replace(COAT.forward, activation=Operand("e4m3", TENSOR, "delayed"))},
            r"forward\.activation: scaling=delayed",
        ),
        (
            {"saved": replace(COAT.saved, gate_up=Operand("e5m2", block(1, 16)))},
            r"saved\.gate_up: .* e4m3 in blocks",
        ),
        ({"saved": replace(COAT.saved, norm_input=Operand("e4m3", ROW))}, "not a whole row"),
        (
            {"saved": replace(COAT.saved, k=Operand("e4m3", block(1, 16), power_of_two=False))},
            r"saved\.q, k, v, o: one format with power-of-two scales",
        ),
        (
            {
                "saved": replace(
                    COAT.saved,
                    q=Operand("e4m3", block(1, 16)),
                    v=Operand("e4m3", block(1, 32)),
                )
            },
            r"saved\.q, k, v, o: one format with power-of-two scales",
        ),
    ],
)
def test_rows_that_no_kernel_computes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(COAT, **change)


def test_a_saved_element_takes_a_byte_and_its_part_of_a_scale() -> None:
    assert Operand("e4m3", block(1, 16)).bytes_per_element == 1 + 1 / 16
    assert Operand("e4m3", block(1, 16), power_of_two=False).bytes_per_element == 1 + 4 / 16


def test_rows_of_the_study_of_parts_are_valid_and_different() -> None:
    study = read_mapping(ROOT / "configs/studies/parts.yaml")
    made = {
        name: load_config(ROOT / "configs/llama-30m.yaml", [*study["overrides"], *row])
        for name, row in study["recipes"].items()
    }
    for name in get_args(Bf16Name):
        assert made[name].precision.bf16_operands == (name,)
    assert made[study["reference"]].precision.recipe == "bf16"
    assert len({c.to_yaml() for c in made.values()}) == len(made)


def test_a_row_of_the_table_refuses_operands_in_bf16_that_are_inexact_or_saved_as_codes() -> None:
    with pytest.raises(ValueError, match="powers of two"):
        replace(RECIPES["coat-paper"], bf16=frozenset({"dgrad.weight"}))
    with pytest.raises(ValueError, match="linear inputs"):
        replace(RECIPES["fp8-linear"], bf16=frozenset({"wgrad.activation"}))
    for name in get_args(OperandName):
        gathers = replace(COAT, bf16=frozenset({name})).gathers_codes
        assert gathers is (name not in ("forward.weight", "dgrad.weight"))
