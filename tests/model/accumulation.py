"""How a tensor core of Hopper adds FP8 products, as a model for a CPU, and tensors that show it."""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 32  # products that a tensor core adds at once
BITS = 13  # fraction bits of the largest term, below which all terms are truncated
PROMOTED = 128  # terms after which the sum is added in fp32, unless accumulation is fast


def tensor_core_gemm(a_MK: Tensor, b_NK: Tensor, *, fast: bool) -> Tensor:
    """a b^T in fp64 [M, N]; `fast` as in coatlm/fp8/gemm.py. K is a multiple of 128.

    Each step aligns its products and the sum so far to the largest of them, and truncates them.
    DeepSeek-V3 (arXiv 2412.19437, s3.3.2) found about 14 bits on an H800.
    """
    a, b = a_MK.double(), b_NK.double()
    total = a.new_zeros(len(a), len(b))
    within = total.clone()
    for first in range(0, a.shape[1], STEP):
        step = slice(first, first + STEP)
        terms = torch.cat([within[..., None], a[:, None, step] * b[None, :, step]], -1)
        largest = terms.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.double).tiny)
        unit = torch.exp2(largest.log2().floor() - BITS)
        within = ((terms / unit).trunc() * unit).sum(-1)
        if not fast and (first + STEP) % PROMOTED == 0:
            total += within
            within.zero_()
    return total + within


def zipf_tensors(tokens: int, size: int, vocab: int) -> tuple[Tensor, ...]:
    """logits [T, V], labels int64 [T], weight [V, H] and hidden [T, H] of an output layer, in BF16.

    Entries are about as frequent as words. All rows of the weight have a random vector in common,
    as those of trained models have one. The logits do not depend on hidden and weight.
    """
    generator = torch.Generator().manual_seed(0)
    frequent = -torch.log(1 + torch.randperm(vocab, generator=generator))
    logits = (2 * torch.randn(tokens, vocab, generator=generator) + frequent).bfloat16()
    labels = torch.multinomial(logits.float().softmax(1), 1, generator=generator)[:, 0]
    weight = torch.randn(vocab, size, generator=generator)
    weight = 0.02 * (weight + torch.randn(size, generator=generator))
    hidden = torch.randn(tokens, size, generator=generator)
    return logits, labels, weight.bfloat16(), hidden.bfloat16()


def length_without_labels(dhidden: Tensor, logits: Tensor, labels: Tensor, weight: Tensor) -> float:
    """What entries other than labels add to dhidden, projected on its exact value: 1 is exact.

    Exactly, they add the mean weight under the softmax without the label. `dhidden` [T, H] is the
    gradient of the sum of all losses.
    """
    each, weight = torch.arange(len(labels)), weight.double()
    p = logits.double().softmax(1)
    of_labels = (p[each, labels] - 1)[:, None] * weight[labels]
    p[each, labels] = 0
    exact = p @ weight
    return float(((dhidden.double() - of_labels) * exact).sum() / exact.square().sum())
