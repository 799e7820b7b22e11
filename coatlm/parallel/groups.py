"""The process groups of a run, as one frozen value that is passed down.

Ranks are laid out as megatron-core does (tensor parallel fastest, then context, data, pipeline).
megatron-core keeps its groups in globals that its own layers and schedules read; they are made here
once, and the rest of coatlm takes them from `Groups`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from coatlm.config import Parallel
from coatlm.megatron import ProcessGroupCollection, parallel_state
from coatlm.platform import device

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
    stage: Group  # tp x dp_cp: the same layers
    embedding: Group | None  # first and last stage, where this rank is one of them
    control: Group  # gloo over all ranks: signals and agreements on the host
    checkpoint: Group  # gloo over all ranks, used by the thread that writes checkpoints
    node: Group | None  # of dp_cp: the ranks on this node, where gradients take two levels
    nodes: Group | None  # of dp_cp: the ranks with this one's place on every node
    collection: ProcessGroupCollection  # what megatron-core's constructors take

    @property
    def first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1


def make_groups(
    parallel: Parallel,
    *,
    timeout: timedelta = timedelta(minutes=30),
    first_on_node: int = 0,
    control: Group | None = None,
) -> Groups:
    """Split the initialised world into groups. The world size is a multiple of tp * pp * cp.

    `first_on_node` is the lowest rank on this rank's node. `control` is a gloo group over all
    ranks, made here unless it is given.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)),
        create_gloo_process_groups=False,
        high_priority_stream_groups=["dp_cp"] if device().type == "cuda" else None,
    )
    ranks = list(range(dist.get_world_size()))
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    world = dist.group.WORLD
    assert world is not None
    dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    control = control or dist.new_group(ranks, backend="gloo", timeout=timeout)
    node, nodes = _levels(parallel, dp_cp, first_on_node, control, timeout)
    return Groups(
        world=world,
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=dp_cp,
        model=parallel_state.get_model_parallel_group(),
        stage=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        embedding=embedding if isinstance(embedding, Group) else None,
        control=control,
        checkpoint=dist.new_group(ranks, backend="gloo", timeout=timeout),
        node=node,
        nodes=nodes,
        collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def split_into_nodes(
    members: Sequence[int], first_on_node: Mapping[int, int], nodes: int | None
) -> list[list[int]]:
    """The ranks of a group node by node: as told, or (None) as launched.

    One list where levels would gain nothing: one node, or one rank on each. So it is too where
    nodes hold different numbers of them, or hold them apart.
    """
    if nodes is None:
        nodes = len({first_on_node[rank] for rank in members})
        found = [first_on_node[rank] for rank in members]
        size = -(-len(members) // nodes)
        if found != [found[i // size * size] for i in range(len(found))]:
            return [list(members)]
    if nodes in (1, len(members)) or len(members) % nodes:
        return [list(members)]
    size = len(members) // nodes
    return [list(members[i : i + size]) for i in range(0, len(members), size)]


def _levels(
    parallel: Parallel, dp_cp: Group, first_on_node: int, control: Group, timeout: timedelta
) -> tuple[Group | None, Group | None]:
    """Groups inside and across nodes for the two levels of fp8-a2a, or None twice.

    Every rank takes part in making every group, as torch.distributed demands.
    """
    if parallel.grad_comm != "fp8-a2a" or parallel.partition != "flat":
        return None, None
    reports: list[tuple[list[int], int]] = [([], 0)] * control.size()
    mine = (dist.get_process_group_ranks(dp_cp), first_on_node)
    dist.all_gather_object(reports, mine, group=control)
    first = {rank: report[1] for rank, report in enumerate(reports)}
    inside, across = None, None
    for members in sorted({tuple(report[0]) for report in reports}):
        split = split_into_nodes(members, first, parallel.grad_comm_nodes)
        if len(split) == 1:
            continue
        for ranks in (*split, *map(list, zip(*split, strict=True))):
            made = dist.new_group(ranks, timeout=timeout, pg_options=prompt())
            if dist.get_rank() in ranks:
                inside, across = (made, across) if ranks in split else (inside, made)
    return inside, across


def prompt() -> Any:
    """Options of a group whose kernels start before those that wait for a place on the device.

    What is packed for a collective is packed by kernels that fill the device; without this, those
    of the next piece go ahead of the collective of the one before.
    """
    if device().type != "cuda":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def release_groups() -> None:
    """Forget the layout; another `make_groups` may follow in the same world.

    Groups of gloo end with those who use them, and their threads. Those of NCCL stay: CUDA graphs
    may hold their communicators.
    """
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)
