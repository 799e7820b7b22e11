"""Gradients of logits as operands of FP8 GEMMs: computed from the logits and quantized in one pass.

    d[T, C] = the gradient of loss.py, 0 for labels
    direct[T, C'], transposed[C', T'] = codes of d / S
    sums[C'] = sum_T d, fp32, not rounded

The gradient of a token's label is about as large as those of all other entries together, so its
rounding would be most of the error. It has no code: `TokenTerms.label_grad` is [T] in fp32.

S is one power of two for all tokens and all chunks, known before any gradient is:

    S = power of two at or above B / 448        B = max_T |dloss| |slope|

B bounds |d| = |dloss| |slope| p, because a probability p is at most 1; S is 1 where B is 0. So a
row or a column needs no scale of its own, and no pass over the gradients has to find amaxes. E4M3
has three bits of mantissa down to some 2^-14 of B, and below that a number every 2^-9 S, about
2^-17 of B.

Rounding is stochastic (fp8/stochastic.py), so that the mean of the codes is the gradient, down to
2^-17 of the smallest number; those of most entries are below that number. Rounded to the nearest
code these would be zero in every step, and what is lost would have one sign. The softmax does not
change if all logits of a token grow alike, and so, without z-loss and soft cap, the gradients of
all entries, the label among them, add up to zero. As the loss does not depend on a shift of all
logits, nothing opposes a force that has one sign: it moves all rows of the weight along the mean
hidden state, step after step, and lse drifts until the digits of BF16 logits no longer reach the
differences between entries. The error of a sum of stochastic codes has no direction.
(docs/results/convergence.md has both in training, with E5M2 codes of all gradients; what the GEMMs
lose is in output_gemms.py.)

Shapes: T tokens, C vocabulary entries of a chunk; C' and T' are rounded up to multiples of 16, as
GEMMs need it of a summed axis. Codes beyond T and C are zero.
"""

# mypy: disable-error-code="assignment, misc"
# Kernels extend tuples at compile time, which changes their types.
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.formats import E4M3
from coatlm.fp8.gemm import padded_rows
from coatlm.fp8.launch import Matrix, Placed, TileShape, empty_codes, launch_emit
from coatlm.fp8.qtensor import TENSOR, QTensor
from coatlm.fp8.scaling import power_of_two_ref, scaled_codes_ref
from coatlm.fp8.transpose import padded_t
from coatlm.kernels.softcap import tanh
from coatlm.model.loss_kernels import logits_grad_ref

TILE = TileShape(128, 64, 8, 1, 8)  # of logits


@dataclass(frozen=True)
class TokenTerms:
    """What the gradient of a token's logits depends on besides the logits; all are [T]."""

    labels: Tensor  # int64
    target: Tensor  # fp32, the label's logit, soft-capped
    lse: Tensor  # fp32, log(sum(exp(logits))) over the whole vocabulary
    dloss: Tensor  # fp32, 0 for tokens without a loss
    slope: Tensor | None  # fp32, 1 + 2 z lse; None without z-loss
    cap: float | None  # the soft cap of the logits

    def arguments(self, first: int) -> tuple[Any, ...]:
        """What `logits_grad_` and `logits_grad_ref` take behind the logits of entry `first` on."""
        return self.labels, self.lse, self.dloss, first, self.slope, self.cap

    @cached_property
    def scale(self) -> Tensor:
        """S, fp32 []; not finite where a term of B is not."""
        bound = self.dloss if self.slope is None else self.dloss * self.slope
        return power_of_two_ref(bound.abs().amax(), E4M3)

    @cached_property
    def label_grad(self) -> Tensor:
        """The gradient of the label's logit, fp32 [T]."""
        softmax = (self.target - self.lse).exp()
        d = ((softmax if self.slope is None else softmax * self.slope) - 1.0) * self.dloss
        return d if self.cap is None else d * (1.0 - (self.target / self.cap).square())

    def label_rows(self, first: int, count: int) -> Tensor:
        """The labels among entries `first` to `first` + count, less first; -1 for others. [T]."""
        row = self.labels - first
        return row.where((row >= 0) & (row < count), -1)


class LogitsGrad(NamedTuple):
    """The gradients of a chunk of logits, without those of labels; None if not wanted."""

    direct: QTensor | None  # [T, C'], for dgrad
    transposed: QTensor | None  # [C', T'], for wgrad, as are the sums
    sums: Tensor | None  # fp32 [C']


