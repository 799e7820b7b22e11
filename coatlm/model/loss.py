"""Fused output layer and vocabulary-parallel cross entropy, in chunks of the vocabulary.

    logits = hidden @ weight^T      lse = log(sum_v exp(logits_v))
    loss = lse - logits_label + z * lse^2
    dlogits = (exp(logits - lse) * (1 + 2 z lse) - onehot(label)) * dloss
    dhidden = dlogits @ weight      dweight = dlogits^T @ hidden

With a soft cap c, logits are c tanh(h / c) of h = hidden @ weight^T (kernels/softcap.py), and
dlogits are multiplied by 1 - tanh(h / c)^2.

z is the coefficient of the z-loss, which keeps lse near 0 (Chowdhery et al. 2022, "PaLM", section
5). Both passes loop over chunks of the vocabulary; in backward `OutputGemms.backward_` turns the
logits of a chunk into dlogits and multiplies (output_gemms.py). Either backward recomputes the
logits, so that one chunk is held at a time, or forward saves them all, which takes 2 V bytes per
token in BF16 and spares one of four GEMMs. Both give the same bits.

Each chunk, and then each tensor-parallel rank, yields (max, sum of exp, label's logit) per token:

    max = max_i max_i       sum = sum_i sum_i * exp(max_i - max)       target = sum_i target_i

Chunks are cut from the vocabulary rather than from the tokens, because a chunk's dweight is then
one GEMM over all tokens: the gradient, the largest tensor here, is read and written once instead of
once per chunk, and needs no accumulator. The only accumulator is dhidden, [T, H] in fp32.

Shapes: S tokens of a sample, B samples, T = S * B, H hidden, V rows of weight on this rank.
Logits and dlogits are rounded to the dtype of hidden; everything per token is fp32.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from coatlm.kernels.softcap import soft_capped
from coatlm.model.logits_quantize import TokenTerms
from coatlm.model.loss_kernels import row_stats, row_stats_ref
from coatlm.model.output_gemms import MakeGemms, OutputGemms, PlainGemms

Observe = Callable[[Tensor, Tensor], None]  # of lse and of which tokens count
IGNORE = -100  # this label has no loss and no gradient
CHUNK_BYTES = 256 * 2**20  # a chunk has CHUNK_ROWS rows or this many bytes of logits, if more,
CHUNK_ROWS = 16384  # but no more than LARGEST_CHUNK_BYTES of logits
LARGEST_CHUNK_BYTES = 2**30
CHUNK_MULTIPLE = 128  # vocabulary rows: a GEMM tile


def cross_entropy_ref(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    labels_SB: Tensor,
    z_loss: float = 0.0,
    cap: float | None = None,
) -> Tensor:
    """The definition, on one rank: fp32 logits, loss[S, B] in fp32, 0 for the label -100."""
    logits_TV = soft_capped(hidden_SBH.float() @ weight_VH.float().t(), cap).flatten(0, 1)
    labels_T = labels_SB.flatten()
    loss_T = F.cross_entropy(logits_TV, labels_T, reduction="none", ignore_index=IGNORE)
    z_T = z_loss * logits_TV.logsumexp(1) ** 2
    return (loss_T + z_T.masked_fill(labels_T == IGNORE, 0.0)).view_as(labels_SB)


def _combine(stats_N3T: Tensor) -> Tensor:
    """Statistics [N, 3, T] of N disjoint parts of the vocabulary -> [3, T] of their union."""
    top_NT, total_NT, target_NT = stats_N3T.unbind(1)
    top_T = top_NT.amax(0)
    total_T = (total_NT * (top_NT - top_T).exp()).sum(0)
    return torch.stack((top_T, total_T, target_NT.sum(0)))


def _combine_over_group_(stats_3T: Tensor, group: dist.ProcessGroup) -> None:
    """Combine the statistics of all ranks in place, by two all-reduces of fp32: [T] and [2, T]."""
    top_T = stats_3T[0].clone()
    dist.all_reduce(top_T, dist.ReduceOp.MAX, group=group)
    stats_3T[1] *= (stats_3T[0] - top_T).exp()
    dist.all_reduce(stats_3T[1:], group=group)
    stats_3T[0] = top_T


def _chunks(
    hidden_TH: Tensor, V: int, chunk: int, gemms: OutputGemms, *, shared: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows of the weight, their logits[T, rows]), in one `shared` buffer or in one each."""
    T = hidden_TH.shape[0]
    buffer = hidden_TH.new_empty(T * min(chunk, V)) if shared else None
    for start in range(0, V, chunk):
        rows = slice(start, min(start + chunk, V))
        size = T * (rows.stop - start)
        logits_TC = (hidden_TH.new_empty(size) if buffer is None else buffer[:size]).view(T, -1)
        yield rows, gemms.logits_(rows, logits_TC)


