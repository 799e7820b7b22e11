"""A whole training step of PyTorch's FSDP2, the peer of `parallel.zero=3`, as TorchTitan has it.

fp32 weights and moments in shards, all-gathered in BF16 (or with torchao, the linears of layers, in
FP8 with tensor-wise scales) and reduce-scattered in fp32; each layer is compiled. AdamW is torch's
fused one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benchmarks.clock import DEVICE
from tools.benchmarks.layer_stacks import (
    INIT_STD,
    SEED,
    LayerShape,
    PlainLayer,
    PlainRMSNorm,
    rope_tables,
)

ROWS = ("fsdp2 bf16", "fsdp2 torchao")
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class PlainLlama(nn.Module):
    """Plain layers between an embedding and an output layer: tokens [B, S] -> logits [B, S, V]."""

    def __init__(self, shape: LayerShape, layers: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, shape.hidden)
        self.layers = nn.ModuleList(PlainLayer(shape) for _ in range(layers))
        self.norm = PlainRMSNorm(shape.hidden)
        self.output = nn.Linear(shape.hidden, vocab, bias=False)
        self.cos_sin = rope_tables(shape, torch.bfloat16)
        for weight in (self.embedding.weight, self.output.weight):
            nn.init.normal_(weight, 0.0, INIT_STD)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSH = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH, *self.cos_sin)
        return self.output(self.norm(x_BSH))


def fsdp_step(
    row: str,
    shape: LayerShape,
    layers: int,
    vocab: int,
    draw: Callable[[], Tensor],
    microbatches: int,
) -> tuple[Callable[[], Any], torch.optim.Optimizer]:
    """A step over `microbatches` of tokens [B, S + 1] that `draw` returns, and its optimizer.

    Raises ImportError without torchao.
    """
    float8 = row == "fsdp2 torchao"
    torch.manual_seed(SEED)
    with torch.device(DEVICE):
        model = PlainLlama(shape, layers, vocab)
    if float8:
        from torchao.float8 import (  # type: ignore[import-not-found]
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model.layers, config=config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step() -> Any:
        total = torch.zeros((), device=DEVICE)
        for _ in range(microbatches):
            tokens = draw()
            with sdpa_kernel(ATTENTION, set_priority=True):
                logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / microbatches).backward()
            total += loss.detach() / microbatches
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if float8:
            precompute_float8_dynamic_scale_for_fsdp(model)
        return total

    return step, optimizer