def quantize_logits_grad_ref(
    logits_TC: Tensor,
    terms: TokenTerms,
    first: int,
    noise: Tensor,
    *,
    direct: bool,
    transposed: bool,
) -> LogitsGrad:
    """The definition, and the CPU path; `noise` is that of the chunk."""
    d_TC = logits_grad_ref(logits_TC.float(), *terms.arguments(first))
    entries = torch.arange(first, first + logits_TC.shape[1], device=logits_TC.device)
    d_TC.masked_fill_(terms.labels[:, None] == entries, 0.0)
    codes = scaled_codes_ref(d_TC, terms.scale, E4M3, noise=noise)
    return LogitsGrad(
        QTensor(codes, terms.scale, TENSOR, E4M3) if direct else None,
        QTensor(padded_t(codes), terms.scale, TENSOR, E4M3) if transposed else None,
        d_TC.sum(0) if transposed else None,
    )


def of_chunk(noise: Tensor, first: int) -> Tensor:
    """`noise` with `first` added to k1, so that each chunk has numbers of its own."""
    noise = noise.clone()
    noise[1].add_(first)
    return noise


@gluon.jit
def load_logits_grad(source, factors, K, at, some, J: gl.constexpr, CAP: gl.constexpr):
    """A loader of emit.py: gradients of logits [T, K], whose first column is the entry `first`."""
    logits_ptr, label_ptr, lse_ptr, dloss_ptr, slope_ptr, first = source
    first_row, first_column, row, column, inner, _ = at
    logits_ptr += first_row.to(gl.int64) * K + first_column
    each = first_row + row + J
    x_at = (row * K + column)[:, :, None] + inner + J * K
    x = gl.load(logits_ptr + x_at, mask=some[:, :, None], other=float("-inf")).to(gl.float32)
    lse = gl.load(lse_ptr + each, mask=some, other=0.0)[:, :, None]
    dloss = gl.load(dloss_ptr + each, mask=some, other=0.0)[:, :, None] * factors[0]
    label = (gl.load(label_ptr + each, mask=some, other=-1) - first).to(gl.int32)[:, :, None]
    if CAP is not None:
        t = tanh(x / CAP)
        x = CAP * t
    softmax = gl.exp(x - lse)
    if slope_ptr is not None:
        softmax *= gl.load(slope_ptr + each, mask=some, other=0.0)[:, :, None]
    d = gl.where(first_column + column[:, :, None] + inner == label, 0.0, softmax) * dloss
    if CAP is not None:
        d *= 1.0 - t * t
    return (gl.where(some[:, :, None], d, 0.0),)


def quantize_logits_grad(
    logits_TC: Tensor,
    terms: TokenTerms,
    first: int,
    noise: Tensor,
    *,
    direct: bool,
    transposed: bool,
) -> LogitsGrad:
    """E4M3 operands of the gradient of a chunk of logits, for dgrad and for wgrad.

    logits: BF16 or fp32 [T, C], of the vocabulary entries from `first` on, which do not change.
    noise: int32 [4] of the layer, as fp8/stochastic.py has it.
    """
    noise = of_chunk(noise, first)
    beyond = padded_rows(logits_TC.shape[1]) - logits_TC.shape[1]
    if beyond:  # gradient 0
        logits_TC = F.pad(logits_TC, (0, beyond), value=float("-inf"))
    quantize = _launch if logits_TC.is_cuda else quantize_logits_grad_ref
    return quantize(logits_TC, terms, first, noise, direct=direct, transposed=transposed)


def _launch(
    logits_TC: Tensor,
    terms: TokenTerms,
    first: int,
    noise: Tensor,
    *,
    direct: bool,
    transposed: bool,
) -> LogitsGrad:
    """The GPU path, for a multiple of 16 columns."""
    (tokens, count), scale = logits_TC.shape, terms.scale
    padded = padded_rows(tokens)
    of_tiles = None  # fp32, of d / S, each over the tokens of a tile
    if transposed:
        tiles = triton.cdiv(padded, TILE.rows)
        of_tiles = torch.empty(tiles, count, dtype=torch.float32, device=logits_TC.device)
    codes, codes_t = empty_codes(
        logits_TC, E4M3 if direct else None, E4M3 if transposed else None, padded
    )
    launch_emit(
        load_logits_grad,
        (logits_TC, terms.labels, terms.lse, terms.dloss, terms.slope, first),
        (Matrix(codes, codes_t, scale),),
        (Placed(0, E4M3),),
        (tokens, padded if transposed else tokens, count),
        TILE,
        options=terms.cap,
        noise=noise,
        sums=of_tiles,
    )
    return LogitsGrad(
        None if codes is None else QTensor(codes, scale, TENSOR, E4M3),
        None if codes_t is None else QTensor(codes_t, scale, TENSOR, E4M3),
        None if of_tiles is None else of_tiles.sum(0).mul_(scale),
    )
