"""Run Gluon kernels on CPU tensors, one program after the other, with NumPy in place of a GPU.

Triton's interpreter does not take Gluon. What the kernels of coatlm/fp8 use is simulated:
arithmetic in fp32, casts to FP8 (which saturate, as those of sm_90 do), masks and addresses, and
the barriers and shared memory of warp-specialized kernels (hopper_on_cpu.py). Layouts are not, nor
does it find layouts that do not fit together: compiling for sm_90 does (sm90.py).

    with simulated(emit, tiles, loaders):  # every module that has code of the kernels
        launch_emit(...)  # with CPU tensors
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from tests.fp8 import hopper_on_cpu

BF16 = object()  # the type, of numbers that are held in fp32
FP8 = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}
FP8_OF_TRITON = {fmt.triton_dtype: fmt for fmt in (E4M3, E5M2)}


class Tile(np.ndarray):
    """A tensor of a kernel; `fmt` is set where the bytes are FP8 codes."""

    fmt: Fp8Format | None = None
    type = SimpleNamespace(layout=None)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array).view(Tile)

    def permute(self, *order: int) -> Tile:
        """Triton's name of `transpose`."""
        return tile(np.transpose(self, order))

    def split(self) -> tuple[Tile, Tile]:
        """The two elements of the last axis."""
        return tile(self[..., 0]), tile(self[..., 1])

    def __neg__(self) -> Tile:
        """Triton's: 0 - x, so that a zero does not become a negative one."""
        return np.subtract(np.zeros((), self.dtype), self)

    def to(self, dtype: Any, bitcast: bool = False) -> Tile:
        """Triton's `to`: a cast, or other bits of the same size."""
        if bitcast:
            return tile(np.array(self).view(dtype))
        if dtype is BF16:
            return tile(torch.from_numpy(np.array(self, np.float32)).bfloat16().float().numpy())
        if dtype in FP8_OF_TRITON:
            fmt = FP8_OF_TRITON[dtype]
            values = torch.from_numpy(np.array(self, dtype=np.float32))
            codes = values.clamp(-fmt.max, fmt.max).to(fmt.dtype)  # NaN stays
            made = tile(codes.view(torch.uint8).numpy())
            made.fmt = fmt
            return made
        if self.fmt is not None:
            codes = torch.from_numpy(np.array(self)).view(self.fmt.dtype)
            return tile(codes.float().numpy())
        return tile(np.array(self).astype(dtype))


def tile(x: Any) -> Tile:
    return np.asarray(x).view(Tile)


class Pointer:
    """Elements of a CPU tensor."""

    def __init__(self, tensor: Tensor, at: Any = 0) -> None:
        self.tensor, self.at, self.fmt = tensor, at, FP8.get(tensor.dtype)
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        self.widened = flat.float().numpy() if tensor.dtype == torch.bfloat16 else None
        self.flat = (flat.view(torch.uint8) if self.fmt else flat) if self.widened is None else None
        kind: Any = {torch.uint8: np.uint8, torch.float32: np.float32}.get(tensor.dtype)
        kind = self.fmt.triton_dtype if self.fmt else kind
        self.dtype = SimpleNamespace(element_ty=kind)

    def __add__(self, more: Any) -> Pointer:
        other = object.__new__(Pointer)
        other.__dict__ = self.__dict__ | {"at": self.at + more}
        return other

    def place(self, mask: Any, like: Any = 0) -> tuple[Any, Any]:
        at = np.asarray(self.at + self.tensor.storage_offset())
        at, some, _ = np.broadcast_arrays(at, True if mask is None else mask, like)
        return np.where(some, at, 0), some


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tile:
    at, some = pointer.place(mask)
    source = pointer.widened if pointer.flat is None else pointer.flat.numpy()
    assert (at[some] < len(source)).all() and (at[some] >= 0).all(), "a load out of bounds"
    made = tile(np.where(some, source[at], np.asarray(other).astype(source.dtype)))
    made.fmt = pointer.fmt
    return made


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, some = pointer.place(mask, value)
    assert pointer.flat is not None
    target = pointer.flat.numpy()
    assert (at[some] < len(target)).all() and (at[some] >= 0).all(), "a store out of bounds"
    assert len(np.unique(at[some])) == some.sum(), "two threads store to one place"
    target[at[some]] = np.broadcast_to(value, at.shape)[some].astype(target.dtype)


def atomic_max(pointer: Pointer, value: Any, mask: Any = None, sem: str = "") -> None:
    at, some = pointer.place(mask, value)
    assert pointer.flat is not None
    np.maximum.at(pointer.flat.numpy(), at[some], np.broadcast_to(value, at.shape)[some])


def inline_asm(asm: Any, _: str, args: list[Any], **options: Any) -> Tile:
    """The pieces of assembly of these kernels."""
    if len(args) == 4:  # the bytes of four rows in one word
        words = sum(np.array(x).astype(np.uint32) << 8 * i for i, x in enumerate(args))
        return tile(np.asarray(words).view(np.int32))
    text = getattr(asm, "value", asm)
    sigmoid = text.startswith("{")
    assert sigmoid or text.startswith(("ex2.approx", "rcp.approx"))
    if sigmoid:
        return tile(1 / (1 + np.exp(-args[0])))
    return tile(np.exp2(args[0]) if text.startswith("ex2") else 1 / args[0])


