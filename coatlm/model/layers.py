"""RMSNorm and the gated MLP of a BF16 Llama layer, on coatlm's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coatlm.kernels.activation import Activation, swiglu
from coatlm.kernels.norm import rms_norm
from coatlm.megatron import MLP as MegatronMLP
from coatlm.megatron import MegatronModule


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, fp32 inside.

    With the configuration's `layernorm_zero_centered_gamma` the factor is 1 + weight, in fp32.
    Under sequence parallelism each tensor-parallel rank has part of the tokens. The attribute
    `sequence_parallel` of the weight says that its gradient has to be summed over these ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        if not config.use_cpu_initialization:
            self.weight.data = self.weight.data.cuda()
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.float() if self.zero_centered else self.weight
        return rms_norm(x, weight, self.eps)


class Branch(MegatronModule):
    """What happens to the output of attention and MLP before it is added to the residual stream.

    y = norm(x) * multiplier: RMSNorm as in OLMo-2 and Gemma 2, the multiplier as in Granite.
    """

    def __init__(self, config: Any, *, norm: bool = False, multiplier: float = 1.0) -> None:
        super().__init__(config=config)
        eps = config.layernorm_epsilon
        self.norm = RMSNorm(config, config.hidden_size, eps) if norm else None
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x)
        return x if self.multiplier == 1.0 else x * self.multiplier


class MLP(MegatronMLP):
    """down(act(gate(x)) * up(x)), with gate and up as one GEMM; parameters are megatron-core's.

    megatron-core 0.19 passes process groups and more to the constructor, 0.16 does not. They are
    not needed: the tensor-parallel group is the same. `branch` has the options of `Branch`.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        *,
        branch: Mapping[str, Any] | None = None,
        activation: Activation = "silu",
        **_: Any,
    ) -> None:
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size)
        self.activation = activation
        self.branch = Branch(config, **(branch or {}))

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        gate_up, _ = self.linear_fc1(hidden_states)
        out, bias = self.linear_fc2(swiglu(gate_up, self.activation))
        return self.branch(out), bias
