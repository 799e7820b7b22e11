"""Before the first step: who this process is, which device it has, what the run consists of.

The only module that reads the environment. Ranks come from torchrun (RANK, WORLD_SIZE, LOCAL_RANK),
from srun (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID), or there is one process.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from coatlm.config import ConfigError

DEFAULT_PORT = 29500
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
FLIGHT_ENTRIES = 2000  # collectives: some hundred steps of a small model, some steps of a deep one


T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """This process among the processes of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this node
    address: str | None = None  # host:port of rank 0; None: one process
    store_held: bool = False  # the launcher already serves the store at `address`
    attempt: str = "0"  # of an elastic launcher; keeps the keys of restarts apart
    own_gpu: bool = False  # the launcher shows each process only its own GPU
    restarts: int = 0  # how often the launcher starts all processes again when one fails
    owned: bool = False  # the launcher is the parent process, and ends when this one should

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Launch:
        """Read torchrun's variables, else srun's. Raises ConfigError where some are missing."""
        if "RANK" in env and "WORLD_SIZE" in env:
            rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
            local = _integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
            host = env.get("MASTER_ADDR", "127.0.0.1")
        elif "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env:
            rank, size = _integer(env, "SLURM_PROCID"), _integer(env, "SLURM_NTASKS")
            local = _integer(env, "SLURM_LOCALID")
            env = {"LOCAL_WORLD_SIZE": str(_tasks_a_node(env, local)), **env}
            host = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
        else:
            return cls()
        return cls(
            rank,
            size,
            local,
            int(env.get("LOCAL_WORLD_SIZE", local + 1)),
            f"{host}:{env.get('MASTER_PORT') or _slurm_port(env)}",
            env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            env.get("TORCHELASTIC_RESTART_COUNT", "0"),
            "SLURM_GPUS_PER_TASK" in env or "SLURM_TRES_PER_TASK" in env,
            int(env.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            "TORCHELASTIC_RUN_ID" in env,
        )


def first_host(nodelist: str) -> str:
    """The first name of a SLURM node list: `gpu[03-07,12],login1` -> `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    if not match:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodelist!r} names no host")
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def start_processes(launch: Launch, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
    """Choose the device and join the other processes (NCCL with a GPU, gloo without)."""
    gpu = choose_gpu(launch)
    backend = "gloo" if gpu is None else "nccl"
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if launch.address is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    host, port = launch.address.rsplit(":", 1)
    store = dist.TCPStore(
        host,
        int(port),
        launch.world_size,
        is_master=launch.rank == 0 and not launch.store_held,
        timeout=RENDEZVOUS_TIMEOUT,
        wait_for_workers=not launch.store_held,
    )
    # a device_id would have NCCL connect every group at once, also those that never carry anything
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"coatlm/{launch.attempt}", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )


def record_collectives(prefix: Path, env: MutableMapping[str, str] = os.environ) -> None:
    """Let torch keep its latest collectives; after a timeout NCCL writes them to PREFIX<rank>.

    Call it before `start_processes`. What the environment says already stays.
    """
    env.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_ENTRIES))
    env.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix.absolute()))
    env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def recorded_collectives() -> bytes:
    """The record so far, pickled: of NCCL with a GPU (torchfrtrace reads it), else of gloo."""
    c10d: Any = torch._C._distributed_c10d
    return c10d._dump_nccl_trace() if torch.cuda.is_available() else c10d._dump_fr_trace()


def choose_gpu(launch: Launch) -> torch.device | None:
    """The GPU of this process, None without GPUs. Raises ConfigError where there are too few.

    A launcher that shows each process one GPU of its own (srun --gpus-per-task=1) is understood.
    """
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    if launch.own_gpu and count == 1:
        return torch.device("cuda", 0)
    if launch.local_size > count:
        raise ConfigError(
            f"{launch.local_size} processes on this node but {count} GPUs: "
            f"start at most {count} a node"
        )
    return torch.device("cuda", launch.local_rank)


def rank_zero_first(function: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call `function` on rank 0, then on the others, which find what it made.

    An error of rank 0 is raised everywhere as ValueError, so that nobody waits for it.
    """
    problem: list[str | None] = [None]
    result = None
    if group.rank() == 0:
        try:
            result = function()
        except ValueError as error:
            problem[0] = str(error)
    dist.broadcast_object_list(problem, src=0, group=group)
    if problem[0] is not None:
        raise ValueError(problem[0])
    return function() if result is None else result


def quiet_megatron() -> None:
    """Drop two warnings of megatron-core that say nothing about a run of coatlm."""
    expected = ("Unknown MLP type", "Rewrapping ModuleSpec", "GPTModel IS DEPRECATED")

    def unexpected(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(expected)

    for module in ("transformer.transformer_layer", "models.gpt.gpt_model"):
        logging.getLogger(f"megatron.core.{module}").addFilter(unexpected)


def _tasks_a_node(env: Mapping[str, str], local_rank: int) -> int:
    """The most tasks of this step on a node: SLURM writes `4(x2),3`."""
    counts = re.findall(r"(?:^|,)(\d+)", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max([local_rank + 1, *map(int, counts)])


def _slurm_port(env: Mapping[str, str]) -> int:
    """One port a job, so that two jobs may share a node."""
    return DEFAULT_PORT + int(env.get("SLURM_JOB_ID", "0")) % 1000


def _integer(env: Mapping[str, str], name: str) -> int:
    value = env.get(name)
    if value is None or not value.isdigit():
        raise ConfigError(f"{name}={value!r}: the launcher must set it to a whole number")
    return int(value)
