"""Ranks, device and process group of this process, from the launcher's environment.

This is the only module that reads the environment. Ranks come from torchrun (RANK, WORLD_SIZE,
LOCAL_RANK) or srun (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID); otherwise there is one process.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from coatlm.config import Config, ConfigError
from coatlm.kernels.cpu_gemms import widen_bf16_gemms
from coatlm.process import within
from coatlm.train.rendezvous import meet, open_store
from coatlm.train.reports import Failure

DEFAULT_PORT = 29500
START_TIMEOUT = 600.0  # seconds for all ranks to connect: the default of parallel.start_timeout
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
FLIGHT_ENTRIES = 2000  # collectives: hundreds of steps of a small model, a few of a deep one
MAX_RANKS = 2**20  # beyond any cluster
LOOPBACK = "127.0.0.1"
TASKS_PER_NODE = re.compile(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*")


@dataclass(frozen=True)
class Launch:
    """The position of this process among those of the run, and what its launcher provides."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this node
    address: str | None = None  # host:port of rank 0; None with a single process
    store_held: bool = False  # the launcher already serves the store at `address`
    attempt: str = "0"  # restart count of an elastic launcher, a prefix of keys in the store
    own_gpu: bool = False  # the launcher makes only its own GPU visible to each process
    restarts: int = 0  # how many times the launcher restarts all processes when one fails
    one_host: bool = True  # all ranks are on this host
    error_file: Path | None = None  # where torchrun expects the error of a failed rank
    job: tuple[str, ...] = ()  # names of the SLURM job and of torchrun's launch, where there are
    restarted: tuple[str, ...] = ()  # those of them that have started the same command before
    owned: bool = False  # the parent process is the launcher; this process ends when it ends

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Launch:
        """Read torchrun's variables, else srun's. Raises ConfigError for an invalid value."""
        if "RANK" in env or "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
            if "LOCAL_RANK" not in env and "LOCAL_WORLD_SIZE" not in env:
                env = {"LOCAL_RANK": env.get("RANK", ""), **env}
        elif "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env:
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        else:
            return cls()
        size = _integer(env, names[1], 1, MAX_RANKS)
        rank = _integer(env, names[0], 0, size - 1, f"below {names[1]}={size}")
        known = _processes_on_node(env, names[2])
        local_size = _integer(env, names[2], 0, MAX_RANKS) + 1 if known is None else known
        allowed = f"below {local_size}, the processes on this node"
        local = _integer(env, names[2], 0, local_size - 1, allowed)
        starters, host = dict(_starters(env)), _master(env, known == size)
        one_host = known == size or host in (LOOPBACK, "localhost", "::1")
        port = _integer(env, "MASTER_PORT", 1, 65535) if env.get("MASTER_PORT") else _job_port(env)
        return cls(
            rank,
            size,
            local,
            local_size,
            f"{host}:{port}",
            _flag(env, "TORCHELASTIC_USE_AGENT_STORE"),
            str(_integer(env, "TORCHELASTIC_RESTART_COUNT", default="0")),
            "SLURM_GPUS_PER_TASK" in env or "SLURM_TRES_PER_TASK" in env,
            _integer(env, "TORCHELASTIC_MAX_RESTARTS", default="0"),
            one_host,
            Path(env["TORCHELASTIC_ERROR_FILE"]) if env.get("TORCHELASTIC_ERROR_FILE") else None,
            tuple(starters.values()),
            tuple(name for count, name in starters.items() if _integer(env, count, default="0")),
            "TORCHELASTIC_RUN_ID" in env,
        )


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `gpu[03-07,12],login1` -> `gpu03`."""
    match = re.match(r"([^,\[\]\s]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?(?:,|$)", nodelist)
    if not match:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodelist!r} names no host")
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def start_processes(
    launch: Launch,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
    *,
    start_timeout: float = START_TIMEOUT,
    refusal: ConfigError | None = None,
    env: MutableMapping[str, str] = os.environ,
) -> tuple[str, ...]:
    """Choose the device and initialize torch.distributed (NCCL with a GPU, gloo without).

    Returns the host of each rank. Waits up to `start_timeout` seconds for all ranks. `refusal` is
    an earlier error of this process: it makes all ranks raise AgreedError, or a single process
    raise it. Raises LostPeerError if rank 0 does not answer.
    """
    gpu = None
    try:
        if refusal is None:
            gpu = choose_gpu(launch)
    except ConfigError as error:
        refusal = error
    if launch.world_size == 1 and refusal is not None:
        raise refusal
    backend = "gloo" if gpu is None else "nccl"
    if gpu is None:
        widen_bf16_gemms()
    else:
        torch.cuda.set_device(gpu)
    store: dist.Store = dist.HashStore()
    hosts: tuple[str, ...] = (platform.node(),)
    if launch.one_host:
        stay_on_loopback(env)
    if launch.world_size > 1:
        assert launch.address is not None
        store = open_store(
            launch.address,
            serve=launch.rank == 0 and not launch.store_held,
            one_host=launch.one_host,
            seconds=start_timeout,
            rank=launch.rank,
        )
        # A store that the launcher holds outlives an attempt. Rank 0's does not, and a node that is
        # replaced has been restarted less often than the others.
        attempt = launch.attempt if launch.store_held else "0"
        store = dist.PrefixStore(f"coatlm/{attempt}", store)
        hosts = meet(
            store,
            launch.rank,
            launch.world_size,
            address=launch.address,
            seconds=start_timeout,
            failure=None if refusal is None else Failure.of(refusal),
        )
    # with a device_id NCCL would connect every group eagerly, including groups that are never used
    with connecting(launch, start_timeout):
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
    return hosts


def connecting(launch: Launch, start_timeout: float) -> AbstractContextManager[None]:
    """End the process if ranks do not connect within `start_timeout` seconds.

    If a rank dies between the rendezvous and its connection, the others would wait for it; once
    connected, the loss of a connection raises an error immediately.
    """
    who = f"[rank {launch.rank}, {platform.node()}]"
    waited = f"parallel.start_timeout={start_timeout:g} s"
    return within(start_timeout, f"{who} not all ranks connected within {waited}: one has exited")


def stay_on_loopback(env: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo and NCCL listen only on the loopback interface, if all ranks are on this host.

    By default both choose the interface of the host name. Variables that are set stay unchanged.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            env.setdefault("GLOO_SOCKET_IFNAME", name)
            env.setdefault("NCCL_SOCKET_IFNAME", name)


def record_collectives(prefix: Path, env: MutableMapping[str, str] = os.environ) -> None:
    """Turn on torch's flight recorder; after a timeout NCCL writes it to PREFIX<rank>.

    Call it before `start_processes`. Variables that are set stay unchanged.
    """
    env.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_ENTRIES))
    env.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix.absolute()))
    env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def recorded_collectives() -> bytes:
    """The pickled flight record of NCCL with a GPU (torchfrtrace reads it), else of gloo."""
    c10d: Any = torch._C._distributed_c10d
    return c10d._dump_nccl_trace() if torch.cuda.is_available() else c10d._dump_fr_trace()


def environment_warnings(
    config: Config, world_size: int, env: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """What variables of CUDA and NCCL in `env` do to a run of `world_size` ranks on GPUs."""
    for warning in (one_queue(config, world_size, env), graphs_alone(config, world_size, env)):
        if warning is not None:
            yield warning


def graphs_alone(config: Config, world_size: int, env: Mapping[str, str]) -> str | None:
    """A warning if NCCL_GRAPH_MIXING_SUPPORT=0 with CUDA graphs on several ranks; None if not.

    NCCL then does not order a communicator's collectives inside of graphs and outside of them. A
    step has both: gradients are reduced in a graph, the loss outside.
    """
    if env.get("NCCL_GRAPH_MIXING_SUPPORT") != "0" or world_size == 1 or not config.cuda_graphs:
        return None
    return (
        f"NCCL_GRAPH_MIXING_SUPPORT=0 with CUDA graphs on {world_size} ranks: collectives inside "
        "and outside of the graphs can hang. Unset it, or set train.cuda_graphs=false"
    )


def one_queue(config: Config, world_size: int, env: Mapping[str, str]) -> str | None:
    """A warning if CUDA_DEVICE_MAX_CONNECTIONS=1 serializes what `config` overlaps; None if not.

    All streams of a GPU then share one hardware queue, in the order of launches. A kernel at its
    head that waits for another stream also holds back the kernels behind it. Megatron-LM needs that
    order on GPUs before Blackwell; here collectives have streams of a higher priority instead.
    `world_size`: the ranks of the run.
    """
    name, p = "CUDA_DEVICE_MAX_CONNECTIONS", config.parallel
    several = world_size // (p.tp * p.pp) > 1
    waiting = {
        f"the exchange of rows with parallel.tp={p.tp} and parallel.tp_chunks={p.tp_chunks}": (
            p.tp > 2 and p.sequence_parallel and p.tp_chunks > 1
        ),
        f"the reduction of gradients with parallel.grad_comm={p.grad_comm}": (
            several and p.overlap_grad_reduce and p.grad_comm.startswith("fp8")
        ),
        f"the all-gathers of weights with parallel.zero={p.zero}": (
            several and p.overlap_param_gather and p.zero in (1, 2)
        ),
    }
    found = [what for what, overlaps in waiting.items() if overlaps]
    if env.get(name) != "1" or not found:
        return None
    return (
        f"{name}=1 makes kernels wait for communication that they could overlap with: "
        f"{'; '.join(found)}. Unset it or set it to 8, CUDA's default, or more"
    )


def choose_gpu(launch: Launch) -> torch.device | None:
    """The GPU of this process; None without GPUs. Raises ConfigError if there are too few.

    Supports launchers that make one GPU visible to each process (srun --gpus-per-task=1).
    """
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    if launch.own_gpu and count == 1:
        return torch.device("cuda", 0)
    if launch.local_size > count:
        raise ConfigError(
            f"{launch.local_size} processes on this node but {count} GPUs: "
            f"start at most {count} per node"
        )
    return torch.device("cuda", launch.local_rank)


def quiet_megatron() -> None:
    """Suppress warnings of megatron-core that do not apply to coatlm."""
    expected = ("Unknown MLP type", "Rewrapping ModuleSpec", "GPTModel IS DEPRECATED")

    def unexpected(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(expected)

    for module in ("transformer.transformer_layer", "models.gpt.gpt_model"):
        logging.getLogger(f"megatron.core.{module}").addFilter(unexpected)


def _processes_on_node(env: Mapping[str, str], local_name: str) -> int | None:
    """The number of processes on this node; None if the launcher does not provide it.

    SLURM writes `4(x2),3` for all nodes of a step; the largest number is used for each.
    """
    if "LOCAL_WORLD_SIZE" in env:
        return _integer(env, "LOCAL_WORLD_SIZE", 1, MAX_RANKS)
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE")
    if tasks is None or not local_name.startswith("SLURM"):
        return None
    if not TASKS_PER_NODE.fullmatch(tasks):
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={tasks[:80]!r}: must read like 4(x2),3")
    return max(int(count) for count in re.findall(r"(?:^|,)(\d+)", tasks))


def _starters(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the restart counter and the name of each launcher: the id of the SLURM job; torchrun's
    run id or, if that is the default `none`, its directory of logs, which each launch makes anew.
    """
    if env.get("SLURM_JOB_ID"):
        yield "SLURM_RESTART_COUNT", env["SLURM_JOB_ID"]
    run_id, error_file = (env.get(f"TORCHELASTIC_{name}") for name in ("RUN_ID", "ERROR_FILE"))
    if run_id and run_id != "none":
        yield "TORCHELASTIC_RESTART_COUNT", run_id
    elif error_file:  # LOGS/attempt_N/RANK/error.json
        logs = Path(error_file).parent.parent.parent
        yield "TORCHELASTIC_RESTART_COUNT", f"{platform.node()}:{logs}"