def _taken(saved: list[tuple[slice, Tensor]]) -> Iterator[tuple[slice, Tensor]]:
    """Yield the chunks of the list in order, and remove each, so that its memory can be freed."""
    while saved:
        yield saved.pop(0)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        chunk: int,
        group: dist.ProcessGroup | None,
        save_logits: bool,
        z_loss: float,
        cap: float | None,
        make_gemms: MakeGemms,
        observe: Observe | None,
    ) -> Tensor:
        V = weight_VH.shape[0]
        ranks = 1 if group is None else group.size()
        first = 0 if group is None else group.rank() * V
        statistics = row_stats if hidden_TH.is_cuda else row_stats_ref
        stats, saved = [], []
        gemms = make_gemms(hidden_TH, weight_VH)
        for rows, logits_TC in _chunks(hidden_TH, V, chunk, gemms, shared=not save_logits):
            stats.append(statistics(logits_TC, labels_T, first + rows.start, cap))
            if save_logits:
                saved.append((rows, logits_TC))
        stats_3T = _combine(torch.stack(stats))
        if group is not None and ranks > 1:
            _combine_over_group_(stats_3T, group)
        top_T, total_T, target_T = stats_3T
        ignored = labels_T == IGNORE
        unknown = ((labels_T < 0) | (labels_T >= V * ranks)) & ~ignored
        lse_T = (top_T + total_T.log()).masked_fill_(unknown, float("nan"))
        target_T = target_T.clone()  # without the rest of stats_3T
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, target_T, lse_T)
        ctx.chunk, ctx.first, ctx.saved, ctx.z_loss, ctx.cap = chunk, first, saved, z_loss, cap
        ctx.make_gemms = make_gemms
        if observe is not None:
            observe(lse_T, ~ignored)
        loss_T = lse_T - target_T
        if z_loss:
            loss_T += z_loss * lse_T.square()
        return loss_T.masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, labels_T, target_T, lse_T = ctx.saved_tensors
        slope_T = 1 + 2 * ctx.z_loss * lse_T if ctx.z_loss else None
        dloss_T = dloss_T.float().masked_fill(labels_T == IGNORE, 0.0)
        terms = TokenTerms(labels_T, target_T, lse_T, dloss_T, slope_T, ctx.cap)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        main_grad: Tensor | None = getattr(weight_VH, "main_grad", None) if wants_weight else None
        dhidden_TH = (
            torch.zeros(hidden_TH.shape, dtype=torch.float32, device=hidden_TH.device)
            if wants_hidden
            else None
        )
        dweight_VH = torch.empty_like(weight_VH) if wants_weight and main_grad is None else None
        gemms, chunks = ctx.make_gemms(hidden_TH, weight_VH), _taken(ctx.saved)
        if not ctx.saved:  # as in a second backward
            chunks = _chunks(hidden_TH, len(weight_VH), ctx.chunk, gemms, shared=True)
        into = dweight_VH if main_grad is None else main_grad
        for rows, logits_TC in chunks:
            gemms.backward_(
                rows,
                logits_TC,
                terms,
                ctx.first + rows.start,
                dhidden=dhidden_TH,
                dweight=None if into is None else into[rows],
                accumulate=main_grad is not None,
            )
        gemms.end_backward_(terms, ctx.first, dhidden=dhidden_TH, dweight=into)
        if dhidden_TH is not None:
            dhidden_TH = dhidden_TH.to(hidden_TH.dtype)
        return dhidden_TH, dweight_VH, *[None] * 8


