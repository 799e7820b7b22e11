"""An unknown key leads to the known one, in whatever section it is."""

from __future__ import annotations

from typing import Any

import pytest

from coatlm.config import ConfigError, make_config
from coatlm.config.hints import SYNONYMS
from coatlm.config.keys import keys


def message(data: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make_config(data)
    return str(error.value)


@pytest.mark.parametrize(
    ("data", "meant"),
    [
        ({"lr": 3e-4}, "optim.lr"),
        ({"steps": 100}, "train.steps"),
        ({"optim": {"steps": 100}}, "train.steps"),
        ({"train": {"lr": 3e-4}}, "optim.lr"),
        ({"optim": {"learning_rate": 3e-4}}, "optim.lr"),
        ({"train": {"learning-rate": 3e-4}}, "optim.lr"),
        ({"train": {"batch_size": 8}}, "train.global_batch"),
        ({"model": {"num_layers": 8}}, "model.layers"),
        ({"model": {"n_layer": 8}}, "model.layers"),
        ({"hidden_size": 8}, "model.hidden"),
        ({"parallel": {"tensor_parallel": 8}}, "parallel.tp"),
        ({"training": {"steps": 8}}, "train"),
        ({"recipe": "coat"}, "precision.recipe or optim.recipe"),
        ({"train": {"every": 8}}, "checkpoint.every or log.every"),
        ({"model": {"tokeniser": "byte"}}, "data.tokenizer"),
        ({"factor": 8}, "model.rope_scaling.factor"),
        ({"data": {"paths": [{"wieght": 2, "path": "a"}]}}, "data.paths.0.weight"),
    ],
)
def test_an_unknown_key_leads_to_the_one_that_is_meant(data: dict[str, Any], meant: str) -> None:
    assert message(data).endswith(f": unknown key; do you mean {meant}?")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"zzz": 1}, "zzz: unknown key; coatlm train --keys lists the known ones"),
        ({"log": {"q": 1}}, "log.q: unknown key; coatlm train --keys log lists the known ones"),
    ],
)
def test_nothing_is_proposed_where_nothing_is_near(data: dict[str, Any], told: str) -> None:
    assert message(data) == told


def test_a_dotted_key_in_a_file_is_told_how_sections_nest() -> None:
    told = "optim.lr: unknown key; in a file, write lr inside the section optim"
    assert message({"optim.lr": 1}) == told


def test_every_synonym_leads_to_a_key_and_is_none() -> None:
    known = {key.name for key in keys()}
    leaves = {key.rpartition(".")[2] for key in known}
    assert set(SYNONYMS.values()) <= known
    assert not leaves & SYNONYMS.keys()
