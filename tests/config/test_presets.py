"""A preset stands for keys; a file's keys win over its preset, and the command line over both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coatlm.config import PRESETS, Config, ConfigError, load_config, make_config
from coatlm.config.keys import keys_table


def formats(config: Config) -> tuple[str, str, str, str]:
    p = config.precision
    return p.recipe, p.scaling, config.optim.recipe, config.parallel.grad_comm


FP8 = ("coat", "delayed", "coat-lean", "fp8-a2a")
BF16 = ("bf16", "current", "adamw-fp32", "fp32")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("preset: fp8\noptim: {lr: 2e-4}\n")
    return path


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_every_key_that_it_names(name: str) -> None:
    dumped = make_config({"preset": name}).model_dump(mode="json")
    for section, values in PRESETS[name].items():
        assert {key: dumped[section][key] for key in values} == values


def test_without_a_preset_the_defaults_stay(tmp_path: Path) -> None:
    assert make_config({}) == Config() == make_config({"preset": None})
    assert formats(Config()) == ("bf16", "current", "adamw-fp32", "fp8-a2a")


def test_keys_of_the_file_and_overrides_win(file: Path) -> None:
    assert formats(load_config(file)) == FP8
    assert formats(load_config(file, ["optim.recipe=coat"])) == (*FP8[:2], "coat", FP8[3])
    file.write_text("preset: fp8\noptim: {lr: 2e-4, recipe: kahan}\n")
    config = load_config(file, ["preset=null"])
    assert (config.optim.lr, *formats(config)) == (2e-4, *formats(Config()))


def test_another_recipe_of_layers_takes_no_scaling_of_the_preset(file: Path) -> None:
    for recipe in ("bf16", "rowwise"):  # neither supports delayed scales
        changed = formats(load_config(file, [f"precision.recipe={recipe}"]))
        assert changed == (recipe, "current", *FP8[2:])


def test_a_preset_on_the_command_line_replaces_the_formats_of_a_file(file: Path) -> None:
    assert formats(load_config(file, ["preset=bf16"])) == BF16
    assert formats(load_config(file, ["optim.recipe=coat", "preset=bf16"]))[2] == "coat"
    file.write_text(load_config(file).to_yaml())  # the resolved file gives every key
    config = load_config(file, ["preset=bf16"])
    assert (config.optim.lr, *formats(config)) == (2e-4, *BF16)


def test_the_resolved_configuration_has_keys_in_place_of_the_preset(file: Path) -> None:
    config = load_config(file)
    assert "preset" not in config.to_yaml()
    file.write_text(config.to_yaml())
    assert load_config(file) == config


@pytest.mark.parametrize("name", ["fp4", 8, ["fp8"], {"fp8": 1}])
def test_an_unknown_preset_is_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(ConfigError) as error:
        make_config({"preset": name})
    names = "fp8, fp8-lean, fp8-states, bf16"
    assert str(error.value) == f"preset={name!r}: must be null or one of {names}"


@pytest.mark.parametrize("name", ["presets", "Preset", "prest"])
def test_a_misspelled_preset_is_meant(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: unknown key; do you mean preset?"):
        make_config({name: "fp8"})


def test_a_section_that_is_no_mapping_is_one_error() -> None:
    with pytest.raises(ConfigError, match=r"^precision=3: "):
        make_config({"preset": "fp8", "precision": 3})


def test_the_table_of_keys_shows_what_a_preset_stands_for() -> None:
    table = keys_table("preset")
    assert keys_table().startswith(table)
    words = table.split()
    for name, sections in PRESETS.items():
        at = words.index(f"preset={name}")
        keys = [
            f"{s}.{key}={value}" for s, values in sections.items() for key, value in values.items()
        ]
        assert words[at + 1 : at + 1 + len(keys)] == keys


@pytest.mark.parametrize(
    ("sections", "graphs"),
    [
        ({}, True),
        ({"model": {"hidden": 2048, "heads": 16}}, True),
        ({"model": {"hidden": 4096, "heads": 32}}, False),  # a graph made no layer faster there
        (
            {"model": {"hidden": 4096, "heads": 32}, "parallel": {"tp": 2}},
            True,
        ),  # twice as many launches
        ({"model": {"hidden": 8192, "heads": 64}, "parallel": {"tp": 2}}, False),
        ({"model": {"hidden": 8192, "heads": 64, "ffn": 2048}, "parallel": {"tp": 4}}, False),
        ({"model": {"hidden": 8192, "heads": 64, "ffn": 2048}, "parallel": {"tp": 8}}, True),
        ({"model": {"hidden": 16384, "heads": 128, "ffn": 2048}, "parallel": {"tp": 8}}, False),
        ({"parallel": {"pp": 2}}, False),
        ({"parallel": {"zero": 2}}, False),
        ({"train": {"recompute": "full"}}, False),
        ({"train": {"cuda_graphs": False}}, False),
        ({"model": {"spec": "te"}, "precision": {"recipe": "te-delayed"}}, False),
    ],
)
def test_graphs_are_captured_where_they_help_and_nothing_excludes_them(
    sections: dict[str, Any], graphs: bool
) -> None:
    assert make_config({"preset": "fp8", **sections}).cuda_graphs is graphs
