"""Choose the GEMM algorithms and attention backends of a run, from a file or else by timing.

Ranks with GPUs of one kind make the same choices: rank 0 reads the cache for all of them, and where
ranks have timed the same kind of GEMM or shape of attention, the choice of the lowest rank counts.
So a run that resumes adds in the same order as before, as long as data.cache_dir and the versions
stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from coatlm.config import Config
from coatlm.fp8 import cublaslt
from coatlm.fp8.timed_choices import Choices, add_choices, machine, read_choices
from coatlm.model.attention_backends import Shape, choose_backends, cudnn_version
from coatlm.model.coat_layer import tune_layers
from coatlm.platform import device

logger = logging.getLogger("coatlm")
GEMMS, ATTENTION = "gemms.json", "attention.json"  # in data.cache_dir


def tune_gemms(
    config: Config, layers: Sequence[nn.Module], grad_dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    """Tune the FP8 layers of this rank's stage on its GPU; all ranks of a gloo group call it."""
    tokens = config.train.micro_batch * config.data.seq_len // config.parallel.cp
    _agree(
        config.data.cache_dir / GEMMS,
        machine(torch.cuda.current_device(), f"cuBLASLt {cublaslt.version()}"),
        lambda choices: tune_layers(layers, tokens, grad_dtype, choices),
        group,
        what="GEMM algorithms",
    )


def tunes_attention(config: Config) -> bool:
    """Whether backends of attention are chosen by time.

    fp32 has one backend, and attention within documents chooses its own.
    """
    p = config.precision
    return p.tune_attention and p.recipe != "fp32" and not config.data.reset_attention_mask


def tune_attention(config: Config, layers: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Choose the backends of causal attention in the layers of this rank's stage, on its GPU.

    All ranks of a gloo group call it. Layers with a sliding window or a soft cap have no choice.
    """
    samples, tokens = config.train.micro_batch, config.data.seq_len // config.parallel.cp
    cores = [layer.self_attention.core_attention for layer in layers]
    shapes: dict[Shape, None] = {}
    for layer in layers:
        shapes |= dict.fromkeys(layer.self_attention.core_shapes(samples, tokens))

    def choose(choices: Choices) -> None:
        backends = choose_backends(shapes, choices, device())
        for core in cores:
            core.backends = backends

    _agree(
        config.data.cache_dir / ATTENTION,
        machine(torch.cuda.current_device(), f"cuDNN {cudnn_version()}"),
        choose,
        group,
        what="attention backends",
    )
    for shape, backend in cores[0].backends.items() if cores else ():
        logger.info("attention over %s: %s", shape, backend)


def _agree(
    path: Path,
    here: str,
    choose: Callable[[Choices], None],
    group: dist.ProcessGroup,
    *,
    what: str,
) -> None:
    """Let all ranks with the machine `here` use the same choices, and write down new ones.

    `choose` uses the choices that it is given, and adds those that it has to time. It is called
    twice, first with the choices of the file, then with those that all ranks have agreed on; what
    another run has written to the file meanwhile comes first. `what` is what is timed, in the
    plural.
    """
    rank = group.rank()
    known: list[Any] = [read_choices(path, what) if rank == 0 else None]
    dist.broadcast_object_list(known, src=0, group=group)
    mine: Choices = dict(known[0].get(here, {}))
    choose(mine)
    reports: list[Any] = [None] * group.size()
    dist.all_gather_object(reports, (here, mine), group=group)
    agreed: dict[str, Choices] = {}
    for name, choices in reports:
        agreed[name] = choices | agreed.get(name, {})
    if any(agreed[name] != known[0].get(name) for name in agreed):  # alike on all ranks
        final: list[Any] = [None]
        if rank == 0:
            final = [add_choices(path, agreed, what, read=known[0])]
        dist.broadcast_object_list(final, src=0, group=group)
        agreed = final[0]
    choose(agreed[here])
