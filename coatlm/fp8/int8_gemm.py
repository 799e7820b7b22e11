"""GEMMs of rotated INT8 operands (int8.py): a b^T [i, j] = Sa[i] Sb[j] sum_k a[i, k] b[j, k].

The products are summed in int32, exactly, so there is no fast accumulation, and no order of a sum
changes it. Hopper's tensor cores multiply INT8 at the rate of FP8. Sums fit as long as K <= 2^31 /
127^2. `matmul_ref` is the definition.

A program stays on its SM and computes every p-th tile of the result, if there are p programs, in an
order in which eight rows of tiles are computed together. It has three parts that run at the same
time, each with its own warps:

    producer     one warp: TMA loads of 128 columns of a and b (a step) into a ring of six stages
    consumers    two warpgroups that take tiles in turn: while one multiplies, the other scales the
                 sums of its tile, rounds them to BF16 and stores them by TMA through a buffer

They meet at barriers in shared memory:

    full[s]     completed by the bytes of the two loads into stage s, in or out of bounds
    empty[s]    by an arrival of the consumer once its tensor cores have read stage s
    turn[c]     by an arrival of the other consumer once it has issued its last product

Step g of a program, counted over all of its tiles, has stage g % 6 and the phase of parity
g // 6 % 2. Producer and consumers count on their own and agree, because M, N, K and the
program determine its tiles and their steps.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from coatlm.fp8.int8 import LONGEST_SUM
from coatlm.fp8.qtensor import ROW, QTensor
from coatlm.kernels.norm import processors

BM, BN, BK = 128, 128, 128  # a tile of the result, and what a step adds to its sums
STAGES = 6
PART = 64  # columns of a tile that are stored together
GROUP = 8  # rows of tiles that are computed together, so that programs share operands in L2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # per thread


def matmul_ref(
    a: QTensor, b: QTensor, *, add: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The definition, and the CPU path: BF16 [M, N]. fp64 holds the sums of products exactly."""
    sums = a.codes.double() @ b.codes.double().t()
    result = sums.float() * a.scale * b.scale.t()
    for term in (bias, add):
        if term is not None:
            result += term.float()
    return result.bfloat16()


@gluon.jit
def _place(tile, down, across, GROUP: gl.constexpr):
    """Row and column of a tile: GROUP rows of tiles at a time, column by column."""
    first = tile // (GROUP * across) * GROUP
    height = gl.minimum(down - first, GROUP)
    within = tile % (GROUP * across)
    return first + within % height, within // height


