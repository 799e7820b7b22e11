"""COAT's FP8 activation flow (arXiv 2410.19313, section 5), without the modules around it.

    x ---- norm ---- qkv ---- rope ---- attention ---- proj -(+x)- x1 ---- norm ---- gate|up
                                                                     SwiGLU ---- down -(+x1)-

Two autograd functions hold all linears: `NormQKV` from the residual stream to q, k, v, and
`ProjMLP` from the attention output to the next layer. Between them attention is torch's own.

T tokens (sequence x batch) of this rank, H hidden, W = q | k | v, F ffn, per tensor-parallel rank;
E4M3 unless said otherwise. Operands of forward have a scale a row, those of backward one a tensor
(the largest of the row scales); what is kept has a scale for 1 x group elements. The scale of a
gradient is current, or fixed before the step (scales.py); all others are current: the kernel that
makes an operand of forward has its rows in registers, and their amax for nothing.

                        kept for backward                made again in backward
    first norm          x [T, H], rms [T]                norm output, transposed
    attention           q, k, v, o, softmax statistics   o transposed
    second norm         x1 [T, H], rms [T]               norm output, transposed
    SwiGLU              gate | up [T, 2F]                SwiGLU output, transposed

Weights are cast when a GEMM needs them, in forward and, to the same codes transposed, in backward,
and are kept no longer unless the recipe says so. Weight gradients are added to `main_grad` by their
GEMM, the first of a step written over it (`main_grad_stale`).
On the CPU the references run: the same scales and codes, products in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coatlm.fp8.formats import E4M3
from coatlm.fp8.gemm import Plans, matmul
from coatlm.fp8.norm_quantize import norm_backward, norm_quantize, quantize_rows
from coatlm.fp8.qtensor import ROW, QTensor, group
from coatlm.fp8.recipe import FlowRecipe
from coatlm.fp8.rope import rotate_qkv_, split_qkv_rope
from coatlm.fp8.rope_quantize import join_quantize
from coatlm.fp8.scaling import current_scale, group_scale
from coatlm.fp8.swiglu_quantize import swiglu_backward_quantize, swiglu_quantize
from coatlm.fp8.transpose import (
    Codes,
    padded_rows,
    quantize_both,
    quantize_direct,
    quantize_rows_transposed,
    quantize_transposed,
    transpose_codes,
    transpose_rows,
)
from coatlm.model.numerics import (
    Probe,
    Rows,
    norm_output,
    qkv_gradient,
    swiglu_gradient,
    swiglu_output,
)
from coatlm.model.scales import CurrentScales, Scales
from coatlm.parallel.tensor import TensorParallel


class Weight(NamedTuple):
    """A weight matrix in FP8, as the GEMMs of forward and of dgrad take it."""

    rows: QTensor  # [out, in], a scale a row
    transposed: QTensor  # [in, out], one scale


class Flow:
    """What the two functions of a layer share: recipe, layout, and weights kept for a step."""

    def __init__(
        self, recipe: FlowRecipe, parallel: TensorParallel, eps: float, plans: Plans | None = None
    ) -> None:
        """`plans`: of the model's GEMMs, which its layers share; None: of this layer alone."""
        self.recipe, self.parallel, self.eps = recipe, parallel, eps
        self.plans = Plans() if plans is None else plans
        self.keeping = False  # the layer sets it, to what the recipe says where it trains
        self.kept: dict[Tensor, Weight] = {}
        self.probe: Probe | None = None  # while this step's numerics are looked at
        self.scales: Scales = CurrentScales()  # of gradients

    def record(self, name: str, source: Tensor | Rows, quantised: Tensor | QTensor | None) -> None:
        """Show the probe x[M, K], or what makes its rows, with its codes, where it has any."""
        if self.probe is not None and isinstance(quantised, QTensor):
            self.probe.record(name, source, quantised)

    def tune(self, weights: Sequence[Tensor], tokens: int, grad_dtype: torch.dtype) -> None:
        """Choose the algorithms of backward's products, for `tokens` in a microbatch."""
        fast = self.recipe.fast
        kinds: dict[str, Any] = {"a_fmt": self.recipe.grad_fmt, "b_fmt": E4M3}
        for weight in weights:
            kinds["device"] = weight.device.index
            n, k = weight.shape
            kinds |= {"fast": "dgrad" in fast, "accumulate": False}
            self.plans.tune(tokens, k, n, out_dtype=torch.bfloat16, **kinds)
            kinds |= {"fast": "wgrad" in fast, "accumulate": True}
            self.plans.tune(n, k, padded_rows(tokens), out_dtype=grad_dtype, **kinds)

    def forward_weight(self, weight: Tensor) -> QTensor:
        """[out, in] with a scale a row."""
        if weight in self.kept:
            return self.kept[weight].rows
        rows = quantize_rows(weight.detach())
        if self.keeping:
            self.kept[weight] = Weight(rows, transpose_rows(rows))
        return rows

    def backward_weight(self, weight: Tensor, scale: Tensor) -> QTensor:
        """[in, out]; `scale`: those of the rows in forward."""
        if weight in self.kept:
            return self.kept[weight].transposed
        return quantize_rows_transposed(weight.detach(), scale)

    def project(self, x: QTensor, weight: QTensor, **options: Any) -> Tensor:
        """x W^T of forward."""
        fast = "forward" in self.recipe.fast
        return matmul(x, weight, fast=fast, plans=self.plans, **options)

    def input_gradient(self, dy: QTensor, weight: Tensor, scale: Tensor) -> Tensor:
        """dy W."""
        w, fast = self.backward_weight(weight, scale), "dgrad" in self.recipe.fast
        return matmul(dy, w, fast=fast, plans=self.plans)

    def weight_gradient(self, weight: Tensor, dy_t: QTensor, x_t: QTensor) -> Tensor | None:
        """dy^T x, added to `main_grad` where there is one, or written over it if it is stale."""
        fast = "wgrad" in self.recipe.fast
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            return matmul(dy_t, x_t, fast=fast, plans=self.plans).to(weight.dtype)
        stale = getattr(weight, "main_grad_stale", False)
        matmul(dy_t, x_t, out=main_grad, accumulate=not stale, fast=fast, plans=self.plans)
        if stale:
            weight.main_grad_stale = False  # type: ignore[attr-defined]
        return None

    def gradient(self, name: str, dy: Tensor, amaxes: Tensor | None = None) -> Codes:
        """dy of a row-parallel linear, gathered over the tokens: [T, K] and [K, T'].

        `name`: what scales and numerics call it. `amaxes`: of dy, where they are known.
        """
        fmt = self.recipe.grad_fmt
        scale, amax = self.scales.slot(name)
        if scale is None:  # this rank's, of its own tokens
            if amaxes is None:
                scale = current_scale(dy, fmt, power_of_two=True)
            else:
                scale = group_scale(amaxes, fmt, power_of_two=True)
            scale = self.parallel.shared_scale(scale)
        if not self.parallel.scattered:
            both = quantize_both(dy, scale, fmt=fmt, amax=amax)
            self.record(name, dy, both.direct)
            return both
        mine = quantize_direct(dy, scale, fmt=fmt, amax=amax)
        self.record(name, dy, mine)
        whole = self.parallel.gather_rows(mine)
        return Codes(whole, transpose_codes(whole))

    def normed_transposed(
        self, kept: Tensor | QTensor, scale: Tensor, rstd: Tensor | None, weight: Tensor | None
    ) -> QTensor:
        """A column-parallel linear's input [K, T'], from what was kept of it.

        `scale`: those of its rows, of all tokens, in forward. Without `rstd` the input itself was
        kept, in FP8 rows.
        """
        one = scale.amax()
        if rstd is None:
            assert isinstance(kept, QTensor) and kept.granularity == ROW
            rstd, kept = kept.scale, kept.codes
        if not self.parallel.scattered:
            return quantize_transposed(kept, one, row=rstd, column=weight)
        mine = quantize_direct(kept, one, row=rstd, column=weight)
        return transpose_codes(self.parallel.gather_rows(mine))


