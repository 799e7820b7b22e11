"""Phases of a run's set-up. `start.set_up` calls them; each succeeds on all ranks or on none."""

from __future__ import annotations

import importlib.util
import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coatlm.config import Config, ConfigError, Eval
from coatlm.config.recipes import BF16_RECIPES
from coatlm.config.run import RESUMED
from coatlm.data.dataset import Datasets
from coatlm.data.tokenizer import Tokenizer
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.hf.run_config import hf_directory
from coatlm.model.capacity import check_host_memory, check_memory
from coatlm.model.decide import Gpu, Saved, decide
from coatlm.model.memory import GIB, replaced
from coatlm.optim.recipes import find_recipe
from coatlm.parallel.groups import Groups, make_groups
from coatlm.platform import device_memory
from coatlm.remote import Location
from coatlm.train import checkpoint
from coatlm.train.agreement import Peers, together
from coatlm.train.faults import FLIGHT
from coatlm.train.hf_weights import check_huggingface
from coatlm.train.manifest import CheckpointError, newest_first, read_checkpoint_manifest
from coatlm.train.remote_checkpoint import (
    check_upload,
    discard_downloads,
    is_uploaded,
    upload_checkpoint,
)
from coatlm.train.resume import Origin, archive_attempt, goes_back
from coatlm.train.run_directory import read_environment, write_config, write_environment
from coatlm.train.setup import (
    COLLECTIVE_TIMEOUT,
    Launch,
    choose_gpu,
    connecting,
    record_collectives,
    start_processes,
)
from coatlm.train.state import read_run_state
from coatlm.train.trackers import check_trackers

if TYPE_CHECKING:
    from coatlm.train.harness import Tasks

FP8_CAPABILITY = (8, 9)  # the first with FP8 types and tensor cores; measured: 9.0
INT8_MAJOR = 9  # of Hopper, whose tensor core instructions fp8/int8_gemm.py has

whole_run = logging.getLogger("coatlm.run")


def join(config: Config, launch: Launch) -> Peers:
    """Wait for all ranks and check that the configuration fits their number."""
    refusal = None
    try:
        if not config.undecided:
            config.data_parallel_size(launch.world_size)
    except ConfigError as error:
        refusal = error
    record_collectives(config.run.dir / FLIGHT)
    hosts = start_processes(launch, start_timeout=config.parallel.start_timeout, refusal=refusal)
    with connecting(launch, config.parallel.start_timeout):
        control = torch.distributed.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return Peers(launch.rank, hosts, control)


def gpu_of_all(peers: Peers, launch: Launch) -> tuple[Gpu | None, int]:
    """The GPU of all ranks, None on CPUs or where names differ, and the smallest memory in bytes of
    a rank's GPU, 0 on CPUs.
    """
    memory = device_memory(choose_gpu(launch), launch.local_size)[0]
    found = together(lambda: (device_name(), memory), peers.group)
    name, smallest = found[0][0], min(memory for _, memory in found)
    if any(other is None for other, _ in found):
        return None, 0
    if name is None or any(other != name for other, _ in found):
        return None, smallest
    return Gpu(name, smallest), smallest


def check_gpu(config: Config, launch: Launch) -> None:
    """Raise ConfigError if this rank's GPU cannot compute in the formats of the run."""
    if (gpu := choose_gpu(launch)) is not None:
        name, capability = torch.cuda.get_device_name(gpu), torch.cuda.get_device_capability(gpu)
        check_capability(config, launch.world_size, name, capability)
        check_heads(config)


def check_heads(config: Config) -> None:
    """Raise ConfigError for heads that the kernel of RoPE's gradients does not take."""
    p, width = config.precision, config.model.size_per_head
    fused = p.flow and p.flow_recipe().fused_gradients and not config.model.qk_norm
    if fused and width % 8:
        raise ConfigError(
            f"model.head_dim={width} with precision.recipe={p.recipe} on a GPU: must be a multiple "
            "of 8"
        )


