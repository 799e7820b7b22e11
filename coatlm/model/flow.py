"""COAT's FP8 activation flow (arXiv 2410.19313, section 5), without the modules around it.

    x ---- norm ---- qkv ---- rope ---- attention ---- proj -(+x)- x1 ---- norm ---- gate|up
                                                                     SwiGLU ---- down -(+x1)-

Two autograd functions hold all linears: `NormQKV` from the residual stream to q, k, v, and
`ProjMLP` from the attention output to the next layer. Between them attention is torch's own.

The recipe (config/recipes.py) names the format of each GEMM operand and each saved tensor.
T tokens (sequence x batch) of this rank, H hidden, W = q | k | v, F ffn, per tensor-parallel rank:

                        saved for backward               recomputed in backward, unless saved
    first norm          x [T, H], 1 / rms [T]            norm output, transposed
    attention           q, k, v, o, softmax statistics   o transposed
    second norm         x1 [T, H], 1 / rms [T]           norm output, transposed
    SwiGLU              gate | up [T, 2F]                SwiGLU output, transposed

In forward, scaling is current: fused kernels compute the scales from the values in their registers.
The scale of a gradient is current, or delayed and fixed before the step (scales.py). Weights are
cast to FP8 for each GEMM, in forward and, transposed, in backward; the recipe's `keep_weights`
caches them for the step. The wgrad GEMM accumulates into `main_grad`, and overwrites it where it is
stale, in the first microbatch of a step (`main_grad_stale`). On the CPU the references run: the
same scales and codes, with GEMMs in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coatlm.fp8 import producers
from coatlm.fp8.formats import E4M3
from coatlm.fp8.norm_backward import norm_backward
from coatlm.fp8.producers import decoded, powers_of_two
from coatlm.fp8.qtensor import QTensor, block
from coatlm.kernels.activation import swiglu
from coatlm.kernels.rope import rotate_qkv_, split_qkv_rope
from coatlm.model.flow_gemms import Flow
from coatlm.model.numerics import norm_rows, qkv_gradient_rows, swiglu_gradient_rows, swiglu_rows


def _save(ctx: Any, *tensors: Tensor | QTensor | None) -> None:
    """`ctx.save_for_backward`, for QTensors too."""
    flat: list[Tensor | None] = []
    layout: list[Any] = []
    for x in tensors:
        if isinstance(x, QTensor):
            flat += [x.codes, x.scale]
            layout.append((x.granularity, x.fmt))
        else:
            flat.append(x)
            layout.append(None)
    ctx.save_for_backward(*flat)
    ctx.layout = layout


def _saved_tensors(ctx: Any) -> list[Any]:
    """The tensors and QTensors that `_save` saved, in the same order."""
    flat = iter(ctx.saved_tensors)
    return [
        next(flat) if kind is None else QTensor(next(flat), next(flat), *kind)
        for kind in ctx.layout
    ]


def _norm_gradient(weight: Tensor, dweight: Tensor) -> Tensor | None:
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return dweight.to(weight.dtype)
    main_grad.add_(dweight)
    return None


class NormQKV(torch.autograd.Function):
    """x[S, B, H] -> (q and k after RoPE, v, x), or (qkv[S, B, W], x) if cos and sin are None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        queries_per_kv_head: int,
        head_dim: int,
        flow: Flow,
        save: bool,
    ) -> tuple[Tensor, ...]:
        recipe, parallel = flow.recipe, flow.parallel
        normed = producers.norm_output(
            x.flatten(0, 1),
            norm,
            flow.eps,
            wanted=recipe.forward.activation,
            saved=flow.saved_as("norm1_saved") if save else None,
            share=parallel.shared_scale,
        )
        gathered, w = parallel.gather_pieces(normed.y), flow.forward_weight(weight)
        flow.record("norm1_saved", normed.x, normed.saved)
        flow.record("qkv_input", norm_rows(normed.x, norm, flow.eps), normed.y)
        flow.record("qkv_weight", weight, w)
        normed_values = partial(producers.recomputed_norm, normed.x, norm, flow.eps)
        y, qkv = flow.project_gathered(
            "qkv", normed.y, gathered, w, weight, normed_values, bias=bias
        )
        qkv = qkv.unflatten(0, (-1, x.shape[1]))
        _save(
            ctx,
            normed.x if normed.saved is None else normed.saved,
            normed.rstd,
            normed.y if flow.saves_input("qkv") else None,
            flow.input_scale(y),
            flow.weight_scale(w),
            *(norm, weight, cos, sin),
        )
        ctx.flow, ctx.has_bias = flow, bias is not None
        residual = x.view_as(x)
        if cos is None or sin is None:
            return qkv, residual
        heads = qkv.unflatten(-1, (-1, (queries_per_kv_head + 2) * head_dim))
        apart = {"q", "k", "v"}.intersection(flow.attention_in_fp8())  # not saved as views of qkv
        if queries_per_kv_head == 1 and not apart:
            return *rotate_qkv_(heads, cos, sin), residual
        q, k, v = split_qkv_rope(
            heads, cos, sin, queries_per_kv_head=queries_per_kv_head, head_dim=head_dim
        )
        return q, k, v, residual

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flow: Flow = ctx.flow
        x, rstd, y, y_scale, w_scale, norm, weight, cos, sin = _saved_tensors(ctx)
        *parts, dresidual = grads
        recipe, dbias = flow.recipe, None
        slot = flow.slot("qkv_grad")
        if len(parts) == 1:
            dqkv = parts[0].flatten(0, 1)
            codes = producers.gradient(dqkv, recipe, **slot)
            flow.record("qkv_grad", dqkv, codes.direct)
            d = flow.as_gradient("qkv", codes, lambda: dqkv)
        else:
            dq, dk, dv = parts
            codes = producers.qkv_gradient((dq, dk, dv), cos, sin, recipe, **slot)
            flow.record("qkv_grad", qkv_gradient_rows(dq, dk, dv, cos, sin), codes.direct)
            d = flow.as_gradient("qkv", codes, partial(producers.joined, dq, dk, dv, cos, sin))
        flow.finish_microbatch()
        if ctx.has_bias:
            rows = d.direct.dequantize() if isinstance(d.direct, QTensor) else d.direct.float()
            dbias = rows.sum(0).to(weight.dtype)
        y_t = flow.norm_output_transposed("qkv", x, rstd, norm, y, y_scale)
        wait = flow.parallel.sum_partial(flow.input_gradient("qkv", d.direct, weight, w_scale))
        dweight = flow.weight_gradient(weight, d.transposed, y_t())
        dx, dnorm, _ = norm_backward(
            wait(), _readable(x), rstd, norm, dresidual=dresidual.flatten(0, 1).contiguous()
        )
        dx = dx.view(dresidual.shape)
        return dx, _norm_gradient(norm, dnorm), dweight, dbias, *[None] * 6


