"""Whether a run fits the memory of its device, from its configuration alone.

    needed = weights + FP8 weights + gradients + optimizer states       on the largest stage,
             or what building the model takes, if that is more
    refused  <=>  needed > memory   or   peak > 2 * memory

`needed` is exact but for padding: every run allocates these tensors. The peak adds activations and
temporaries, which are an estimate: within some percent on GPUs, but not on a CPU. The factor of 2
makes sure that no run is refused that might fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from coatlm.config import Config, ConfigError, make_config
from coatlm.model.accounting import rank_parameters
from coatlm.model.memory import GIB, optim_state_bytes, stage_bytes

MARGIN = 2  # the factor by which an estimated peak must exceed the memory
SUGGESTIONS = 3
KINDS = ("weights, gradients and optimizer states need", "a step needs an estimated")
MORE_RANKS = "or more ranks with a larger parallel.tp or parallel.pp"

IN_INT8 = {"coat-lean": "coat-lean-int8"}  # recipes for a run whose forward is in INT8
CHANGES: tuple[tuple[str, str, object], ...] = (  # section, key, value; the cheapest first
    ("parallel", "zero", 1),
    ("train", "micro_batch", 1),
    ("parallel", "main_grads", "bf16"),
    ("train", "update", "backward"),
    ("optim", "recipe", "coat-lean"),
    ("optim", "recipe", "coat"),
    ("optim", "recipe", "coat-24"),
    ("optim", "offload", "states"),
    ("parallel", "zero", 3),
    ("train", "recompute", "full"),
    ("precision", "recipe", "coat-lean"),
    ("precision", "recipe", "bf16"),
    ("parallel", "main_grads", "fp8"),
)


def check_memory(
    config: Config, vocab: int, *, data_parallel: int, memory: int, device: str
) -> None:
    """Raise ConfigError, naming remedies, if a rank cannot fit the `memory` bytes of `device`."""
    limits, sizes = (memory, MARGIN * memory), requirements(config, vocab, data_parallel)
    beyond = [kind for kind in range(len(KINDS)) if sizes[kind] > limits[kind]]
    if not beyond:
        return
    kind, *_ = beyond
    changed = remedies(config, data_parallel)
    less = {key: requirements(c, vocab, data_parallel)[kind] for key, c in changed}
    enough = [key for key in less if less[key] <= limits[kind]]
    helpful = sorted((key for key in less if less[key] < sizes[kind]), key=less.__getitem__)
    named = [f"{key} ({less[key] / GIB:,.1f} GiB)" for key in (enough or helpful)[:SUGGESTIONS]]
    raise ConfigError(
        f"model.layers={config.model.layers}, model.hidden={config.model.hidden}: {KINDS[kind]} "
        f"{sizes[kind] / GIB:,.1f} GiB per rank, and {device} has {memory / GIB:,.1f} GiB; "
        f"try {', '.join([*named, MORE_RANKS])}"
    )


def check_host_memory(
    config: Config, vocab: int, *, data_parallel: int, ranks: int, memory: int
) -> None:
    """Raise ConfigError if the states that `ranks` GPUs of a host offload exceed its `memory`."""
    if config.optim.offload == "none":
        return
    size = ranks * largest_states(config, vocab, data_parallel)
    if size > memory:
        raise ConfigError(
            f"optim.offload=states: optimizer states of {ranks} ranks need {size / GIB:,.1f} GiB "
            f"of this host's memory, of which {memory / GIB:,.1f} GiB are free; use more hosts, "
            "or an optim.recipe with fewer bytes per parameter"
        )


def largest_states(config: Config, vocab: int, data_parallel: int) -> int:
    """Bytes of optimizer states, wherever they are, of the rank with the most parameters."""
    p = config.parallel
    count = max(
        rank_parameters(config.model, vocab, tp=p.tp, pp=p.pp, stage=stage)
        for stage in {0, p.pp - 1}
    )
    return optim_state_bytes(config, count, data_parallel)


def requirements(config: Config, vocab: int, data_parallel: int) -> tuple[int, int]:
    """`needed` and the peak in bytes, each on the pipeline stage where it is highest."""
    stages = stage_bytes(config, vocab, data_parallel)
    needed = (s.weights + s.fp8_weights + s.main_grads + s.optim_states for s in stages)
    return max(*needed, *(s.initial for s in stages)), max(s.total for s in stages)


def remedies(config: Config, data_parallel: int) -> Iterator[tuple[str, Config]]:
    """Yield each entry of CHANGES that is valid here: (`section.key=value`, changed config)."""
    p = config.parallel
    ranks = data_parallel * p.tp * p.pp * p.cp
    rotated = config.precision.flow and config.precision.flow_recipe().rotated
    for section, key, plain in CHANGES:
        value = IN_INT8.get(str(plain), plain) if rotated and section == "precision" else plain
        data = config.model_dump(mode="json")
        if data[section][key] == value:
            continue
        data[section][key] = value
        with suppress(ConfigError):
            changed = make_config(data)
            changed.data_parallel_size(ranks)
            yield f"{section}.{key}={value}", changed
