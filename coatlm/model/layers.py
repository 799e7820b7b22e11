"""RMSNorm and the SwiGLU MLP of a BF16 Llama layer, on coatlm's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coatlm.fp8.activation import swiglu
from coatlm.fp8.norm import rms_norm
from coatlm.megatron import MLP as MegatronMLP
from coatlm.megatron import MegatronModule


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, fp32 inside.

    Under sequence parallelism each tensor-parallel rank has part of the tokens. The attribute
    `sequence_parallel` of the weight says that its gradient has to be summed over these ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        if not config.use_cpu_initialization:
            self.weight.data = self.weight.data.cuda()
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Branch(MegatronModule):
    """What happens to the output of attention and MLP before it is added to the residual stream.

    y = norm(x) * multiplier: RMSNorm is that of OLMo-2, the multiplier that of Granite.
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
    """down(silu(gate(x)) * up(x)), with gate and up as one GEMM; parameters are megatron-core's.

    megatron-core 0.19 passes process groups and more to the constructor, 0.16 does not. They are
    not needed: the tensor-parallel group is the same. `branch` has the options of `Branch`.
    """

    def __init__(
        self, config: Any, submodules: Any, *, branch: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size)
        self.branch = Branch(config, **(branch or {}))

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        gate_up, _ = self.linear_fc1(hidden_states)
        out, bias = self.linear_fc2(swiglu(gate_up))
        return self.branch(out), bias
