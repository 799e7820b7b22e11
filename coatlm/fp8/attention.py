"""Attention that saves q, k, v and its output in FP8, in blocks along head_dim.

Forward computes with the exact values; backward decodes what was saved. The statistics of softmax
are saved as they are, so the probabilities that backward computes from decoded q and k do not sum
to one exactly: their error is that of the logits. Scales are one-byte powers of two (scaling.py).

Among the tensors that autograd saves, q, k, v and the output are recognized by their memory, which
is that of an argument or of the result of one of the functions in WATCHED, or of all of attention.
Masks and probabilities are saved unchanged, whatever their shape, and so are those of q, k, v and
the output that are not asked for in FP8. A tensor that was decoded from FP8 is saved as the codes
that it was decoded from (`note_codes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from coatlm.config.recipes import ATTENTION
from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import QTensor, block
from coatlm.fp8.quantize import quantize
from coatlm.fp8.scaling import power_of_two
from coatlm.kernels.document_attention import document_attention
from coatlm.kernels.flash_attention import flash_attention

TILE, WARPS = 4096, 4  # elements per program
SAVED_DTYPES = (torch.bfloat16, torch.float16)
WATCHED = (F.scaled_dot_product_attention, document_attention, flash_attention)


@triton.jit
def _dequantize_kernel(
    code_ptr, exponent_ptr, x_ptr, blocks, SIZE: tl.constexpr, BLOCKS: tl.constexpr
):
    g = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = g[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    code = tl.load(code_ptr + at, mask=g[:, None] < blocks, other=0.0).to(tl.float32)
    exponent = tl.load(exponent_ptr + g, mask=g < blocks, other=127).to(tl.int32)
    x = code * power_of_two(exponent)[:, None]
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=g[:, None] < blocks)


def dequantize_blocks(x: QTensor, dtype: torch.dtype) -> Tensor:
    """codes * scale for blocks of a row with E8M0 scales; exact in BF16."""
    if not x.codes.is_cuda:
        return x.dequantize(dtype)
    assert x.granularity.columns is not None
    size, blocks = x.granularity.columns, x.scale.numel()
    out = torch.empty(x.codes.shape, dtype=dtype, device=x.codes.device)
    count = max(TILE // size, 1)
    _dequantize_kernel[(triton.cdiv(blocks, count),)](
        x.codes,
        x.scale.view(torch.uint8),
        out,
        blocks,
        SIZE=size,
        BLOCKS=count,
        num_warps=WARPS,
    )
    return out


def quantize_blocks(x: Tensor, size: int) -> QTensor:
    """x[..., K] in E4M3 with an E8M0 scale per `size` elements, as a tensor of attention is saved.

    As `size` divides head_dim, the blocks of x[T, heads * D] are those of x[S, B, heads, D].
    """
    return quantize(x, fmt=E4M3, granularity=block(1, size), scale_dtype=torch.float8_e8m0fnu)


def note_codes(x: Tensor, codes: QTensor) -> Tensor:
    """Returns x, a contiguous tensor that `codes` decode to, of the same shape.

    Inside of `SavedInFp8`, x and the first rows of x are saved as these codes.
    """
    if has_torch_function((x,)):
        noted: Tensor = handle_torch_function(note_codes, (x,), x, codes)
        return noted
    return x


def memory_order(x: Tensor) -> list[int]:
    """Dimensions from the largest stride to the smallest: `x.permute` of it is contiguous."""
    return sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], dim))


class Packed(NamedTuple):
    """A saved tensor in FP8: its codes in memory order, and what restores its dimensions."""

    codes: QTensor
    order: list[int]
    dtype: torch.dtype

    def unpack(self) -> Tensor:
        """The tensor, decoded, with the shape and strides that it had."""
        return dequantize_blocks(self.codes, self.dtype).permute(_inverse(self.order))


class _Holder:
    """What autograd saves in place of a tensor that may turn out to be one of attention.

    The output of attention is saved before it is returned.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.held: Tensor | Packed = tensor


