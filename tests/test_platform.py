"""megatron-core runs on a machine without a GPU because its CUDA literals are rewritten."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coatlm import platform


def test_every_rule_still_matches_the_installed_megatron_core() -> None:
    assert platform.unmatched_rules() == []


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("torch.zeros(2, device='cuda')", "torch.zeros(2, device='cpu')"),
        ("x.cuda()", "x.to('cpu')"),
        ("x.cuda(torch.cuda.current_device())", "x.to('cpu')"),
        ("x.cuda(non_blocking=True)", "x.to('cpu', non_blocking=True)"),
        ("'torch.cuda.BFloat16Tensor'", "'torch.BFloat16Tensor'"),
        ("torch.cuda.is_available()", "torch.cuda.is_available()"),
    ],
)
def test_literals_are_rewritten_and_questions_are_not(source: str, rewritten: str) -> None:
    assert platform.rewrite(source) == rewritten


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hook stays away from GPUs")
def test_the_hook_is_installed_once_and_leaves_torch_alone() -> None:
    before = torch.cuda.current_device
    platform.enable_cpu()
    platform.enable_cpu()
    assert sum(type(finder) is platform._Finder for finder in sys.meta_path) == 1
    assert torch.cuda.current_device is before


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
