"""FP8 GEMMs: a[M, K] and b[N, K] -> a b^T [M, N], scales included.

Both operands are FP8 with the summed axis last, the one layout that Hopper's FP8 tensor cores take:

    out[i, j] = sum_k sa[i, k] a[i, k] sb[j, k] b[j, k]  (+ bias[j])  (+ add[i, j])

Granularities of the scales, of `a` and of `b`:

    TENSOR x TENSOR     one scale per operand
    ROW x ROW           one scale per row of each operand
    ROW x TENSOR        a scale per row of one, one scale for the other; and TENSOR x ROW
    block(1, 128) x block(1, 128), block(1, 128) x block(128, 128), block(128, 128) x block(1, 128)

Two INT8 operands with scales per row have GEMMs of their own, with exact sums (int8_gemm.py).

The sum is fp32 and is rounded to `out`'s dtype; where something BF16 is added, cuBLASLt may round
the sum first. With `fast` the tensor core keeps about 14 bits between the steps of a sum instead of
adding every 128 terms in fp32. That is faster, and truncates what it adds: a sum of many terms of
one sign comes out short, weight gradients at the start of training by up to 11 % for 8192 tokens
and 42 % for 131,072 (docs/results/layer.md). Blocks of 128 are always added in fp32, because each
has a scale of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from coatlm.fp8 import cublaslt, int8_gemm
from coatlm.fp8.cublaslt import Heuristic, Kind, Plan, ScaleMode
from coatlm.fp8.formats import ALIGNMENT, Fp8Format, RotatedInt8
from coatlm.fp8.qtensor import ROW, TENSOR, Granularity, QTensor
from coatlm.fp8.timed_choices import milliseconds

CANDIDATES = 8  # algorithms that `tune` times
ROW_BLOCK, SQUARE_BLOCK = Granularity(1, 128), Granularity(128, 128)
SCALE_MODES = {
    TENSOR: ScaleMode.TENSOR,
    ROW: ScaleMode.ROW,
    ROW_BLOCK: ScaleMode.BLOCK_1X128,
    SQUARE_BLOCK: ScaleMode.BLOCK_128X128,
}
PAIRS = (
    (TENSOR, TENSOR),
    (ROW, ROW),
    (ROW, TENSOR),
    (TENSOR, ROW),
    (ROW_BLOCK, ROW_BLOCK),
    (ROW_BLOCK, SQUARE_BLOCK),
    (SQUARE_BLOCK, ROW_BLOCK),
)


first_guess = functools.cache(cublaslt.make_plan)


class Plans:
    """cuBLASLt's plans for the GEMMs of one model: those that `tune` chose, else its first guess.

    Without a GPU nothing is planned.
    """

    def __init__(self) -> None:
        self._plans: dict[Kind, Plan] = {}
        self._tuned: dict[Kind, str] = {}  # the names of the algorithms

    def plan(self, kind: Kind) -> Plan:
        """The plan of a kind of GEMM, created at its first use."""
        if kind not in self._plans:
            self._plans[kind] = cublaslt.make_plan(kind)
        return self._plans[kind]

    def tune(
        self,
        m: int,
        n: int,
        k: int,
        *,
        a_fmt: Fp8Format,
        b_fmt: Fp8Format,
        out_dtype: torch.dtype,
        fast: bool,
        accumulate: bool,
        device: int,
        choices: dict[str, str] | None = None,
    ) -> None:
        """Time cuBLASLt's candidates for a[m, k] b[n, k]^T with TENSOR scales; use the fastest.

        cuBLASLt's first guess was up to 15 % slower than its best on H200. Takes a tenth of a
        second and the memory of the operands, once per kind. The candidates sum in different
        orders, so results may differ in their last bits from one process to another, unless they
        share `choices`: an algorithm that it names for this kind of GEMM is used without timing,
        else the fastest is added to it.
        """
        tensor = ScaleMode.TENSOR
        kind = Kind(
            m, n, k, a_fmt.dtype, b_fmt.dtype, out_dtype, tensor, tensor, fast, False, device
        )
        choices = {} if choices is None else choices
        used = self._tuned.get(kind)
        if used is not None and choices.setdefault(kind.name, used) == used:
            return
        plan = self.plan(kind)
        candidates = {candidate.name: candidate for candidate in plan.candidates(CANDIDATES)}
        if choices.get(kind.name) not in candidates:
            times = _times(plan, candidates, a_fmt, b_fmt, accumulate=accumulate)
            choices[kind.name] = min(times, key=times.__getitem__)
        self._tuned[kind] = choices[kind.name]
        plan.heuristic = candidates[choices[kind.name]]


def padded_rows(m: int, block: int = 1) -> int:
    """m rounded up to a summed axis that GEMMs take: whole blocks, and a multiple of 16."""
    multiple = max(ALIGNMENT, block)
    return -(-m // multiple) * multiple


def matmul_ref(
    a: QTensor,
    b: QTensor,
    *,
    out: Tensor | None = None,
    accumulate: bool = True,
    add: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The definition, and the CPU path; BF16 [M, N], or `out` in its own dtype."""
    result = a.dequantize() @ b.dequantize().t()
    return _finished(result, out=out, accumulate=accumulate, add=add, bias=bias)