class ProjMLP(torch.autograd.Function):
    """Attention output o[S, B, q] and residual x[S, B, H] -> the layer's output [S, B, H].

    `o_codes` and `o_scale` are o in FP8 blocks, [S, B, q], if the recipe saves it so, else None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        o: Tensor,
        o_codes: Tensor | None,
        o_scale: Tensor | None,
        x: Tensor,
        proj: Tensor,
        norm: Tensor,
        fc1: Tensor,
        fc2: Tensor,
        flow: Flow,
        save: bool,
    ) -> Tensor:
        parallel, wanted = flow.parallel, flow.recipe.forward.activation
        o_T, x_T = o.flatten(0, 1), x.flatten(0, 1)
        o8, w = producers.as_operand(o_T, wanted), flow.forward_weight(proj)
        if parallel.size == 1:
            stream, add = flow.project("proj", o8, w, proj, lambda: o_T, add=x_T), None
            w1 = flow.forward_weight(fc1)
        else:
            wait = flow.project_summed(o8, w)
            w1 = flow.forward_weight(fc1)
            stream, add = wait(), x_T
        normed = producers.norm_output(
            stream,
            norm,
            flow.eps,
            wanted=wanted,
            saved=flow.saved_as("norm2_saved") if save else None,
            add=add,
            share=parallel.shared_scale,
        )
        gathered = parallel.gather_pieces(normed.y)
        normed_values = partial(producers.recomputed_norm, normed.x, norm, flow.eps)
        y, gate_up = flow.project_gathered("fc1", normed.y, gathered, w1, fc1, normed_values)
        active = producers.swiglu_output(
            gate_up, wanted=wanted, saved=flow.saved_as("gate_up_saved") if save else None
        )
        w2 = flow.forward_weight(fc2)
        if parallel.size == 1:
            out = flow.project("fc2", active.a, w2, fc2, partial(swiglu, gate_up), add=normed.x)
        else:
            out = flow.project_summed(active.a, w2)() + normed.x
        o_saved = o_T if o_codes is None or o_scale is None else _in_rows(o_codes, o_scale, o_T)
        flow.record("attention_output", o_T, o8)
        flow.record("o_saved", o_T, o_saved)
        flow.record("norm2_saved", normed.x, normed.saved)
        flow.record("fc1_input", norm_rows(normed.x, norm, flow.eps), normed.y)
        flow.record("gate_up_saved", gate_up, active.saved)
        flow.record("fc2_input", swiglu_rows(gate_up), active.a)
        for name, weight, codes in (("proj", proj, w), ("fc1", fc1, w1), ("fc2", fc2, w2)):
            flow.record(f"{name}_weight", weight, codes)
        _save(
            ctx,
            o8 if flow.saves_input("proj") else o_saved,
            flow.input_scale(o8),
            normed.x if normed.saved is None else normed.saved,
            normed.rstd,
            normed.y if flow.saves_input("fc1") else None,
            flow.input_scale(y),
            gate_up if active.saved is None else active.saved,
            active.a if flow.saves_input("fc2") else None,
            flow.input_scale(active.a),
            *(flow.weight_scale(weight) for weight in (w, w1, w2)),
            *(proj, norm, fc1, fc2),
        )
        ctx.flow = flow
        return out.view(x.shape).data  # no view: pipeline stages free outputs they sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        flow: Flow = ctx.flow
        (o, o_scale, x1, rstd, y, y_scale, gate_up, a, a_scale, *rest) = _saved_tensors(ctx)
        w_scale, w1_scale, w2_scale, proj, norm, fc1, fc2 = rest
        recipe, shape = flow.recipe, dout.shape
        source, wanted = recipe.forward.activation, recipe.wgrad.activation
        dout = dout.flatten(0, 1).contiguous()

        d_t, da = flow.output_gradient("fc2", dout, fc2, w2_scale)
        codes, recomputed = producers.swiglu_gradient(
            da, gate_up, a_scale, recipe, with_output=a is None, **flow.slot("fc1_grad")
        )
        flow.record("fc1_grad", swiglu_gradient_rows(da, gate_up), codes.direct)
        g = flow.as_gradient("fc1", codes, partial(producers.swiglu_gradient_values, da, gate_up))
        del da, codes
        if recomputed is None:
            recomputed = producers.codes_transposed(a, source, wanted)
        swiglu_values = partial(producers.recomputed_swiglu, gate_up)
        a_t = flow.input_transposed("fc2", recomputed, swiglu_values)
        dfc2 = flow.weight_gradient(fc2, d_t, a_t)
        del a_t, d_t, recomputed

        y_t = flow.norm_output_transposed("fc1", x1, rstd, norm, y, y_scale)
        wait = flow.parallel.sum_partial(flow.input_gradient("fc1", g.direct, fc1, w1_scale))
        dfc1 = flow.weight_gradient(fc1, g.transposed, y_t())
        del g, y_t
        dx1, dnorm, amaxes = norm_backward(wait(), _readable(x1), rstd, norm, dresidual=dout)

        d_t, do = flow.output_gradient("proj", dx1, proj, w_scale, amaxes)
        if flow.saves_input("proj"):
            codes_t = producers.codes_transposed(o, source, wanted)
        else:
            codes_t = producers.input_transposed(o, wanted, o_scale)
        o_t = flow.input_transposed("proj", codes_t, partial(producers.decoded, o))
        dproj = flow.weight_gradient(proj, d_t, o_t)
        do = do.view(-1, shape[1], do.shape[-1])
        return (
            *(do, None, None, dx1.view(shape)),
            *(dproj, _norm_gradient(norm, dnorm), dfc1, dfc2, None, None),
        )


def _readable(x: Tensor | QTensor) -> Tensor | QTensor:
    """A saved norm input in a form that `norm_backward` reads; dequantized if need be."""
    return x if powers_of_two(x) else decoded(x)


def _in_rows(codes: Tensor, scale: Tensor, like: Tensor) -> QTensor:
    """The FP8 attention output [S, B, N * D], as blocks of the rows of [T, N * D]."""
    size = codes.numel() // scale.numel()
    return QTensor(codes.view(like.shape), scale.view(len(like), -1), block(1, size), E4M3)
