"""Choose the GEMM algorithms of a run: those of the cache, others by timing them.

Ranks with GPUs of one kind use the same algorithms: rank 0 reads the cache for all of them, and
where ranks have timed the same kind of GEMM, the choice of the lowest rank counts. So a run that
resumes adds in the same order as before, as long as data.cache_dir and the versions stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from coatlm.config import Config
from coatlm.fp8.gemm_choices import Choices, add_choices, machine, read_choices
from coatlm.model.coat_layer import tune_layers

CACHE = "gemms.json"  # in data.cache_dir


def tune_gemms(
    config: Config, layers: Sequence[nn.Module], grad_dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    """Tune the FP8 layers of this rank's stage on its GPU; all ranks of a gloo group call it."""
    path, rank = config.data.cache_dir / CACHE, group.rank()
    tokens = config.train.micro_batch * config.data.seq_len // config.parallel.cp
    here = machine(torch.cuda.current_device())
    known: list[Any] = [read_choices(path) if rank == 0 else None]
    dist.broadcast_object_list(known, src=0, group=group)
    mine: Choices = dict(known[0].get(here, {}))
    tune_layers(layers, tokens, grad_dtype, mine)
    reports: list[Any] = [None] * group.size()
    dist.all_gather_object(reports, (here, mine), group=group)
    agreed: dict[str, Choices] = {}
    for name, choices in reports:
        agreed[name] = choices | agreed.get(name, {})
    tune_layers(layers, tokens, grad_dtype, agreed[here])
    if rank == 0 and any(agreed[name] != known[0].get(name) for name in agreed):
        add_choices(path, agreed)
