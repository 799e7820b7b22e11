"""The GPU step, as far as a CPU can tell: it compiles for sm_90, and how well.

The host code runs as it would on a GPU, but where it launches a kernel the kernel is only compiled,
for the arguments of that launch. What it computes is a matter of tests/gpu/test_fused_adamw.py.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from coatlm.fp8.accumulate import BlockFp8
from coatlm.fp8.formats import E4M3
from coatlm.optim import fused
from coatlm.optim.adamw import AdamW
from coatlm.optim.moment_formats import Fp32
from coatlm.optim.recipes import RECIPES, Recipe
from coatlm.optim.shards import FlatShard
from coatlm.optim.weight_formats import Master

BF16, FP32 = torch.bfloat16, torch.float32
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PER_THREAD = 16  # elements, with the default tile
EXPANDED = ("coat", "coat-lean", "coat-24")


class Hopper:
    """A driver that knows for what it compiles, and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands for a kernel: `kernel[grid](...)` compiles it and appends the result to `found`."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.found: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.found.append(self.kernel.warmup(*args, grid=grid, **options))

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Compiled]:
    stand_ins = {n: Compiled(getattr(fused, n)) for n in ("_step_kernel", "_prepare_kernel")}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(fused, name, stand_in)
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    return stand_ins


def one_byte(n: int) -> BlockFp8:
    return BlockFp8.zeros(n, torch.zeros(4, dtype=torch.int32))


def step(
    recipe: str | Recipe,
    *,
    weight: torch.dtype = BF16,
    grad: torch.dtype = BF16,
    tile: fused.TileLayout | None = None,
) -> None:
    n = 4096
    grads: Any = torch.zeros(n, dtype=grad) if grad.itemsize > 1 else one_byte(n)
    shard = FlatShard(torch.zeros(n, dtype=weight), grads, ((0, n),), ((0, n),))
    options = {"betas": (0.9, 0.95), "eps": 1e-8}
    opt = AdamW([shard], recipe=recipe, weight_decay=0.1, **options)  # type: ignore[arg-type]
    launch = fused.FusedStep(
        opt.recipe,
        weights=[shard.weight],
        grads=[shard.grad],
        spans=list(opt.spans(n)),
        states=opt.states[0],
        decayed=torch.ones(n // 128, dtype=torch.uint8),
        **options,  # type: ignore[arg-type]
    )
    if tile is not None:
        launch.use(tile)
    scalars = torch.zeros(4)
    rates: Any
    for clip, rates in ((torch.ones(()), (1e-3, 1e-4)), (None, torch.zeros(2))):
        fused.prepare(scalars, betas=opt.betas, clip_coefficient=clip, step_count=opt.step_count)
        launch(scalars, rates)


def disassembled(compiled: Any, path: Path) -> tuple[Counter[str], str]:
    """(machine instructions by name without modifiers, what cuobjdump says of resources)."""
    path.write_bytes(compiled.asm["cubin"])

    def dump(flag: str) -> str:
        command = [TOOLS / "cuobjdump", flag, path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    lines = re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", dump("-sass"))
    return Counter(lines), dump("-res-usage")


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_step_compiles_with_wide_accesses_and_without_spills(
    recipe: str, kernels: dict[str, Compiled], tmp_path: Path
) -> None:
    step(recipe)
    assert len(kernels["_prepare_kernel"].found) == 2  # with a clip coefficient and without
    for compiled in kernels["_step_kernel"].found:
        ptx = compiled.asm["ptx"]
        accesses = re.findall(r"(?:ld|st)\.global\S*\.v(\d)\.b(\d+)", ptx)
        assert max(int(n) * int(width) for n, width in accesses) == 128
        _, resources = disassembled(compiled, tmp_path / "kernel.cubin")
        assert "STACK:0" in resources and "LOCAL:0" in resources


@pytest.mark.parametrize(
    ("recipe", "weight", "grad"),
    [("adamw-fp32", FP32, FP32), ("coat", BF16, FP32), ("coat", FP32, FP32), ("fp8lm", BF16, FP32)],
)
def test_step_compiles_for_fp32_weights_and_gradients(
    recipe: str, weight: torch.dtype, grad: torch.dtype, kernels: dict[str, Compiled]
) -> None:
    step(recipe, weight=weight, grad=grad)
    assert kernels["_step_kernel"].found


@pytest.mark.parametrize("recipe", ["fp8lm", "coat-24", "adamw-fp32"])
def test_step_compiles_for_one_byte_gradients_without_spills(
    recipe: str, kernels: dict[str, Compiled], tmp_path: Path
) -> None:
    step(recipe, grad=E4M3.dtype)
    for compiled in kernels["_step_kernel"].found:
        _, resources = disassembled(compiled, tmp_path / "kernel.cubin")
        assert "STACK:0" in resources and "LOCAL:0" in resources


@pytest.mark.parametrize("run", (4, 8))
def test_step_compiles_for_other_tiles(run: int, kernels: dict[str, Compiled]) -> None:
    step("coat", tile=fused.TileLayout(blocks=32, warps=8, run=run))
    assert kernels["_step_kernel"].found


@pytest.mark.parametrize("recipe", EXPANDED)
def test_coat_stays_below_what_an_sm_can_issue_while_memory_streams(
    recipe: str, kernels: dict[str, Compiled], tmp_path: Path
) -> None:
    """An H200 has 132 SMs with 4 schedulers and 16 special-function lanes at 1.7 GHz or more.

    While 16 bytes per parameter move at 4.25 TB/s, 3.76 ns per 1000 parameters, a scheduler issues
    108 instructions per 32 elements, and the special-function units finish 13 per element.
    """
    step(recipe)
    compiled, _ = kernels["_step_kernel"].found
    names, _ = disassembled(compiled, tmp_path / "kernel.cubin")
    assert names.total() / PER_THREAD <= 0.75 * 108
    assert names["MUFU"] / PER_THREAD <= 11  # 2 to decode, 2 to encode a moment, sqrt, 1 / x


@pytest.mark.parametrize("recipe", ("adamw-bf16", "collage-light", "collage-plus", "kahan"))
def test_strict_bf16_is_not_contracted(recipe: str, kernels: dict[str, Compiled]) -> None:
    """Each product and sum is rounded: the only fused multiply-adds are those of two_prod."""
    step(recipe)
    compiled, _ = kernels["_step_kernel"].found
    fmas = re.findall(r"fma\.rn\.bf16(x2)?", compiled.asm["ptx"])
    elements = sum(2 if packed else 1 for packed in fmas)
    assert elements == (PER_THREAD if recipe == "collage-plus" else 0)


class UnknownMoment(Fp32):
    kind = "unheard-of"


class UnknownMaster(Master):
    kind = "unheard-of"


@pytest.mark.parametrize("part", [{"m": UnknownMoment()}, {"weight": UnknownMaster()}])
def test_a_format_that_the_kernel_does_not_know_does_not_compile(
    kernels: dict[str, Compiled], part: dict[str, Any]
) -> None:
    with pytest.raises(triton.CompilationError) as raised:
        step(replace(RECIPES["adamw-fp32"], **part))
    assert "format that this kernel does not know" in str(raised.value.__cause__)