def fma(a: Any, b: Any, c: Any) -> Tile:
    exact = np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)
    return tile(exact.astype(np.float32))


def shared_layout(shape: list[int], dtype: Any) -> NVMMASharedLayout:
    """The layout for a descriptor, which checks it; nothing else reads it here."""
    real = triton.language.bfloat16 if dtype is BF16 else getattr(triton.language, dtype.name)
    return NVMMASharedLayout.get_default_for(shape, real)


def language(program: list[int]) -> SimpleNamespace:
    """What `gl` and `tl` are in a kernel. `program`: its number, and how many there are."""
    names = ("uint8", "int8", "int32", "uint32", "int64", "float32")
    types = {name: np.dtype(name) for name in names}
    layouts = dict.fromkeys(
        ["BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout"],
        lambda *args: None,
    )
    return SimpleNamespace(
        **types,
        **layouts,
        bfloat16=BF16,
        nvidia=SimpleNamespace(ampere=SimpleNamespace(mma_v2=lambda a, b, c: tile(a @ b + c))),
        float8e5=E5M2.triton_dtype,
        float8e4nv=E4M3.triton_dtype,
        constexpr=lambda value: value,
        to_tensor=lambda value: tile(np.int32(value)),
        allocate_shared_memory=hopper_on_cpu.allocate,
        warp_specialize=hopper_on_cpu.specialize,
        NVMMASharedLayout=SimpleNamespace(get_default_for=shared_layout),
        PropagateNan=triton.language.PropagateNan,
        static_range=range,
        program_id=lambda axis: tile(program[0]),
        num_programs=lambda axis: program[1],
        cdiv=lambda a, b: tile(-(-a // b)),
        arange=lambda start, stop, layout=None: tile(np.arange(start, stop)),
        full=lambda shape, value, dtype, layout=None: tile(np.full(shape, value, dtype)),
        load=load,
        store=store,
        atomic_max=atomic_max,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        permute=lambda x, order: x.permute(*order),
        split=lambda x: x.split(),
        join=lambda a, b: tile(np.stack([a, b], -1)),
        reshape=lambda x, shape: tile(np.reshape(x, shape)),
        inline_asm_elementwise=inline_asm,
        max=lambda x, axis: tile(np.max(x, axis)),
        sum=lambda x, axis: tile(np.sum(x, axis)),
        reduce=lambda x, axis, combine: tile(np.max(x, axis)),
        maximum=lambda a, b, propagate_nan=None: tile(np.maximum(a, b)),
        minimum=lambda a, b: tile(np.minimum(a, b)),
        abs=lambda x: tile(np.abs(x)),
        exp=lambda x: tile(np.exp(x)),
        rsqrt=lambda x: tile(1 / np.sqrt(x)),
        where=lambda some, a, b: (
            tile(np.where(some, a, np.asarray(b).astype(a.dtype)))
            if isinstance(a, np.ndarray)
            else tile(np.where(some, a, b))
        ),
        div_rn=lambda a, b: tile(np.float32(a) / np.float32(b)),
        fma=fma,
        umulhi=lambda a, b: tile(
            (np.asarray(a).astype(np.uint64) * np.uint64(b) >> np.uint64(32)).astype(np.uint32)
        ),
    )


def argument(value: Any) -> Any:
    """Convert an argument of a launch to what the kernel receives."""
    if isinstance(value, tuple):
        return tuple(argument(item) for item in value)
    if isinstance(value, Tensor):
        return Pointer(value)
    if isinstance(value, TensorDescriptor):
        return hopper_on_cpu.Descriptor(value)
    return tile(value) if isinstance(value, int) and not isinstance(value, bool) else value


class Kernel:
    """A Gluon kernel that is launched as on a GPU."""

    def __init__(self, kernel: Any, program: list[int]) -> None:
        self.kernel, self.program = kernel, program

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(
            *args: Any, num_warps: int, enable_fp_fusion: bool = False, **constants: Any
        ) -> None:
            for program in range(grid[0]):
                self.program[:] = [program, grid[0]]
                with np.errstate(all="ignore"):
                    self.kernel.fn(*map(argument, args), **constants)

        return launch


@contextmanager
def simulated(*modules: ModuleType) -> Iterator[None]:
    """The kernels (`*_kernel`) of these modules run on CPU tensors."""
    program = [0, 1]
    fake = language(program)
    changes = [
        mock.patch.object(module, name, fake)
        for module, name in itertools.product(modules, ("gl", "tl"))
        if hasattr(module, name)
    ]
    changes += [
        mock.patch.object(module, "hopper", hopper_on_cpu.hopper(tile))
        for module in modules
        if hasattr(module, "hopper")
    ]
    changes += [
        mock.patch.object(module, name, Kernel(value, program))
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, JITFunction)
    ]
    call = mock.patch.object(JITFunction, "__call__", lambda self, *a, **k: self.fn(*a, **k))
    with call:
        for change in changes:
            change.start()
        try:
            yield
        finally:
            for change in changes:
                change.stop()