@gluon.jit
def _produce(
    a_desc, b_desc, a_ring, b_ring, full, empty, down, across, steps, GROUP: gl.constexpr
):  # fmt: skip
    """Load the operands of all steps, each as soon as its stage is empty."""
    STAGES: gl.constexpr = a_ring.shape[0]
    BM: gl.constexpr = a_ring.shape[1]
    BN: gl.constexpr = b_ring.shape[1]
    BK: gl.constexpr = b_ring.shape[2]
    stage = gl.to_tensor(0)
    parity = gl.to_tensor(1)  # that of the phase before the first: all stages are empty
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        row, column = _place(tile, down, across, GROUP)
        for k in range(steps):
            hopper.mbarrier.wait(empty.index(stage), parity)
            ready = full.index(stage)
            hopper.mbarrier.expect(ready, (BM + BN) * BK)
            hopper.tma.async_copy_global_to_shared(
                a_desc, [row * BM, k * BK], ready, a_ring.index(stage)
            )
            hopper.tma.async_copy_global_to_shared(
                b_desc, [column * BN, k * BK], ready, b_ring.index(stage)
            )
            last = stage == STAGES - 1
            stage = gl.where(last, 0, stage + 1)
            parity = gl.where(last, parity ^ 1, parity)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    """The stage of the step before. (A variable of the loop that holds it is taken for a constant
    by Triton 3.6 and 3.7, because it starts with the value of `stage`.)"""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _columns(x, PARTS: gl.constexpr):
    """x in PARTS parts of its columns, from left to right. No data moves between threads."""
    if PARTS == 1:
        return (x,)
    else:
        halves = x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()
        return _columns(halves[0], PARTS // 2) + _columns(halves[1], PARTS // 2)


@gluon.jit
def _consume(
    out_desc,
    add_ptr,  # BF16 [M, N] with rows `add_stride` apart, or None
    add_stride,
    bias_ptr,  # BF16 [N], or None
    a_scale_ptr,
    b_scale_ptr,
    a_ring,
    b_ring,
    buffers,
    full,
    empty,
    turn,
    down,
    across,
    steps,
    M,
    N,
    CONSUMER: gl.constexpr,  # 0 or 1
    GROUP: gl.constexpr,
):
    """Compute every second tile of the program."""
    STAGES: gl.constexpr = a_ring.shape[0]
    BM: gl.constexpr = a_ring.shape[1]
    BN: gl.constexpr = b_ring.shape[1]
    PART: gl.constexpr = buffers.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    programs = gl.num_programs(0)
    buffer = buffers.index(CONSUMER)
    stage = CONSUMER * steps % STAGES
    parity = CONSUMER * steps // STAGES & 1
    turn_parity = gl.to_tensor(1 - CONSUMER)  # consumer 0 begins
    first = gl.program_id(0) + CONSUMER * programs
    for tile in range(first, down * across, 2 * programs):
        row, column = _place(tile, down, across, GROUP)
        rows = row * BM + gl.arange(0, BM, gl.SliceLayout(1, OUT))
        a_scale = gl.load(a_scale_ptr + rows, mask=rows < M, other=0.0)
        sums = gl.full([BM, BN], 0, gl.int32, SUMS)
        hopper.mbarrier.wait(turn.index(CONSUMER), turn_parity)
        turn_parity = turn_parity ^ 1
        for k in range(steps):
            hopper.mbarrier.wait(full.index(stage), parity)
            sums = hopper.warpgroup_mma(
                a_ring.index(stage), b_ring.index(stage).permute((1, 0)), sums, is_async=True
            )
            sums = hopper.warpgroup_mma_wait(1, (sums,))
            hopper.mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=k > 0)
            last = stage == STAGES - 1
            stage = gl.where(last, 0, stage + 1)
            parity = gl.where(last, parity ^ 1, parity)
        hopper.mbarrier.arrive(turn.index(1 - CONSUMER))
        sums = hopper.warpgroup_mma_wait(0, (sums,))
        hopper.mbarrier.arrive(empty.index(_before(stage, STAGES)))
        ahead = stage + steps  # past the tile of the other consumer
        stage = ahead % STAGES
        parity = parity ^ (ahead // STAGES & 1)

        parts = _columns(sums, BN // PART)
        for part in gl.static_range(BN // PART):
            columns = column * BN + part * PART + gl.arange(0, PART, gl.SliceLayout(0, OUT))
            b_scale = gl.load(b_scale_ptr + columns, mask=columns < N, other=0.0)
            y = gl.convert_layout(parts[part], OUT, assert_trivial=True).to(gl.float32)
            y = y * a_scale[:, None] * b_scale[None, :]
            if bias_ptr is not None:
                bias = gl.load(bias_ptr + columns, mask=columns < N, other=0.0)
                y = y + bias.to(gl.float32)[None, :]
            if add_ptr is not None:
                at = (rows.to(gl.int64) * add_stride)[:, None] + columns[None, :]
                some = (rows < M)[:, None] & (columns < N)[None, :]
                y = y + gl.load(add_ptr + at, mask=some, other=0.0).to(gl.float32)
            hopper.tma.store_wait(0)  # of the part before
            buffer.store(y.to(gl.bfloat16))
            hopper.fence_async_shared()
            hopper.tma.async_copy_shared_to_global(
                out_desc, [row * BM, column * BN + part * PART], buffer
            )
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "K"])
def _matmul_kernel(
    a_desc,
    b_desc,
    out_desc,
    add_ptr,
    add_stride,
    bias_ptr,
    a_scale_ptr,
    b_scale_ptr,
    M,
    N,
    K,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Set up what the three parts share, and run them."""
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BN: gl.constexpr = b_desc.block_type.shape[0]
    BK: gl.constexpr = b_desc.block_type.shape[1]
    PART: gl.constexpr = out_desc.block_type.shape[1]
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    a_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BM, BK], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BN, BK], b_desc.layout)
    buffers = gl.allocate_shared_memory(gl.bfloat16, [2, BM, PART], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for s in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(s), count=1)
        hopper.mbarrier.init(empty.index(s), count=1)
    for c in gl.static_range(2):
        hopper.mbarrier.init(turn.index(c), count=1)
    hopper.fence_async_shared()
    down, across, steps = gl.cdiv(M, BM), gl.cdiv(N, BN), gl.cdiv(K, BK)
    # Variables that hold these tuples would turn their constants into tensors.
    # fmt: off
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc, add_ptr, add_stride, bias_ptr, a_scale_ptr, b_scale_ptr, a_ring,
                    b_ring, buffers, full, empty, turn, down, across, steps, M, N,
                    gl.constexpr(0), GROUP,
                ),
            ),
            (
                _consume,
                (
                    out_desc, add_ptr, add_stride, bias_ptr, a_scale_ptr, b_scale_ptr, a_ring,
                    b_ring, buffers, full, empty, turn, down, across, steps, M, N,
                    gl.constexpr(1), GROUP,
                ),
            ),
            (
                _produce,
                (a_desc, b_desc, a_ring, b_ring, full, empty, down, across, steps, GROUP),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on


def matmul(
    a: QTensor,
    b: QTensor,
    *,
    out: Tensor | None = None,
    add: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """a[M, K], b[N, K], both INT8 with scales per row -> a b^T in BF16 [M, N], in `out` if given.

    `add`: BF16 [M, N], `bias`: BF16 [N], added before the one rounding; `add` may be `out`. Sums
    are exact. On a GPU K and N are multiples of 16. Raises ValueError for other scales, for K of
    more than 133144, and for `out`, `add` or `bias` of other shapes or strides.
    """
    _check(a, b, {"out": out, "add": add}, bias)
    if not a.codes.is_cuda:
        result = matmul_ref(a, b, add=add, bias=bias)
        return result if out is None else out.copy_(result)
    shape = a.codes.shape[0], b.codes.shape[0]
    into = torch.empty(shape, dtype=torch.bfloat16, device=a.codes.device) if out is None else out
    if into.numel():
        _multiply(a, b, into, add, bias, processors(into.device))
    return into


def _check(a: QTensor, b: QTensor, results: dict[str, Tensor | None], bias: Tensor | None) -> None:
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if {a.granularity, b.granularity} != {ROW}:
        raise ValueError(f"scales are {a.granularity} and {b.granularity}: INT8 has one per row")
    if k > LONGEST_SUM:
        raise ValueError(f"rows of {k}: an int32 holds sums of {LONGEST_SUM} products")
    for name, x in results.items():
        if x is not None and (x.shape != (m, n) or x.stride(1) != 1):
            raise ValueError(
                f"{name} is {list(x.shape)} with strides {x.stride()}: must be [{m}, {n}] with "
                "columns next to each other"
            )
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {list(bias.shape)} {bias.stride()}: must be [{n}], contiguous")


@functools.cache
def _layouts() -> list[gl.NVMMASharedLayout]:
    """Those of a tile of a, of b, and of a part of the result in shared memory."""
    tiles = ((BM, BK, gl.int8), (BN, BK, gl.int8), (BM, PART, gl.bfloat16))
    return [gl.NVMMASharedLayout.get_default_for([m, n], dtype) for m, n, dtype in tiles]


def _multiply(
    a: QTensor, b: QTensor, into: Tensor, add: Tensor | None, bias: Tensor | None, most: int
) -> None:
    """Launch at most `most` programs."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    layouts = _layouts()
    _matmul_kernel[(min(triton.cdiv(m, BM) * triton.cdiv(n, BN), most),)](
        TensorDescriptor.from_tensor(a.codes, [BM, BK], layouts[0]),
        TensorDescriptor.from_tensor(b.codes, [BN, BK], layouts[1]),
        TensorDescriptor.from_tensor(into, [BM, PART], layouts[2]),
        add,
        0 if add is None else add.stride(0),
        bias,
        a.scale,
        b.scale,
        m,
        n,
        k,
        STAGES=STAGES,
        GROUP=GROUP,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
    )
