"""The bytes of an FP8 payload, and the tensors beside it that `payload` packs and unpacks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coatlm.fp8.formats import ALIGNMENT, E3M4, SCALE_BLOCK, Coding


@dataclass(frozen=True, eq=False)
class Shared:
    """Scales that all ranks know, one per tensor. `owner` is the tensor of each block of x or y."""

    scale: Tensor  # fp32 [T]
    owner: Tensor  # int32 [A, B, blocks], any view whose rows are contiguous
    amax: Tensor | None = None  # int32 [T], bits that `pack` raises to those of the largest |x|


@dataclass(frozen=True, eq=False)
class Own:
    """The unrounded values [A, B, n] of the rank itself, which is source number `rank` of R."""

    values: Tensor
    rank: int


@dataclass(frozen=True)
class Layout:
    """The bytes of a payload of `elements` values, which are a multiple of 128."""

    elements: int
    fmt: Coding
    scaled: bool  # the payload carries the scales of its blocks

    def __post_init__(self) -> None:
        if self.fmt is E3M4 and not self.scaled:
            raise ValueError("fmt=e3m4 needs scaled=True: the format has no code for NaN")

    @property
    def blocks(self) -> int:
        return self.elements // SCALE_BLOCK

    @property
    def nbytes(self) -> int:
        size = self.elements + (4 * self.blocks if self.scaled else 0)
        return -(-size // ALIGNMENT) * ALIGNMENT  # payloads lie one after the other

    def empty(self, *shape: int, device: torch.device) -> Tensor:
        """Uninitialized payloads, uint8 [*shape, bytes]."""
        return torch.empty(*shape, self.nbytes, dtype=torch.uint8, device=device)


def check(x: Tensor, payloads: Tensor, layout: Layout, shared: Shared | None) -> None:
    """Raise ValueError for tensors that the kernels cannot address."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"x.dtype={x.dtype}: torch.float32 or torch.bfloat16")
    if layout.elements % SCALE_BLOCK or x.ndim != 3 or x.shape[-1] != layout.elements:
        raise ValueError(f"x {list(x.shape)}: [A, B, {layout.elements}], n % {SCALE_BLOCK} == 0")
    wanted = (*x.shape[:2], layout.nbytes)
    if payloads.shape[1:] != wanted or not payloads.is_contiguous():
        raise ValueError(f"payloads {list(payloads.shape)}: contiguous [R, {list(wanted)}]")
    if x.numel() and (x.stride(2) != 1 or x.stride(0) % SCALE_BLOCK or x.stride(1) % SCALE_BLOCK):
        raise ValueError(f"strides {x.stride()} of x: multiples of {SCALE_BLOCK}, the last one 1")
    if layout.scaled == (shared is not None):
        raise ValueError(f"scaled={layout.scaled}: scales are either shared or part of the payload")
    if shared is not None:
        owners = (*x.shape[:2], layout.blocks)
        if shared.owner.shape != owners or shared.owner.stride(2) != 1:
            raise ValueError(f"owner {list(shared.owner.shape)}: {list(owners)}, contiguous rows")
