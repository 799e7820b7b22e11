"""The gradient of the QKV projection from those of attention, in FP8 and transposed.

The inverse of rope.py's split: dq, dk, dv [S, B, heads, D] -> dqkv[S * B, W], W = G (N/G + 2) D, in
megatron's layout (a group's query heads, its key head, its value head), queries and keys turned
back. dqkv takes one scale for the tensor: unless it is given (delayed.py), a first pass over the
same operands finds its amax. The last writes the codes as they are and transposed, and finds the
amax on its way where later scales need it. Arithmetic is fp32, rounded once, to FP8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import Fp8Format
from coatlm.fp8.qtensor import TENSOR, QTensor
from coatlm.fp8.rope import join_qkv_rope_ref
from coatlm.fp8.scaling import (
    amax_of,
    group_scale,
    larger,
    power_of_two_ref,
    raise_amax_ref,
    scaled_codes_ref,
)
from coatlm.fp8.transpose import (
    Codes,
    as_bytes,
    inverse_of,
    padded_rows,
    padded_t,
    store_words,
)

WORDS, WARPS = 16, 4  # a tile: one head of 4 x 16 tokens


def join_quantize_ref(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    fmt: Fp8Format,
    scale: Tensor | None,
    amax: Tensor | None,
) -> Codes:
    """The definition, and the CPU path."""
    joined = join_qkv_rope_ref(dq.float(), dk.float(), dv.float(), cos, sin)
    joined = joined.flatten(2).flatten(0, 1)
    raise_amax_ref(amax, joined)
    scale = power_of_two_ref(joined.abs().amax(), fmt) if scale is None else scale
    codes = scaled_codes_ref(joined, scale, fmt)
    return Codes(QTensor(codes, scale, TENSOR, fmt), QTensor(padded_t(codes), scale, TENSOR, fmt))


@triton.jit
def _rotated_back(
    at_ptr,
    stride_s,
    stride_b,
    cos_ptr,
    sin_ptr,
    turns,
    t,
    tokens,
    B,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both halves of one head for the tokens t, in fp32."""
    s, b = t // B, t % B
    i = tl.arange(0, BLOCK)[None, :]
    mask = (t[:, None] < tokens) & (i < HALF)
    at = at_ptr + (s * stride_s + b * stride_b)[:, None] + i
    x1 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + s[:, None] * HALF + i, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + s[:, None] * HALF + i, mask=mask, other=0.0)
    y1 = tl.where(turns, x1 * cos + x2 * sin, x1)
    y2 = tl.where(turns, x2 * cos - x1 * sin, x2)
    return y1, y2


