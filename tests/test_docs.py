"""What README, CONTRIBUTING, SECURITY and docs/ name exists, and every link leads somewhere."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from coatlm.config import Config, Precision
from coatlm.config.keys import sentence
from coatlm.config.recipes import (
    BF16_RECIPES,
    COAT,
    PRECISION_RECIPES,
    RECIPES,
    TE_RECIPES,
    fp8_weight_recipes,
)

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SECTIONS = "|".join(Config.model_fields)
KEY = re.compile(rf"`((?:{SECTIONS})\.[a-z_0-9]+)(?:\.[a-z_0-9]+)*(?:=([^`]*))?`")
RUN_FILES = {"train.log"}  # a file of a run directory, and no key
NAMED = re.compile(r"`((?:coatlm|tests|tools|docs|configs|\.ci)/[\w./-]*)`")
MODULE = re.compile(r"`(coatlm(?:\.[a-z_0-9]+)+)`")


def said(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return FENCED.sub("", page.read_text())


def each_page(*pages: Path) -> pytest.MarkDecorator:
    ids = [str(page.relative_to(ROOT)) for page in pages]
    return pytest.mark.parametrize("page", pages, ids=ids)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading, and mkdocs one of plain words."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in HEADING.findall(said(page))}


def broken_links(text: str, page: Path) -> Iterator[str]:
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists():
            yield f"{link}: no such file"
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            yield f"{link}: no such heading"


def choices(annotation: Any) -> list[Any]:
    """The values of the `Literal`s in a type; none where it is not a choice."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return list(typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return [value for part in typing.get_args(annotation) for value in choices(part)]
    return []


def wrong_keys(text: str) -> Iterator[str]:
    for line in text.splitlines():
        # the first column of a table may name the keys of another program
        own = line.split("|", 2)[2] if line.startswith("|") else line
        for key, value in KEY.findall(own):
            section, name = key.split(".")
            fields = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
            if key in RUN_FILES:
                continue
            if name not in fields:
                yield f"{key}: no such key"
                continue
            allowed = [str(choice) for choice in choices(fields[name].annotation)]
            placeholder = value == "" or value.isupper()
            if allowed and not placeholder and value not in (*allowed, "null", "true", "false"):
                yield f"{key}={value}: one of {', '.join(allowed)}"


def missing_files(text: str) -> Iterator[str]:
    for path in NAMED.findall(text):
        if not re.search("[A-Z]{2}", path) and not (ROOT / path).exists():
            yield path
    for module in MODULE.findall(text):
        path = ROOT / module.replace(".", "/")
        if not path.with_suffix(".py").exists() and not path.is_dir():
            yield module


