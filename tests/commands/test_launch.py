"""make train: as many processes as the GPUs and the batch allow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coatlm.commands import entry
from coatlm.commands.launch import command, count_gpus, fit
from coatlm.config import load_config
from coatlm.config.shipped import shipped

CONFIG = "train: {micro_batch: 8, global_batch: 16}\n"
PRETRAIN, ELASTIC = (entry.ROOT / name for name in ("pretrain.py", "tools/elastic.py"))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.mark.parametrize(
    ("gpus", "count", "micro_batch"), [(2, 2, 8), (3, 2, 8), (4, 4, 4), (7, 4, 4), (8, 8, 2)]
)
def test_the_largest_number_that_divides_the_batch_is_started(
    config: str, gpus: int, count: int, micro_batch: int
) -> None:
    processes, overrides = fit([config], gpus)
    assert processes == count
    loaded = load_config(config, overrides)
    assert loaded.train.micro_batch == micro_batch
    assert loaded.data_parallel_size(processes) == count


@pytest.mark.parametrize("path", shipped().values(), ids=lambda path: path.stem)
def test_every_shipped_configuration_uses_all_of_eight_gpus_or_of_more_nodes(path: Path) -> None:
    p = load_config(path).parallel
    gpus = max(8, p.tp * p.pp * p.cp)
    processes, overrides = fit([str(path)], gpus)
    assert processes == gpus
    load_config(path, overrides).data_parallel_size(gpus)


def test_overrides_count(config: str) -> None:
    assert fit([config, "train.global_batch=48", "train.micro_batch=2"], 7) == (6, [])


def test_the_processes_are_a_multiple_of_the_model_parallel_ranks(config: str) -> None:
    assert fit([config, "parallel.pp=2", "parallel.cp=2"], 7) == (4, [])


def test_a_number_that_the_layout_refuses_is_left_out(config: str) -> None:
    pipeline = ["parallel.pp=2", "parallel.vpp=2", "model.layers=4"]
    sizes, one = ["train.global_batch=8", "train.micro_batch=2"], ["train.micro_batch=1"]
    assert fit([config, *pipeline, *sizes], 8) == (8, one)  # 2 would be 1 microbatch of 2 stages
    sizes = ["train.global_batch=4", "train.micro_batch=2"]
    assert fit([config, *pipeline, *sizes], 8) == (4, one)  # 8 have 1 microbatch
    nodes = ["parallel.grad_comm_nodes=4", "train.global_batch=24", "train.micro_batch=1"]
    assert fit([config, *nodes], 7) == (4, [])


def test_an_automatic_layout_takes_all_gpus_and_an_automatic_microbatch_stays(config: str) -> None:
    assert fit([config, "parallel.layout=auto"], 7) == (7, [])
    assert fit([config, "train.micro_batch=auto"], 7) == (4, [])
    whole = ["train.micro_batch=auto", "train.update=backward"]  # one microbatch per step
    assert fit([config, *whole], 7) == (4, [])


def test_where_nothing_fits_every_gpu_is_started_and_pretrain_reports(config: str) -> None:
    assert fit([config, "parallel.tp=8"], 4) == (4, [])


def test_a_mistake_is_reported_by_one_process(config: str) -> None:
    assert fit([config, "train.stesp=3"], 8) == (1, [])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run.yaml", "--dry-run"]])
def test_what_does_not_train_is_one_process(arguments: list[str]) -> None:
    assert command(arguments, 8) == [sys.executable, str(PRETRAIN), *arguments]


def test_one_gpu_or_none_needs_no_torchrun(config: str) -> None:
    assert PRETRAIN.is_file()
    for gpus in (0, 1):
        assert command([config], gpus) == [sys.executable, str(PRETRAIN), config]


@pytest.mark.parametrize("preset", [["--preset", "fp8"], ["--preset=fp8"], ["preset=fp8"]])
def test_a_preset_is_no_reason_to_start_one_process(config: str, preset: list[str]) -> None:
    line = command([config, *preset], 8)
    assert line[3:] == [*line[3:5], config, *preset, "train.micro_batch=2"]


def test_several_gpus_are_started_by_torchrun(config: str) -> None:
    line = command([config, "optim.lr=1e-3"], 8)
    assert line[1:4] == [str(ELASTIC), "--standalone", "--nproc-per-node=8"]
    assert line[4:] == [str(PRETRAIN), config, "optim.lr=1e-3", "train.micro_batch=2"]


def test_an_installed_package_starts_modules_that_ignore_the_working_directory(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "IS_CHECKOUT", False)
    python = sys.executable
    train = ["-P", "-m", "coatlm.commands.train"]
    assert command([config], 1) == [python, *train, config]
    several = ["-P", "-m", "coatlm.commands.elastic", "--standalone", "--nproc-per-node=2"]
    assert command([config], 2) == [python, *several, "--no-python", python, "-u", *train, config]


@pytest.mark.parametrize(
    ("nodes", "devices", "count"),
    [
        ([], [], 1),
        (["nvidia0", "nvidia1.lock", "nvidiactl"], [], 1),  # a container without /sys
        (["nvidia0", "nvidia10"], [], 5),
        ([], ["0x10de 0x030200"], 1),
        ([], ["0x10de 0x030200", "0x10de 0x030000"], 5),  # no driver was used since the start
        ([], ["0x10de 0x030000", "0x10de 0x040300", "0x8086 0x030000"], 1),  # sound; another vendor
        (["nvidia0", "dxg"], [], 5),
    ],
)
def test_torch_counts_gpus_where_several_are_possible(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[str],
    devices: list[str],
    count: int,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    (tmp_path / "dev").mkdir()
    for name in nodes:
        (tmp_path / "dev" / name).touch()
    for number, device in enumerate(devices):
        place = tmp_path / f"sys/bus/pci/devices/0000:{number:02}:00.0"
        place.mkdir(parents=True)
        for name, value in zip(("vendor", "class"), device.split(), strict=True):
            (place / name).write_text(f"{value}\n")
    assert count_gpus(tmp_path) == count


def test_without_several_gpus_the_launcher_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys, pathlib; from coatlm.commands.launch import command, count_gpus\n"
    code += "command(['quickstart'], count_gpus(pathlib.Path(sys.argv[1]))); print(*sys.modules)"
    line = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "coatlm.config" in done.stdout.split()
    assert "torch" not in done.stdout.split()
