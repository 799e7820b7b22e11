"""Export weights in E4M3 with scales, in the two layouts that vLLM and transformers read.

    compressed-tensors
        NAME.weight            float8_e4m3fn [out, in]      W / S, rounded to nearest
        NAME.weight_scale      S, fp32: [out, 1] per output channel, or [1] per tensor
    blocks, the layout of DeepSeek-V3
        NAME.weight            float8_e4m3fn [out, in]
        NAME.weight_scale_inv  S, fp32 [out / 128, in / 128]: per 128 x 128 elements; W = code * S

S = amax / 448. This applies to the linear layers inside the blocks; embedding, output layer, norms
and biases have the dtype of the export. `quantization_config` in config.json describes the format.
With dynamic activations the reader also casts the inputs of these layers to E4M3, with one scale
per token (channel), per tensor (tensor) or per 128 elements of a token (block).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import ROW, TENSOR, Granularity, block
from coatlm.fp8.quantize import quantize
from coatlm.hf.files import Described

WeightGranularity = Literal["channel", "tensor", "block"]
BLOCK = 128  # rows and columns of a block
GRANULARITY: dict[WeightGranularity, Granularity] = {
    "channel": ROW,
    "tensor": TENSOR,
    "block": block(BLOCK, BLOCK),
}
SUFFIX: dict[WeightGranularity, str] = {
    "channel": "_scale",
    "tensor": "_scale",
    "block": "_scale_inv",  # DeepSeek's name of S, the factor that a code is multiplied by
}


@dataclass(frozen=True)
class Fp8Export:
    """The scale granularity of an FP8 export, and whether readers also cast activations.

    Raises ValueError for blocks without dynamic activations, which their layout cannot express.
    """

    scales: WeightGranularity = "channel"
    dynamic_activations: bool = True

    def __post_init__(self) -> None:
        if self.scales == "block" and not self.dynamic_activations:
            raise ValueError("fp8_activations=none: weights in blocks need dynamic")

    def describe(self, name: str, shape: tuple[int, ...]) -> dict[str, Described]:
        """The stored tensors that replace the weight of a linear layer.

        Raises ValueError with its name if blocks do not divide it: transformers derives the size of
        a block from the number of scales.
        """
        if self.scales == "block" and any(n % BLOCK for n in shape):
            raise ValueError(
                f"{name} is {list(shape)}: blocks of {BLOCK} x {BLOCK} need multiples of {BLOCK}; "
                "choose fp8_scales=channel"
            )
        sizes: dict[WeightGranularity, tuple[int, ...]] = {
            "channel": (shape[0], 1),
            "tensor": (1,),
            "block": tuple(n // BLOCK for n in shape),
        }
        return {
            name: Described(torch.float8_e4m3fn, shape),
            name + SUFFIX[self.scales]: Described(torch.float32, sizes[self.scales]),
        }

    def encode(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Quantize a weight into the tensors of `describe`. Raises ValueError for NaN or Inf."""
        granularity = GRANULARITY[self.scales]
        quantized = quantize(weight.float(), fmt=E4M3, granularity=granularity)
        if not bool(quantized.scale.isfinite().all()):
            raise ValueError(f"{name}: has NaN or Inf, which E4M3 cannot hold")
        scale = quantized.scale.reshape(1) if self.scales == "tensor" else quantized.scale
        return {name: quantized.codes, name + SUFFIX[self.scales]: scale}

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        if self.scales == "block":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": ["lm_head"],
            }
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