def default_chunk(tokens: int, dtype: torch.dtype) -> int:
    """Vocabulary rows per chunk, a positive multiple of 128.

    For each chunk 8 T H bytes of dhidden are read and written beside a GEMM of 2 T H rows FLOPs.
    From CHUNK_ROWS on this traffic hardly matters. With so many tokens that their logits would
    exceed LARGEST_CHUNK_BYTES, a chunk has fewer rows.
    """
    row = max(tokens * dtype.itemsize, 1)
    rows = min(max(CHUNK_BYTES // row, CHUNK_ROWS), LARGEST_CHUNK_BYTES // row)
    return max(rows // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE


def linear_cross_entropy(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    labels_SB: Tensor,
    *,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
    save_logits: bool = False,
    z_loss: float = 0.0,
    cap: float | None = None,
    gemms: MakeGemms = PlainGemms,
    observe: Observe | None = None,
) -> Tensor:
    """The loss per token in nats, fp32 [S, B]; differentiable in hidden and weight.

    With a tensor-parallel `group`, `weight` is this rank's V rows of the vocabulary in rank order,
    hidden, labels and the result are the same on every rank, and the gradient of hidden is this
    rank's partial sum, over its rows: the caller reduces it, as megatron's
    copy_to_tensor_model_parallel_region or gather_from_sequence_parallel_region do in backward.

    `labels` (int64) are entries of the whole vocabulary; -100 gives loss 0 and no gradient, any
    other label outside it gives NaN, in loss and gradients (a check that raises would stall the
    GPU). `chunk` is the number of vocabulary rows per chunk, by default that of `default_chunk`.
    With `save_logits` and autograd, forward saves T * V logits for backward. z_loss is z, cap is c.
    `gemms` are those of the output layer, in BF16 or FP8 (output_gemms.py). `observe` is called
    with lse and with whether the token has a loss, both [T].

    If `weight` has an attribute `main_grad`, its gradient is added there and autograd gets None:
    the hooks of the weight's accumulation node still run, and nothing is allocated. The flag
    `grad_added_to_main_grad` is not set: it would discard `weight.grad`, which with tied
    embeddings holds the gradient of the embedding. Raises ValueError if shapes or dtypes mismatch.
    """
    if hidden_SBH.shape[:-1] != labels_SB.shape:
        raise ValueError(
            f"labels have shape {tuple(labels_SB.shape)}, must be {tuple(hidden_SBH.shape[:-1])}"
        )
    if weight_VH.shape[1:] != hidden_SBH.shape[-1:] or weight_VH.dtype != hidden_SBH.dtype:
        raise ValueError(
            f"weight is {weight_VH.dtype} {tuple(weight_VH.shape)}, "
            f"must be {hidden_SBH.dtype} [V, {hidden_SBH.shape[-1]}] like hidden"
        )
    if chunk is None:
        chunk = default_chunk(labels_SB.numel(), hidden_SBH.dtype)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, must be at least 1")
    hidden_TH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
    save_logits = save_logits and torch.is_grad_enabled()
    loss_T = _LinearCrossEntropy.apply(
        hidden_TH,
        weight_VH,
        labels_SB.reshape(-1),
        chunk,
        group,
        save_logits,
        z_loss,
        cap,
        gemms,
        observe,
    )
    return loss_T.view_as(labels_SB)


@torch.no_grad()
def largest_logits(
    hidden_SBH: Tensor,
    weight_VH: Tensor,
    *,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
    gemms: MakeGemms = PlainGemms,
) -> Tensor:
    """The vocabulary entry with the largest logit per token, int64 [S, B].

    Of equal logits, that of the lowest entry counts. The arguments are those of
    `linear_cross_entropy`, as are the logits.
    """
    hidden_TH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
    chunk = chunk or default_chunk(hidden_TH.shape[0], hidden_TH.dtype)
    first = 0 if group is None else group.rank() * weight_VH.shape[0]
    chunks = _chunks(hidden_TH, len(weight_VH), chunk, gemms(hidden_TH, weight_VH), shared=True)
    best = [logits.max(1) for _, logits in chunks]
    top_NT = torch.stack([values for values, _ in best]).float()
    entry_NT = torch.stack([first + i * chunk + columns for i, (_, columns) in enumerate(best)])
    top_T, at_T = top_NT.max(0)
    entry_T = entry_NT.gather(0, at_T[None])[0]
    if group is not None:
        highest_T = top_T.clone()
        dist.all_reduce(highest_T, dist.ReduceOp.MAX, group=group)
        entry_T = entry_T.where(top_T == highest_T, torch.iinfo(torch.int64).max)
        dist.all_reduce(entry_T, dist.ReduceOp.MIN, group=group)
    return entry_T.view(hidden_SBH.shape[:-1])


@torch.no_grad()
def all_logits(
    hidden_SBH: Tensor, weight_VH: Tensor, *, cap: float | None = None, gemms: MakeGemms
) -> Tensor:
    """The logits [S, B, V] of this rank's V rows, in the dtype of hidden, without autograd.

    The arguments are those of `linear_cross_entropy`.
    """
    hidden_TH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
    logits_TV = hidden_TH.new_empty(len(hidden_TH), len(weight_VH))
    gemms(hidden_TH, weight_VH).logits_(slice(None), logits_TV)
    return soft_capped(logits_TV, cap).view(*hidden_SBH.shape[:-1], -1)
