"""What is installed beside torch, and the memory that a process may fill."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from coatlm import platform


def test_without_apex_there_is_nothing_to_say() -> None:
    assert not platform.has_apex() and not platform.has_foreign_apex()


@pytest.mark.parametrize(("inside", "foreign"), [("models", True), ("multi_tensor_apply", False)])
def test_a_web_library_called_apex_is_told_from_nvidias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, foreign: bool
) -> None:
    (tmp_path / "apex" / inside).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert platform.has_foreign_apex() is foreign


def test_ranks_of_a_host_share_its_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        platform.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 2**30)
    )
    assert platform.device_memory(None, 1) == (8 * 2**30, "this host")
    assert platform.device_memory(None, 4) == (2 * 2**30, "this host, shared by 4 ranks,")
