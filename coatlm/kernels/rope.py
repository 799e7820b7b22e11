"""Rotary position embedding (Su et al. 2021, s3.4), in the half-rotation layout of Llama.

Element i < D/2 of a head is paired with i + D/2, and the pair turns by position * inv_freq[i]:

    y1 = x1 * cos - x2 * sin        y2 = x2 * cos + x1 * sin

Backward is the rotation by the opposite angle, so only cos and sin are saved. Arithmetic is fp32,
rounded once. Shapes: S tokens, B samples, N query heads, G key-value heads, D elements per head.
Megatron's fused QKV layout has W = (N/G + 2) * D elements per key-value head: its N/G query heads,
then the key, then the value.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from coatlm.kernels.rope_scaling import stretch

TILE = 1024  # half-head elements per program: with WARPS, a thread holds 16 bytes of BF16 per half
WARPS = 4


def rope_frequencies(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    *,
    length: int | None = None,
) -> Tensor:
    """inv_freq[D/2] in fp32, radians per token: theta^(-2i/D), stretched by `scaling` if given.

    `length` is the number of tokens of a sequence, which LongRoPE's frequencies depend on.
    Raises ValueError for an odd head size, and for a `scaling` that `rope_scaling` does not know.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}, must be even")
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return inv_freq if scaling is None else stretch(inv_freq, theta, scaling, length)


def rope_tables(
    positions_S: Tensor, inv_freq: Tensor, *, factor: float = 1.0, half: int | None = None
) -> tuple[Tensor, Tensor]:
    """cos, sin of position * inv_freq, times `factor`: fp32 [S, D/2].

    Where `half` = D/2 exceeds the number of frequencies, the other pairs do not turn: cos is 1 and
    sin is 0.

    Positions are in tokens, of any integer dtype. With a factor of a, the rotation is one by the
    angle and a multiplication by a; so is its backward, which is not its inverse then.
    """
    angle = positions_S.float()[:, None] * inv_freq.float()[None, :]
    still = (0, (len(inv_freq) if half is None else half) - len(inv_freq))
    return F.pad(angle.cos() * factor, still, value=1.0), F.pad(angle.sin() * factor, still)