def check_capability(config: Config, ranks: int, name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError if a run on `ranks` GPUs of this compute capability needs FP8 types and
    they have none, or GEMMs of INT8 and they are not of Hopper.
    """
    precision, parallel, optim = config.precision, config.parallel, config.optim
    in_int8 = {
        f"precision.recipe={precision.recipe}": precision.flow and precision.flow_recipe().rotated,
        f"precision.output_layer={precision.output_layer}": precision.output_layer == "int8",
    }
    found = [key for key, needed in in_int8.items() if needed]
    if found and capability[0] != INT8_MAJOR:
        raise ConfigError(
            f"{', '.join(found)}: GEMMs of INT8 need a GPU of compute capability {INT8_MAJOR}.0, "
            f"and {name} has {'.'.join(map(str, capability))}; the same without int8 needs "
            f"{'.'.join(map(str, FP8_CAPABILITY))}"
        )
    if capability >= FP8_CAPABILITY:
        return
    summed = ranks > parallel.tp * parallel.pp  # gradients, over data- and context-parallel ranks
    recipe = find_recipe(optim.recipe)
    states = [m.zeros(SCALE_BLOCK, torch.device("cpu")) for m in recipe.moments.values()]
    in_fp8 = {
        f"precision.recipe={precision.recipe}": precision.recipe not in BF16_RECIPES,
        f"precision.output_layer={precision.output_layer}": precision.output_layer != "bf16",
        f"optim.recipe={optim.recipe}": any(t.itemsize == 1 for s in states for t in s.values()),
        f"parallel.main_grads={parallel.main_grads}": parallel.main_grads == "fp8",
        f"parallel.grad_comm={parallel.grad_comm}": summed and "fp8" in parallel.grad_comm,
        f"parallel.weight_gather={parallel.weight_gather}": parallel.weight_gather == "fp8",
    }
    if found := [key for key, needed in in_fp8.items() if needed]:
        have, need = (".".join(map(str, version)) for version in (capability, FP8_CAPABILITY))
        raise ConfigError(
            f"{', '.join(found)}: FP8 needs a GPU of compute capability {need} or above, and "
            f"{name} has {have}; preset=bf16 needs none"
        )


def decide_layout(
    config: Config, vocab: int, launch: Launch, gpu: Gpu | None, peers: Peers
) -> tuple[Config, str]:
    """The configuration with parallel.layout and train.micro_batch decided, and why.

    Where nodes have different numbers of ranks, a node counts as so many that each consists of
    whole ones: all ranks then decide alike, and no tensor-parallel group spans two nodes.
    """
    if not config.undecided:
        return config, ""
    if gpu is None and torch.cuda.is_available():
        raise ConfigError(f"{config.undecided}: must be given where the ranks' GPUs differ")
    per_node = math.gcd(*together(lambda: launch.local_size, peers.group))
    return decide(
        config,
        vocab,
        ranks=launch.world_size,
        per_node=per_node,
        gpu=gpu,
        earlier=earlier_config(config, launch, peers),
    )


def documents_as_before(config: Config, launch: Launch, peers: Peers) -> Config:
    """The configuration with data.reset_attention_mask and data.reset_position_ids of the
    checkpoint from which this run resumes, where they are not given. Without the keys, as older
    versions wrote them, both are false.

    Raises ConfigError for positions that are to restart where the checkpoint has no documents.
    """
    data = config.data
    missing = set(RESUMED) - data.model_fields_set
    if not missing:
        return config
    earlier = earlier_config(config, launch, peers)
    if earlier is None:
        return config
    before = {key: earlier["data"].get(key, False) for key in missing}
    if not before.get("reset_attention_mask", data.reset_attention_mask):
        if data.reset_position_ids:
            raise ConfigError(
                "data.reset_position_ids=true needs data.reset_attention_mask=true to be given "
                "too: it is false in the checkpoint from which this run resumes"
            )
        before["reset_position_ids"] = False  # without documents there is nothing to restart at
    return replaced(config, data=before)


def earlier_config(config: Config, launch: Launch, peers: Peers) -> Saved | None:
    """The configuration in the run's own checkpoint from which it resumes, if any: the newest that
    can be read, or the one to which checkpoint.resume goes back. All ranks call it."""
    if config.checkpoint.resume == "none" and not begun_by(config, launch, peers):
        return None

    def newest() -> Saved | None:
        for path in newest_first(config.run.dir / checkpoint.CHECKPOINTS):
            with suppress(CheckpointError):
                state = read_run_state(path)
                if goes_back(config, path):
                    path = Path(config.checkpoint.resume)
                    state = read_run_state(path)
                return checkpoint.saved_config(path, state).model_dump(mode="json")
        return None

    return together(lambda: newest() if launch.rank == 0 else None, peers.group)[0]


def check_inputs(config: Config, tokenizer: Tokenizer, vocab: int) -> None:
    """Check the trackers and the section checkpoint, on rank 0. Raises ConfigError."""
    check_trackers(config.log)
    directory = config.run.dir / checkpoint.CHECKPOINTS
    if config.checkpoint.upload is not None:
        check_upload(config.checkpoint.upload, directory)
    source = hf_directory(config.checkpoint.resume)
    if source is None:
        checkpoint.check_resume(config.checkpoint.resume, directory)
    elif not newest_first(directory):
        check_huggingface(source, config, tokenizer, vocab)


def open_tasks(options: Eval, tokenizer: Tokenizer, seq_len: int) -> Tasks | None:
    """Load eval.tasks; None without any. Raises ValueError as `harness.Tasks` does.

    `seq_len` is the longest text in tokens that the model is given at once.
    """
    if not options.tasks:
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            f"eval.tasks={list(options.tasks)} needs the package lm_eval: "
            "pip install 'coatlm[eval]'"
        )
    from coatlm.train.harness import Tasks  # imports lm_eval, which takes seconds

    return Tasks(options, tokenizer, seq_len=seq_len)


def make_process_groups(config: Config, launch: Launch, peers: Peers) -> Groups:
    """Create the process groups of `config.parallel`."""
    first_on_node = launch.rank - launch.local_rank
    with connecting(launch, config.parallel.start_timeout):
        return make_groups(config.parallel, first_on_node=first_on_node, control=peers.group)


def check_splits(config: Config, data: Datasets) -> None:
    """Raise ConfigError if train.eval_every is above 0 without a validation split.

    Warns if an evaluation reads more samples than the split has, and so some of them again.
    """
    train = config.train
    if not train.eval_every:
        return
    if data.validation is None:
        raise ConfigError("train.eval_every > 0 needs a validation split: the second of data.split")
    streams = data.validation.streams
    counts = data.validation.blend.counts(train.eval_batches * train.global_batch)
    for number, (read, stream) in enumerate(zip(counts, streams, strict=True), 1):
        if read > stream.windows:
            whole_run.warning(
                "train.eval_batches=%d: an evaluation reads %s samples%s, but the validation split "
                "has %s: some are read more than once",
                train.eval_batches,
                f"{read:,}",
                f" of source {number}" if len(streams) > 1 else "",
                f"{stream.windows:,}",
            )


def check_size(config: Config, launch: Launch, vocab: int) -> None:
    """Raise ConfigError for a model that does not fit the memory of this process's device, or for
    states that do not fit that of its host."""
    gpu, ranks = choose_gpu(launch), launch.local_size
    memory, owner = device_memory(gpu, ranks)
    dp = config.data_parallel_size(launch.world_size)
    check_memory(config, vocab, data_parallel=dp, memory=memory, device=owner)
    if gpu is not None:
        free, _ = device_memory(None, 1)
        check_host_memory(config, vocab, data_parallel=dp, ranks=ranks, memory=free)


def named_memory(launch: Launch) -> str | None:
    """The memory and the name of this process's GPU; None on a CPU, for which no plan is made."""
    gpu = choose_gpu(launch)
    if gpu is None:
        return None
    memory, owner = device_memory(gpu, launch.local_size)
    return f"the {memory / GIB:.1f} GiB of {owner}"


def begun_by(config: Config, launch: Launch, peers: Peers) -> bool:
    """Whether an earlier start of the same job or launch has written env.json, in
    `write_description`. All ranks call it, since a new node may have rank 0 now.
    """

    def written() -> str:
        found = read_environment(config.run.dir).get("job") if launch.rank == 0 else None
        return f" {found or ''} "

    found = together(lambda: (written(), launch.restarted), peers.group)
    return any(f" {name} " in found[0][0] for _, names in found for name in names)


def write_description(config: Config, launch: Launch, origin: Origin) -> None:
    """Move away files of an earlier attempt, then write config.yaml and env.json.

    Every rank has resumed, so a checkpoint that was downloaded for that is removed.
    """
    discard_downloads(config.run.dir)
    archive_attempt(config, origin)
    write_config(config.run.dir, config)
    job = " ".join(launch.job) or None
    write_environment(config.run.dir, device_name=device_name(), job=job)


def upload_again(url: str, path: Path, peers: Peers) -> None:
    """Upload the last checkpoint of a run that is done, unless `url` has it already.

    The ranks, all of which call it, divide the files. A failure is logged, as during a run.
    """
    target = Location.of(url) / path.name

    def missing() -> list[str]:
        if peers.rank or is_uploaded(path, target):
            return []
        return sorted(read_checkpoint_manifest(path).files)

    try:
        if files := together(missing, peers.group)[0]:
            whole_run.info("%s is missing: uploading %s", target.url, path)
            upload_checkpoint(path, files[peers.rank :: len(peers.hosts)], target, peers.group)
            whole_run.info("uploaded %s", target.url)
    except CheckpointError as error:  # on all ranks
        whole_run.warning("%s was not uploaded: %s", target.url, error)


def device_name() -> str | None:
    """The GPU's name; None on a CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
