"""The parts of cuBLASLt that FP8 GEMMs need, through ctypes: one `Plan` for each kind of GEMM.

torch.nn.functional.scaled_mm cannot add to an existing matrix (a main gradient, the residual
stream), so cuBLASLt, which torch has loaded, is called directly. It is column-major: a row-major
[M, N] is its [N, M], and therefore `b` is its first operand.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORKSPACE = 32 * 2**20  # bytes for split sums; what NVIDIA recommends for Hopper

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
A_SCALE_MODE, B_SCALE_MODE = 31, 32
EPILOGUE_BIAS, MAX_WORKSPACE_BYTES = 4, 1


class ScaleMode(IntEnum):
    """cublasLtMatmulMatrixScale_t: which elements of an operand [rows, K] share a scale (fp32)."""

    TENSOR = 0
    ROW = 3
    BLOCK_1X128 = 4  # scales in memory: [K / 128, rows]
    BLOCK_128X128 = 5  # scales: [rows / 128, K / 128], with K / 128 padded to a multiple of 4


class Kind(NamedTuple):
    """The key of a plan: what distinguishes one GEMM a[M, K], b[N, K] -> a b^T from another."""

    m: int
    n: int
    k: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    a_scale: ScaleMode
    b_scale: ScaleMode
    fast: bool  # tensor cores keep about 14 bits of a sum between its steps
    bias: bool
    device: int

    @property
    def name(self) -> str:
        """All fields but `device`, as key=value separated by spaces."""
        values = self._asdict() | {"a_scale": self.a_scale.name, "b_scale": self.b_scale.name}
        return " ".join(f"{key}={values[key]}" for key in self._fields[:-1])


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; it begins with the algorithm."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )

    @property
    def name(self) -> str:
        """The algorithm in hexadecimal, which identifies it to one version of cuBLASLt."""
        return bytes(self.algo).hex()


_one, _zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
ONE, ZERO = ctypes.addressof(_one), ctypes.addressof(_zero)


@dataclass(eq=False)
class Plan:
    """One kind of GEMM: its descriptors, and the algorithm that runs it."""

    kind: Kind
    operation: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]  # b, a, out
    heuristic: Heuristic

    def run(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        out: Tensor,
        *,
        add: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """out = a b^T (+ bias) (+ add), on the current stream; `add` may be `out`."""
        self._point(A_SCALE_POINTER, b_scale)
        self._point(B_SCALE_POINTER, a_scale)
        if bias is not None:
            self._point(BIAS_POINTER, bias)
        device = self.kind.device
        stream = torch.cuda.current_stream(device).cuda_stream
        layout_b, layout_a, layout_out = self.layouts
        _call(
            "cublasLtMatmul",
            _handle(device),
            self.operation,
            ONE,
            b.data_ptr(),
            layout_b,
            a.data_ptr(),
            layout_a,
            ZERO if add is None else ONE,
            (out if add is None else add).data_ptr(),
            layout_out,
            out.data_ptr(),
            layout_out,
            ctypes.byref(self.heuristic),
            _workspace(device, stream).data_ptr(),
            WORKSPACE,
            stream,
        )

    def candidates(self, count: int) -> list[Heuristic]:
        """Up to `count` algorithms for this kind, cuBLASLt's best guess first."""
        return _heuristics(self.operation, self.layouts, self.kind, count)

    def _point(self, attribute: int, tensor: Tensor) -> None:
        pointer = ctypes.c_void_p(tensor.data_ptr())
        _call("cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.byref(pointer), 8)


def make_plan(kind: Kind) -> Plan:
    """Descriptors of `kind`, with the algorithm that cuBLASLt would choose.

    Raises RuntimeError where cuBLASLt has no algorithm for it.
    """
    operation = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(operation), COMPUTE_32F, CUDA_TYPES[torch.float])
    placeholder = ctypes.c_void_p(_workspace(kind.device, 0).data_ptr())  # `run` sets the pointers
    attributes: list[tuple[int, Any]] = [(TRANSA, ctypes.c_int32(TRANSPOSE))]
    attributes += [(FAST_ACCUM, ctypes.c_int8(kind.fast))]
    attributes += [(A_SCALE_POINTER, placeholder), (B_SCALE_POINTER, placeholder)]
    attributes += [(A_SCALE_MODE, ctypes.c_int32(kind.b_scale))]
    attributes += [(B_SCALE_MODE, ctypes.c_int32(kind.a_scale))]
    if kind.bias:
        attributes += [(EPILOGUE, ctypes.c_int32(EPILOGUE_BIAS))]
        attributes += [(BIAS_POINTER, placeholder)]
        attributes += [(BIAS_DATA_TYPE, ctypes.c_int32(CUDA_TYPES[torch.bfloat16]))]
    for attribute, value in attributes:
        size = ctypes.sizeof(value)
        _call("cublasLtMatmulDescSetAttribute", operation, attribute, ctypes.byref(value), size)
    m, n, k = kind.m, kind.n, kind.k
    layouts = (
        _layout(kind.b_dtype, k, n),
        _layout(kind.a_dtype, k, m),
        _layout(kind.out_dtype, n, m),
    )
    plan = Plan(kind, operation, layouts, _heuristics(operation, layouts, kind, 1)[0])
    weakref.finalize(plan, _destroy, operation, layouts).atexit = False
    return plan


