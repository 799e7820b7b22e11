"""FP8 payloads: the bytes in which gradients and weights travel between ranks.

    pack      x [A, B, n] -> payloads [A, B, bytes]        code = cast(x r), r = 1 / S
    unpack    payloads [R, A, B, bytes] -> y [A, B, n]     y = sum over R of code * S

A payload holds n codes and, unless the ranks share scales, behind them the fp32 scales S of its
blocks (S = amax / MAX by the rules of scaling.py). A block is 128 consecutive elements of a flat
buffer and takes 132 bytes. Each function is one kernel, which reads and writes every element once.
A shared scale belongs to a tensor; `Shared` says which tensor a block belongs to. Values may exceed
a shared scale that was fixed before they were known: they saturate, `pack` records their tensor's
amax for later scales, and a block with a NaN or an infinity becomes NaN.

A rank does not round its own values in a sum: `pack` skips their payload, and `unpack` adds the
values themselves (`Own`) to the decoded payloads of the others. The skipped payload keeps its place
in the buffer, because NCCL is faster if all parts of an exchange have equal size.

S, r and x r are each rounded once, so a code may differ from cast(x / S) where x / S is within a
relative 2^-22 of the midpoint between two codes. With `divide` the code is cast(x / S), as in
`quantize`. r is clamped to the largest fp32 number: where 1 / S overflows, codes are smaller than
x / S. Sums are in fp32 and in the order of the ranks, so every run gives the same bits. A block
with a NaN or an infinity has a scale that is not finite: all of it decodes to NaN, and the sum is
NaN on every rank. In E3M4 the scale also overflows where a block holds a value beyond 2^121.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.codes import decode, encode
from coatlm.fp8.formats import BLOCK_ELEMENTS, SCALE_BLOCK
from coatlm.fp8.payload_layout import Layout, Own, Shared, check
from coatlm.fp8.quantize import quotient
from coatlm.fp8.scaling import amax_of, block_amax_ref, scale_of, scale_ref
from coatlm.fp8.segments import raise_largest, raise_largest_ref

ROWS = 32  # blocks per program: 4096 elements and 128 bytes of scales
WARPS = 4  # 32 elements per thread
LARGEST = torch.finfo(torch.float32).max


def pack_ref(
    x: Tensor,
    payloads: Tensor,
    layout: Layout,
    shared: Shared | None = None,
    divide: bool = False,
    skip: int = -1,
) -> None:
    """The definition of `pack`, and its CPU path."""
    n = layout.elements
    if shared is None:
        scale = scale_ref(block_amax_ref(x, SCALE_BLOCK), layout.fmt)
        payloads[..., n : n + 4 * layout.blocks] = scale.contiguous().view(torch.uint8)
    else:
        scale = shared.scale[shared.owner.long()].view(*x.shape[:-1], -1)
        if shared.amax is not None:
            finite = block_amax_ref(x, SCALE_BLOCK).isfinite()
            scale = torch.where(finite, scale, torch.nan)
            sent = torch.arange(len(x)) != skip
            raise_largest_ref(shared.amax, x[sent], shared.owner[sent])
    blocked = x.float().unflatten(-1, (-1, SCALE_BLOCK))
    scale = _nan_unless_finite(scale)[..., None]
    scaled = blocked / scale if divide else blocked * (1.0 / scale).clamp(max=LARGEST)
    payloads[..., :n] = layout.fmt.encode(scaled).view(torch.uint8).view(x.shape)


def unpack_ref(
    payloads: Tensor,
    y: Tensor,
    layout: Layout,
    shared: Shared | None = None,
    own: Own | None = None,
    add: bool = False,
) -> None:
    """The definition of `unpack`, and its CPU path."""
    n = layout.elements
    shape = (*y.shape[:-1], layout.blocks, SCALE_BLOCK)
    total = torch.full(shape, -0.0, device=y.device)  # -0 + -0 is -0
    for number, source in enumerate(payloads):
        if own is not None and number == own.rank:
            continue
        codes = source[..., :n].contiguous().view(layout.fmt.dtype)
        value = layout.fmt.decode(codes).unflatten(-1, (-1, SCALE_BLOCK))
        if shared is None:
            scale = source[..., n : n + 4 * layout.blocks].contiguous().view(torch.float32)
            value = value * _nan_unless_finite(scale)[..., None]
        total += value
    if shared is not None:
        scale = shared.scale[shared.owner.long()].view(*y.shape[:-1], -1)
        total = total * _nan_unless_finite(scale)[..., None]
    total = total.view(y.shape)
    if own is not None:
        total = total + own.values.float()
    y.copy_(total + y.float() if add else total)


def _nan_unless_finite(scale: Tensor) -> Tensor:
    return torch.where(scale.isfinite(), scale, torch.nan)


@triton.jit
def _pack_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,  # the scales of the first payload, or None
    shared_ptr,  # fp32 [T], or None
    owner_ptr,
    amax_ptr,  # int32 [T], or None
    blocks,  # per payload
    inner,  # B
    outer_stride, inner_stride,  # of x, in elements
    owner_outer_stride, owner_inner_stride,
    bytes_each,  # per payload
    skip,  # the index a whose payloads are not written, or -1
    TOP: tl.constexpr, LARGEST: tl.constexpr, DIVIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(blocks, ROWS)
    payload = program // tiles
    a, b = payload // inner, payload % inner
    start = a * outer_stride + b * inner_stride
    g = program % tiles * ROWS + tl.arange(0, ROWS)
    at = g[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    some = (g < blocks) & (a != skip)
    mask = some[:, None]
    x = tl.load(x_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
    if shared_ptr is None:
        scale = scale_of(amax_of(x, 1), TOP, False)
        tl.store(scale_ptr + payload * (bytes_each // 4) + g, scale, mask=some)
    else:
        owners = owner_ptr + a * owner_outer_stride + b * owner_inner_stride
        owner = tl.load(owners + g, mask=some, other=-1)
        scale = tl.load(shared_ptr + owner, mask=some, other=1.0)
        if amax_ptr is not None:
            amax = amax_of(x, 1)
            raise_largest(amax_ptr, amax, owner)
            scale = tl.where(amax < float("inf"), scale, float("nan"))
    scale = tl.where(scale < float("inf"), scale, float("nan"))
    if DIVIDE:
        scaled = quotient(x, scale[:, None])
    else:
        r = tl.div_rn(1.0, scale)
        scaled = x * tl.where(r > LARGEST, LARGEST, r)[:, None]
    code = encode(scaled, code_ptr.dtype.element_ty)
    tl.store(code_ptr + payload * bytes_each + at, code, mask=mask)


@triton.jit
def _unpack_kernel(
    code_ptr,
    scale_ptr,
    shared_ptr,
    owner_ptr,
    own_ptr,  # the values that replace the payloads of source `skip`, or None
    y_ptr,
    blocks,
    inner,
    outer_stride, inner_stride,  # of y, in elements
    own_outer_stride, own_inner_stride,
    owner_outer_stride, owner_inner_stride,
    bytes_each,
    skip,
    source_bytes,  # from the payloads of one source to those of the next
    SOURCES: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(blocks, ROWS)
    payload = program // tiles
    start = payload // inner * outer_stride + payload % inner * inner_stride
    g = program % tiles * ROWS + tl.arange(0, ROWS)
    at = g[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    mask = g[:, None] < blocks
    code_ptr += payload * bytes_each
    # -0, as -0 + -0 is -0; by its bits, because tl.full(..., -0.0) fills with +0
    total = tl.full([ROWS, BLOCK_ELEMENTS], 0x80000000, tl.uint32).to(tl.float32, bitcast=True)
    for source in tl.range(0, SOURCES, loop_unroll_factor=4):
        begin = source * source_bytes.to(tl.int64)
        some = (g < blocks) & (source != skip)
        value = decode(tl.load(code_ptr + begin + at, mask=some[:, None], other=0.0))
        if shared_ptr is None:
            scales = scale_ptr + (begin + payload * bytes_each) // 4
            scale = tl.load(scales + g, mask=some, other=0.0)
            total += value * tl.where(scale < float("inf"), scale, float("nan"))[:, None]
        else:
            total += value
    if shared_ptr is not None:
        owners = owner_ptr + payload // inner * owner_outer_stride
        owners += payload % inner * owner_inner_stride
        owner = tl.load(owners + g, mask=g < blocks, other=0)
        scale = tl.load(shared_ptr + owner)
        total *= tl.where(scale < float("inf"), scale, float("nan"))[:, None]
    if own_ptr is not None:
        own = own_ptr + payload // inner * own_outer_stride + payload % inner * own_inner_stride
        total += tl.load(own + at, mask=mask, other=0.0).to(tl.float32)
    y_at = y_ptr + start + at
    if ADD:
        total += tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=mask)


def pack(
    x: Tensor,
    payloads: Tensor,
    *,
    layout: Layout,
    shared: Shared | None = None,
    divide: bool = False,
    skip: int = -1,
) -> None:
    """Encode x [A, B, n], fp32 or BF16, into the contiguous `payloads` uint8 [A, B, bytes].

    The payloads of index a = `skip` are not needed: their contents are undefined, and their values
    do not count in `shared.amax`. x may be any view of a flat buffer whose rows are contiguous and
    start at multiples of 128 elements. Raises ValueError if shapes, strides or scales do not fit
    the layout.
    """
    check(x, payloads[None], layout, shared)
    if not x.numel():
        return
    if not x.is_cuda:
        pack_ref(x, payloads, layout, shared, divide, skip)
        return
    a, b, _ = x.shape
    _pack_kernel[(a * b * triton.cdiv(layout.blocks, ROWS),)](
        x,
        payloads.view(layout.fmt.dtype),
        _scales(payloads, layout),
        None if shared is None else shared.scale,
        None if shared is None else shared.owner,
        None if shared is None else shared.amax,
        layout.blocks,
        b,
        x.stride(0),
        x.stride(1),
        *_owner_strides(shared),
        layout.nbytes,
        skip,
        TOP=layout.fmt.max,
        LARGEST=LARGEST,
        DIVIDE=divide,
        ROWS=ROWS,
        num_warps=WARPS,
    )


def unpack(
    payloads: Tensor,
    y: Tensor,
    *,
    layout: Layout,
    shared: Shared | None = None,
    own: Own | None = None,
    add: bool = False,
) -> None:
    """Write the sum over R of the decoded `payloads` uint8 [R, A, B, bytes] to y [A, B, n].

    With `add` the sum is added to y. y is fp32 or BF16 and may be a view, as x of `pack` may.
    `own.values` are added last; they have the shape of y and may be y itself. Raises ValueError as
    `pack` does.
    """
    check(y, payloads, layout, shared)
    if own is not None:
        check(own.values, payloads, layout, shared)
    if not y.numel():
        return
    if not y.is_cuda:
        unpack_ref(payloads, y, layout, shared, own, add)
        return
    a, b, _ = y.shape
    mine = y if own is None else own.values
    _unpack_kernel[(a * b * triton.cdiv(layout.blocks, ROWS),)](
        payloads.view(layout.fmt.dtype),
        _scales(payloads, layout),
        None if shared is None else shared.scale,
        None if shared is None else shared.owner,
        None if own is None else mine,
        y,
        layout.blocks,
        b,
        y.stride(0),
        y.stride(1),
        mine.stride(0),
        mine.stride(1),
        *_owner_strides(shared),
        layout.nbytes,
        -1 if own is None else own.rank,
        a * b * layout.nbytes,
        SOURCES=len(payloads),
        ADD=add,
        ROWS=ROWS,
        num_warps=WARPS,
    )


def _owner_strides(shared: Shared | None) -> tuple[int, ...]:
    return (0, 0) if shared is None else shared.owner.stride()[:2]


def _scales(payloads: Tensor, layout: Layout) -> Tensor | None:
    """The buffer of payloads as fp32, from the scales of the first payload on."""
    if not layout.scaled:
        return None
    return payloads.view(-1)[layout.elements :].view(torch.float32)