@triton.jit
def _head_codes(
    at_ptr,
    stride_s,
    stride_b,
    cos_ptr,
    sin_ptr,
    turns,
    t,
    tokens,
    B,
    inverse,
    code_ptr,
    width,
    largest,
    AMAX: tl.constexpr,
    FORMAT: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes of both halves for the tokens t, stored at `code_ptr` and returned as bytes.

    And with AMAX the amaxes of the tokens so far. A scale that is not of these numbers may be too
    small for them: conversions would saturate infinite quotients too, and x + 0 x makes them NaN.
    """
    y1, y2 = _rotated_back(
        at_ptr, stride_s, stride_b, cos_ptr, sin_ptr, turns, t, tokens, B, HALF, BLOCK
    )
    if AMAX:
        largest = larger(largest, larger(amax_of(y1, 1), amax_of(y2, 1)))
    y1, y2 = y1 * inverse, y2 * inverse
    if AMAX:
        y1, y2 = y1 + y1 * 0.0, y2 + y2 * 0.0
    y1, y2 = as_bytes(y1, FORMAT), as_bytes(y2, FORMAT)
    i = tl.arange(0, BLOCK)[None, :]
    mask = (t[:, None] < tokens) & (i < HALF)
    at = code_ptr + t[:, None] * width + i
    tl.store(at, y1, mask=mask)
    tl.store(at + HALF, y2, mask=mask)
    return y1, y2, largest


@triton.jit
def _join_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    amax_ptr,  # fp32[programs]; where codes are written int32[], bits to be raised, or None
    scale_ptr,  # None in the pass that writes no codes
    code_ptr,  # uint8[tokens, heads * D]
    code_t_ptr,  # int32[heads * D, words]
    tokens,
    words,
    B,
    heads,
    q_s,
    q_b,
    q_n,
    k_s,
    k_b,
    k_n,
    v_s,
    v_b,
    v_n,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of 4 WORDS tokens. Head j is number j % GROUP of group j // GROUP."""
    j = tl.program_id(0) % heads
    word = (tl.program_id(0) // heads).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    group, member = (j // GROUP).to(tl.int64), j % GROUP
    if member < GROUP - 2:
        at = q_ptr + (group * (GROUP - 2) + member) * q_n
        stride_s, stride_b = q_s, q_b
    elif member == GROUP - 2:
        at = k_ptr + group * k_n
        stride_s, stride_b = k_s, k_b
    else:
        at = v_ptr + group * v_n
        stride_s, stride_b = v_s, v_b
    turns = member < GROUP - 1  # the value head does not
    if scale_ptr is None:
        t = (tl.program_id(0) // heads).to(tl.int64) * 4 * WORDS + tl.arange(0, 4 * WORDS)
        y1, y2 = _rotated_back(
            at, stride_s, stride_b, cos_ptr, sin_ptr, turns, t, tokens, B, HALF, BLOCK
        )
        tl.store(amax_ptr + tl.program_id(0), amax_of(larger(amax_of(y1, 1), amax_of(y2, 1)), 0))
    else:
        inverse = inverse_of(scale_ptr)
        width = heads * 2 * HALF
        code_at = code_ptr + j * 2 * HALF
        t = 4 * word
        AMAX: tl.constexpr = amax_ptr is not None
        largest = tl.zeros([WORDS], tl.float32)
        a1, a2, largest = _head_codes(
            at, stride_s, stride_b, cos_ptr, sin_ptr, turns, t, tokens, B,
            inverse, code_at, width, largest, AMAX, FORMAT, HALF, BLOCK)  # fmt: skip
        b1, b2, largest = _head_codes(
            at, stride_s, stride_b, cos_ptr, sin_ptr, turns, t + 1, tokens, B,
            inverse, code_at, width, largest, AMAX, FORMAT, HALF, BLOCK)  # fmt: skip
        c1, c2, largest = _head_codes(
            at, stride_s, stride_b, cos_ptr, sin_ptr, turns, t + 2, tokens, B,
            inverse, code_at, width, largest, AMAX, FORMAT, HALF, BLOCK)  # fmt: skip
        d1, d2, largest = _head_codes(
            at, stride_s, stride_b, cos_ptr, sin_ptr, turns, t + 3, tokens, B,
            inverse, code_at, width, largest, AMAX, FORMAT, HALF, BLOCK)  # fmt: skip
        if AMAX:
            amax = amax_of(largest, 0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            tl.atomic_max(amax_ptr, amax, sem="relaxed")
        i = tl.arange(0, BLOCK)
        code_t_at = code_t_ptr + (j * 2 * HALF).to(tl.int64) * words
        store_words(a1, b1, c1, d1, code_t_at, word, words, i, HALF)
        store_words(a2, b2, c2, d2, code_t_at + HALF * words, word, words, i, HALF)


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
) -> Codes:
    """Gradients of rotated q, k and of v, strided -> codes of dqkv[T, W] and [W, T'], T = S * B.

    cos and sin: fp32 [S, D/2]. T' is T padded for the GEMM (transpose.py). `scale`: fp32 [], a
    power of two, else that of its own amax. `amax`: fp32 [], raised to the largest |dqkv|.
    """
    if not dq_SBND.is_cuda:
        return join_quantize_ref(dq_SBND, dk_SBGD, dv_SBGD, cos, sin, fmt, scale, amax)
    parts = [x if x.stride(-1) == 1 else x.contiguous() for x in (dq_SBND, dk_SBGD, dv_SBGD)]
    S, B, G, D = dk_SBGD.shape
    group = dq_SBND.shape[2] // G + 2
    tokens, heads, half = S * B, G * group, D // 2
    padded, width = padded_rows(tokens), heads * D
    device = dq_SBND.device
    words = padded // 4
    programs = triton.cdiv(words, WORDS) * heads
    codes = torch.empty(tokens, width, dtype=fmt.dtype, device=device)
    codes_t = torch.empty(width, padded, dtype=fmt.dtype, device=device)
    strides = [stride for x in parts for stride in x.stride()[:3]]
    shape = {"GROUP": group, "HALF": half, "WORDS": WORDS, "BLOCK": triton.next_power_of_2(half)}

    def launch(amax: Tensor | None, scale: Tensor | None) -> None:
        _join_kernel[(programs,)](
            *parts,
            cos,
            sin,
            amax,
            scale,
            codes.view(torch.uint8),
            codes_t.view(torch.int32),
            tokens,
            words,
            B,
            heads,
            *strides,
            FORMAT=fmt.triton_dtype,
            **shape,
            num_warps=WARPS,
        )

    if scale is None:
        amaxes = torch.empty(programs, dtype=torch.float32, device=device)
        launch(amaxes, None)
        scale = group_scale(amaxes, fmt, power_of_two=True)
    launch(None if amax is None else amax.view(torch.int32), scale)
    return Codes(QTensor(codes, scale, TENSOR, fmt), QTensor(codes_t, scale, TENSOR, fmt))
