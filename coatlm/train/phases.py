"""The phases of a run's set-up, called by `loop.set_up`; each succeeds on all ranks or none."""

from __future__ import annotations

import torch

from coatlm.config import Config, ConfigError
from coatlm.data.dataset import Datasets
from coatlm.model.capacity import check_memory
from coatlm.parallel.groups import Groups, make_groups
from coatlm.platform import device_memory
from coatlm.train import checkpoint
from coatlm.train.agreement import Peers
from coatlm.train.faults import FLIGHT
from coatlm.train.resume import Origin, archive_attempt
from coatlm.train.run_directory import read_environment, write_config, write_environment
from coatlm.train.setup import (
    COLLECTIVE_TIMEOUT,
    Launch,
    choose_gpu,
    connecting,
    record_collectives,
    start_processes,
)
from coatlm.train.trackers import check_trackers


def join(config: Config, launch: Launch) -> Peers:
    """Wait for all ranks and check that the configuration fits their number."""
    refusal = None
    try:
        config.data_parallel_size(launch.world_size)
    except ConfigError as error:
        refusal = error
    record_collectives(config.run.dir / FLIGHT)
    hosts = start_processes(launch, start_timeout=config.parallel.start_timeout, refusal=refusal)
    with connecting(launch, config.parallel.start_timeout):
        control = torch.distributed.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return Peers(launch.rank, hosts, control)


def check_inputs(config: Config) -> None:
    """Check the trackers and checkpoint.resume, which rank 0 can do alone. Raises ConfigError."""
    check_trackers(config.log)
    checkpoint.check_resume(config.checkpoint.resume, config.run.dir / checkpoint.CHECKPOINTS)


def make_process_groups(config: Config, launch: Launch, peers: Peers) -> Groups:
    """The process groups of `config.parallel`."""
    first_on_node = launch.rank - launch.local_rank
    with connecting(launch, config.parallel.start_timeout):
        return make_groups(config.parallel, first_on_node=first_on_node, control=peers.group)


def check_parts(config: Config, data: Datasets) -> None:
    """Raise ConfigError if train.eval_every is above 0 and there is no validation part."""
    if config.train.eval_every and data.validation is None:
        raise ConfigError("train.eval_every > 0 needs a validation part: the second of data.split")


def check_size(config: Config, launch: Launch, vocab: int) -> None:
    """Raise ConfigError for a model that this process's device cannot hold."""
    memory, owner = device_memory(choose_gpu(launch), launch.local_size)
    dp = config.data_parallel_size(launch.world_size)
    check_memory(config, vocab, data_parallel=dp, memory=memory, device=owner)


def begun_by(config: Config, launch: Launch) -> bool:
    """Whether an earlier start of the same job got as far as `write_description`: see env.json."""
    return launch.restarted and read_environment(config.run.dir).get("job") == launch.job


def write_description(config: Config, launch: Launch, origin: Origin) -> None:
    """Set aside what the run does not continue, then write config.yaml and env.json."""
    archive_attempt(config, origin)
    write_config(config.run.dir, config)
    write_environment(config.run.dir, device_name=device_name(), job=launch.job)


def device_name() -> str | None:
    """The GPU's name; None on a CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
