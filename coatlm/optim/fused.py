"""The fused AdamW step: one streaming kernel for every recipe. `AdamW.propose` is its reference.

A program loads gradient, weight and states of a few blocks of 128 elements, computes the update and
stores the results: each byte moves once, and decoded states stay in registers. The states of all
shards are contiguous, so one launch covers any number of shards; a table maps programs to spans,
the ranges of elements of one shard.

The kernel is written in Gluon, which is Triton with explicit layouts. 8 threads hold a block,
16 elements each, so that arithmetic per block (k, L and their logarithms) costs a sixteenth of
arithmetic per element. Triton's default layout for such a tile distributes a block over a whole
warp and repeats the per-block arithmetic 32 times.

FP8-LM's scales need the largest magnitude of a tensor before its first code can be stored. Its
recipe launches the kernel twice; the first launch, with MEASURE, only finds those maxima.

Nothing is contracted into fused multiply-adds where `contracts` does not say so, and results are
bit-identical to the reference wherever arithmetic is IEEE: in all recipes but COAT's.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import libdevice

from coatlm.fp8.accumulate import BlockFp8
from coatlm.fp8.expand import expand_encode
from coatlm.fp8.formats import BLOCK_ELEMENTS, E4M3
from coatlm.optim import collage, tiles
from coatlm.optim.recipes import MASTER, Recipe
from coatlm.optim.shards import program_tables

TYPES = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, E4M3.dtype: gl.float8e4nv}


class TileLayout(NamedTuple):
    """How the blocks of a program are distributed over its threads."""

    blocks: int = 16  # of 128 elements, per program
    warps: int = 4  # per program
    run: int = 16  # consecutive elements per thread: 4, 8 or 16


class Slots(NamedTuple):
    """The tensors of a moment or a weight state; None for those that its format does not have."""

    main: Any = None  # [n]
    low: Any = None  # [n] BF16: low half, compensation
    scale: Any = None  # [n / 128] fp32
    k: Any = None  # [n / 128] uint8


SLOTS = {"": "main", "remainder": "main", "low": "low", "compensation": "low"}  # by suffix
SLOTS |= {"scale": "scale", "k": "k"}


@triton.jit
def _load(pointer, first, at, mask):
    if pointer is None:
        return 0  # never used
    else:
        return tl.load(pointer + first + at, mask=mask)


@triton.jit
def _encode_and_store(M: tl.constexpr, state, main, low, amax_ptr, first, at, row, count):
    """Store a moment or a master. `amax_ptr` points to the bits of its tensor's max |x|."""
    mask = (row < count)[:, None]
    if M.kind == "expanded":
        HOW: tl.constexpr = M.how
        code, k, scale = expand_encode(main, HOW)
        tl.store(
            state.main + first * BLOCK_ELEMENTS + at, code.to(tl.uint8, bitcast=True), mask=mask
        )
        tl.store(state.k + first + row, k, mask=row < count)
        tl.store(state.scale + first + row, scale, mask=row < count)
    elif M.kind == "scaled":
        amax = tl.load(amax_ptr).to(tl.float32, bitcast=True)
        code, scale = tiles.scaled_code(M, main, amax)
        code = code.to(state.main.dtype.element_ty, bitcast=True)
        tl.store(state.main + first * BLOCK_ELEMENTS + at, code, mask=mask)
        tl.store(state.scale + first + row, scale, mask=row < count)
    else:
        if state.main is not None:
            stored = main.to(state.main.dtype.element_ty)
            tl.store(state.main + first * BLOCK_ELEMENTS + at, stored, mask=mask)
        if state.low is not None:
            tl.store(state.low + first * BLOCK_ELEMENTS + at, low, mask=mask)


