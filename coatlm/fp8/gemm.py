"""FP8 matrix products: a[M, K] and b[N, K] -> a b^T [M, N], scales included.

Both operands are FP8 with the summed axis last, the one layout that Hopper's FP8 tensor cores take.
A scale is one number for the operand or one for each of its rows:

    out[i, j] = sa[i] sb[j] sum_k a[i, k] b[j, k]  (+ bias[j])  (+ add[i, j])

The sum is fp32 and is rounded to `out`'s dtype; where something BF16 is added, cuBLASLt may round
the product first. With `fast` the tensor core keeps about 14 bits between the steps of a sum
instead of adding every 128 products in fp32. That is faster; sums over 32768 correlated values came
out 0.4 % too small, with an error of 0.6 % of their norm where rounding the operands leaves 3.5 %.

torch.nn.functional.scaled_mm cannot add to a matrix that is there (a main gradient, the residual
stream), so cuBLASLt, which torch has loaded, is called directly. It is column-major: a row-major
[M, N] is its [N, M], so `b` is its first operand.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coatlm.fp8.formats import Fp8Format
from coatlm.fp8.qtensor import ROW, TENSOR, QTensor

WORKSPACE = 32 * 2**20  # bytes for split sums; what NVIDIA recommends for Hopper
CANDIDATES, REPEATS = 8, 8  # algorithms that `tune` times, and how often
ALIGNMENT = 16  # elements: K and N are multiples of it; bytes: pointers are, those to scales too

# cublasLt.h and library_types.h
CUDA_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
COMPUTE_32F, TRANSPOSE = 68, 1
TRANSA, EPILOGUE, BIAS_POINTER = 3, 7, 8
A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM, BIAS_DATA_TYPE = 17, 18, 25, 26
A_SCALE_MODE, B_SCALE_MODE, OUTER_VEC_32F = 31, 32, 3
EPILOGUE_BIAS, MAX_WORKSPACE_BYTES = 4, 1


def matmul_ref(
    a: QTensor,
    b: QTensor,
    *,
    out: Tensor | None = None,
    accumulate: bool = True,
    add: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The definition, and the CPU path; BF16 [M, N], or what `out` is then."""
    product = a.dequantize() @ b.dequantize().t()
    if bias is not None:
        product += bias.float()
    if add is not None:
        product += add.float()
    if out is None:
        return product.bfloat16()
    return out.copy_(out.float() + product if accumulate else product)


def matmul(
    a: QTensor,
    b: QTensor,
    *,
    out: Tensor | None = None,
    accumulate: bool = True,
    add: Tensor | None = None,
    bias: Tensor | None = None,
    fast: bool = True,
) -> Tensor:
    """a[M, K], b[N, K] -> a b^T in BF16 [M, N]; with `out` (BF16 or fp32) it is added to `out`.

    Without `accumulate` it is written over what `out` holds, which is not read. `add`: BF16 [M, N],
    added before the one rounding; not with `out`. `bias`: BF16 [N].
    Both scales are of TENSOR granularity (fp32 []), or both of ROW (fp32 [M, 1] and [N, 1]).
    Raises ValueError for other granularities, for shapes that do not fit, and on a GPU for K or N
    that is no multiple of 16, for scales whose address is none, and for two E5M2 operands.
    """
    _check(a, b, out, add)
    if not a.codes.is_cuda:
        return matmul_ref(a, b, out=out, accumulate=accumulate, add=add, bias=bias)
    (m, k), n = a.codes.shape, b.codes.shape[0]
    into = torch.empty(m, n, dtype=torch.bfloat16, device=a.codes.device) if out is None else out
    plan = _plan(
        m,
        n,
        k,
        a.codes.dtype,
        b.codes.dtype,
        into.dtype,
        a.granularity == ROW,
        fast,
        bias is not None,
        into.device.index,
    )
    plan.run(a, b, into, out if out is not None and accumulate else add, bias)
    return into


