"""Backends of causal attention, and the choice between them by time.

    cudnn       cuDNN's kernels
    flash       FlashAttention-2 with repeatable gradients (coatlm/kernels/flash_attention.py)
    efficient   torch's memory-efficient kernels

The first of them that accepts a shape is its default. Another one is chosen if

    its forward and backward take less than 1 - MARGIN of the default's time
    and give the same bits each time, whatever the default does
    and its peak memory exceeds the default's by at most SPARE of the GPU's memory

so a choice does not make a run less repeatable, and the clock's noise does not change it. Without a
choice, as on a CPU and for shapes that were not timed, torch takes the first of ORDER that accepts
the inputs; the last of them, which materializes probabilities, is no candidate.

Shapes: S tokens, B samples, N query heads, G key/value heads, D elements per head.
"""

from __future__ import annotations

import gc
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from coatlm.fp8.timed_choices import REPEATS, milliseconds
from coatlm.kernels.cpu_attention import cpu_attention
from coatlm.kernels.cpu_gemms import slow_in_bf16
from coatlm.kernels.flash_attention import flash_attention
from coatlm.platform import device_memory

logger = logging.getLogger("coatlm")

ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MARGIN = 0.03
SPARE = 1 / 256  # the planner's error is several times as large
ROUNDS = 3  # in each of which all backends are timed, one after the other
BUDGET = 200.0  # milliseconds for a backend in a round; longer ones run once
RUNS = 4  # whose bits are compared


class Shape(NamedTuple):
    """The sizes of a call of attention on a rank: BF16 q [S, B, N, D], k and v [S, B, G, D]."""

    samples: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None  # 1 / sqrt(D) if None

    @property
    def name(self) -> str:
        """All fields as text: the key of the shape in the file of choices."""
        return " ".join(f"{key}={value}" for key, value in self._asdict().items())

    def __str__(self) -> str:
        heads = f"{self.heads} heads of {self.head_dim}"
        fewer = f", {self.kv_heads} for keys" if self.kv_heads != self.heads else ""
        return f"{self.samples} x {self.tokens} tokens, {heads}{fewer}"


class Measured(NamedTuple):
    """What was measured of forward and backward with a backend."""

    ms: float
    repeats: bool  # whether output and gradients had the same bits each time
    peak: int  # bytes that were allocated at most, without the inputs


# (q [S, B, N, D], k, v [S, B, G, D], scale) -> o [S, B, N, D]
Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def torch_attention(
    q_SBND: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    scale: float | None,
    *,
    order: Sequence[SDPBackend] = ORDER,
    mask: Any = None,
) -> Tensor:
    """torch's attention [S, B, N, D] by the first backend of `order` that accepts the inputs.

    A CPU has its own order. Causal for as many queries as keys, for others as `mask` says.
    """
    q_BNSD, k_BGTD, v_BGTD = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_TBGD, v_TBGD))
    with sdpa_kernel(list(order), set_priority=True) if q_SBND.is_cuda else nullcontext():
        o_BNSD = F.scaled_dot_product_attention(
            q_BNSD,
            k_BGTD,
            v_BGTD,
            attn_mask=mask,
            is_causal=q_SBND.shape[0] == k_TBGD.shape[0],
            scale=scale,
            enable_gqa=q_BNSD.shape[1] != k_BGTD.shape[1],
        )
    return o_BNSD.permute(2, 0, 1, 3)


def _flash(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, scale: float | None) -> Tensor:
    qkv = (x.transpose(0, 1) for x in (q_SBND, k_SBGD, v_SBGD))
    return flash_attention(*qkv, scale=scale).transpose(0, 1)


def _cpu(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, scale: float | None) -> Tensor:
    q_BSND, k_BSGD, v_BSGD = (x.transpose(0, 1) for x in (q_SBND, k_SBGD, v_SBGD))
    return cpu_attention(q_BSND, k_BSGD, v_BSGD, None, scale=scale).transpose(0, 1)


BACKENDS: dict[str, Attend] = {
    "cudnn": partial(torch_attention, order=[SDPBackend.CUDNN_ATTENTION]),
    "flash": _flash,
    "efficient": partial(torch_attention, order=[SDPBackend.EFFICIENT_ATTENTION]),
}


def chosen_backend(
    q_SBND: Tensor, k_SBGD: Tensor, scale: float | None, backends: Mapping[Shape, str]
) -> str | None:
    """The backend that was chosen for causal attention of q to k, if one was."""
    (tokens, samples, heads, head_dim), kv_heads = q_SBND.shape, k_SBGD.shape[2]
    return backends.get(Shape(samples, tokens, heads, kv_heads, head_dim, scale))


def causal_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    scale: float | None,
    backends: Mapping[Shape, str],
) -> Tensor:
    """Causal attention [S, B, N, D] by the backend that was chosen for the shape, if one was.

    A CPU without instructions for BF16 computes gradients in fp32; the output has torch's bits.
    """
    name = chosen_backend(q_SBND, k_SBGD, scale, backends)
    default = _cpu if slow_in_bf16(q_SBND) else torch_attention
    attend = default if name is None else BACKENDS[name]
    return attend(q_SBND, k_SBGD, v_SBGD, scale)


