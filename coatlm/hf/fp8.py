"""Export weights in E4M3 with scales, in the compressed-tensors format of vLLM and transformers.

    NAME.weight         float8_e4m3fn [out, in]      W / S, rounded to nearest
    NAME.weight_scale   S, fp32: [out, 1] per output channel, or [1] per tensor

S = amax / 448. This applies to the linear layers inside the blocks; embedding, output layer, norms
and biases have the dtype of the export. `quantization_config` in config.json describes the format.
With dynamic activations the reader also casts the inputs of these layers to E4M3, with one scale
per token (channel) or per tensor (tensor).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import ROW, TENSOR
from coatlm.fp8.quantize import quantize
from coatlm.hf.files import Described

Scales = Literal["channel", "tensor"]


@dataclass(frozen=True)
class Fp8Export:
    """The scale granularity of an FP8 export, and whether readers also cast activations."""

    scales: Scales = "channel"
    dynamic_activations: bool = True

    def describe(self, name: str, shape: tuple[int, ...]) -> dict[str, Described]:
        """The stored tensors that replace the weight of a linear layer."""
        scale = (shape[0], 1) if self.scales == "channel" else (1,)
        return {
            name: Described(torch.float8_e4m3fn, shape),
            f"{name}_scale": Described(torch.float32, scale),
        }

    def encode(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Quantize a weight into the tensors of `describe`. Raises ValueError for NaN or Inf."""
        granularity = ROW if self.scales == "channel" else TENSOR
        quantized = quantize(weight.float(), fmt=E4M3, granularity=granularity)
        if not bool(quantized.scale.isfinite().all()):
            raise ValueError(f"{name}: has NaN or Inf, which E4M3 cannot hold")
        scale = quantized.scale if self.scales == "channel" else quantized.scale.reshape(1)
        return {name: quantized.codes, f"{name}_scale": scale}

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        token = "token" if self.scales == "channel" else "tensor"
        weights = {**number, "strategy": self.scales, "dynamic": False, "observer": "minmax"}
        inputs = {**number, "strategy": token, "dynamic": True, "observer": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": inputs if self.dynamic_activations else None,
                    "output_activations": None,
                }
            },
        }
