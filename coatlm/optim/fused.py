"""The AdamW step as one streaming kernel for every recipe; its reference is `adamw.AdamW.propose`.

A program loads gradient, weight and states of a few groups of 128 elements, computes and stores:
each byte moves once and nothing of full size is ever decoded. The states of all shards lie behind
one another, so one launch serves any number of shards; a table says whose groups a program has.

Gluon is Triton with layouts spelled out. 8 threads hold a group here, 16 elements each, so what is
computed once a group (k, L and their logarithms) costs a sixteenth of that an element. Triton's own
layout for such a tile spreads a group over a warp and repeats that work 32 times.

FP8-LM's scales need the largest magnitude of a whole tensor before the first code can be stored, so
its recipe runs the kernel twice; with MEASURE it finds the maxima and stores nothing else.

Launched without contraction into fused multiply-adds, but for COAT's moments: the bits are those of
the reference wherever the arithmetic is IEEE, which is everywhere but in COAT's recipes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import libdevice

from coatlm.fp8.expand import expand_encode
from coatlm.fp8.formats import SCALE_BLOCK, Fp8Format
from coatlm.optim import expansion, tiles
from coatlm.optim.formats import Expanded

if TYPE_CHECKING:
    from coatlm.optim.adamw import Recipe

TYPES = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16}


class Tile(NamedTuple):
    """How a program's groups lie in its threads."""

    groups: int = 16
    warps: int = 4  # of 4 groups each at a time
    run: int = 16  # consecutive elements of a thread: 4, 8 or 16


class Slots(NamedTuple):
    """Where a moment or a weight is stored; None for what its format lacks."""

    main: Any = None  # [n]
    low: Any = None  # [n] BF16: low half, compensation
    scale: Any = None  # [n / 128] fp32
    k: Any = None  # [n / 128] uint8


SLOTS = {"": "main", "remainder": "main", "low": "low", "compensation": "low"}  # by suffix
SLOTS |= {"scale": "scale", "k": "k"}


@triton.jit
def _load(pointer, first, at, mask):
    if pointer is None:
        return 0  # nobody looks at it
    else:
        return tl.load(pointer + first + at, mask=mask)


@triton.jit
def _encode_and_store(M: tl.constexpr, state, main, low, amax_ptr, first, at, row, count):
    """A moment or master into its slots; `amax_ptr` has the bits of its tensor's largest."""
    mask = (row < count)[:, None]
    if M.kind == "expanded":
        HOW: tl.constexpr = M.how
        code, k, scale = expand_encode(main, HOW)
        tl.store(state.main + first * 128 + at, code.to(tl.uint8, bitcast=True), mask=mask)
        tl.store(state.k + first + row, k, mask=row < count)
        tl.store(state.scale + first + row, scale, mask=row < count)
    elif M.kind == "scaled":
        amax = tl.load(amax_ptr).to(tl.float32, bitcast=True)
        code, scale = tiles.scaled_code(M, main, amax)
        code = code.to(state.main.dtype.element_ty, bitcast=True)
        tl.store(state.main + first * 128 + at, code, mask=mask)
        tl.store(state.scale + first + row, scale, mask=row < count)
    else:
        if state.main is not None:
            stored = main.to(state.main.dtype.element_ty)
            tl.store(state.main + first * 128 + at, stored, mask=mask)
        if state.low is not None:
            tl.store(state.low + first * 128 + at, low, mask=mask)


@triton.jit
def _raise_to_amax(pointer, x, mask):
    bits = tl.abs(x).to(tl.int32, bitcast=True)  # ordered as the numbers are, NaN last
    largest = tl.max(tl.max(tl.where(mask, bits, 0), 1), 0)
    # it only grows, so a look at an old value spares nearly all programs the atomic
    tl.atomic_max(pointer, largest, mask=largest > tl.load(pointer))