def matmul_bf16(
    a: QTensor | Tensor,
    b: QTensor | Tensor,
    *,
    out: Tensor | None = None,
    accumulate: bool = True,
    add: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`matmul` in BF16, for operands of which one or both are BF16; FP8 ones are dequantized first.

    Products are exact and sums are fp32, as everything is that is added to them. Scales have to be
    powers of two: then BF16 represents the dequantized operands exactly, except below 2^-133.
    For studies, and for few operands (precision.guard): it allocates its operands in BF16 and its
    result in fp32.
    """
    one, other = (x.dequantize(torch.bfloat16) if isinstance(x, QTensor) else x for x in (a, b))
    if one.is_cuda:
        result = torch.mm(one, other.t(), out_dtype=torch.float32)
    else:
        result = one.float() @ other.float().t()
    return _finished(result, out=out, accumulate=accumulate, add=add, bias=bias)


def _finished(
    result: Tensor,
    *,
    out: Tensor | None,
    accumulate: bool,
    add: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """An fp32 sum with all that is added to it, rounded once."""
    if bias is not None:
        result += bias.float()
    if add is not None:
        result += add.float()
    if out is None:
        return result.bfloat16()
    return out.copy_(out.float() + result if accumulate else result)


def matmul(
    a: QTensor,
    b: QTensor,
    *,
    out: Tensor | None = None,
    accumulate: bool = True,
    add: Tensor | None = None,
    bias: Tensor | None = None,
    fast: bool = True,
    plans: Plans | None = None,
) -> Tensor:
    """a[M, K], b[N, K] -> a b^T in BF16 [M, N]; with `out` (BF16 or fp32) it is added to `out`.

    Without `accumulate` the result overwrites `out`, which is not read. `add`: BF16 [M, N], added
    before the one rounding; not with `out`. `bias`: BF16 [N]. `plans`: those of the model,
    else cuBLASLt's first guess. Scales are fp32, of one of the pairs of granularities that the
    module's docstring lists. Blocks ignore `fast`, INT8 ignores it and `plans`.
    Raises ValueError for other granularities and for shapes that do not fit; on a GPU also for K, N
    or an address of scales that is no multiple of 16, for an operand with 1 x 128 blocks whose
    number of rows is no multiple of 4, and for two E5M2 operands.
    """
    _check(a, b, out, add)
    added = out if out is not None and accumulate else add
    if isinstance(a.fmt, RotatedInt8):
        return int8_gemm.matmul(a, b, out=out, add=added, bias=bias)
    if a.granularity != b.granularity and TENSOR in (a.granularity, b.granularity):
        a, b = _scaled_by_rows(a), _scaled_by_rows(b)
    if not a.codes.is_cuda:
        return matmul_ref(a, b, out=out, accumulate=accumulate, add=add, bias=bias)
    (m, k), n = a.codes.shape, b.codes.shape[0]
    into = torch.empty(m, n, dtype=torch.bfloat16, device=a.codes.device) if out is None else out
    blocks = a.granularity.columns is not None
    kind = Kind(
        m,
        n,
        k,
        a.codes.dtype,
        b.codes.dtype,
        into.dtype,
        SCALE_MODES[a.granularity],
        SCALE_MODES[b.granularity],
        fast and not blocks,
        bias is not None,
        into.device.index,
    )
    plan = first_guess(kind) if plans is None else plans.plan(kind)
    plan.run(
        a.codes,
        b.codes,
        scales_in_order(a),
        scales_in_order(b),
        into,
        add=added,
        bias=bias,
    )
    return into


def _scaled_by_rows(x: QTensor) -> QTensor:
    """x[M, K] with a scale per row, which cuBLASLt takes of both operands or of none."""
    if x.granularity == ROW:
        return x
    scale = x.scale.expand(x.codes.shape[0], 1).contiguous()
    return QTensor(x.codes, scale, ROW, x.fmt)


def scales_in_order(x: QTensor) -> Tensor:
    """The scales of x[M, K] in the order in which cuBLASLt reads them; a copy only if needed.

    1 x 128 blocks: memory [K / 128, M]. 128 x 128 blocks: memory [M / 128, K / 128], rows padded to
    a multiple of 4. Other scales are returned as they are.
    """
    scale = x.scale
    if x.granularity == ROW_BLOCK:
        return scale.t().contiguous().t()
    if x.granularity == SQUARE_BLOCK:
        length = -(-scale.shape[1] // 4) * 4
        if scale.stride() != (length, 1):
            scale = F.pad(scale, (0, length - scale.shape[1]))
    return scale


def _times(
    plan: Plan,
    candidates: Mapping[str, Heuristic],
    a_fmt: Fp8Format,
    b_fmt: Fp8Format,
    *,
    accumulate: bool,
) -> dict[str, float]:
    """The milliseconds that each of the algorithms takes for random operands."""
    kind = plan.kind
    scale = torch.ones((), device=f"cuda:{kind.device}")
    a, b = (
        fmt.encode(torch.randn(rows, kind.k, device=scale.device))
        for rows, fmt in ((kind.m, a_fmt), (kind.n, b_fmt))
    )
    out = torch.zeros(kind.m, kind.n, dtype=kind.out_dtype, device=scale.device)
    add = out if accumulate else None
    times = {}
    for name, candidate in candidates.items():
        plan.heuristic = candidate
        times[name] = milliseconds(lambda: plan.run(a, b, scale, scale, out, add=add))
    return times


def _name(granularity: Granularity) -> str:
    """The granularity as the module's docstring writes it."""
    if granularity.columns is None:
        return "TENSOR" if granularity.rows is None else "ROW"
    return f"block({granularity.rows}, {granularity.columns})"


def _check(a: QTensor, b: QTensor, out: Tensor | None, add: Tensor | None) -> None:
    """Raise ValueError for what `matmul` cannot do."""
    if a.codes.dim() != 2 or b.codes.dim() != 2 or a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(f"shapes {list(a.shape)} and {list(b.shape)}: [M, K] and [N, K] needed")
    if (a.granularity, b.granularity) not in PAIRS:
        pairs = ", ".join(f"{_name(x)} and {_name(y)}" for x, y in PAIRS)
        raise ValueError(
            f"scales are {_name(a.granularity)} and {_name(b.granularity)}: must be {pairs}"
        )
    if out is not None and add is not None:
        raise ValueError("add: with `out` the GEMM is added to `out`, and nothing else")
    integers = isinstance(a.fmt, RotatedInt8) or isinstance(b.fmt, RotatedInt8)
    if integers and (a.fmt != b.fmt or (out is not None and out.dtype != torch.bfloat16)):
        raise ValueError(
            f"operands are {a.fmt.name} and {b.fmt.name}: INT8 takes two INT8 operands with "
            "scales per row, and torch.bfloat16 for `out`"
        )
    if not a.codes.is_cuda:
        return
    if a.codes.shape[1] % ALIGNMENT or b.codes.shape[0] % ALIGNMENT:
        raise ValueError(f"shapes {list(a.shape)}, {list(b.shape)}: K and N are multiples of 16")
    if integers:
        return
    if a.scale.data_ptr() % ALIGNMENT or b.scale.data_ptr() % ALIGNMENT:
        raise ValueError("scales: at addresses that are multiples of 16 bytes")
    for x in (a, b):
        if x.granularity == ROW_BLOCK and x.codes.shape[0] % 4:
            raise ValueError(f"shape {list(x.shape)}: 1 x 128 blocks need a multiple of 4 rows")
    if a.codes.dtype == b.codes.dtype == torch.float8_e5m2:
        raise ValueError("two E5M2 operands: tensor cores take at most one")