@each_page(*PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert list(broken_links(said(page), page)) == []


@each_page(*PAGES)
def test_every_key_exists_and_has_the_value_given(page: Path) -> None:
    assert list(wrong_keys(said(page))) == []


@each_page(*PAGES)
def test_every_file_and_module_named_exists(page: Path) -> None:
    assert list(missing_files(said(page))) == []


def test_what_does_not_exist_is_found() -> None:
    page = ROOT / "README.md"
    links = "[a](docs/nothing.md) [b](docs/concepts.md#nothing) [c](docs/concepts.md#zero)"
    assert len(list(broken_links(links, page))) == 2
    keys = "`optim.rate` `optim.lr` `optim.recipe=coat` `optim.recipe=goat`\n| `optim.rate` | x |"
    assert [line.split(":")[0] for line in wrong_keys(keys)] == ["optim.rate", "optim.recipe=goat"]
    files = "`coatlm/fp8/nothing.py` `coatlm/fp8/gemm.py` `coatlm.fp8.nothing` `coatlm.fp8.gemm`"
    assert list(missing_files(files)) == ["coatlm/fp8/nothing.py", "coatlm.fp8.nothing"]


def test_concepts_name_every_recipe() -> None:
    text = (ROOT / "docs/concepts.md").read_text() + (ROOT / "README.md").read_text()
    optim = Config.model_fields["optim"].annotation.model_fields["recipe"].annotation  # type: ignore[union-attr]
    for recipe in choices(optim):
        assert f"`{recipe}`" in text or f"={recipe}`" in text or recipe.startswith("adamw-bf16")


def table_of_recipes(text: str) -> list[str]:
    """The names in the first column of the table that `precision.recipe` begins."""
    (table,) = re.findall(
        r"^\| `precision\.recipe` \|.*\n\|[ :|-]+\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    return [
        name for row in table.splitlines() for name in re.findall("`([^`]+)`", row.split("|")[1])
    ]


def listed(text: str) -> list[str]:
    """The names of an enumeration: a, b and c."""
    return re.split(", | and | or ", text.replace("`", "").strip())


def wrong_lists(text: str, lists: dict[str, Collection[str]]) -> Iterator[str]:
    """The enumerations, found by the patterns in `lists`, that are not exactly these names."""
    for pattern, names in lists.items():
        (found,) = re.findall(pattern, re.sub(r"\s+", " ", text))
        if sorted(listed(found)) != sorted(names):
            yield f"{found}: {', '.join(names)}"


@each_page(ROOT / "README.md", ROOT / "docs/concepts.md")
def test_the_table_of_precision_recipes_names_each_recipe_once(page: Path) -> None:
    assert sorted(table_of_recipes(page.read_text())) == sorted(RECIPES)


def test_lists_of_recipes_in_pages_are_those_of_the_table() -> None:
    tensor_wise = [name for name, r in RECIPES.items() if r.tensor_wise_gradients]
    concepts = {
        "gradients have tensor-wise scales: ([^.]*?) - Measured": tensor_wise,
        "`parallel.weight_gather=fp8`, with ([^.]*?) - Measured": fp8_weight_recipes(),
    }
    assert list(wrong_lists((ROOT / "docs/concepts.md").read_text(), concepts)) == []
    readme = {
        "for backward: (`fp32`[^.]*?), `te-": BF16_RECIPES,
        "(`te-[^.]*?) \\(TransformerEngine's\\)": TE_RECIPES,
    }
    assert list(wrong_lists((ROOT / "README.md").read_text(), readme)) == []


def test_texts_of_keys_list_the_recipes_of_the_table() -> None:
    text = sentence(Precision.model_fields["recipe"])
    words = set(re.findall(r"[\w-]+", text))
    assert words >= set(RECIPES)
    assert {w for w in words if re.match("coat|rowwise|fp8-", w)} <= set(RECIPES)
    as_coat = [name for name, r in RECIPES.items() if r.saved == COAT.saved and name != "coat"]
    assert list(wrong_lists(text, {r"\. ([^.;]*) save what coat saves": as_coat})) == []
    in_e4m3 = [name for name, r in RECIPES.items() if r.dgrad.gradient.fmt == "e4m3"]
    text = sentence(Precision.model_fields["grad_format"])
    assert list(wrong_lists(text, {"e4m3 in (.*), e5m2 in the others": in_e4m3})) == []
    text = Precision.__doc__ or ""
    (first,) = re.findall(r"FP8 recipes: (\S+) and those\s+listed after it", text)
    assert PRECISION_RECIPES[PRECISION_RECIPES.index(first) :] == tuple(RECIPES)


def test_a_recipe_that_a_table_or_a_list_lacks_is_found() -> None:
    table = "| `precision.recipe` | saved |\n| --- | --- |\n| `a`, `b` | x |\n| `c` | as `d` |\n"
    assert table_of_recipes(table) == ["a", "b", "c"]
    assert list(wrong_lists("with `a`,\n`b` and `c`.", {"with (.*)\\.": ["c", "a", "b"]})) == []
    assert list(wrong_lists("with a and b.", {"with (.*)\\.": ["a", "b", "c"]})) == [
        "a and b: a, b, c"
    ]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 260