def measure_backends(
    shape: Shape,
    device: torch.device,
    *,
    backends: Mapping[str, Attend] = BACKENDS,
    clock: Callable[..., float] = milliseconds,
) -> dict[str, Measured]:
    """Forward and backward of the backends that accept the shape, on random inputs.

    Takes some tenths of a second, or more for long samples, and memory for the inputs and for what
    a backend needs. `clock` is called as `milliseconds` is.
    """
    inputs = random_inputs(shape, device)
    steps: dict[str, partial[list[Tensor]]] = {}
    found: dict[str, tuple[bool, int]] = {}
    for name, attend in backends.items():
        step = partial(forward_and_backward, attend, inputs, shape.scale)
        try:
            with warnings.catch_warnings():  # torch's reasons for not accepting
                warnings.simplefilter("ignore")
                found[name] = _repeats(step), _peak(step, device)
        except RuntimeError:  # not accepted, or more memory needed than there is
            continue
        steps[name] = step
    times = {name: math.inf for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            once = clock(step, repeats=1)
            repeats = min(REPEATS, int(BUDGET / max(once, 1e-3)))
            times[name] = min(times[name], clock(step, repeats=repeats) if repeats > 1 else once)
    return {name: Measured(times[name], *found[name]) for name in steps}


def random_inputs(shape: Shape, device: torch.device) -> list[Tensor]:
    """q, k, v, which require gradients, and the gradient of the output, as a layer lays them out.

    The default generator, which other parts of a run may draw from, is left as it is.
    """
    generator = torch.Generator(device).manual_seed(0)
    *qkv, do_SBND = (
        torch.randn(
            (shape.tokens, shape.samples, heads, shape.head_dim),
            dtype=torch.bfloat16,
            device=device,
            generator=generator,
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    )
    return [*(x.requires_grad_() for x in qkv), do_SBND]


def forward_and_backward(
    attend: Attend, inputs: Sequence[Tensor], scale: float | None
) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    *qkv, do_SBND = inputs
    q, k, v = qkv
    with torch.enable_grad():
        out = attend(q, k, v, scale)
    return [out.detach(), *torch.autograd.grad(out, qkv, do_SBND)]


def _repeats(step: Callable[[], Collection[Tensor]]) -> bool:
    first = step()
    others = (step() for _ in range(RUNS - 1))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def _peak(step: Callable[[], object], device: torch.device) -> int:
    """The bytes that a step holds at its peak; 0 on a CPU, which does not count them.

    Tensors of an earlier step may be freed while this one runs, by the garbage collector or by a
    thread of autograd. So the collector runs first, and the baseline is the smaller of the
    allocations before and after. A tensor that is freed after the peak is still counted.
    """
    if device.type != "cuda":
        return 0
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    peak = torch.cuda.max_memory_allocated(device)
    return peak - min(before, torch.cuda.memory_allocated(device))


def choose(measured: Mapping[str, Measured], spare: int) -> str:
    """The backend that the module's docstring defines; `spare` is in bytes.

    `measured` has those that accept the shape, at least one, in the order of BACKENDS.
    """
    default = next(iter(measured))
    limit = measured[default]
    admitted = [
        name
        for name, found in measured.items()
        if found.ms <= (1 - MARGIN) * limit.ms
        and found.repeats
        and found.peak <= limit.peak + spare
    ]
    return min(admitted, key=lambda name: measured[name].ms, default=default)


def choose_backends(
    shapes: Iterable[Shape],
    choices: dict[str, str],
    device: torch.device,
    *,
    measure: Callable[[Shape, torch.device], dict[str, Measured]] = measure_backends,
) -> dict[Shape, str]:
    """The backend for each shape: the one that `choices` names, else by timing, which adds it.

    A shape that no backend accepts is left to torch's order.
    """
    chosen = {}
    for shape in shapes:
        if choices.get(shape.name) not in BACKENDS:
            measured = measure(shape, device)
            if not measured:
                continue
            memory = device_memory(device, 1)[0] if device.type == "cuda" else 0
            choices[shape.name] = choose(measured, int(SPARE * memory))
            logger.info("timed attention over %s: %s", shape, in_words(measured))
        chosen[shape] = choices[shape.name]
    return chosen


def in_words(measured: Mapping[str, Measured]) -> str:
    """The times of backends in milliseconds, and which of them are not repeatable."""
    return ", ".join(
        f"{name} {found.ms:.3g} ms" + ("" if found.repeats else " (not repeatable)")
        for name, found in measured.items()
    )


def cudnn_version() -> int:
    """The version of cuDNN that torch runs, such as 91900; 0 without one."""
    return torch.backends.cudnn.version() or 0
