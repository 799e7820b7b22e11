"""Check Triton kernels on a machine without a GPU: compile them for sm_90, or interpret them.

`compile_sm90` runs the whole pipeline, Triton IR to cubin, so a kernel that cannot be built for
Hopper fails a CPU test. It answers "does it compile", not "is it right". `run_interpreted` answers
part of the second question: kernels run on CPU tensors, which shows indexing and fp32 arithmetic
(casts to BF16 and FP8 it gets wrong; those need a GPU).

    def test_kernel_compiles_for_sm90() -> None:
        compiled = compile_sm90(
            _scale_kernel,
            {"x_ptr": "*bf16", "y_ptr": "*bf16", "N": "i32"},  # every argument but constexprs
            {"BLOCK": 1024},  # every constexpr
            aligned=("N",),  # integers that are multiples of 16 at the launches meant
        )
        assert set(access_bytes(compiled)) == {16}

    def interpreted_kernel_equals_the_reference() -> None:  # pytest.mark.parametrize works too
        assert torch.equal(_launch(x_cpu), scale_ref(x_cpu))

    def test_kernels_in_the_interpreter() -> None:
        run_interpreted(__file__)
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
SM90 = GPUTarget("cuda", 90, 32)

POINTER = {  # torch dtype -> the type that Triton gives to a tensor argument of it
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint16: "*u16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


def compile_sm90(
    kernel: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    *,
    aligned: Sequence[str] = (),
    num_warps: int = 4,
    num_stages: int = 3,
) -> CompiledKernel:
    """Build `kernel` (`@triton.jit`, autotuned or not, or `@gluon.jit`); `.asm` holds ptx, cubin.

    `signature` gives every runtime argument its Triton type ("*bf16", "i32", "i64", "fp32"; see
    POINTER), `constexprs` every constexpr its value. Pointers count as 16-byte aligned, as torch
    allocates them, and so do the integers named in `aligned`, as Triton finds out at a launch: the
    vector width of loads and stores depends on both. Raises ValueError when the names are not the
    kernel's; compile errors are Triton's own.
    """
    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn  # autotune and heuristics wrap the function
    if sorted([*signature, *constexprs]) != sorted(kernel.arg_names):
        given = sorted([*signature, *constexprs])
        raise ValueError(f"arguments {given} are not those of the kernel, {kernel.arg_names}")
    kinds = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    attrs = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind) in enumerate(kinds.items())
        if kind.startswith("*") or name in aligned
    }
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(fn=kernel, signature=kinds, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=SM90, options=options)


@contextmanager
def launches_compiled(*modules: ModuleType) -> Iterator[list[CompiledKernel]]:
    """Kernels (`*_kernel`) of these modules are compiled by a launch and not run; yields what was.

    The signature is that of the launch's arguments, which may be tensors of any device, "meta" too.
    """
    made: list[CompiledKernel] = []
    with ExitStack() as patches:
        for module in modules:
            for name, kernel in list(vars(module).items()):
                if name.endswith("_kernel") and isinstance(kernel, JITFunction):
                    launch = _Launch(kernel, made)
                    patches.enter_context(mock.patch.object(module, name, launch))
        yield made


class _Launch:
    def __init__(self, kernel: Any, made: list[CompiledKernel]) -> None:
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        kernel, backend = self.kernel, make_backend(SM90)
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)

        def launch(*args: Any, **constants: Any) -> None:
            bound, kinds, _ = bind(*args, **constants)
            packed = kernel._pack_args(backend, constants, bound, kinds, None)
            options, signature, constexprs, attrs = packed
            language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
            source = language(kernel, signature, constexprs, attrs)
            self.made.append(triton.compile(source, target=SM90, options=options.__dict__))

        return launch


def access_bytes(compiled: CompiledKernel) -> list[int]:
    """Bytes per thread of every global access in the PTX, widest first; sm_90 has at most 16."""
    ptx = compiled.asm["ptx"]
    direct = re.findall(r"\b(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bufs](\d+)\b", ptx)
    to_shared = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?\], (0x\w+|\d+)", ptx)
    widths = [int(lanes or 1) * int(bits) // 8 for lanes, bits in direct]
    return sorted(widths + [int(size, 0) for size in to_shared], reverse=True)


def spilled_bytes(compiled: CompiledKernel) -> int:
    """Bytes of local memory that each thread stores because registers did not suffice."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"], encoding="utf-8")
        command = [PTXAS, "-v", "-arch=sm_90a", str(source), "-o", f"{folder}/kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))


def flushes_subnormals(compiled: CompiledKernel) -> bool:
    """Whether products replace subnormal numbers of fp32, which stochastic.py needs, by zero."""
    return re.search(r"mul\.(rn\.)?ftz", compiled.asm["ptx"]) is not None


def run_interpreted(test_file: str) -> None:
    """Run the functions `interpreted_*` of a test file, as tests, with Triton as an interpreter.

    In a process of its own: Triton decides at import, and does not undo what it then changes.
    """
    if triton.__version__.startswith("3.6."):
        pytest.skip("the interpreter of Triton 3.6 fails at loops with numpy >= 2.4")
    options = ["-q", "-p", "no:cacheprovider", "-o", "python_functions=interpreted_*"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, test_file],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
