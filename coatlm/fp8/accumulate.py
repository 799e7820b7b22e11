"""Gradients accumulated in one byte per element: E4M3 codes with an fp32 scale per block of 128.

    copy_    codes = cast(x / S)                       rounded to nearest
    add_     codes = cast((codes S_old + x) / S)       rounded stochastically (stochastic.py)

with S = amax / MAX of each block of the new values (scaling.py), which is computed from the fp32
values in registers: codes and scales are read once and written once. Rounding a sum to nearest
would lose every addend below half the spacing of the sum's codes, always in the same direction;
stochastic rounding loses nothing on average. A value that nothing is added to stays as it is.

A block that holds a NaN or an infinity becomes NaN. Both S and x / S, computed as x * (1 / S), are
rounded once, as in payload.py, so packing the values for an exchange gives the same codes again.

The random bits are a function of the element's place in the tensor that is added to and of `noise`
(int32 [4], on the device), whose last word counts additions: `add_` advances it, so that replays of
a CUDA graph draw new bits. `SumNoise` sets the rest at the start of each step. Ranks that hold
copies of a gradient must have the same noise, or their weights drift apart.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.formats import BLOCK_ELEMENTS, E4M3, SCALE_BLOCK, Fp8Format
from coatlm.fp8.payload import unpack
from coatlm.fp8.payload_layout import Layout, Shared
from coatlm.fp8.scaling import amax_of, block_amax_ref, larger, scale_of, scale_ref
from coatlm.fp8.stochastic import half, stochastic, stochastic_ref, words

STEP, COUNT = 2, 3  # where in `noise` they are
HALF = SCALE_BLOCK // 2  # columns c and c + HALF of a block share a random word
ROWS = 64  # blocks per program of `_write_kernel`: 8 elements per thread, block and half
SQUARED_ROWS = 32  # blocks per program of `_squares_kernel`
WARPS = 4


@dataclass(frozen=True, eq=False)
class BlockFp8:
    """A flat tensor of n values in FP8, one scale per block of 128; n is a multiple of 128."""

    codes: Tensor  # fmt.dtype [n]
    scale: Tensor  # fp32 [n / 128]
    noise: Tensor  # int32 [4]: two words of key, step, additions in the step
    fmt: Fp8Format = E4M3

    @classmethod
    def zeros(cls, n: int, noise: Tensor, fmt: Fp8Format = E4M3) -> BlockFp8:
        """Make n zeros on the device of `noise`. Raises ValueError unless 128 divides n."""
        if n % SCALE_BLOCK:
            raise ValueError(f"n={n}: must be a multiple of {SCALE_BLOCK}")
        codes = torch.zeros(n, dtype=torch.uint8, device=noise.device).view(fmt.dtype)
        return cls(codes, torch.zeros(n // SCALE_BLOCK, device=noise.device), noise, fmt)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return self.codes.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def numel(self) -> int:
        return self.codes.numel()

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, span: slice) -> BlockFp8:
        """A view of elements [start, stop), both multiples of 128."""
        start, stop, step = span.indices(len(self))
        assert step == 1 and not (start % SCALE_BLOCK or stop % SCALE_BLOCK), span
        blocks = slice(start // SCALE_BLOCK, stop // SCALE_BLOCK)
        return replace(self, codes=self.codes[start:stop], scale=self.scale[blocks])

    def to(self, dtype: torch.dtype) -> Tensor:
        """The values, fp32 or BF16 [n]."""
        layout = Layout(len(self), self.fmt, scaled=False)
        owner = torch.arange(len(self.scale), dtype=torch.int32, device=self.device)
        values = torch.empty(1, 1, len(self), dtype=dtype, device=self.device)
        codes = self.codes.view(torch.uint8).view(1, 1, 1, -1)
        unpack(codes, values, layout=layout, shared=Shared(self.scale, owner[None, None]))
        return values.view(-1)

    def float(self) -> Tensor:
        """The values, fp32 [n]."""
        return self.to(torch.float32)

    def zero_(self) -> None:
        """Set all values to zero."""
        self.codes.view(torch.uint8).zero_()
        self.scale.zero_()

    def copy_(self, values: Tensor) -> None:
        """Replace all values, rounded to nearest; arguments as those of `add_`."""
        self._write(values, add=False)

    def add_(self, values: Tensor) -> None:
        """Add `values`, fp32 or BF16 of any shape, and round the sums stochastically.

        There are n values or up to 127 fewer, where the last block ends in padding. Raises
        ValueError for other sizes and dtypes.
        """
        self._write(values, add=True)
        self.noise[COUNT].add_(1)

    def square_sum(self) -> Tensor:
        """The sum of the squares, fp32 []; NaN or Inf if a value is."""
        return square_sums(self).sum()

    def _write(self, values: Tensor, *, add: bool) -> None:
        x, n = values.detach().reshape(-1), len(self)
        if x.dtype not in (torch.float32, torch.bfloat16) or not 0 <= n - len(x) < SCALE_BLOCK:
            raise ValueError(
                f"values: {len(x)} of {x.dtype}, must be torch.float32 or torch.bfloat16 and fill "
                f"{n // SCALE_BLOCK} blocks of {SCALE_BLOCK}"
            )
        write = _launch_write if self.codes.is_cuda else write_ref
        write(x, self, add=add)


class SumNoise:
    """The noise of the one-byte gradients of a rank's model chunks: int32 [chunks, 4].

    `rank`: the position in the data- and context-parallel process group, which accumulates other
    microbatches; ranks that differ in tensor- or pipeline-parallel position alone share the noise.
    """

    def __init__(self, chunks: int, *, seed: int, rank: int, device: torch.device) -> None:
        digest = hashlib.sha256(f"gradient sums/{seed}/{rank}".encode()).digest()
        noise = torch.zeros(chunks, 4, dtype=torch.int32)
        noise[:, 0] = int.from_bytes(digest[:4], "little", signed=True)
        noise[:, 1] = torch.arange(chunks)
        self.noise, self.step = noise.to(device), 0

    def begin_(self) -> None:
        """Begin the next step. Does not wait for the device."""
        self.noise[:, STEP].fill_(self.step)
        self.noise[:, COUNT].zero_()
        self.step += 1


def write_ref(x: Tensor, out: BlockFp8, *, add: bool) -> None:
    """The definition of `BlockFp8.copy_` and `add_`, and their CPU path; x is flat."""
    values = torch.zeros(out.numel(), device=x.device)
    values[: len(x)] = x
    values = values.view(-1, SCALE_BLOCK)
    if add:
        values += out.codes.float().view(-1, SCALE_BLOCK) * out.scale[:, None]
    out.scale.copy_(scale_ref(block_amax_ref(values, SCALE_BLOCK)[:, 0], out.fmt))
    scaled = values * (1.0 / torch.where(out.scale.isfinite(), out.scale, torch.nan))[:, None]
    if add:
        scaled = stochastic_ref(scaled, out.noise, out.fmt, halves=HALF)
    out.codes.copy_(out.fmt.encode(scaled).view(-1))


def square_sums_ref(x: BlockFp8) -> Tensor:
    """The definition of `square_sums`, and its CPU path."""
    return x.float().view(-1, SCALE_BLOCK).square().sum(1)


@triton.jit
def _inverse(scale):
    """1 / scale; NaN where the scale is not finite."""
    return tl.div_rn(1.0, tl.where(scale < float("inf"), scale, float("nan")))


@gluon.jit
def _write_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    noise_ptr,
    n,  # values of x
    ADD: gl.constexpr,
    TOP: gl.constexpr,
    FORMAT: gl.constexpr,
    HALF: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    R: gl.constexpr = ROWS // 4
    first = gl.program_id(0).to(gl.int64) * R
    quad = first + gl.arange(0, R, gl.SliceLayout(1, L))  # four blocks, which share random words
    column = gl.arange(0, HALF, gl.SliceLayout(0, L))[None, :]
    word = (None, None, None, None)
    if ADD:
        word = words(noise_ptr, quad[:, None], column)
    for j in gl.static_range(4):
        block = quad * 4 + j
        at = block[:, None] * (2 * HALF) + column
        some = block * (2 * HALF) < n
        inside = some[:, None]
        low = gl.load(x_ptr + at, mask=at < n, other=0.0).to(gl.float32)
        high = gl.load(x_ptr + at + HALF, mask=at + HALF < n, other=0.0).to(gl.float32)
        if ADD:
            old = gl.load(scale_ptr + block, mask=some, other=0.0)[:, None]
            low += gl.load(code_ptr + at, mask=inside, other=0.0).to(gl.float32) * old
            high += gl.load(code_ptr + at + HALF, mask=inside, other=0.0).to(gl.float32) * old
        scale = scale_of(larger(amax_of(low, 1), amax_of(high, 1)), TOP, False)
        inverse = _inverse(scale)[:, None]
        low, high = low * inverse, high * inverse
        if ADD:
            low = stochastic(low, half(word[j], 0), FORMAT)
            high = stochastic(high, half(word[j], 1), FORMAT)
        gl.store(code_ptr + at, low.to(FORMAT), mask=inside)
        gl.store(code_ptr + at + HALF, high.to(FORMAT), mask=inside)
        gl.store(scale_ptr + block, scale, mask=some)


@triton.jit
def _squares_kernel(code_ptr, scale_ptr, sum_ptr, blocks, ROWS: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = g[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    code = tl.load(code_ptr + at, mask=(g < blocks)[:, None], other=0.0)
    x = code.to(tl.float32) * tl.load(scale_ptr + g, mask=g < blocks, other=0.0)[:, None]
    tl.store(sum_ptr + g, tl.sum(x * x, 1), mask=g < blocks)


def _launch_write(x: Tensor, out: BlockFp8, *, add: bool) -> None:
    if not len(x):
        return
    _write_kernel[(triton.cdiv(len(out.scale), ROWS),)](
        x,
        out.codes,
        out.scale,
        out.noise,
        len(x),
        ADD=add,
        TOP=out.fmt.max,
        FORMAT=out.fmt.triton_dtype,
        HALF=HALF,
        ROWS=ROWS,
        WARPS=WARPS,
        num_warps=WARPS,
        enable_fp_fusion=False,  # codes S_old + x: the product is rounded, as in the reference
    )


def square_sums(x: BlockFp8) -> Tensor:
    """The sum of the squares of each block, fp32 [n / 128]; NaN or Inf if a value is."""
    if not x.codes.is_cuda:
        return square_sums_ref(x)
    sums = torch.empty_like(x.scale)
    if blocks := len(sums):
        grid = (triton.cdiv(blocks, SQUARED_ROWS),)
        _squares_kernel[grid](x.codes, x.scale, sums, blocks, SQUARED_ROWS, num_warps=WARPS)
    return sums