def rope_ref(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition; the inverse is rope_ref(y, cos, -sin)."""
    x1, x2 = x_SBND.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_SBND.dtype)


def split_qkv_rope_ref(
    qkv_SBGW: Tensor, cos: Tensor, sin: Tensor, queries_per_kv_head: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of the fused split: q[S, B, N, D], k[S, B, G, D] rotated, v[S, B, G, D]."""
    heads = qkv_SBGW.unflatten(-1, (queries_per_kv_head + 2, head_dim))
    q, k, v = heads.split((queries_per_kv_head, 1, 1), dim=3)
    q, k, v = (x.flatten(2, 3) for x in (q, k, v))
    v = v.clone(memory_format=torch.contiguous_format)
    return rope_ref(q, cos, sin), rope_ref(k, cos, sin), v


def join_qkv_rope_ref(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """The inverse of `split_qkv_rope_ref`, which is also its backward: qkv[S, B, G, W]."""
    kv_heads = k_SBGD.shape[2]
    q, k = rope_ref(q_SBND, cos, -sin), rope_ref(k_SBGD, cos, -sin)
    heads = (x.unflatten(2, (kv_heads, -1)) for x in (q, k, v_SBGD))
    return torch.cat(tuple(heads), dim=3).flatten(3)


@triton.jit
def _rope_kernel(
    fused_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    B,
    heads,
    fused_s, fused_b, fused_n,  # strides of tokens, samples and heads, in elements
    q_s, q_b, q_n,
    k_s, k_b, k_n,
    v_s, v_b, v_n,
    QUERIES: tl.constexpr,
    PER_KV_HEAD: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Rotate `heads` heads of one token from the fused tensor into q, k, v, or (INVERSE) back.

    The fused tensor has PER_KV_HEAD heads per key-value head: QUERIES query heads, the key, and
    the value. PER_KV_HEAD = QUERIES = 1 rotates every head of a single tensor.
    """
    blocks = tl.cdiv(heads, HEADS)
    token = tl.program_id(0) // blocks
    s = (token // B).to(tl.int64)
    b = (token % B).to(tl.int64)
    j = ((tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    i = tl.arange(0, BLOCK)[None, :]
    mask = (j < heads) & (i < HALF)

    kv_head = j // PER_KV_HEAD
    member = j % PER_KV_HEAD
    fused_at = fused_ptr + s * fused_s + b * fused_b + j * fused_n + i
    # `+ i` after the choice would hide that a row is contiguous: scalar loads and stores.
    q_at = q_ptr + s * q_s + b * q_b + (kv_head * QUERIES + member) * q_n + i
    k_at = k_ptr + s * k_s + b * k_b + kv_head * k_n + i
    v_at = v_ptr + s * v_s + b * v_b + kv_head * v_n + i
    split_at = tl.where(member < QUERIES, q_at, tl.where(member == QUERIES, k_at, v_at))

    source = split_at if INVERSE else fused_at
    target = fused_at if INVERSE else split_at
    x1 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + s * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + s * HALF + i, mask=i < HALF, other=0.0)
    if INVERSE:
        sin = -sin
    turns = member <= QUERIES  # the value head is not rotated
    y1 = tl.where(turns, x1 * cos - x2 * sin, x1)
    y2 = tl.where(turns, x2 * cos + x1 * sin, x2)
    tl.store(target, y1.to(target.dtype.element_ty), mask=mask)
    tl.store(target + HALF, y2.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_in_place_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    B,
    rotated,
    width,
    PER_KV_HEAD: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate `rotated` heads of one token: of PER_KV_HEAD heads all but the last, the value."""
    blocks = tl.cdiv(rotated, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    s = token // B
    j = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    mask = (j < rotated) & (i < HALF)
    head = j // (PER_KV_HEAD - 1) * PER_KV_HEAD + j % (PER_KV_HEAD - 1)
    at = qkv_ptr + token * width + head * 2 * HALF + i
    x1 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + s * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + s * HALF + i, mask=i < HALF, other=0.0)
    tl.store(at, (x1 * cos - x2 * sin).to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (x2 * cos + x1 * sin).to(at.dtype.element_ty), mask=mask)


def _tile(head_dim: int) -> dict[str, int]:
    """How many heads of which padded half length a program holds."""
    half = head_dim // 2
    block = triton.next_power_of_2(half)
    return {"HALF": half, "BLOCK": block, "HEADS": max(1, TILE // block)}


def _launch(
    fused: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    queries: int,
    per_kv_head: int,
    inverse: bool,
) -> None:
    """fused[S, B, heads, D] -> parts, or back; of the strides only the last must be 1."""
    S, B, heads, D = fused.shape
    tile = _tile(D)
    strides = [stride for x in (fused, *parts) for stride in x.stride()[:3]]
    grid = (S * B * triton.cdiv(heads, tile["HEADS"]),)
    _rope_kernel[grid](
        fused,
        *parts,
        cos.contiguous(),
        sin.contiguous(),
        B,
        heads,
        *strides,
        QUERIES=queries,
        PER_KV_HEAD=per_kv_head,
        INVERSE=inverse,
        num_warps=WARPS,
        **tile,
    )


def _rotate(x_SBND: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    if not x_SBND.is_cuda:
        return rope_ref(x_SBND, cos, -sin if inverse else sin)
    return _rotate_on_gpu(x_SBND, cos, sin, inverse=inverse)


def _rotate_on_gpu(x_SBND: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    x = x_SBND if x_SBND.stride(-1) == 1 else x_SBND.contiguous()
    y = x.new_empty(x.shape)
    fused, part = (y, x) if inverse else (x, y)
    _launch(fused, (part, part, part), cos, sin, queries=1, per_kv_head=1, inverse=inverse)
    return y


def _split_on_gpu(
    qkv_SBGW: Tensor, cos: Tensor, sin: Tensor, queries_per_kv_head: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    S, B, G, _ = qkv_SBGW.shape
    fused = qkv_SBGW.contiguous().view(S, B, -1, head_dim)
    q, k, v = (fused.new_empty(S, B, n, head_dim) for n in (G * queries_per_kv_head, G, G))
    queries = queries_per_kv_head
    _launch(fused, (q, k, v), cos, sin, queries=queries, per_kv_head=queries + 2, inverse=False)
    return q, k, v


def _join_on_gpu(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_SBND, k_SBGD, v_SBGD))
    S, B, G, D = k_SBGD.shape
    queries = q_SBND.shape[2] // G
    fused = q_SBND.new_empty(S, B, G * (queries + 2), D)
    _launch(fused, (q, k, v), cos, sin, queries=queries, per_kv_head=queries + 2, inverse=True)
    return fused.view(S, B, G, -1)


def join_qkv_rope(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """`join_qkv_rope_ref` on any device: qkv[S, B, G, W]. No gradient."""
    join = _join_on_gpu if q_SBND.is_cuda else join_qkv_rope_ref
    return join(q_SBND, k_SBGD, v_SBGD, cos, sin)


def rotate_qkv_(qkv_SBNW: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys where they are -> q, k, v [S, B, N, D], views of qkv.

    qkv is contiguous and has one query head per key-value head: W = 3 D. This moves 4 D elements
    per head, `split_qkv_rope` 6 D, and the results occupy as much memory. No gradient.
    """
    S, B, N, W = qkv_SBNW.shape
    q, k, v = qkv_SBNW.chunk(3, dim=-1)
    if qkv_SBNW.is_cuda:
        tile, rotated = _tile(W // 3), 2 * N
        _rotate_in_place_kernel[(S * B * triton.cdiv(rotated, tile["HEADS"]),)](
            qkv_SBNW, cos, sin, B, rotated, N * W, PER_KV_HEAD=3, num_warps=WARPS, **tile
        )
    else:
        for x in (q, k):
            x.copy_(rope_ref(x, cos, sin))
    return q, k, v


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x_SBND, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SBND: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(dy_SBND, *ctx.saved_tensors, inverse=True), None, None


class _SplitQKVRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_SBGW: Tensor,
        cos: Tensor,
        sin: Tensor,
        queries_per_kv_head: int,
        head_dim: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        split = _split_on_gpu if qkv_SBGW.is_cuda else split_qkv_rope_ref
        return split(qkv_SBGW, cos, sin, queries_per_kv_head, head_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return join_qkv_rope(dq, dk, dv, *ctx.saved_tensors), None, None, None, None


def _check_tables(S: int, D: int, cos: Tensor, sin: Tensor) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (S, D // 2):
            raise ValueError(f"{name} has shape {tuple(table.shape)}, must be {(S, D // 2)}")


def rope(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x[S, B, N, D], cos and sin fp32 [S, D/2] -> x rotated, contiguous, in its dtype.

    Differentiable in x, which may be strided. Triton on CUDA, else the reference. Raises ValueError
    when the tables do not fit x.
    """
    _check_tables(x_SBND.shape[0], x_SBND.shape[-1], cos, sin)
    return _Rope.apply(x_SBND, cos, sin)


def split_qkv_rope(
    qkv_SBGW: Tensor, cos: Tensor, sin: Tensor, *, queries_per_kv_head: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Fused QKV -> q[S, B, N, D] and k[S, B, G, D] rotated, v[S, B, G, D]; all new and contiguous.

    W = (queries_per_kv_head + 2) * head_dim, where queries_per_kv_head is N/G.
    One kernel each way: forward reads qkv once, backward takes dq, dk, dv with any strides and
    writes one dqkv. v is copied although attention would take a view of it: the view would keep all
    of qkv alive until backward, (N + 2G) * D elements per token in place of G * D, and the copy
    costs only G / (N + 2G) of this kernel's traffic. Raises ValueError when the sizes do not fit.
    """
    S, _, _, W = qkv_SBGW.shape
    if (queries_per_kv_head + 2) * head_dim != W:
        raise ValueError(
            f"qkv has {W} elements per key-value head, must be "
            f"(queries_per_kv_head + 2) * head_dim = ({queries_per_kv_head} + 2) * {head_dim}"
        )
    _check_tables(S, head_dim, cos, sin)
    return _SplitQKVRope.apply(qkv_SBGW, cos, sin, queries_per_kv_head, head_dim)