class SavedInFp8(TorchFunctionMode):
    """A context in which autograd saves q, k, v and the output of attention in FP8.

    They are the first three arguments and the results of the functions WATCHED that are called
    inside, and the tensors `also`, q, k and v, such as a checkpointed attention saves. `size`:
    elements per scale. `names`: those of q, k, v and o (the output) that are saved in FP8.
    """

    def __init__(self, size: int, *also: Tensor, names: Collection[str] = ATTENTION) -> None:
        super().__init__()
        self.size, self.names = size, names
        self.known: list[Tensor] = []  # alive until the end, so that no other takes their memory
        self.know(*also)
        self.holders: list[_Holder] = []
        self.packed: dict[int, tuple[int, Packed]] = {}  # address -> number of elements, codes
        self.given: dict[int, QTensor] = {}  # address -> what `note_codes` was told
        self.hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SavedInFp8:
        self.hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self.hooks.__exit__(*args)
        memory = {x.untyped_storage().data_ptr() for x in self.known}
        for holder in self.holders:
            x = holder.held
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in memory:
                holder.held = self._quantized(x)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is note_codes:
            x, codes = args
            self.known.append(x)
            self.given[x.data_ptr()] = codes
            return x
        if func not in WATCHED:
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.know(*args[:3], out)
        return out

    def know(self, *qkvo: Tensor) -> None:
        """Let these be saved in FP8, if `names` has them: q, k, v and the output, in this order."""
        named = zip(ATTENTION, qkvo, strict=False)
        self.known += [x for name, x in named if name in self.names]

    def saved_form(self, x: Tensor) -> QTensor:
        """x in FP8, contiguous. If x is contiguous too, the memory is that which autograd saves.

        Attention with a mask may write its output as [B, S, N, D]; the codes are then copied.
        """
        codes, order = self._quantized(x).codes, memory_order(x)
        dense, inverse = [x.shape[dim] for dim in order[:-1]], _inverse(order)
        ordered, scale = (
            part.view(torch.uint8).view(*dense, -1).permute(inverse).contiguous().view(part.dtype)
            for part in (codes.codes, codes.scale)
        )
        return QTensor(ordered, scale, codes.granularity, codes.fmt)

    def forget(self) -> None:
        """Release the exact tensors, once autograd has what it needs."""
        self.known.clear()
        self.holders.clear()
        self.packed.clear()
        self.given.clear()

    def _quantized(self, x: Tensor) -> Packed:
        elements, packed = self.packed.get(x.data_ptr(), (0, None))
        if packed is None or elements != x.numel():
            order = memory_order(x)
            dense, given = x.detach().permute(order), self.given.get(x.data_ptr())
            if given is not None and dense.is_contiguous():
                codes = _first_rows(given, dense.shape)
            else:
                codes = quantize_blocks(dense, self.size)
            packed = Packed(codes, order, x.dtype)
            self.packed[x.data_ptr()] = (x.numel(), packed)
        return packed

    def _pack(self, x: Tensor) -> Tensor | _Holder:
        if x.dtype not in SAVED_DTYPES or x.dim() not in (3, 4) or x.stride(-1) != 1:
            return x
        self.holders.append(_Holder(x.detach()))  # an output would keep its own graph alive
        return self.holders[-1]


def _unpack(saved: Tensor | _Holder) -> Tensor:
    x = saved.held if isinstance(saved, _Holder) else saved
    return x.unpack() if isinstance(x, Packed) else x


def _first_rows(x: QTensor, shape: torch.Size) -> QTensor:
    """The first elements of x in the order of memory, as a tensor of `shape`; a view."""
    codes, scale = (
        part.view(-1)[: math.prod(sizes)].view(sizes)
        for part, sizes in (
            (x.codes, shape),
            (x.scale, x.granularity.scale_shape(shape)),
        )
    )
    return QTensor(codes, scale, x.granularity, x.fmt)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def attend_saving_fp8(
    core: Callable[[], Tensor],
    size: int,
    *qkv: Tensor,
    names: Collection[str] = ATTENTION,
) -> tuple[Tensor, QTensor | None]:
    """Run `core`, an attention that returns [S, B, N*D]. Returns its output, and that in FP8.

    `size`: elements per scale, a divisor of head_dim. `qkv`: q, k and v, which `core` reads.
    `names`: those of q, k, v and o that are saved in FP8; without o its FP8 form is None.
    """
    assert len(qkv) == 3
    with SavedInFp8(size, *qkv, names=names) as saved:
        out = core()
        saved.know(*qkv, out)  # attention in pieces saves it, and calls none of WATCHED
    made = saved.saved_form(out) if "o" in names else None
    saved.forget()
    return out, made
