"""Every key is explained, bounded and shown by `--keys`."""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import pytest

from coatlm.config import Config, ConfigError, keys_table, make_config
from coatlm.config.fields import YEAR
from coatlm.config.keys import WIDTH, Key, keys, sentence, type_name

FIELDS = [key for key in keys() if "." in key.name]
NUMBERS = [key for key in FIELDS if re.search("integer|number", type_name(key.field.annotation))]
VAGUE = ("kept", "keeps", "made again", "made anew", "a step,", "recording", "under way")


def name(key: Key) -> str:
    return key.name


def told(key: Key, number: Any) -> str:
    """What the user is told about `number` as the key's value, or as each item of its list."""
    *outer, last = key.name.split(".")
    default = key.field.get_default()
    several = len(default) if isinstance(default, tuple) else 2 if key.name == "log.profile" else 0
    data: Any = {last: [number] * several if several else number}
    for part in reversed(outer):
        data = {part.removesuffix("[]"): [data] if part.endswith("[]") else data}
    if outer == ["data"]:
        data["data"]["text"] = "a"
    with pytest.raises(ConfigError) as error:
        make_config(data)
    return str(error.value)


@pytest.mark.parametrize("key", FIELDS, ids=name)
def test_every_key_has_a_sentence(key: Key) -> None:
    text = sentence(key.field)
    assert (text.endswith(".") and text[0].isupper()) or text.startswith("byte, ")
    assert not [word for word in VAGUE if word in text]


def test_every_section_has_a_sentence() -> None:
    for key in keys():
        if key.section is not None:
            assert (key.section.__doc__ or "").strip().endswith(".")


def test_the_table_shows_every_key_once_in_lines_that_fit() -> None:
    lines = keys_table().splitlines()
    shown = [line.split()[0] for line in lines if re.match(r"\w+[.\[]", line)]
    assert shown == [key.name for key in FIELDS]
    assert max(map(len, lines)) <= WIDTH


def test_a_row_has_type_default_range_unit_and_meaning() -> None:
    row, meaning, *_ = keys_table("train.micro_batch").splitlines()
    assert row.split("  ") == ["train.micro_batch", "integer", "4", ">= 1, <= 2^24 samples"]
    assert meaning.startswith("    Samples per forward pass on each data-parallel rank. auto is ")


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("run.dir", ["path", "runs/run"]),
        ("run.seed", ["integer", "1234", ">= 0, <= 2^63 - 1"]),
        ("model.layers", ["integer", "4", ">= 1, <= 10,000 layers"]),
        ("model.kv_heads", ["integer or null", "null", ">= 1, <= 2^16 heads"]),
        ("optim.schedule", ["choice", "cosine", "cosine | wsd | linear | constant"]),
        ("optim.betas", ["[number, number]", "[0.9, 0.95]"]),
        ("parallel.zero", ["choice", "1", "0 | 1 | 2 | 3"]),
        ("train.cuda_graphs", ["choice", "false", "true | false | auto"]),
        ("log.tensorboard", ["boolean", "false", "true | false"]),
        ("data.text", ["list of text", "[]"]),
        (
            "data.reset_attention_mask",
            ["boolean", "true with paths, else false", "true | false"],
        ),
        ("data.paths[].path", ["path or text"]),
        ("log.profile", ["[integer, integer] or null", "null"]),
    ],
)
def test_what_a_key_takes_is_shown(key: str, cells: list[str]) -> None:
    row = keys_table(key).splitlines()[0]
    assert re.split(r"\s{2,}", row) == [key, *cells]


@pytest.mark.parametrize("section", [*Config.model_fields, "model.rope_scaling", "data.paths"])
def test_a_section_shows_its_keys_alone(section: str) -> None:
    rows = [line for line in keys_table(section).splitlines() if re.match(r"\w+[.\[]", line)]
    assert rows and all(row.startswith(section) for row in rows)


@pytest.mark.parametrize("section", ["trian", "train.step", "configs/a.yaml"])
def test_a_section_that_does_not_exist_is_refused(section: str) -> None:
    with pytest.raises(ConfigError, match="no such section or key"):
        keys_table(section)


@pytest.mark.parametrize(
    "key", [k for k in NUMBERS if "integer" in type_name(k.field.annotation)], ids=name
)
def test_an_integer_has_an_upper_bound_that_fits_64_bits(key: Key) -> None:
    assert "less than or equal to" in told(key, 2**63)


@pytest.mark.parametrize(
    "number",
    [math.inf, -math.inf, math.nan, 16**5000, True, "1"],
    ids=["inf", "-inf", "nan", "huge", "boolean", "text"],
)
@pytest.mark.parametrize("key", NUMBERS, ids=name)
def test_a_number_is_finite_and_no_other_type(key: Key, number: Any) -> None:
    assert key.name.replace("[]", ".0") in told(key, number)


def test_a_time_is_one_that_threads_can_wait_for() -> None:
    assert YEAR < threading.TIMEOUT_MAX
    assert "log.hang_timeout=1e+300: " in told_of({"log": {"hang_timeout": 1e300}})
    for key in NUMBERS:
        extra = key.field.json_schema_extra
        if isinstance(extra, dict) and extra["unit"] == "seconds":
            assert f"{key.name}={float(2 * YEAR)}: " in told(key, float(2 * YEAR))


def told_of(data: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make_config(data)
    return str(error.value)


def test_a_product_of_sizes_of_the_layout_is_bounded() -> None:
    layout = {"tp": 2**10, "cp": 2**11, "pp": 2}
    assert "tp*pp*cp=1024*2*2048 is above 1048576" in told_of({"parallel": layout})