@gluon.jit
def _step_kernel(
    span_of_ptr,  # int32[programs]
    span_ptr,  # int64[spans, 5]: addresses of weight and gradient, first group, groups, program
    scalar_ptr,  # fp32[4]: 1 or 0 (skip), clip coefficient, 1 / c1, 1 / c2
    decayed_ptr,  # uint8[groups]
    amax_ptr,  # int32[spans, 3]: bits of the largest |m|, |v| and |master|
    m,
    v,
    w,
    lr,
    decay,  # lr * weight_decay
    M: gl.constexpr,
    V: gl.constexpr,
    W: gl.constexpr,
    WEIGHT: gl.constexpr,
    GRAD: gl.constexpr,
    STRICT: gl.constexpr,
    BETAS: gl.constexpr,
    PAIR: gl.constexpr,
    EPS: gl.constexpr,
    TILE: gl.constexpr,
    MEASURE: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, TILE.run], [4, 8], [TILE.warps, 1], [1, 0])
    program = gl.program_id(0)
    go, clip = gl.load(scalar_ptr), gl.load(scalar_ptr + 1)
    scale_m, scale_v = gl.load(scalar_ptr + 2), gl.load(scalar_ptr + 3)
    span = gl.load(span_of_ptr + program)
    span_ptr, amax_ptr = span_ptr + span * 5, amax_ptr + span * 3
    skipped = (program - gl.load(span_ptr + 4)) * TILE.groups  # groups of other programs
    first, count = gl.load(span_ptr + 2) + skipped, gl.load(span_ptr + 3) - skipped
    weight_ptr = gl.load(span_ptr).to(gl.pointer_type(WEIGHT)) + skipped * 128
    grad_ptr = gl.load(span_ptr + 1).to(gl.pointer_type(GRAD)) + skipped * 128
    weight_ptr, grad_ptr = gl.multiple_of(weight_ptr, 16), gl.multiple_of(grad_ptr, 16)
    if go == 0.0:
        return

    row = gl.arange(0, TILE.groups, gl.SliceLayout(1, LAYOUT))
    at = row[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))[None, :]
    mask = (row < count)[:, None]
    grad = gl.load(grad_ptr + at, mask=mask)
    weight = gl.load(weight_ptr + at, mask=mask)
    m_main, m_low = _load(m.main, first * 128, at, mask), _load(m.low, first * 128, at, mask)
    v_main, v_low = _load(v.main, first * 128, at, mask), _load(v.low, first * 128, at, mask)
    w_main, w_low = _load(w.main, first * 128, at, mask), _load(w.low, first * 128, at, mask)
    m_scale, m_k = _load(m.scale, first, row, row < count), _load(m.k, first, row, row < count)
    v_scale, v_k = _load(v.scale, first, row, row < count), _load(v.k, first, row, row < count)
    w_scale = _load(w.scale, first, row, row < count)
    decays = _load(decayed_ptr, first, row, row < count).to(gl.float32) * decay

    g = grad.to(gl.float32) * clip
    if STRICT:
        g = g.to(gl.bfloat16).to(gl.float32)
    m_main, m_low = tiles.ema(M, m_main, m_low, m_scale, m_k, g, BETAS[0], PAIR)
    v_main, v_low = tiles.ema(V, v_main, v_low, v_scale, v_k, g * g, BETAS[1], PAIR)
    m_hat, v_hat = tiles.value(M, m_main, m_low) * scale_m, tiles.value(V, v_main, v_low) * scale_v
    if V.kind == "expanded":
        direction = m_hat * tiles.reciprocal(gl.sqrt(v_hat) + EPS)
    else:
        direction = tiles.divide(m_hat, tiles.square_root(v_hat) + EPS)
    old = tiles.master(W, weight, w_main, w_scale)
    update = -lr * direction - decays[:, None] * old
    weight, w_main, w_low = tiles.add(W, weight, w_low, old, update)

    if MEASURE:
        _raise_to_amax(amax_ptr, m_main, mask)
        _raise_to_amax(amax_ptr + 1, v_main, mask)
        _raise_to_amax(amax_ptr + 2, w_main, mask)
    else:
        gl.store(weight_ptr + at, weight, mask=mask)
        _encode_and_store(M, m, m_main, m_low, amax_ptr, first, at, row, count)
        _encode_and_store(V, v, v_main, v_low, amax_ptr + 1, first, at, row, count)
        _encode_and_store(W, w, w_main, w_low, amax_ptr + 2, first, at, row, count)


@triton.jit
def _prepare_kernel(step_count_ptr, clip_ptr, scalar_ptr, BETA1: tl.constexpr, BETA2: tl.constexpr):
    """Decide whether to step, count the step, and write the scalars of `_step_kernel`."""
    clip = 1.0
    if clip_ptr is not None:
        clip = tl.load(clip_ptr)
    go = tl.abs(clip) < float("inf")
    step_count = tl.load(step_count_ptr) + go.to(tl.int64)
    tl.store(step_count_ptr, step_count)
    tl.store(scalar_ptr, go.to(tl.float32))
    tl.store(scalar_ptr + 1, clip)
    tl.store(scalar_ptr + 2, _inverse_correction(BETA1, step_count))
    tl.store(scalar_ptr + 3, _inverse_correction(BETA2, step_count))


@triton.jit
def _inverse_correction(BETA: tl.constexpr, step_count):
    power = libdevice.pow(tl.full((), BETA, tl.float64), step_count.to(tl.float64))
    return (1.0 / (1.0 - power)).to(tl.float32)


def covers(recipe: "Recipe") -> bool:
    """Whether the kernel knows every format of `recipe`: all but DE8 codes."""
    moments = [moment for moment in (recipe.m, recipe.v) if isinstance(moment, Expanded)]
    return all(isinstance(moment.how.fmt, Fp8Format) for moment in moments)


