"""Who a process is, from torchrun's or srun's environment, and which GPU it takes."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from coatlm.config import ConfigError, make_config
from coatlm.train.setup import (
    Launch,
    choose_gpu,
    environment_warnings,
    first_host,
    one_queue,
    record_collectives,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08],login",
    "SLURM_JOB_ID": "42017",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def test_nothing_set_is_one_process() -> None:
    assert Launch.from_environment({}) == Launch(0, 1, 0, address=None)


def test_torchrun_is_understood() -> None:
    names = {"job": ("seven",), "restarted": ("seven",), "owned": True}
    expected = Launch(5, 8, 1, 4, "node0:1234", True, "2", one_host=False, **names)
    launched = TORCHRUN | {"TORCHELASTIC_RUN_ID": "seven"}
    assert Launch.from_environment(launched) == expected
    assert Launch.from_environment(launched | {"TORCHELASTIC_MAX_RESTARTS": "3"}).restarts == 3


@pytest.mark.parametrize("run_id", [{}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_launches_without_an_id_of_their_own_are_told_apart_by_their_logs(
    run_id: dict[str, str],
) -> None:
    def attempt(logs: str, number: int) -> Launch:
        made = {
            "TORCHELASTIC_ERROR_FILE": f"{logs}/attempt_{number}/5/error.json",
            "TORCHELASTIC_RESTART_COUNT": str(number),
        }
        return Launch.from_environment(TORCHRUN | run_id | made)

    first, again = attempt("/tmp/a/none_x", 0), attempt("/tmp/a/none_x", 1)
    assert first.job == again.job == again.restarted == (f"{platform.node()}:/tmp/a/none_x",)
    assert first.restarted == () and attempt("/tmp/b/none_y", 0).job != first.job
    assert Launch.from_environment(TORCHRUN | run_id).job == ()  # without logs nothing is proven


@pytest.mark.parametrize(
    ("changes", "restarted"),
    [
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, ()),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, ("seven",)),  # not the job, which may launch others
        ({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "1"}, ("42017",)),
    ],
)
def test_what_has_restarted_a_run_is_torchrun_or_the_slurm_job(
    changes: dict[str, str], restarted: tuple[str, ...]
) -> None:
    env = TORCHRUN | {"TORCHELASTIC_RUN_ID": "seven", "SLURM_JOB_ID": "42017"} | changes
    launch = Launch.from_environment(env)
    assert (launch.job, launch.restarted) == (("42017", "seven"), restarted)


def test_srun_is_understood_without_torchrun() -> None:
    launch = Launch.from_environment(SRUN)
    assert (launch.rank, launch.world_size, launch.local_rank) == (3, 4, 1)
    assert launch.local_size == 2 and not launch.own_gpu
    assert launch.address == "gpu07:29517"  # the port differs between jobs


def test_srun_with_a_gpu_for_each_task_is_understood() -> None:
    assert Launch.from_environment(SRUN | {"SLURM_GPUS_PER_TASK": "1"}).own_gpu


def test_a_batch_script_without_srun_is_one_process() -> None:
    alone = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_NODELIST"}
    assert Launch.from_environment(alone).world_size == 1


@pytest.mark.parametrize(
    ("changes", "one_host", "address"),
    [
        ({}, False, "node0:1234"),
        ({"LOCAL_WORLD_SIZE": "8"}, True, "node0:1234"),  # as torchrun says
        ({"MASTER_ADDR": "127.0.0.1"}, True, "127.0.0.1:1234"),  # no other host gets there
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, True, "127.0.0.1:29500"),
    ],
)
def test_whether_all_ranks_are_on_one_host_is_the_launchers_word(
    changes: dict[str, str], one_host: bool, address: str
) -> None:
    launch = Launch.from_environment(TORCHRUN | changes)
    assert (launch.one_host, launch.address) == (one_host, address)


def test_srun_on_one_node_stays_on_the_loopback_address() -> None:
    launch = Launch.from_environment(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4"})
    assert launch.one_host and launch.address == "127.0.0.1:29517"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("RANK", "a", "a whole number below WORLD_SIZE=8"),
        ("RANK", "8", "below WORLD_SIZE=8"),
        ("RANK", "-1", "below WORLD_SIZE=8"),
        ("RANK", "\u0663", "below WORLD_SIZE=8"),  # a digit of another script
        ("RANK", "9" * 5000, "below WORLD_SIZE=8"),
        ("WORLD_SIZE", "0", "from 1 to"),
        ("WORLD_SIZE", "", "from 1 to"),
        ("LOCAL_RANK", "4", "below 4, the processes on this node"),
        ("LOCAL_WORLD_SIZE", "x", "from 1 to"),
        ("LOCAL_WORLD_SIZE", "0", "from 1 to"),
        ("MASTER_PORT", "70000", "from 1 to 65535"),
        ("MASTER_PORT", "http", "from 1 to 65535"),
        ("TORCHELASTIC_RESTART_COUNT", "once", "from 0 on"),
        ("TORCHELASTIC_MAX_RESTARTS", "1.5", "from 0 on"),
        ("TORCHELASTIC_USE_AGENT_STORE", "yes", "True or False"),
        ("SLURM_PROCID", "4", "below SLURM_NTASKS=4"),
        ("SLURM_NTASKS", "four", "from 1 to"),
        ("SLURM_LOCALID", "7", "below 2"),
        ("SLURM_JOB_ID", "job", "from 0 on"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(y2)", "4(x2),3"),
        ("SLURM_STEP_NODELIST", "[3-4]", "names no host"),
    ],
)
def test_a_variable_that_cannot_be_is_named_with_its_value_and_what_is_allowed(
    name: str, value: str, allowed: str
) -> None:
    launcher = SRUN if name.startswith("SLURM") else TORCHRUN
    with pytest.raises(ConfigError) as caught:
        Launch.from_environment(launcher | {name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}={value[:80]!r}") and allowed in message
    assert len(message) < 400 and "\n" not in message


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_half_of_torchruns_variables_is_not_one_process(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=not set"):
        Launch.from_environment({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_LOCALID"])
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Launch.from_environment({key: value for key, value in SRUN.items() if key != name})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-08,12]", "gpu07"),
        ("rack3-gpu[1,5]-ib,x", "rack3-gpu1-ib"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("launch", "gpus", "index"),
    [
        (Launch(), 0, None),
        (Launch(1, 2, 1, 2), 2, 1),
        (Launch(), 8, 0),
        (Launch(3, 4, 3, 4, own_gpu=True), 1, 0),
    ],
)
def test_gpu_of_a_process(monkeypatch: Any, launch: Launch, gpus: int, index: int | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_gpu(launch) == (None if index is None else torch.device("cuda", index))


def test_collectives_are_recorded_unless_the_environment_says_otherwise(tmp_path: Path) -> None:
    env = {"TORCH_FR_BUFFER_SIZE": "7"}
    record_collectives(tmp_path / "flight_rank_", env)
    assert env == {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_rank_"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


@pytest.mark.parametrize("rank", range(4))
def test_more_processes_than_gpus_is_an_error_on_every_rank(monkeypatch: Any, rank: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="4 processes on this node but 2 GPUs"):
        choose_gpu(Launch(rank, 4, rank, 4))


QUIET = {"zero": 0, "grad_comm": "bf16"}  # nothing that one queue of a GPU serializes
FP8_SUM = "gradients with parallel.grad_comm=fp8-a2a"


@pytest.mark.parametrize(
    ("parallel", "ranks", "named"),
    [
        (
            QUIET | {"tp": 4, "sequence_parallel": True, "tp_chunks": 2},
            4,
            ["rows with parallel.tp=4 and parallel.tp_chunks=2"],
        ),
        (QUIET | {"tp": 2, "sequence_parallel": True, "tp_chunks": 2}, 2, []),  # one step of rows
        (QUIET | {"tp": 4, "tp_chunks": 2}, 4, []),  # all-reduces: no rows to pass
        (QUIET | {"tp": 4, "sequence_parallel": True}, 4, []),
        (QUIET | {"grad_comm": "fp8-a2a"}, 2, [FP8_SUM]),
        (QUIET | {"grad_comm": "fp8-a2a", "cp": 2}, 2, [FP8_SUM]),
        (QUIET | {"grad_comm": "fp8-a2a"}, 1, []),
        (QUIET | {"grad_comm": "fp8-a2a", "pp": 2}, 2, []),
        (QUIET | {"grad_comm": "fp8-a2a", "overlap_grad_reduce": False}, 2, []),
        (QUIET | {"zero": 1}, 2, ["weights with parallel.zero=1"]),
        (QUIET | {"zero": 3}, 2, []),  # one layer at a time
        (QUIET | {"zero": 1, "overlap_param_gather": False}, 2, []),
        (
            {"tp": 4, "sequence_parallel": True, "tp_chunks": 2},
            8,
            ["tp_chunks", "grad_comm", "zero"],
        ),
        (QUIET, 2, []),
    ],
)
def test_one_queue_per_gpu_is_a_warning_where_kernels_would_overlap(
    parallel: dict[str, Any], ranks: int, named: list[str]
) -> None:
    model = {"layers": 2, "hidden": 256, "heads": 8, "head_dim": 32, "ffn": 256}
    config = make_config({"model": model, "precision": {"recipe": "coat"}, "parallel": parallel})
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    said = one_queue(config, ranks, {name: "1"})
    assert (said is not None) == bool(named)
    if said is not None:
        assert said.startswith(f"{name}=1 makes ") and said.count(";") == len(named) - 1
        assert all(what in said for what in named)
        assert said.endswith(". Unset it or set it to 8, CUDA's default, or more")
    for env in ({}, {name: "8"}, {name: "32"}):
        assert one_queue(config, ranks, env) is None


def test_nccl_without_mixing_is_a_warning_with_graphs_on_several_ranks() -> None:
    def warnings(ranks: int, graphs: bool, value: str | None) -> list[str]:
        config = make_config({"train": {"cuda_graphs": graphs}})
        env = {} if value is None else {"NCCL_GRAPH_MIXING_SUPPORT": value}
        return list(environment_warnings(config, ranks, env))

    (said,) = warnings(2, True, "0")
    assert said.startswith("NCCL_GRAPH_MIXING_SUPPORT=0 with CUDA graphs on 2 ranks: ")
    assert said.endswith(". Unset it, or set train.cuda_graphs=false")
    for ranks, graphs, value in ((1, True, "0"), (2, False, "0"), (2, True, "1"), (2, True, None)):
        assert warnings(ranks, graphs, value) == []
