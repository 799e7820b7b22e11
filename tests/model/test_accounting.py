"""Parameters against published counts and real modules, FLOPs against torch's counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from coatlm.config import ConfigError, Model
from coatlm.model import accounting as acc
from tests.model.shapes import (
    GEMMA,
    LLAMA2_7B,
    LLAMA3_8B,
    OLMO2,
    QWEN3_06B,
    QWEN25_05B,
    TINY,
    VARIANTS,
    config,
)


class Layer(nn.Module):
    """A transformer layer written from the architecture's description, full attention."""

    def __init__(self, m: Model) -> None:
        super().__init__()
        d, self.m = m.size_per_head, m
        kv = m.key_value_heads * d
        self.norms = nn.ModuleList(nn.RMSNorm(m.hidden) for _ in range(4 if m.sandwich_norm else 2))
        widths = (m.heads * d, kv) if m.qk_norm_width == "all" else (d, d)
        self.qk_norms = nn.ModuleList(nn.RMSNorm(n) for n in widths if m.qk_norm)
        self.q = nn.Linear(m.hidden, m.heads * d, bias=m.qkv_bias)
        self.k = nn.Linear(m.hidden, kv, bias=m.qkv_bias)
        self.v = nn.Linear(m.hidden, kv, bias=m.qkv_bias)
        self.proj = nn.Linear(m.heads * d, m.hidden, bias=False)
        self.gate = nn.Linear(m.hidden, m.ffn, bias=False)
        self.up = nn.Linear(m.hidden, m.ffn, bias=False)
        self.down = nn.Linear(m.ffn, m.hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        batch, seq, _ = x_BSH.shape
        y = self.norms[0](x_BSH)
        q, k, v = self.q(y), self.k(y), self.v(y)
        if self.m.qk_norm and self.m.qk_norm_width == "all":
            q, k = self.qk_norms[0](q), self.qk_norms[1](k)
        q, k, v = (part.view(batch, seq, -1, self.m.size_per_head) for part in (q, k, v))
        if self.m.qk_norm and self.m.qk_norm_width == "head":
            q, k = self.qk_norms[0](q), self.qk_norms[1](k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = (t.repeat_interleave(self.m.heads // self.m.key_value_heads, 1) for t in (k, v))
        y = ((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, -1)
        x_BSH = x_BSH + self.proj(y)
        y = self.norms[1](x_BSH)
        return x_BSH + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, layers, norm, output."""

    def __init__(self, m: Model, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, m.hidden)
        self.layers = nn.ModuleList(Layer(m) for _ in range(m.layers))
        self.norm = nn.RMSNorm(m.hidden)
        self.output = nn.Linear(m.hidden, vocab, bias=False)
        if m.tie_embeddings:
            self.output.weight = self.embedding.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x = self.embedding(tokens_BS)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# parameters


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA3_8B, 8_030_261_248),
        (QWEN25_05B, 494_032_768),
        (QWEN3_06B, 596_049_920),
    ],
)
def test_total_equals_the_published_count(model: dict[str, Any], published: int) -> None:
    m = Model.model_validate(model)
    assert m.vocab is not None
    assert acc.parameters(m, m.vocab) == published


@pytest.mark.parametrize("variant", VARIANTS)
def test_total_equals_a_handmade_torch_model(variant: dict[str, Any]) -> None:
    m = Model.model_validate({**TINY, **variant})
    with torch.device("meta"):
        assert acc.parameters(m, 256) == count(Llama(m, 256))


def test_total_equals_megatron_gpt_models(megatron: None) -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for variant in (v for v in VARIANTS if v not in (OLMO2, GEMMA)):  # of which it has no layer
        m = Model.model_validate({**TINY, **variant})
        transformer = TransformerConfig(
            num_layers=m.layers,
            hidden_size=m.hidden,
            num_attention_heads=m.heads,
            num_query_groups=m.key_value_heads,
            kv_channels=m.size_per_head,
            ffn_hidden_size=m.ffn,
            gated_linear_unit=True,
            add_bias_linear=False,
            add_qkv_bias=m.qkv_bias,
            qk_layernorm=m.qk_norm,
            normalization="RMSNorm",
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=m.qk_norm)
        model = GPTModel(
            config=transformer,
            transformer_layer_spec=spec,
            vocab_size=256,
            max_sequence_length=64,
            share_embeddings_and_output_weights=m.tie_embeddings,
            position_embedding_type="rope",
        )
        assert acc.parameters(m, 256) == count(model), variant


@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_of_a_pipeline_sum_to_the_total_and_the_tied_copy(variant: dict[str, Any]) -> None:
    m = Model.model_validate({**TINY, **variant})
    stages = [acc.rank_parameters(m, 256, pp=4, stage=s) for s in range(4)]
    copy = 256 * m.hidden if m.tie_embeddings else 0
    assert sum(stages) == acc.parameters(m, 256) + copy
    assert acc.rank_parameters(m, 256) == acc.parameters(m, 256)


def test_tensor_parallel_divides_everything_but_the_norms() -> None:
    m = Model.model_validate({**TINY, "qkv_bias": True, "qk_norm": True})
    norms = m.layers * (2 * 32 + 2 * 16) + 32
    whole, half = (acc.rank_parameters(m, 256, tp=tp) for tp in (1, 2))
    assert half - norms == (whole - norms) / 2


@pytest.mark.parametrize(("vocab", "padded"), [(257, 384), (384, 384), (50257, 50304), (1, 128)])
def test_padded_vocab_is_the_next_multiple_of_128(vocab: int, padded: int) -> None:
    assert acc.padded_vocab(vocab) == padded


def test_vocab_of_the_configuration_is_used_as_given_and_the_tokenizers_is_padded() -> None:
    assert acc.model_vocab(config({"vocab": 300})) == 300
    assert acc.model_vocab(config({"vocab": None}), 257) == 384
    with pytest.raises(ConfigError, match=r"model\.vocab=null.*data\.tokenizer=byte"):
        acc.model_vocab(config({"vocab": None}))


# FLOPs


@pytest.mark.parametrize("model", [TINY, {**TINY, "tie_embeddings": True, "qk_norm": True}])
def test_flops_are_those_torch_counts_with_half_of_full_attention(model: dict[str, Any]) -> None:
    m, seq = Model.model_validate(model), 24
    net = Llama(m, 256)
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(2, seq, dtype=torch.long)).sum().backward()
    masked = 6 * m.layers * seq * acc.query_size(m)  # the handmade model attends to everything
    per_token = counter.get_total_flops() / (2 * seq)
    assert per_token == acc.flops_per_token(m, 256, seq) + masked


def test_layers_with_a_window_count_the_tokens_that_it_shows() -> None:
    m, seq = Model.model_validate({**TINY, "window": {"size": 5, "period": 2}}), 24
    at = torch.arange(seq + 1.0)  # where a token has `at` tokens before it; half of that is causal
    spans = [2 * torch.trapezoid(at.clamp(max=most)).item() / seq for most in (5, seq)]
    assert [acc.attention_span(m, layer, seq) for layer in (0, 1)] == pytest.approx(spans)
    attention = 6 * acc.query_size(m) * 2 * sum(spans)  # two layers of each kind
    assert acc.flops_per_token(m, 256, seq) == pytest.approx(
        6 * acc.matmul_parameters(m, 256) + attention
    )
    assert acc.attention_span(m, 0, 5) == 5


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Some CPU", None),
        (None, None),
    ],
)
def test_peak_flops_by_the_name_torch_gives(name: str | None, peak: float | None) -> None:
    assert acc.peak_flops(name) == peak
    assert acc.mfu(100e12, name) == (100e12 / peak if peak else None)