def _keep(ctx: Any, *tensors: Tensor | QTensor | None) -> None:
    """save_for_backward, also of QTensors."""
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


def _kept(ctx: Any) -> list[Any]:
    """What `_keep` was given."""
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
    """x[S, B, H] -> (q, k, v rotated, x), or (qkv[S, B, W], x) without rotary tables."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        heads_per_group: int,
        head_dim: int,
        flow: Flow,
        keep: bool,
    ) -> tuple[Tensor, ...]:
        recipe = flow.recipe
        size = recipe.group if keep else 0
        normed = norm_quantize(x.flatten(0, 1), norm, flow.eps, group_size=size)
        y, w = flow.parallel.gather_rows(normed.y), flow.forward_weight(weight)
        flow.record("norm1_saved", normed.x, normed.saved)
        flow.record("qkv_input", norm_output(normed.x, norm, flow.eps), normed.y)
        flow.record("qkv_weight", weight, w)
        qkv = flow.project(y, w, bias=bias).unflatten(0, (-1, x.shape[1]))
        x_kept = normed.x if normed.saved is None else normed.saved
        y_kept = normed.y if recipe.keep_linear_inputs else None
        _keep(ctx, x_kept, normed.rstd, y_kept, y.scale, w.scale, norm, weight, cos, sin)
        ctx.flow, ctx.has_bias = flow, bias is not None
        residual = x.view_as(x)
        if cos is None or sin is None:
            return qkv, residual
        groups = qkv.unflatten(-1, (-1, (heads_per_group + 2) * head_dim))
        if heads_per_group == 1 and not recipe.attention_group:
            return *rotate_qkv_(groups, cos, sin), residual
        q, k, v = split_qkv_rope(
            groups, cos, sin, heads_per_group=heads_per_group, head_dim=head_dim
        )
        return q, k, v, residual

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flow: Flow = ctx.flow
        x, rstd, y, y_scale, w_scale, norm, weight, cos, sin = _kept(ctx)
        *parts, dresidual = grads
        fmt, dbias = flow.recipe.grad_fmt, None
        scale, amax = flow.scales.slot("qkv_grad")
        if len(parts) == 1:
            dqkv = parts[0].flatten(0, 1)
            if scale is None:
                scale = current_scale(dqkv, fmt, power_of_two=True)
            d = quantize_both(dqkv, scale, fmt=fmt, amax=amax)
            flow.record("qkv_grad", dqkv, d.direct)
        else:
            dq, dk, dv = parts
            d = join_quantize(dq, dk, dv, cos, sin, fmt=fmt, scale=scale, amax=amax)
            flow.record("qkv_grad", qkv_gradient(dq, dk, dv, cos, sin), d.direct)
        if ctx.has_bias:
            dbias = d.direct.dequantize().sum(0).to(weight.dtype)
        wait = flow.parallel.sum_partial(flow.input_gradient(d.direct, weight, w_scale))
        if y is None:
            y_t = flow.normed_transposed(x, y_scale, rstd, norm)
        else:
            y_t = flow.normed_transposed(y, y_scale, None, None)
        dweight = flow.weight_gradient(weight, d.transposed, y_t)
        dx, dnorm, _ = norm_backward(
            wait(), x, rstd, norm, dresidual=dresidual.flatten(0, 1).contiguous()
        )
        dx = dx.view(dresidual.shape)
        return dx, _norm_gradient(norm, dnorm), dweight, dbias, *[None] * 6


class ProjMLP(torch.autograd.Function):
    """Attention output o[S, B, q] and residual x[S, B, H] -> the layer's output [S, B, H].

    `o_codes`, `o_scale`: o in FP8 groups, [S, B, q], where attention keeps it so; else None.
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
        keep: bool,
    ) -> Tensor:
        recipe, parallel = flow.recipe, flow.parallel
        size = recipe.group if keep else 0
        o_T, x_T = o.flatten(0, 1), x.flatten(0, 1)
        o8, w = quantize_rows(o_T), flow.forward_weight(proj)
        if parallel.size == 1:
            x1 = flow.project(o8, w, add=x_T)
            normed = norm_quantize(x1, norm, flow.eps, group_size=size)
        else:
            partial = parallel.sum_partial(flow.project(o8, w))()
            normed = norm_quantize(partial, norm, flow.eps, add=x_T, group_size=size)
        y, w1 = parallel.gather_rows(normed.y), flow.forward_weight(fc1)
        gate_up = flow.project(y, w1)
        active = swiglu_quantize(gate_up, group_size=size)
        w2 = flow.forward_weight(fc2)
        if parallel.size == 1:
            out = flow.project(active.a, w2, add=normed.x)
        else:
            out = parallel.sum_partial(flow.project(active.a, w2))() + normed.x
        if o_codes is not None and o_scale is not None:
            o_kept: Tensor | QTensor = _regroup(o_codes, o_scale, o_T.shape)
        else:
            o_kept = o_T
        flow.record("attention_output", o_T, o8)
        flow.record("attention_saved", o_T, o_kept)
        flow.record("norm2_saved", normed.x, normed.saved)
        flow.record("fc1_input", norm_output(normed.x, norm, flow.eps), normed.y)
        flow.record("gate_up_saved", gate_up, active.saved)
        flow.record("fc2_input", swiglu_output(gate_up), active.a)
        for name, weight, codes in (("proj", proj, w), ("fc1", fc1, w1), ("fc2", fc2, w2)):
            flow.record(f"{name}_weight", weight, codes)
        keeps = recipe.keep_linear_inputs
        _keep(
            ctx,
            o8 if keeps else o_kept,
            o8.scale,
            normed.x if normed.saved is None else normed.saved,
            normed.rstd,
            normed.y if keeps else None,
            y.scale,
            gate_up if active.saved is None else active.saved,
            active.a if keeps else None,
            active.a.scale,
            *(w.scale, w1.scale, w2.scale),
            *(proj, norm, fc1, fc2),
        )
        ctx.flow = flow
        return out.view(x.shape).data  # not marked as a view: pipeline stages free what they sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        flow: Flow = ctx.flow
        (o, o_scale, x1, rstd, y, y_scale, gate_up, a, a_scale, *rest) = _kept(ctx)
        w_scale, w1_scale, w2_scale, proj, norm, fc1, fc2 = rest
        fmt, shape = flow.recipe.grad_fmt, dout.shape
        dout = dout.flatten(0, 1).contiguous()

        d = flow.gradient("fc2_grad", dout)
        da = flow.input_gradient(d.direct, fc2, w2_scale)
        scale, amax = flow.scales.slot("fc1_grad")
        g = swiglu_backward_quantize(
            *(da, gate_up, a_scale.amax()), fmt=fmt, with_a=a is None, scale=scale, amax=amax
        )
        flow.record("fc1_grad", swiglu_gradient(da, gate_up), g.dx)
        del da
        a_t = transpose_rows(a) if g.a_t is None else g.a_t
        dfc2 = flow.weight_gradient(fc2, d.transposed, a_t)
        del a_t, d

        wait = flow.parallel.sum_partial(flow.input_gradient(g.dx, fc1, w1_scale))
        if y is None:
            y_t = flow.normed_transposed(x1, y_scale, rstd, norm)
        else:
            y_t = flow.normed_transposed(y, y_scale, None, None)
        dfc1 = flow.weight_gradient(fc1, g.dx_t, y_t)
        del g, y_t
        dx1, dnorm, amaxes = norm_backward(wait(), x1, rstd, norm, dresidual=dout)

        d = flow.gradient("proj_grad", dx1, amaxes)
        do = flow.input_gradient(d.direct, proj, w_scale)
        if isinstance(o, QTensor) and o.granularity == ROW:
            o_t = transpose_rows(o)
        else:
            o_t = quantize_transposed(o, o_scale.amax())
        dproj = flow.weight_gradient(proj, d.transposed, o_t)
        do = do.view(-1, shape[1], do.shape[-1])
        return (
            *(do, None, None, dx1.view(shape)),
            *(dproj, _norm_gradient(norm, dnorm), dfc1, dfc2, None, None),
        )


def _regroup(codes: Tensor, scale: Tensor, shape: torch.Size) -> QTensor:
    """FP8 groups [S, B, N * D] as those of rows [T, N * D]."""
    size = codes.numel() // scale.numel()
    return QTensor(codes.view(shape), scale.view(shape[0], -1), group(size), E4M3)