def version() -> int:
    """The version of cuBLASLt, such as 120804."""
    return _library().cublasLtGetVersion()


def _destroy(operation: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...]) -> None:
    """Free the descriptors of a plan."""
    _call("cublasLtMatmulDescDestroy", operation)
    for layout in layouts:
        _call("cublasLtMatrixLayoutDestroy", layout)


@functools.cache
def _library() -> Any:
    """cuBLASLt as torch has loaded it, with the types of the calls above."""
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
    library.cublasLtMatrixLayoutDestroy.argtypes = [pointer]
    library.cublasLtMatmulDescCreate.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    library.cublasLtMatmulDescDestroy.argtypes = [pointer]
    library.cublasLtMatmulDescSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, size]
    library.cublasLtMatmulPreferenceSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, size]
    library.cublasLtMatmulPreferenceDestroy.argtypes = [pointer]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[pointer] * 7, ctypes.c_int, *[pointer] * 2]
    library.cublasLtMatmul.argtypes = [*[pointer] * 14, size, pointer]
    library.cublasLtGetVersion.restype = size
    library.cublasLtGetStatusName.argtypes = [ctypes.c_int]
    library.cublasLtGetStatusName.restype = ctypes.c_char_p
    return library


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
    """A workspace per stream, because GEMMs on two streams may overlap."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=f"cuda:{device}")


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    """A row-major [columns, rows] as cuBLASLt's column-major [rows, columns]."""
    layout = ctypes.c_void_p()
    kind = CUDA_TYPES[dtype]
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind, rows, columns, rows)
    return layout


def _heuristics(
    operation: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...], kind: Kind, count: int
) -> list[Heuristic]:
    """Up to `count` algorithms, the best guess first. RuntimeError where there is none."""
    preference, limit = ctypes.c_void_p(), ctypes.c_size_t(WORKSPACE)
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    _call(
        "cublasLtMatmulPreferenceSetAttribute",
        preference,
        MAX_WORKSPACE_BYTES,
        ctypes.byref(limit),
        ctypes.sizeof(limit),
    )
    results, returned = (Heuristic * count)(), ctypes.c_int()
    b, a, out = layouts
    try:
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            _handle(kind.device),
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
    except RuntimeError as error:
        raise RuntimeError(f"{error} for {kind}") from None
    finally:
        _call("cublasLtMatmulPreferenceDestroy", preference)
    if not returned.value:
        raise RuntimeError(f"cublasLtMatmulAlgoGetHeuristic: no algorithm for {kind}")
    return list(results)[: returned.value]