@triton.jit
def _raise_to_amax(pointer, x, mask):
    """Raise the int32 bits at `pointer` to those of max |x| over the tile."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)  # ordered as the numbers are, NaN largest
    largest = tl.max(tl.max(tl.where(mask, bits, 0), 1), 0)
    # the maximum only grows, so a stale value is enough to skip nearly all atomics
    tl.atomic_max(pointer, largest, mask=largest > tl.load(pointer))


@gluon.jit
def _step_kernel(
    span_of_ptr,  # int32[programs]
    span_ptr,  # int64[spans, 6]: see `program_tables`
    scalar_ptr,  # fp32[4]: 1 or 0 (skip the step), clip coefficient, 1 / c1, 1 / c2
    decayed_ptr,  # uint8[blocks]
    amax_ptr,  # int32[spans, 3]: bits of the largest |m|, |v| and |master|
    m,
    v,
    w,
    rate_ptr,  # fp32[2]: lr, lr * weight decay; None: `lr` and `decay` hold them
    lr,
    decay,
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
    if rate_ptr is not None:
        lr, decay = gl.load(rate_ptr), gl.load(rate_ptr + 1)
    span = gl.load(span_of_ptr + program)
    span_ptr, amax_ptr = span_ptr + span * 6, amax_ptr + span * 3
    skipped = (program - gl.load(span_ptr + 4)) * TILE.blocks  # blocks of earlier programs
    first, count = gl.load(span_ptr + 2) + skipped, gl.load(span_ptr + 3) - skipped
    weight_ptr = gl.load(span_ptr).to(gl.pointer_type(WEIGHT)) + skipped * BLOCK_ELEMENTS
    grad_ptr = gl.load(span_ptr + 1).to(gl.pointer_type(GRAD)) + skipped * BLOCK_ELEMENTS
    weight_ptr, grad_ptr = gl.multiple_of(weight_ptr, 16), gl.multiple_of(grad_ptr, 16)
    if go == 0.0:
        return

    row = gl.arange(0, TILE.blocks, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, BLOCK_ELEMENTS, gl.SliceLayout(0, LAYOUT))
    at = row[:, None] * BLOCK_ELEMENTS + column[None, :]
    mask = (row < count)[:, None]
    grad = gl.load(grad_ptr + at, mask=mask)
    weight = gl.load(weight_ptr + at, mask=mask)
    begin = first * BLOCK_ELEMENTS
    m_main, m_low = _load(m.main, begin, at, mask), _load(m.low, begin, at, mask)
    v_main, v_low = _load(v.main, begin, at, mask), _load(v.low, begin, at, mask)
    w_main, w_low = _load(w.main, begin, at, mask), _load(w.low, begin, at, mask)
    m_scale, m_k = _load(m.scale, first, row, row < count), _load(m.k, first, row, row < count)
    v_scale, v_k = _load(v.scale, first, row, row < count), _load(v.k, first, row, row < count)
    w_scale = _load(w.scale, first, row, row < count)
    decays = _load(decayed_ptr, first, row, row < count).to(gl.float32) * decay

    g = grad.to(gl.float32)
    if gl.float8e4nv == GRAD:
        grad_scale_ptr = gl.load(span_ptr + 5).to(gl.pointer_type(gl.float32)) + skipped
        g = g * gl.load(grad_scale_ptr + row, mask=row < count, other=0.0)[:, None]
    g = g * clip
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
    """Decide whether the step is skipped, count it, and write the scalars of `_step_kernel`."""
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


def fastest_tile(recipe: Recipe, grad: torch.dtype) -> TileLayout:
    """The fastest layout on an H200 of those that `tools/bench.py optimizer tiles=1` measures.

    With fp32 states, fewer consecutive elements per thread are faster, because a warp's accesses
    are then contiguous. Arithmetic per block is cheaper with more.
    """
    fp32 = [part.kind in ("fp32", "master") for part in (recipe.m, recipe.v, recipe.weight)]
    if not any(fp32):
        return TileLayout()
    if recipe.expanded:
        return TileLayout(run=8 if grad == torch.bfloat16 else 16)
    return TileLayout(run=4)


def contracts(recipe: Recipe, grad: torch.dtype) -> bool:
    """Whether the compiler may contract multiplications and additions into fused multiply-adds.

    COAT's recipes with BF16 gradients are bound by instructions and gain 3 %; their approximate
    logarithms differ from the reference's in any case.
    """
    return recipe.expanded and grad == torch.bfloat16


def prepare(
    scalars: Tensor,
    *,
    betas: tuple[float, float],
    clip_coefficient: Tensor | None,
    step_count: Tensor,
) -> None:
    """Begin a step: count it in `step_count`, int64[], unless `clip_coefficient`, fp32[], is not
    finite, and write `scalars`, fp32[4], which every `FusedStep` of the step reads.
    """
    _prepare_kernel[(1,)](step_count, clip_coefficient, scalars, *betas)


class FusedStep:
    """A step of all shards, or of a piece of them: a launch, two with tensor-wise scales.

    `weights` and `grads` (fp32, BF16 or one-byte) are flat CUDA tensors, one per shard, whose
    addresses must not change. `spans` are (shard, start, stop) in elements; a program works on one
    span, and a tensor-wise scale covers one span. `states` are the states of all shards,
    concatenated; `decayed` (uint8) has one entry for each of their blocks. Both may begin at block
    `first_block` of these and end with the last span. `prepare` comes before a step.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor | BlockFp8],
        spans: Sequence[tuple[int, int, int]],
        states: Mapping[str, Tensor],
        decayed: Tensor,
        betas: tuple[float, float],
        eps: float,
        first_block: int = 0,
    ) -> None:
        self.weights, self.grads, self.spans = weights, grads, spans
        self.decayed, self.first_block = decayed, first_block
        self.amax = torch.zeros(len(spans), 3, dtype=torch.int32, device=decayed.device)
        self.slots = [_slots(states, name) for name in (*recipe.moments, MASTER)]
        self.passes = (True, False) if recipe.tensor_scaled else (False,)
        self.constants: dict[str, Any] = {
            "M": recipe.m,
            "V": recipe.v,
            "W": recipe.weight,
            "WEIGHT": TYPES[weights[0].dtype],
            "GRAD": TYPES[grads[0].dtype],
            "STRICT": recipe.strict,
            "BETAS": betas,
            "PAIR": collage.bf16_pair(betas[1]),
            "EPS": eps,
            "enable_fp_fusion": contracts(recipe, grads[0].dtype),
        }
        self.use(fastest_tile(recipe, grads[0].dtype))

    def use(self, tile: TileLayout) -> None:
        """Set the layout of later launches; it affects speed only."""
        span_of, table = program_tables(
            self.weights, self.grads, self.spans, tile.blocks, self.first_block
        )
        self.span_of, self.table = (t.to(self.decayed.device) for t in (span_of, table))
        self.constants |= {"TILE": tile, "num_warps": tile.warps}

    def __call__(
        self, scalars: Tensor, rates: Tensor | tuple[float, float], *, passes: Sequence[bool] = ()
    ) -> None:
        """Update on the current stream, by `scalars` of `prepare` and `rates`: lr and
        lr * weight decay. Without spans there is nothing to do.

        `rates` in a tensor, fp32[2], are read when the kernel runs, also in replays of a CUDA
        graph; as numbers they are fixed by the launch, which is 1.5 to 3 % faster.

        `passes` are launches of the kernel: True finds `amax`, False updates with the scales that
        follow from it; (): those that the recipe needs.
        """
        passes = (passes or self.passes) if self.spans else ()
        if True in passes:
            self.amax.zero_()
        by_value = (0.0, 0.0) if isinstance(rates, Tensor) else rates
        for measure in passes:
            _step_kernel[(self.span_of.numel(),)](
                self.span_of,
                self.table,
                scalars,
                self.decayed,
                self.amax,
                *self.slots,
                rates if isinstance(rates, Tensor) else None,
                *by_value,
                MEASURE=measure,
                **self.constants,
            )


def _slots(states: Mapping[str, Tensor], name: str) -> Slots:
    parts = [(*key.partition("."), tensor) for key, tensor in states.items()]
    return Slots(**{SLOTS[suffix]: tensor for key, _, suffix, tensor in parts if key == name})
