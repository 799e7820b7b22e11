"""The gradient of the fused QKV tensor from those of q, k and v, in FP8, direct and transposed.

This is the inverse of rope.py's split: dq, dk, dv [S, B, heads, D] -> dqkv[S * B, W] with
W = G (N/G + 2) D in megatron's layout (per key-value head: its query heads, the key, the value);
the rotation of queries and keys is undone. dqkv has one scale per tensor: unless it is given
(delayed.py), a first pass over the same operands finds the amax. The last pass writes the codes as
they are and transposed, and finds the amax where later scales need it. Arithmetic is fp32, rounded
once, to FP8.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.formats import Fp8Format
from coatlm.fp8.gemm import padded_rows
from coatlm.fp8.launch import Matrix, Placed, TileShape, launch_amax, launch_emit
from coatlm.fp8.qtensor import TENSOR, QTensor
from coatlm.fp8.scaling import power_of_two_ref, raise_amax_ref, scaled_codes_ref, tensor_scale
from coatlm.fp8.tiles import load_values
from coatlm.fp8.transpose import Codes, padded_t
from coatlm.kernels.rope import join_qkv_rope_ref

ROWS, WARPS = 64, 4  # tokens of one head in a tile, and warps for it
AMAX_ROWS = 16  # tokens in a tile of the pass that finds an amax


def join_quantize_ref(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    fmt: Fp8Format,
    scale: Tensor | None,
    amax: Tensor | None,
    noise: Tensor | None = None,
) -> Codes:
    """The definition, and the CPU path."""
    joined = join_qkv_rope_ref(dq.float(), dk.float(), dv.float(), cos, sin)
    joined = joined.flatten(2).flatten(0, 1)
    raise_amax_ref(amax, joined)
    scale = power_of_two_ref(joined.abs().amax(), fmt) if scale is None else scale
    codes = scaled_codes_ref(joined, scale, fmt, noise=noise, halves=dq.shape[-1] // 2)
    return Codes(QTensor(codes, scale, TENSOR, fmt), QTensor(padded_t(codes), scale, TENSOR, fmt))


@gluon.jit
def load_joined(source, factors, K, at, some, J: gl.constexpr, OPTIONS: gl.constexpr):
    """Both halves of a head of dqkv, rotated back. OPTIONS: (heads per key-value head, D / 2).

    HEADS counts k and v; head j is number j % HEADS of key-value head j // HEADS. A tile is the
    first half of one head. `source`: dq, dk, dv, cos, sin, B, and the strides of tokens, samples
    and heads of the three.
    """
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, B, q_strides, k_strides, v_strides = source
    HEADS: gl.constexpr = OPTIONS[0]
    HALF: gl.constexpr = OPTIONS[1]
    first_row, first_column, row, column, inner, _ = at
    head = first_column // (2 * HALF)
    kv_head, member = (head // HEADS).to(gl.int64), head % HEADS
    if member < HEADS - 2:
        head_ptr = q_ptr + (kv_head * (HEADS - 2) + member) * q_strides[2]
        stride_s, stride_b = q_strides[0], q_strides[1]
    elif member == HEADS - 2:
        head_ptr = k_ptr + kv_head * k_strides[2]
        stride_s, stride_b = k_strides[0], k_strides[1]
    else:
        head_ptr = v_ptr + kv_head * v_strides[2]
        stride_s, stride_b = v_strides[0], v_strides[1]
    token = first_row.to(gl.int64) + (row + J)
    s, b = token // B, token % B
    i = column[:, :, None] + inner
    x_at = (s * stride_s + b * stride_b)[:, :, None] + i
    x1, x2 = load_values(head_ptr, x_at, some), load_values(head_ptr + HALF, x_at, some)
    angle_at = (s * HALF)[:, :, None] + i
    cos, sin = load_values(cos_ptr, angle_at, some), load_values(sin_ptr, angle_at, some)
    turns = member < HEADS - 1  # the value head is not rotated
    y1 = gl.where(turns, x1 * cos + x2 * sin, x1)
    y2 = gl.where(turns, x2 * cos - x1 * sin, x2)
    if factors[0] is not None:
        return y1 * factors[0], y2 * factors[0]
    else:
        return y1, y2


def tile_of(half: int) -> TileShape:
    """Tiles of one head of ROWS tokens; `half`: D / 2, a multiple of 4."""
    inner = min(half & -half, 16)
    columns = triton.next_power_of_2(half)
    return TileShape(ROWS, columns, 8, 1, WARPS, step=2 * half, width=half, inner=inner)


def join_quantize(
    dq_SBND: Tensor,
    dk_SBGD: Tensor,
    dv_SBGD: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    fmt: Fp8Format,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    noise: Tensor | None = None,
) -> Codes:
    """Gradients of rotated q, k and of v, strided -> codes of dqkv[T, W] and [W, T'], T = S * B.

    cos and sin: fp32 [S, D/2]. T' is T padded for the GEMM (transpose.py). `scale`: fp32 [], a
    power of two; if None, from the amax of dqkv. `amax`: fp32 [], raised to the largest |dqkv|.
    `noise`: for stochastic rounding (stochastic.py); None rounds to nearest.
    """
    if not dq_SBND.is_cuda:
        return join_quantize_ref(dq_SBND, dk_SBGD, dv_SBGD, cos, sin, fmt, scale, amax, noise)
    parts = [x if x.stride(-1) == 1 else x.contiguous() for x in (dq_SBND, dk_SBGD, dv_SBGD)]
    S, B, G, D = dk_SBGD.shape
    if D % 8:
        raise ValueError(f"heads of {D} elements: on a GPU, a multiple of 8 is needed")
    heads = dq_SBND.shape[2] // G + 2
    tokens, width = S * B, G * heads * D
    padded, device = padded_rows(tokens), dq_SBND.device
    source = (*parts, cos, sin, B, *(x.stride()[:3] for x in parts))
    tile, options = tile_of(D // 2), (heads, D // 2)
    if scale is None:
        few = tile._replace(rows=AMAX_ROWS)
        amaxes = launch_amax(load_joined, source, tokens, width, few, options=options)
        scale = tensor_scale(amaxes, fmt, power_of_two=True)
    codes = torch.empty(tokens, width, dtype=fmt.dtype, device=device)
    codes_t = torch.empty(width, padded, dtype=fmt.dtype, device=device)
    launch_emit(
        load_joined,
        source,
        (Matrix(codes, codes_t, scale),),
        (Placed(0, fmt), Placed(0, fmt, further=D // 2)),
        (tokens, padded, width),
        tile,
        options=options,
        amax=amax,
        noise=noise,
    )
    return Codes(QTensor(codes, scale, TENSOR, fmt), QTensor(codes_t, scale, TENSOR, fmt))
