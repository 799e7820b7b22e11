"""The guide's table of families says what the configuration accepts and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from coatlm.config import ConfigError, make_config
from coatlm.config.flow import LOCAL_LAYER_ONLY
from coatlm.hf.config import read_model
from coatlm.hf.families import FAMILIES
from tests.hf.models import CASES, SMALL

GUIDE = Path(__file__).parents[2] / "docs/guides/huggingface.md"
LAYOUTS = {"tp": {"tp": 2}, "pp": {"pp": 2}, "cp": {"cp": 2}}


def models(family: str) -> list[dict[str, Any]]:
    """The section model of each test case of a family, with sizes that tp and pp divide."""
    found: list[dict[str, Any]] = []
    for case in (case for case in CASES.values() if case["model_type"] == family):
        raw = AutoConfig.for_model(**{**SMALL, **case}).to_diff_dict()
        found.append(read_model(raw) | {"layers": 4, "vocab": 256})
    return found


def refused(sections: dict[str, Any]) -> str:
    """The message that refuses a configuration; empty if it is accepted."""
    data = {"text": "x", "seq_len": 64}
    try:
        make_config({"data": data, **sections})
    except ConfigError as error:
        return str(error)
    return ""


def row(family: str) -> list[str]:
    """The cells of a family: its keys, FP8 layers, tp, pp, cp."""
    keys = ", ".join(f"`{name}`" for name in FAMILIES[family].model)
    cases, usual = models(family), make_config({}).model
    unfit = [
        name
        for name in LOCAL_LAYER_ONLY
        if any(case.get(name, getattr(usual, name)) != getattr(usual, name) for case in cases)
    ]
    messages = [refused({"model": case, "precision": {"recipe": "coat"}}) for case in cases]
    assert all(any(name in message for name in unfit) for message in messages if message)
    assert bool(unfit) == any(messages)
    fp8 = "no: " + ", ".join(f"`{name}`" for name in unfit) if unfit else "yes"
    layouts = []
    for layout in LAYOUTS.values():
        problems = [refused({"model": case, "parallel": layout}) for case in cases]
        layouts.append("no" if any(problems) else "yes")
    return [keys, fp8, *layouts]


def table() -> dict[str, list[str]]:
    """The cells in the guide, without those of the models' names."""
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {c[0].strip("`"): c[2:] for c in cells if c[0].strip("`") in FAMILIES}


def test_the_guide_has_every_family() -> None:
    assert list(table()) == list(FAMILIES)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_guide_says_what_fits_a_family(family: str) -> None:
    assert table()[family] == row(family)
