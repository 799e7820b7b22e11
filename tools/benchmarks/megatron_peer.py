"""A whole training step of megatron-core with TransformerEngine layers, in its usual configuration.

GPTModel, DistributedDataParallel and the distributed optimizer of megatron-core, with
TransformerEngine's FusedAdam, fp32 master weights and moments, and fp32 gradients.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.benchmarks.layer_stacks import LayerShape

ROWS = {  # -> fp8, fp8_recipe of megatron-core
    "megatron+te bf16": (None, None),
    "megatron+te delayed": ("hybrid", "delayed"),
    "megatron+te current": ("hybrid", "tensorwise"),
}


def megatron_step(
    row: str,
    shape: LayerShape,
    layers: int,
    vocab: int,
    draw: Callable[[], Tensor],
    microbatches: int,
) -> tuple[Callable[[], Any], Any]:
    """A step over `microbatches` of tokens [B, S + 1] that `draw` returns, and its optimizer.

    Call `provide_fused_weight_gradient` first.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    from coatlm.model.attention import CoreAttention

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    fp8, fp8_recipe = ROWS[row]
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=True,
        bias_activation_fusion=True,
        apply_rope_fusion=True,
        masked_softmax_fusion=True,
        cross_entropy_loss_fusion=True,
        **({"fp8": fp8, "fp8_recipe": fp8_recipe} if fp8 else {}),
    )
    spec = get_gpt_layer_with_transformer_engine_spec()
    # cuDNN attention through torch for both sides: TE's own choice depends on how it was built
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocab,
        max_sequence_length=shape.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).cuda()
    ddp = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=dist.get_world_size() > 1,
            overlap_param_gather=dist.get_world_size() > 1,
        ),
        module=model,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = ddp.no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            min_lr=1e-5,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=1.0,
            overlap_param_gather=dist.get_world_size() > 1,
        ),
        [ddp],
    )
    config.grad_scale_func = optimizer.scale_loss
    schedule = get_forward_backward_func()
    positions = torch.arange(shape.seq, device="cuda")[None].expand(shape.batch, -1)

    def forward_step(data: Any, chunk: Any) -> Any:
        tokens = next(data)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        output = chunk(inputs, positions, None, labels=labels)

        def loss_function(out: Tensor) -> Any:
            loss = out.float().mean()  # the schedule divides by num_microbatches
            return loss, {"loss": loss.detach().clone()}

        return output, loss_function

    def step() -> Any:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        results = schedule(
            forward_step_func=forward_step,
            data_iterator=iter([draw() for _ in range(microbatches)]),
            model=[ddp],
            num_microbatches=microbatches,
            seq_length=shape.seq,
            micro_batch_size=shape.batch,
            forward_only=False,
        )
        optimizer.step()
        return results[-1]["loss"]

    return step, optimizer


def provide_fused_weight_gradient() -> None:
    """Stand in for the module of apex by which megatron's output layer accumulates gradients.

    megatron-core looks for the module once, at its own import, which may already have happened. So
    what it found is overwritten.
    """
    from megatron.core.tensor_parallel import layers

    module: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")

    def accumulate(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(dy.flatten(0, -2).t() @ x.flatten(0, -2))

    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate
    layers.fused_weight_gradient_mlp_cuda = module
    layers._grad_accum_fusion_available = True
