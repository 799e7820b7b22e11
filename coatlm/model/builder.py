"""The model chunks of this pipeline stage, built from a configuration.

`Llama` is megatron-core's GPTModel with a forward pass of its own: rotary tables are computed once,
and the output layer and the cross entropy are one chunked operation (`loss.py`). Initial weights
are a pure function of the seed and the parameter's name, so every parallel layout starts from the
same model.

Where ranks hold shards of the weights, a chunk is built without memory for them (`allocate=False`),
and `parallel.flat_model` computes the initial weights of one bucket at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coatlm.config import Config
from coatlm.megatron import GPTModel, TransformerConfig, tensor_parallel
from coatlm.model.coat_layer import CoatTransformerLayer
from coatlm.model.embedding import Embedding
from coatlm.model.loss import all_logits, largest_logits, linear_cross_entropy
from coatlm.model.numerics import Probe
from coatlm.model.output_gemms import output_gemms
from coatlm.model.rotary import RotaryTables
from coatlm.model.spec import block_spec
from coatlm.parallel.cuda_graphs import captures
from coatlm.parallel.groups import Groups
from coatlm.parallel.regions import Region, regions_of
from coatlm.platform import device, has_apex

TE_RECIPES = {  # precision.recipe -> megatron's fp8 and fp8_recipe
    "te-delayed": ("hybrid", "delayed"),
    "te-current": ("hybrid", "tensorwise"),
    "te-blockwise": ("e4m3", "blockwise"),
}


class Llama(GPTModel):
    """A Llama model chunk: tokens and labels [B, S] -> per-token loss [B, S].

    Stages other than the first take hidden states, and stages other than the last return them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        run: Config,
        groups: Groups,
        *,
        allocate: bool = True,
        **kwargs: Any,
    ) -> None:
        """Without `allocate`, parameters are on the meta device, where they take no memory."""
        with nullcontext() if allocate else torch.device("meta"):
            super().__init__(config=config, position_embedding_type="none", **kwargs)
        self.allocated = allocate
        model = run.model
        if self.pre_process:  # of GPTModel, which takes no spec for it
            self.embedding.word_embeddings.__class__ = Embedding
        self.run, self.groups, self.tp_group = run, groups, groups.tp
        cp = groups.cp
        self.rotary = RotaryTables(run, cp_rank=cp.rank(), cp_size=cp.size())
        self.cos_sin = self.rotary.of_sample(run.data.seq_len)
        self.embedding_multiplier = model.embedding_multiplier
        if model.scale_embeddings:
            root = torch.tensor(math.sqrt(model.hidden), dtype=config.params_dtype)
            self.embedding_multiplier = root.item()
        self.logits_scaling = model.logits_scaling
        self.logits_softcap = model.logits_softcap
        self.save_logits = run.train.logits == "save"
        self.z_loss = run.train.z_loss
        self.gemms = output_gemms(run.precision)
        self.probe: Probe | None = None  # of the logits

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        document_bounds: Tensor | None = None,
        *,
        predictions: bool = False,
    ) -> Tensor:
        """The last stage returns fp32 losses [B, S], or logits [B, S, V/tp] if `labels` is None.

        With `predictions` it returns fp64 [2, B, S]: the losses, and the vocabulary entry with the
        largest logit. A sample may be shorter than data.seq_len. With `document_bounds` [B, n + 1]
        tokens attend within their document. The samples are then concatenated in all hidden
        states, [B S, 1, H], as attention reads them.
        """
        shape, seq_len = tokens.shape, tokens.shape[1] * self.groups.cp.size()
        if document_bounds is None:
            cos_sin = self.rotary.of_sample(seq_len)
        else:
            cos_sin = self.rotary.of_documents(document_bounds, seq_len)
            tokens = tokens.reshape(1, -1)
            labels = None if labels is None else labels.reshape(1, -1)
        hidden = self.embedding(input_ids=tokens, position_ids=None) if self.pre_process else None
        if hidden is not None and self.embedding_multiplier != 1.0:
            hidden = hidden * self.embedding_multiplier
        hidden = self.decoder(
            hidden_states=hidden, attention_mask=document_bounds, rotary_pos_emb=cos_sin
        )
        if not self.post_process:
            return hidden
        if self.logits_scaling != 1.0:
            hidden = hidden / self.logits_scaling
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if labels is None:
            logits = all_logits(hidden, weight, cap=self.logits_softcap, gemms=self.gemms)
            return logits.transpose(0, 1).view(*shape, -1)
        group = self.tp_group if self.tp_group.size() > 1 else None
        losses = linear_cross_entropy(
            hidden,
            weight,
            labels.t().contiguous(),
            group=group,
            save_logits=self.save_logits,
            z_loss=self.z_loss if self.training else 0.0,
            cap=self.logits_softcap,
            gemms=self.gemms,
            observe=None if self.probe is None else self.probe.record_logits,
        )
        losses = losses.t().view(shape)
        if not predictions:
            return losses
        largest = largest_logits(hidden, weight, group=group, gemms=self.gemms).t().view(shape)
        return torch.stack((losses.double(), largest.double()))

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark tied weights. The base class also adds up their values over the pipeline stages.

        `init_weight` draws them alike on both, so there is nothing to add, and there may be no
        values yet.
        """
        self.embd_group = None
        super().setup_embeddings_and_output_layer()

    def set_is_first_microbatch(self) -> None:
        """Discard the cached FP8 weights, which the optimizer step has made stale.

        megatron-core's schedules call this before the first forward pass of a step. The base class
        does the same for TransformerEngine's FP8 weights.
        """
        super().set_is_first_microbatch()
        for layer in self.decoder.layers:
            if isinstance(layer, CoatTransformerLayer):
                layer.forget_weights()


def build_model(
    config: Config, groups: Groups, vocab: int, *, allocate: bool = True
) -> list[Llama]:
    """Build the chunks of this stage (one, or `vpp`) on this rank's device, with initial weights.

    `vocab` is the padded vocabulary size. Chunks are in the order of the interleaved schedule.
    Without `allocate` parameters are on the meta device, and `init_weight` gives their values.
    """
    transformer = transformer_config(config)
    if not allocate:  # megatron-core then names no device, and the meta device applies
        transformer.use_cpu_initialization = True
    tensor_parallel.model_parallel_cuda_manual_seed(
        config.run.seed, use_cudagraphable_rng=captures(config), force_reset_rng=True
    )
    stages, p = groups.pp.size(), config.parallel
    layers = config.model.layers // (stages * p.vpp)
    chunks = []
    for chunk in range(p.vpp):
        first = (chunk * stages + groups.pp.rank()) * layers
        model = Llama(
            transformer,
            config,
            groups,
            allocate=allocate,
            transformer_layer_spec=block_spec(config, first, layers),
            vocab_size=vocab,
            max_sequence_length=config.data.seq_len,
            pre_process=groups.first_stage and chunk == 0,
            post_process=groups.last_stage and chunk == p.vpp - 1,
            share_embeddings_and_output_weights=config.model.tie_embeddings,
            vp_stage=chunk if p.vpp > 1 else None,
            pg_collection=groups.collection,
        )
        chunks.append(model.to(device()) if allocate else model)
    if allocate:
        init_weights(chunks, config)
    return chunks


def transformer_config(config: Config) -> TransformerConfig:
    """The megatron-core configuration of the model and its parallel layout."""
    m, p = config.model, config.parallel
    bf16 = config.precision.recipe != "fp32"
    dtype = torch.bfloat16 if bf16 else torch.float32
    options: dict[str, Any] = {}
    if config.precision.recipe in TE_RECIPES:
        options["fp8"], options["fp8_recipe"] = TE_RECIPES[config.precision.recipe]
    if config.train.recompute == "full":
        options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if config.train.recompute != "none":
        options["recompute_granularity"] = config.train.recompute
    return TransformerConfig(
        num_layers=m.layers,
        hidden_size=m.hidden,
        num_attention_heads=m.heads,
        num_query_groups=m.key_value_heads,
        kv_channels=m.size_per_head,
        ffn_hidden_size=m.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=m.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=m.qkv_bias,
        qk_layernorm=m.qk_norm,
        layernorm_zero_centered_gamma=m.zero_centered_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        sequence_parallel=p.sequence_parallel,
        use_cpu_initialization=device().type == "cpu",
        perform_initialization=False,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=has_apex() and p.main_grads != "fp8",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        deallocate_pipeline_outputs=p.pp > 1,
        batch_p2p_comm=False,
        overlap_p2p_comm=False,
        **options,
    )


@torch.no_grad()
def init_weights(chunks: Sequence[Llama], config: Config) -> None:
    """Set the initial weights of `chunks`, which are allocated."""
    for chunk in chunks:
        for param, region in regions_of(chunk):
            init_weight(region, region.of(param), config=config)


@torch.no_grad()
def init_weight(region: Region, weight: Tensor, *, config: Config) -> None:
    """Set `weight`, of the shape of `region`, to the initial weights there.

    Matrices are drawn from Normal(0, init_std), output projections from Normal(0, init_std /
    sqrt(2 * layers)); factors of norms are one and biases zero. Each logical tensor is drawn whole,
    in fp32, from a generator seeded by (seed, name), and the region is copied from it: the model is
    the same in every parallel layout.
    """
    m = config.model
    if weight.dim() == 1:
        norm = 0.0 if m.zero_centered_norm else 1.0
        weight.fill_(norm if "norm" in region.key else 0.0)
        return
    output = region.key.endswith(("linear_proj.weight", "linear_fc2.weight"))
    std = m.init_std / math.sqrt(2 * m.layers) if output else m.init_std
    digest = hashlib.sha256(f"{config.run.seed}/{region.key}".encode()).digest()
    generator = torch.Generator(device=weight.device)
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    whole = torch.empty(region.global_shape, dtype=torch.float32, device=weight.device)
    whole.normal_(0.0, std, generator=generator)
    inside = zip(region.offset, region.shape, strict=True)
    weight.copy_(whole[tuple(slice(start, start + size) for start, size in inside)])