def _master(env: Mapping[str, str], one_host: bool) -> str:
    """The name or address of rank 0's host."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    return LOOPBACK if one_host or "RANK" in env else first_host(env["SLURM_STEP_NODELIST"])


def _job_port(env: Mapping[str, str]) -> int:
    """One port per job, so that two jobs can share a node."""
    return DEFAULT_PORT + _integer(env, "SLURM_JOB_ID", default="0") % 1000


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "False")
    if value not in ("True", "False"):
        raise ConfigError(f"{name}={value[:80]!r}: the launcher must set it to True or False")
    return value == "True"


def _integer(
    env: Mapping[str, str],
    name: str,
    low: int = 0,
    high: int = 2**63,
    allowed: str | None = None,
    *,
    default: str | None = None,
) -> int:
    """The integer in a variable. Raises ConfigError with its name unless low <= it <= high."""
    value = env.get(name, default)
    number = int(value) if value is not None and re.fullmatch(r"[0-9]{1,18}", value) else None
    if number is None or not low <= number <= high:
        bound = allowed or (f"from {low} on" if high == 2**63 else f"from {low} to {high}")
        shown = "not set" if value is None else repr(value[:80])
        raise ConfigError(f"{name}={shown}: the launcher must set it to a whole number {bound}")
    return number
