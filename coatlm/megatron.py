"""Everything of megatron-core that coatlm uses; no other module imports megatron.

The import hook of `megatron_hook` must be installed before the first `import megatron.core`, so
this module installs it above the imports. Packages that work without megatron-core (`config`,
`fp8`, `optim`) do not import this module.
"""

from __future__ import annotations

from types import ModuleType

from coatlm import megatron_hook

megatron_hook.install()

with (
    megatron_hook.without_trackers(),
    megatron_hook.deferred_compilation(),
    megatron_hook.without_messages(),
):
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.core import CheckpointingConfig
    from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
    from megatron.core.dist_checkpointing.strategies.checkpointable import (
        CheckpointableShardedTensor,
        LocalShardsContainer,
    )
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

__all__ = [
    "MLP",
    "AttnMaskType",
    "CheckpointableShardedTensor",
    "CheckpointingConfig",
    "ColumnParallelLinear",
    "GPTModel",
    "IdentityOp",
    "LocalShardsContainer",
    "MLPSubmodules",
    "MegatronModule",
    "ModuleSpec",
    "ProcessGroupCollection",
    "RowParallelLinear",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "ShardedTensor",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "apply_factories",
    "get_bias_dropout_add",
    "get_forward_backward_func",
    "is_main_replica",
    "parallel_state",
    "tensor_parallel",
    "transformer_engine",
]


def transformer_engine() -> ModuleType:
    """megatron-core's wrappers of TransformerEngine's modules. Requires TransformerEngine."""
    from megatron.core.extensions import transformer_engine as wrappers

    return wrappers
