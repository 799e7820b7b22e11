"""Values of other keys that an option excludes, each as `section.key=value: must be ...`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coatlm.config.recipes import RECIPES

if TYPE_CHECKING:
    from coatlm.config.combined import Config

MICROBATCHES_PER_GRAPH = 32  # the most of a step in one graph: some 1e5 kernels with 48 layers


def obstacles(config: Config) -> Iterator[str]:
    """What given options exclude, as `section.key=value with section.key=value: must be ...`."""
    p, t, window = config.parallel, config.train, config.log.profile
    for given, what, found in (
        (p.cp_comm == "p2p", "parallel.cp_comm=p2p", p2p_obstacles),
        (p.cp_comm_kv == "fp8", "parallel.cp_comm_kv=fp8", kv_obstacles),
        (t.cuda_graphs is True, "train.cuda_graphs=true", graph_obstacles),
        (t.update == "backward", "train.update=backward", update_obstacles),
        (window is not None, f"log.profile={list(window or ())}", profile_obstacles),
    ):
        for obstacle in found(config) if given else ():
            yield f"{what} with {obstacle}"


def graph_obstacles(config: Config) -> Iterator[str]:
    """What a CUDA graph of a microbatch cannot capture."""
    for name, value, allowed in (
        ("parallel.pp", config.parallel.pp, 1),
        ("model.spec", config.model.spec, "local"),
        ("train.recompute", config.train.recompute, "none"),
        ("train.update", config.train.update, "step"),
        ("precision.keep_weights", config.precision.keep_weights, False),
    ):
        if value != allowed:
            yield f"{name}={value}: must be {allowed}"
    if config.parallel.zero >= 2:  # buffers are freed and allocated in every step
        yield f"parallel.zero={config.parallel.zero}: must be 0 or 1"


def step_obstacles(config: Config, data_parallel: int) -> Iterator[str]:
    """What a CUDA graph of a whole step cannot hold, beside `graph_obstacles`."""
    t, offload, recipe = config.train, config.optim.offload, config.precision.recipe
    microbatches = t.microbatches(data_parallel)
    if microbatches > MICROBATCHES_PER_GRAPH:
        most = MICROBATCHES_PER_GRAPH
        yield f"{microbatches} microbatches per rank and step: must be {most} or fewer"
    if offload != "none":
        yield f"optim.offload={offload}: must be none"
    if recipe == "fp32":  # too many kernels: attention by blocks (kernels/block_attention.py)
        yield "precision.recipe=fp32: must be another"


def p2p_obstacles(config: Config) -> Iterator[str]:
    """What needs a mask between the chunks of two context-parallel ranks, or another softmax."""
    m = config.model
    if config.data.reset_attention_mask:
        yield "data.reset_attention_mask=true: must be false"
    if m.window is not None:
        yield "model.window: must be null"
    if m.attention_softcap is not None:
        yield f"model.attention_softcap={m.attention_softcap}: must be null"


def auto_p2p_obstacles(config: Config) -> Iterator[str]:
    """Why parallel.cp_comm=auto is not p2p: beside what p2p excludes, what its pieces of attention
    have no fused kernels for, so that they would hold a matrix of logits.
    """
    yield from p2p_obstacles(config)
    m, recipe = config.model, config.precision.recipe
    if not m.fused_heads:
        yield f"model.head_dim={m.size_per_head}: must be a multiple of 8, at most 256"
    if recipe == "fp32":
        yield f"precision.recipe={recipe}: must not be fp32"


def kv_obstacles(config: Config) -> Iterator[str]:
    """What leaves no layer that saves keys and values in FP8."""
    recipe, names = config.precision.recipe, config.precision.bf16_operands
    saving = [name for name, row in RECIPES.items() if row.saved.k and row.saved.v]
    if recipe not in saving:
        yield f"precision.recipe={recipe}: must be {' or '.join(saving)}"
    if {"saved.k", "saved.v"}.intersection(names):
        yield f"precision.bf16_operands={list(names)}: must not name saved.k or saved.v"


def update_obstacles(config: Config) -> Iterator[str]:
    """What cannot be combined with updates in backward: options that need all gradients before the
    update, or that use weights after their gradients are complete.
    """
    p, t = config.parallel, config.train
    for name, value, allowed in (
        ("parallel.pp", p.pp, 1),
        ("model.spec", config.model.spec, "local"),
        ("train.spike_sigma", t.spike_sigma, 0.0),  # it may refuse the whole update
        ("log.states_every", config.log.states_every, 0),  # measured before the whole update
    ):
        if value != allowed:
            yield f"{name}={value}: must be {allowed}"
    if not p.overlap_grad_reduce:
        yield "parallel.overlap_grad_reduce=false: must be true"
    if p.main_grads == "fp8":  # an arena has no scales
        yield f"parallel.main_grads={p.main_grads}: must be fp32 or bf16"


def profile_obstacles(config: Config) -> Iterator[str]:
    """What ends the run before the last step to trace."""
    window, steps = config.log.profile, config.train.steps
    if window and window[1] > steps:
        yield f"train.steps={steps}: must be at least {window[1]}"
