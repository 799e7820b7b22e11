"""From the section `precision` of a run to the choices of a layer."""

from typing import Any

import pytest
from coatlm.fp8.recipe import FLOW_RECIPES, FlowRecipe, recipe_of

from coatlm.config import Precision
from coatlm.fp8.formats import E4M3, E5M2

NAMES = ["fp8-linear", "coat", "coat-lean"]


def recipe(name: str, **options: Any) -> FlowRecipe:
    return recipe_of(Precision(recipe=name, **options))


@pytest.mark.parametrize("name", NAMES)
def test_without_options_a_recipe_is_as_its_name_says(name: str) -> None:
    assert recipe(name) == FLOW_RECIPES[name]


def test_every_recipe_that_the_configuration_calls_a_flow_is_here() -> None:
    assert sorted(FLOW_RECIPES) == sorted(NAMES)
    assert all(Precision(recipe=name).flow for name in FLOW_RECIPES)
    assert not Precision(recipe="bf16").flow


@pytest.mark.parametrize(
    ("name", "groups"), [("fp8-linear", (0, 0)), ("coat", (64, 0)), ("coat-lean", (64, 64))]
)
def test_a_group_size_is_for_what_is_kept_in_groups(name: str, groups: tuple[int, int]) -> None:
    made = recipe(name, group_size=64)
    assert (made.group, made.attention_group) == groups


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep", [True, False])
def test_linear_inputs_are_kept_as_asked(name: str, keep: bool) -> None:
    assert recipe(name, keep_linear_inputs=keep).keep_linear_inputs is keep


def test_formats_accumulation_and_weights_are_those_asked_for() -> None:
    made = recipe("coat", grad_format="e4m3", fast_accumulation=("wgrad",), keep_weights=True)
    assert (made.grad_fmt, made.fast, made.keep_weights) == (E4M3, {"wgrad"}, True)
    default = recipe("coat")
    assert (default.grad_fmt, default.keep_weights) == (E5M2, False)
    assert default.fast == {"forward", "dgrad", "wgrad"}
