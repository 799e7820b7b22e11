"""Before the first step: who this process is, which device it has, what the run consists of.

The only module that reads the environment. Ranks come from torchrun (RANK, WORLD_SIZE, LOCAL_RANK),
from srun (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID), or there is one process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from coatlm.config import ConfigError

DEFAULT_PORT = 29500
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Launch:
    """This process among the processes of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str | None = None  # host:port of rank 0; None: one process

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
            host = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
        else:
            return cls()
        port = env.get("MASTER_PORT") or str(_slurm_port(env))
        return cls(rank, size, local, f"{host}:{port}")


def first_host(nodelist: str) -> str:
    """The first name of a SLURM node list: `gpu[03-07,12],login1` -> `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    if not match:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodelist!r} names no host")
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def start_processes(launch: Launch, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
    """Choose the device and join the other processes (NCCL with a GPU, gloo without)."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if launch.local_rank >= count:
            raise ConfigError(
                f"LOCAL_RANK={launch.local_rank} but this node has {count} GPUs: "
                f"start at most {count} processes a node"
            )
        torch.cuda.set_device(launch.local_rank)
        backend, device = "nccl", torch.device("cuda", launch.local_rank)
    else:
        backend, device = "gloo", None
    if launch.address is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    host, port = launch.address.rsplit(":", 1)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        host,
        int(port),
        launch.world_size,
        is_master=launch.rank == 0 and not agent,
        timeout=RENDEZVOUS_TIMEOUT,
        wait_for_workers=not agent,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"coatlm/{attempt}", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device,
    )


def _slurm_port(env: Mapping[str, str]) -> int:
    """One port a job, so that two jobs may share a node."""
    return DEFAULT_PORT + int(env.get("SLURM_JOB_ID", "0")) % 1000


def _integer(env: Mapping[str, str], name: str) -> int:
    value = env.get(name)
    if value is None or not value.isdigit():
        raise ConfigError(f"{name}={value!r}: the launcher must set it to a whole number")
    return int(value)