def fastest_tile(recipe: "Recipe", grad: torch.dtype) -> Tile:
    """The layout that an H200 runs fastest, of those that tools/bench.py optimizer tiles=1 tries.

    A thread's run of fp32 states is best short, so that a warp's access is contiguous; what is
    computed once a group wants it long.
    """
    fp32 = [part.kind in ("fp32", "master") for part in (recipe.m, recipe.v, recipe.weight)]
    expanded = any(isinstance(moment, Expanded) for moment in (recipe.m, recipe.v))
    if not any(fp32):
        return Tile()
    if expanded:
        return Tile(run=8 if grad == torch.bfloat16 else 16)
    return Tile(run=4)


def contracts(recipe: "Recipe", grad: torch.dtype) -> bool:
    """Whether multiplications and additions may fuse: with BF16 gradients COAT's recipes are bound
    by instructions and gain 3%. Their bits are their own in any case.
    """
    expanded = any(isinstance(moment, Expanded) for moment in (recipe.m, recipe.v))
    return expanded and grad == torch.bfloat16


class FusedStep:
    """A step of all shards in two launches, four with tensor scales, on the current stream.

    `weights` and `grads` are flat CUDA tensors, one a shard, that stay where they are. `spans` are
    (shard, start, stop) in elements; programs and tensor scales belong to one span. `states` are
    those of all shards end to end, `decayed` (uint8) has one entry for each of their groups.
    """

    def __init__(
        self,
        recipe: "Recipe",
        *,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        spans: Sequence[tuple[int, int, int]],
        states: Mapping[str, Tensor],
        decayed: Tensor,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.weights, self.grads, self.spans = weights, grads, spans
        self.decayed, self.betas = decayed, betas
        self.scalars = torch.zeros(4, device=decayed.device)
        self.amax = torch.zeros(len(spans), 3, dtype=torch.int32, device=decayed.device)
        self.slots = [_slots(states, name) for name in ("exp_avg", "exp_avg_sq", "fp32_param")]
        self.passes = (True, False) if recipe.tensor_scaled else (False,)
        self.constants: dict[str, Any] = {
            "M": recipe.m,
            "V": recipe.v,
            "W": recipe.weight,
            "WEIGHT": TYPES[weights[0].dtype],
            "GRAD": TYPES[grads[0].dtype],
            "STRICT": recipe.strict,
            "BETAS": betas,
            "PAIR": expansion.split(betas[1]),
            "EPS": eps,
            "enable_fp_fusion": contracts(recipe, grads[0].dtype),
        }
        self.use(fastest_tile(recipe, grads[0].dtype))

    def use(self, tile: Tile) -> None:
        """Lay programs out like this from now on; nothing but speed depends on it."""
        span_of, table = _tables(self.weights, self.grads, self.spans, tile.groups)
        self.span_of, self.table = (t.to(self.decayed.device) for t in (span_of, table))
        self.constants |= {"TILE": tile, "num_warps": tile.warps}

    def __call__(
        self, *, lr: float, decay: float, clip_coefficient: Tensor | None, step_count: Tensor
    ) -> None:
        """One step; `decay` is lr * weight_decay, the coefficient fp32[], the count int64[]."""
        _prepare_kernel[(1,)](step_count, clip_coefficient, self.scalars, *self.betas)
        if len(self.passes) > 1:
            self.amax.zero_()
        for measure in self.passes:
            _step_kernel[(self.span_of.numel(),)](
                self.span_of,
                self.table,
                self.scalars,
                self.decayed,
                self.amax,
                *self.slots,
                lr,
                decay,
                MEASURE=measure,
                **self.constants,
            )


def _tables(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    spans: Sequence[tuple[int, int, int]],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Which span each program works on, and what `_step_kernel` wants to know of each span."""
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + weight.numel() // SCALE_BLOCK)
    rows, programs, total = [], [], 0
    for shard, start, stop in spans:
        addresses = [t[shard][start:].data_ptr() for t in (weights, grads)]
        assert not any(address % 16 for address in addresses), "accesses are 16 bytes wide"
        count = (stop - start) // SCALE_BLOCK
        rows.append([*addresses, starts[shard] + start // SCALE_BLOCK, count, total])
        programs.append(triton.cdiv(count, groups))
        total += programs[-1]
    span_of = torch.arange(len(spans), dtype=torch.int32)
    return span_of.repeat_interleave(torch.tensor(programs)), torch.tensor(rows)


def _slots(states: Mapping[str, Tensor], name: str) -> Slots:
    parts = [(*key.partition("."), tensor) for key, tensor in states.items()]
    return Slots(**{SLOTS[suffix]: tensor for key, _, suffix, tensor in parts if key == name})
