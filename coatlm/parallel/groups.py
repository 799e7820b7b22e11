"""The process groups of a run, as one frozen value that is passed down.

Ranks are numbered as in megatron-core: tensor parallel fastest, then context, data, pipeline.
megatron-core stores its groups in globals, which its own layers and schedules read. `make_groups`
creates them once; the rest of coatlm takes them from `Groups`.
"""

from __future__ import annotations

import gc
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
    """The process groups that this rank belongs to, named by what their ranks have in common."""

    world: Group  # all ranks
    tp: Group  # tensor parallel: ranks that split every layer
    pp: Group  # pipeline parallel: ranks with the stages of one model
    cp: Group  # context parallel: ranks with the parts of the same samples
    dp: Group  # data parallel: ranks with different samples
    dp_cp: Group  # ranks with the same parameters: gradients are summed, states sharded over it
    model: Group  # tp x pp: one whole model
    stage: Group  # tp x dp_cp: ranks with the same layers
    embedding: Group | None  # first and last stage, if this rank is in one of them
    control: Group  # gloo over all ranks, for signals and decisions of the host
    checkpoint: Group  # gloo over all ranks, used by the thread that writes checkpoints
    node: Group | None  # subgroup of dp_cp on this node, for two-level reduction of gradients
    nodes: Group | None  # subgroup of dp_cp with one rank per node, at the same position
    collection: ProcessGroupCollection  # the argument of megatron-core's constructors

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
    """Split the initialized world into groups. The world size is a multiple of tp * pp * cp.

    `first_on_node` is the lowest rank on this rank's node. `control` is a gloo group over all
    ranks, created here unless it is given.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)),
        create_gloo_process_groups=False,
        high_priority_stream_groups=["tp", "cp", "dp_cp"] if device().type == "cuda" else None,
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
    """Split the ranks of a process group by node: into `nodes` equal nodes, or (None) as launched.

    Returns a single list where two levels are of no use (one node, or one rank per node) or not
    supported (different numbers of ranks per node, or ranks of a node that are not consecutive).
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
    """The groups inside and across nodes for the two levels of fp8-a2a, or (None, None).

    Every rank has to create every group, as torch.distributed requires.
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
            group = dist.new_group(ranks, timeout=timeout, pg_options=high_priority())
            if dist.get_rank() in ranks:
                inside, across = (group, across) if ranks in split else (inside, group)
    return inside, across


def high_priority() -> Any:
    """Options of a process group on a high-priority stream; None on a CPU.

    The kernels that pack a piece fill the device. With normal priority, the collective of a piece
    would start after the packing of the next one.
    """
    if device().type != "cuda":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def release_groups() -> None:
    """Release the groups; another `make_groups` may follow in the same world.

    Gloo groups are destroyed. Their threads, one of which polls a hundred times per second, end
    when nothing refers to the group any more. Models refer to groups through reference cycles, so
    the garbage collector runs here; models must be dropped before the call. NCCL groups are not
    destroyed: CUDA graphs may have captured their communicators.
    """
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)
    gc.collect()
