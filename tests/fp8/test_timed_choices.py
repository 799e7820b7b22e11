"""Timed choices in a file: found again, never replaced, and harmless if the file is not whole."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coatlm.fp8 import cublaslt, gemm
from coatlm.fp8.cublaslt import Heuristic, Kind
from coatlm.fp8.formats import E4M3, E5M2
from coatlm.fp8.gemm import Plans
from coatlm.fp8.timed_choices import add_choices, machine, read_choices

WHAT = "GEMM algorithms"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "gemms.json"


def algorithm(number: int) -> Heuristic:
    heuristic = Heuristic()
    heuristic.algo[0] = number
    return heuristic


class Gpu:
    """Three algorithms, of which the second is the fastest; `timed` has the kinds it has timed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timed: list[str] = []
        monkeypatch.setattr(cublaslt, "make_plan", self.make_plan)
        monkeypatch.setattr(gemm, "_times", self.times)

    def make_plan(self, kind: Kind) -> SimpleNamespace:
        found = [algorithm(number) for number in (7, 8, 9)]
        return SimpleNamespace(kind=kind, candidates=lambda _: found, heuristic=found[0])

    def times(self, plan: SimpleNamespace, candidates: dict, *_: object, **__: object) -> dict:  # type: ignore[type-arg]
        self.timed.append(plan.kind.name)
        return dict(zip(candidates, (3.0, 1.0, 2.0), strict=True))


def tune(choices: dict[str, str], plans: Plans | None = None) -> Heuristic:
    """The algorithm of a kind of GEMM."""
    plans = Plans() if plans is None else plans
    options = {"a_fmt": E5M2, "b_fmt": E4M3, "out_dtype": torch.float32, "fast": True}
    plans.tune(64, 32, 16, accumulate=True, device=0, choices=choices, **options)  # type: ignore[arg-type]
    [plan] = plans._plans.values()
    return plan.heuristic


def test_a_kind_is_timed_once_and_found_in_the_choices_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, choices, plans = Gpu(monkeypatch), dict[str, str](), Plans()
    assert tune(choices, plans).name == algorithm(8).name
    tune(choices, plans)
    assert len(gpu.timed) == 1 and choices == {gpu.timed[0]: algorithm(8).name}
    assert "m=64 n=32 k=16" in gpu.timed[0] and "device" not in gpu.timed[0]
    tune(choices)
    assert len(gpu.timed) == 1


def test_the_choice_of_another_rank_replaces_the_own_one_untimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, choices, plans = Gpu(monkeypatch), dict[str, str](), Plans()
    tune(choices, plans)
    [kind] = choices
    assert tune({kind: algorithm(9).name}, plans).name == algorithm(9).name
    assert len(gpu.timed) == 1


def test_an_algorithm_that_cublaslt_does_not_offer_is_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, choices = Gpu(monkeypatch), dict[str, str]()
    tune(choices)
    [kind] = choices
    foreign = {kind: "00ff"}
    assert tune(foreign).name == foreign[kind] == algorithm(8).name
    assert len(gpu.timed) == 2


def test_choices_are_read_as_they_were_added_and_the_first_one_stays(file: Path) -> None:
    assert read_choices(file, WHAT) == {}
    add_choices(file, {"one": {"a": "1"}}, WHAT)
    found = add_choices(file, {"one": {"a": "2", "b": "3"}, "two": {"a": "4"}}, WHAT)
    assert found == {"one": {"a": "1", "b": "3"}, "two": {"a": "4"}}
    assert read_choices(file, WHAT) == found


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"format": 1, "machines": {"one": {"a": "1"',  # a write that was cut off
        '{"format": 2, "machines": {}}',
        '{"format": 1}',
        '{"format": 1, "machines": {"one": ["a"]}}',
        '{"format": 1, "machines": {"one": {"a": 1}}}',
        "[]",
        "\0\xff",
    ],
)
def test_another_content_is_ignored_with_one_warning_and_replaced(
    file: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.mkdir()
    file.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.WARNING, "coatlm"):
        assert read_choices(file, WHAT) == {}
        add_choices(file, {"one": {"a": "1"}}, WHAT)
    assert len(caplog.messages) == 1 and str(file) in caplog.messages[0]
    assert caplog.messages[0].endswith("GEMM algorithms are timed again")
    assert read_choices(file, WHAT) == {"one": {"a": "1"}}


def test_an_unknown_name_is_replaced_unless_another_run_has_done_so(file: Path) -> None:
    add_choices(file, {"one": {"a": "gone", "b": "2"}}, WHAT)
    read = read_choices(file, WHAT)
    found = add_choices(file, {"one": {"a": "first", "b": "2"}}, WHAT, read=read)
    assert found == read_choices(file, WHAT) == {"one": {"a": "first", "b": "2"}}
    assert add_choices(file, {"one": {"a": "second", "b": "2"}}, WHAT, read=read) == found


def test_a_path_that_cannot_be_looked_up_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "coatlm"):
        assert read_choices(tmp_path / ("x" * 300) / "gemms.json", WHAT) == {}
    assert caplog.messages[0].endswith("GEMM algorithms are timed again")


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "coatlm"):
        add_choices(tmp_path / "file" / "gemms.json", {"one": {"a": "1"}}, WHAT)
    assert caplog.messages[0].startswith("GEMM algorithms are timed again at the next start: ")


def test_processes_that_add_at_the_same_time_lose_nothing(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:  # a lock belongs to an open file, not to a process
        list(pool.map(lambda i: add_choices(file, {"one": {str(i): "x"}}, WHAT), range(40)))
    assert len(read_choices(file, WHAT)["one"]) == 40
    assert json.loads(file.read_text())["format"] == 1


def test_another_version_of_a_library_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    names = {machine(1, library) for library in ("cuBLASLt 130100", "cuDNN 91900", "cuDNN 92000")}
    assert f"GPU 1, torch {torch.__version__}, CUDA 13.0, cuDNN 91900" in names and len(names) == 3
