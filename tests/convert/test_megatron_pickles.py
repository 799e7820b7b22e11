"""Which classes a pickle of Megatron may hold, and that none of them is imported."""

from __future__ import annotations

import argparse
import enum
import importlib
import signal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from coatlm import megatron  # noqa: F401 # the hook comes before megatron.core
from coatlm.convert.pickles import Inert, load_pickle

from megatron.core.transformer.enums import AttnBackend  # isort: skip

TRANSFORMER = "megatron.core.transformer.enums"


def save_enum(path: Path, module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A common.pt with members of an enumeration, which afterwards exists nowhere."""
    with monkeypatch.context() as patch:
        made = enum.Enum(name, {"A": 1, "B": "b"}, module=module)
        patch.setattr(importlib.import_module(module), name, made, raising=False)
        args = argparse.Namespace(hidden_size=48, scope=made["A"], modules=[*made])
        torch.save({"args": args, "iteration": 7}, path)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (TRANSFORMER, "InferenceCudaGraphScope"),  # of megatron-core 0.19.2
        (TRANSFORMER, "CudaGraphModule"),  # the same, with --cuda-graph-modules
        (TRANSFORMER, "InventedHere"),
        ("megatron.core.enums", "InventedHere"),
    ],
)
def test_enumerations_of_any_megatron_core_are_read_without_their_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    path = tmp_path / "common.pt"
    save_enum(path, module, name, monkeypatch)
    for content in (None, path.read_bytes()):
        found = load_pickle(path, content)
        args = found["args"]
        assert (found["iteration"], args.hidden_size) == (7, 48)
        assert [type(value) for value in (args.scope, *args.modules)] == [Inert] * 3
        assert [value.arguments for value in args.modules] == [(1,), ("b",)]


@pytest.mark.parametrize(
    "module", ["megatron.core.utils", "megatron.core.transformer.spec_utils", "enum"]
)
def test_an_enumeration_of_another_module_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    path = tmp_path / "common.pt"
    save_enum(path, module, "InventedHere", monkeypatch)
    for content in (None, path.read_bytes()):
        with pytest.raises(ValueError, match=rf"holds {module}\.InventedHere, which is not all"):
            load_pickle(path, content)


def test_classes_that_megatron_core_has_registered_with_torch_are_inert(tmp_path: Path) -> None:
    """Of a real class and an inert one with the same name, torch takes any one."""
    registered = torch.serialization.get_safe_globals()
    assert AttnBackend in registered and np.ndarray in registered
    state = {"numpy": np.random.get_state(), "signal": signal.SIGTERM, "enum": AttnBackend.auto}
    torch.save(state, tmp_path / "good.pt")
    found = load_pickle(tmp_path / "good.pt")
    assert [type(v) for v in (found["numpy"][1], found["signal"], found["enum"])] == [Inert] * 3
    torch.save({"model": Fraction(1, 2)}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=r"holds fractions\.Fraction, which is not allowed"):
        load_pickle(tmp_path / "bad.pt")
    assert set(torch.serialization.get_safe_globals()) == set(registered)
