"""YAML without surprises: what is a number, what is text, and what is too much."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from coatlm.config.yaml_text import MOST_CHARACTERS, dump_yaml, has_comment, parse_yaml

TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def problem(text: str) -> str:
    """Why `text` is refused."""
    with pytest.raises(ValueError) as error:
        parse_yaml(text)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("3.0e-4", 3e-4),
        (".5", 0.5),
        ("-1_000", -1000),
        ("0x1f", 31),
        ("0b101", 5),
        (".inf", math.inf),
        ("010", "010"),  # 8 in YAML 1.1, 10 in YAML 1.2
        ("1:30", "1:30"),  # 90 in YAML 1.1
        ("2026-11-22", "2026-11-22"),
        ("1.2.3", "1.2.3"),
        ("${oc.env:HOME}", "${oc.env:HOME}"),
        ("=", "="),
        ("true", True),
        ("on", True),
        ("null", None),
    ],
)
def test_a_plain_scalar_is_what_it_looks_like(text: str, value: Any) -> None:
    found = parse_yaml(text)
    assert (type(found), found) == (type(value), value)


@given(data=DATA)
@settings(max_examples=100, deadline=timedelta(seconds=5))
def test_what_is_dumped_is_parsed_as_the_same(data: Any) -> None:
    assert parse_yaml(dump_yaml(data)) == data


@given(text=TEXT)
@settings(max_examples=50, deadline=timedelta(seconds=5))
def test_text_is_dumped_so_that_yaml_1_1_reads_it_as_text_too(text: str) -> None:
    assert yaml.safe_load(dump_yaml([text, "3e-4", "010", "1:30", "on"]))[0] == text
    assert all(isinstance(x, str) for x in yaml.safe_load(dump_yaml(["010", "1:30", "on"])))


def test_aliases_and_merge_keys_work() -> None:
    text = "a: &a {x: 1, y: 2}\nb: *a\nc: {<<: *a, y: 3}\n"
    assert parse_yaml(text)["b"] == {"x": 1, "y": 2}
    assert parse_yaml(text)["c"] == {"x": 1, "y": 3}


def test_aliases_that_multiply_are_refused_before_they_take_memory() -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    assert "aliases expand to more than" in problem("\n".join(lines))


def test_merge_keys_that_multiply_are_refused() -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 40)]
    assert "aliases expand to more than" in problem("\n".join(lines))


def test_a_list_that_holds_itself_is_refused() -> None:
    assert "aliases expand" in problem("a: &a [*a]")


@pytest.mark.parametrize("text", ["[" * 50_000, "{a: " * 50_000, "- " * 50_000])
def test_deep_nesting_is_refused(text: str) -> None:
    assert "nested too deeply" in problem(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb:\n  a: 1\n  a: 2\n", "line 4: duplicate key a"),
        ("a: [1", "line 1: "),
        ("a: *b", "line 1: found undefined alias 'b'"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
        ("a: \x1b[31m", "not valid YAML: "),
        ("a" * (MOST_CHARACTERS + 1), "longer than"),
        ("9" * 5000, "4300 digits"),
        ("b: 1\na: !!int", "line 2: '' cannot be read as !!int"),
        ("a: !!int x", "line 1: 'x' cannot be read as !!int: invalid literal"),
        ("a: !!bool abc", "line 1: 'abc' cannot be read as !!bool"),
        ('a: !!timestamp "abc"', "line 1: 'abc' cannot be read as !!timestamp"),
        ("a: !!timestamp 2026-13-01", "!!timestamp: month must be in 1..12"),
        ("a: !!float " + ":".join(["1"] * 250), "cannot be read as !!float"),
        ("? [a]\n: 1", "unhashable"),
    ],
)
def test_what_cannot_be_read_is_explained_in_one_line(text: str, told: str) -> None:
    assert told in problem(text)


@pytest.mark.parametrize(
    ("text", "comment"),
    [("a #b", True), ("[a, b] # c", True), ("a#b", False), ("'a #b'", False), ("['#']", False)],
)
def test_a_comment_is_told_from_a_number_sign(text: str, comment: bool) -> None:
    assert has_comment(text) == comment
