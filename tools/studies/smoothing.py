"""Smooth-SwiGLU (arXiv 2409.12517, section 4.4) in the FP8 flow, to study what it would change.

Channel i of a = silu(gate) * up, the input of the down projection W, is divided by s_i before it is
quantized, and column i of W is multiplied by s_i before that is. In exact arithmetic s cancels:

    forward    y  =  (a / s) (W s)^T
    dgrad      da = (dy (W s)) / s
    wgrad      dW = (dy^T (a / s)) s

s_i is the power of two at or above amax_i / 448, with amax_i the largest magnitude of channel i
over the tokens of the microbatch: the scale that the channel would have if it had one of its own.
So a division by s_i changes no bit of a mantissa, and every channel of a / s that is not zero has
an amax between 224 and 448. What the recipe does with a and W, it does with a / s and W s. Two
things differ: a is rounded to BF16 first, which the fused kernels do not do, and da and dW are
scaled after their GEMMs. gate | up is saved for backward as the recipe says.

T tokens, H hidden, F ffn. It needs one process, and the backward pass of a microbatch has to follow
its forward pass before the next one begins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coatlm.fp8 import producers
from coatlm.fp8.formats import E4M3
from coatlm.fp8.operand import emit_transposed
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.scaling import power_of_two_ref
from coatlm.model.bf16_tensors import LinearName
from coatlm.model.coat_layer import CoatTransformerLayer
from coatlm.model.flow_gemms import Flow, GemmInput, Values


class Smoothed(NamedTuple):
    """The operands of a forward GEMM, and the factors that backward needs."""

    factors: Tensor  # s, fp32 [F]
    activation: QTensor  # a / s, [T, F]
    weight: QTensor  # W s, [H, F]


def channel_factors(a: Tensor) -> Tensor:
    """The factors s, fp32 [F], of the channels of a [T, F]; 1 where a channel is zero."""
    return power_of_two_ref(a.float().abs().amax(0), E4M3)


def divided(x: Tensor, factors: Tensor) -> Tensor:
    """x [M, F] / factors [F], powers of two, in the dtype of x. Exact except for subnormals."""
    return (x.float() / factors).to(x.dtype)


class SmoothFlow(Flow):
    """The flow of a layer whose down projection is smoothed."""

    def __init__(self, plain: Flow) -> None:
        super().__init__(plain.recipe, plain.parallel, plain.eps, plain.plans)
        self.down: Tensor | None = None  # the weight of the last forward pass
        self.smoothed: Smoothed | None = None  # of the last forward pass

    def project(
        self,
        linear: LinearName,
        x: QTensor,
        w: QTensor,
        weight: Tensor,
        values: Values,
        **options: Any,
    ) -> Tensor:
        """As `Flow.project`; the codes x and w of the down projection are not used."""
        if linear != "fc2":
            return super().project(linear, x, w, weight, values, **options)
        a, forward = values(), self.recipe.forward
        factors = channel_factors(a)
        activation = producers.as_operand(divided(a, factors), forward.activation)
        smooth = producers.as_operand(divided(weight.detach(), 1 / factors), forward.weight)
        self.down, self.smoothed = weight, Smoothed(factors, activation, smooth)
        return self._multiply("forward", activation, smooth, **options)

    def input_gradient(
        self, linear: LinearName, dy: GemmInput, weight: Tensor, scale: Tensor | None
    ) -> Tensor:
        """As `Flow.input_gradient`."""
        if linear != "fc2":
            return super().input_gradient(linear, dy, weight, scale)
        factors, _, smooth = self._of_forward()
        recipe, values = self.recipe, divided(weight.detach(), 1 / factors)
        w = producers.weight_transposed(
            values, recipe.forward, recipe.dgrad, self.weight_scale(smooth)
        )
        return divided(self._multiply("dgrad", dy, w), factors)

    def input_transposed(self, linear: LinearName, codes: QTensor, values: Values) -> GemmInput:
        """As `Flow.input_transposed`, of a / s."""
        if linear != "fc2":
            return super().input_transposed(linear, codes, values)
        factors, activation, _ = self._of_forward()
        wanted = self.recipe.wgrad.activation
        if self.saves_input(linear):
            return producers.codes_transposed(activation, self.recipe.forward.activation, wanted)
        scale = self.input_scale(activation)
        return emit_transposed(
            divided(values(), factors), wanted, scale=None if scale is None else scale.amax()
        )

    def weight_gradient(self, weight: Tensor, dy_t: GemmInput, x_t: GemmInput) -> Tensor | None:
        """As `Flow.weight_gradient`, for weights with a `main_grad`."""
        if weight is not self.down:
            return super().weight_gradient(weight, dy_t, x_t)
        dw = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        self._multiply("wgrad", dy_t, x_t, out=dw, accumulate=False)
        dw.mul_(self._of_forward().factors)
        if weight.main_grad_stale:  # type: ignore[attr-defined]
            weight.main_grad.copy_(dw)  # type: ignore[attr-defined]
            weight.main_grad_stale = False  # type: ignore[attr-defined]
        else:
            weight.main_grad.add_(dw)  # type: ignore[attr-defined]
        return None

    def _of_forward(self) -> Smoothed:
        assert self.smoothed is not None
        return self.smoothed


def smooth_layers(module: nn.Module) -> None:
    """Let every FP8 layer of a model smooth its down projection."""
    for layer in module.modules():
        if isinstance(layer, CoatTransformerLayer):
            layer.flow = SmoothFlow(layer.flow)