@functools.cache
def tune(
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
) -> None:
    """Time cuBLASLt's candidates for products with TENSOR scales of this kind; keep the fastest.

    Its first choice was up to 15 % slower than its best on H200. Takes a tenth of a second and
    the memory of the operands, once a process. The candidates sum in different orders, so results
    may differ in their last bits from one process to another.
    """
    plan = _plan(m, n, k, a_fmt.dtype, b_fmt.dtype, out_dtype, False, fast, False, device)
    scale = torch.ones((), device=f"cuda:{device}")
    a, b = (
        QTensor(fmt.encode(torch.randn(rows, k, device=scale.device)), scale, TENSOR, fmt)
        for rows, fmt in ((m, a_fmt), (n, b_fmt))
    )
    out = torch.zeros(m, n, dtype=out_dtype, device=scale.device)
    candidates = _heuristics(plan.operation, plan.layouts, device, CANDIDATES)
    times = []
    for candidate in candidates:
        plan.heuristic = candidate
        times.append(_milliseconds(lambda: plan.run(a, b, out, out if accumulate else None, None)))
    plan.heuristic = candidates[times.index(min(times))]


def _milliseconds(work: Callable[[], None]) -> float:
    """Median time of `work` on the GPU."""
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    for mark in marks[:-1]:
        mark.record()
        work()
    marks[-1].record()
    marks[-1].synchronize()
    pairs = itertools.pairwise(marks)
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def _check(a: QTensor, b: QTensor, out: Tensor | None, add: Tensor | None) -> None:
    """Raise ValueError for what `matmul` cannot do."""
    if a.codes.dim() != 2 or b.codes.dim() != 2 or a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(f"shapes {list(a.shape)} and {list(b.shape)}: [M, K] and [N, K] needed")
    if a.granularity != b.granularity or a.granularity not in (ROW, TENSOR):
        raise ValueError(f"scales are {a.granularity} and {b.granularity}: both TENSOR or both ROW")
    if out is not None and add is not None:
        raise ValueError("add: with `out` the product is added to `out`, and nothing else")
    if not a.codes.is_cuda:
        return
    if a.codes.shape[1] % ALIGNMENT or b.codes.shape[0] % ALIGNMENT:
        raise ValueError(f"shapes {list(a.shape)}, {list(b.shape)}: K and N are multiples of 16")
    if a.scale.data_ptr() % ALIGNMENT or b.scale.data_ptr() % ALIGNMENT:
        raise ValueError("scales: at addresses that are multiples of 16 bytes")
    if a.codes.dtype == b.codes.dtype == torch.float8_e5m2:
        raise ValueError("two E5M2 operands: tensor cores take at most one")


@functools.cache
def _library() -> Any:
    """cuBLASLt as torch has loaded it, with the types of the calls below."""
    assert torch.version.cuda is not None
    library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cublasLtMatrixLayoutCreate.argtypes = [
        pointer,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int64,
    ]
    library.cublasLtMatmulDescCreate.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    library.cublasLtMatmulDescSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, size]
    library.cublasLtMatmulPreferenceSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, size]
    library.cublasLtMatmulPreferenceDestroy.argtypes = [pointer]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[pointer] * 7, ctypes.c_int, *[pointer] * 2]
    library.cublasLtMatmul.argtypes = [*[pointer] * 14, size, pointer]
    library.cublasLtGetStatusName.argtypes = [ctypes.c_int]
    library.cublasLtGetStatusName.restype = ctypes.c_char_p
    return library


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def _call(name: str, *args: Any) -> None:
    """Call into cuBLASLt. Raises RuntimeError with its reason."""
    status = getattr(_library(), name)(*args)
    if status:
        reason = _library().cublasLtGetStatusName(status).decode()
        raise RuntimeError(f"{name}: {reason}")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@functools.cache
def _workspace(device: int, stream: int) -> Tensor:
    """One a stream: products on two streams may overlap."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=f"cuda:{device}")


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    """A row-major [columns, rows] as cuBLASLt's column-major [rows, columns]."""
    layout = ctypes.c_void_p()
    kind = CUDA_TYPES[dtype]
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind, rows, columns, rows)
    return layout


