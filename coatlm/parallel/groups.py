"""The process groups of a run, as one frozen value that is passed down.

Ranks are laid out as megatron-core does (tensor parallel fastest, then context, data, pipeline).
megatron-core keeps its groups in globals that its own layers and schedules read; they are made here
once, and the rest of coatlm takes them from `Groups`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from coatlm.config import Parallel
from coatlm.platform import enable_cpu

enable_cpu()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Groups:
    """Who this rank talks to. A size is `group.size()`, a position `group.rank()`."""

    world: Group
    tp: Group  # shares every layer
    pp: Group  # holds the other layers
    cp: Group  # holds the other parts of the sequence
    dp: Group  # sees other samples
    dp_cp: Group  # the same parameters: gradients are summed and states sharded over it
    model: Group  # tp x pp: one whole model
    embedding: Group | None  # first and last stage, where this rank is one of them
    control: Group  # gloo over all ranks: signals and agreements on the host
    checkpoint: Group  # gloo over all ranks, used by the thread that writes checkpoints
    collection: ProcessGroupCollection  # what megatron-core's constructors take

    @property
    def first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1


def make_groups(parallel: Parallel, *, timeout: timedelta = timedelta(minutes=30)) -> Groups:
    """Split the initialised world into groups. The world size is a multiple of tp * pp * cp."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)),
        create_gloo_process_groups=False,
    )
    ranks = list(range(dist.get_world_size()))
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    world = dist.group.WORLD
    assert world is not None
    return Groups(
        world=world,
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        model=parallel_state.get_model_parallel_group(),
        embedding=embedding if isinstance(embedding, Group) else None,
        control=dist.new_group(ranks, backend="gloo", timeout=timeout),
        checkpoint=dist.new_group(ranks, backend="gloo", timeout=timeout),
        collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def release_groups() -> None:
    """Forget the layout; another `make_groups` may follow in the same world."""
    parallel_state.destroy_model_parallel()