@dataclass(eq=False)
class _Plan:
    """One kind of product: descriptors that last, and the algorithm cuBLASLt prefers for it."""

    operation: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]  # b, a, out
    heuristic: _Heuristic  # begins with the algorithm
    device: int

    def run(
        self, a: QTensor, b: QTensor, out: Tensor, add: Tensor | None, bias: Tensor | None
    ) -> None:
        self._point(A_SCALE_POINTER, b.scale)
        self._point(B_SCALE_POINTER, a.scale)
        if bias is not None:
            self._point(BIAS_POINTER, bias)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        layout_b, layout_a, layout_out = self.layouts
        _call(
            "cublasLtMatmul",
            _handle(self.device),
            self.operation,
            ONE,
            b.codes.data_ptr(),
            layout_b,
            a.codes.data_ptr(),
            layout_a,
            ZERO if add is None else ONE,
            (out if add is None else add).data_ptr(),
            layout_out,
            out.data_ptr(),
            layout_out,
            ctypes.byref(self.heuristic),
            _workspace(self.device, stream).data_ptr(),
            WORKSPACE,
            stream,
        )

    def _point(self, attribute: int, tensor: Tensor) -> None:
        pointer = ctypes.c_void_p(tensor.data_ptr())
        _call("cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.byref(pointer), 8)


_one, _zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
ONE, ZERO = ctypes.addressof(_one), ctypes.addressof(_zero)


@functools.cache
def _plan(
    m: int,
    n: int,
    k: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    out_dtype: torch.dtype,
    rows: bool,
    fast: bool,
    bias: bool,
    device: int,
) -> _Plan:
    operation = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(operation), COMPUTE_32F, CUDA_TYPES[torch.float])
    somewhere = ctypes.c_void_p(_workspace(device, 0).data_ptr())  # `run` gives the real ones
    attributes: list[tuple[int, Any]] = [(TRANSA, ctypes.c_int32(TRANSPOSE))]
    attributes += [(FAST_ACCUM, ctypes.c_int8(fast))]
    attributes += [(A_SCALE_POINTER, somewhere), (B_SCALE_POINTER, somewhere)]
    if rows:
        attributes += [(A_SCALE_MODE, ctypes.c_int32(OUTER_VEC_32F))]
        attributes += [(B_SCALE_MODE, ctypes.c_int32(OUTER_VEC_32F))]
    if bias:
        attributes += [(EPILOGUE, ctypes.c_int32(EPILOGUE_BIAS))]
        attributes += [(BIAS_POINTER, somewhere)]
        attributes += [(BIAS_DATA_TYPE, ctypes.c_int32(CUDA_TYPES[torch.bfloat16]))]
    for attribute, value in attributes:
        size = ctypes.sizeof(value)
        _call("cublasLtMatmulDescSetAttribute", operation, attribute, ctypes.byref(value), size)
    layouts = (_layout(b_dtype, k, n), _layout(a_dtype, k, m), _layout(out_dtype, n, m))
    return _Plan(operation, layouts, _heuristics(operation, layouts, device, 1)[0], device)


def _heuristics(
    operation: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...], device: int, count: int
) -> list[_Heuristic]:
    """Up to `count` algorithms, cuBLASLt's best guess first. RuntimeError where it knows none."""
    preference, limit = ctypes.c_void_p(), ctypes.c_size_t(WORKSPACE)
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    _call(
        "cublasLtMatmulPreferenceSetAttribute",
        preference,
        MAX_WORKSPACE_BYTES,
        ctypes.byref(limit),
        ctypes.sizeof(limit),
    )
    results, returned = (_Heuristic * count)(), ctypes.c_int()
    b, a, out = layouts
    _call(
        "cublasLtMatmulAlgoGetHeuristic",
        _handle(device),
        operation,
        b,
        a,
        out,
        out,
        preference,
        count,
        ctypes.byref(results),
        ctypes.byref(returned),
    )
    _call("cublasLtMatmulPreferenceDestroy", preference)
    if not returned.value:
        raise RuntimeError("cublasLtMatmulAlgoGetHeuristic: no algorithm for this product")
    return list(results)[: returned.value]
