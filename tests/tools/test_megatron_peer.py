"""The peer of whole steps accumulates weight gradients as with apex, imported before or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import coatlm.megatron  # noqa: F401  imports megatron-core, which looks for apex at its import
from tools.benchmarks.megatron_peer import provide_fused_weight_gradient


def test_the_kernel_of_apex_is_provided_after_megatron_core_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.tensor_parallel import layers

    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", None, raising=False)
    provide_fused_weight_gradient()
    assert layers._grad_accum_fusion_available
    kernel: Any = layers.fused_weight_gradient_mlp_cuda
    x_SBK, dy_SBN = torch.randn(3, 2, 5), torch.randn(3, 2, 4)
    found = torch.ones(4, 5)
    kernel.wgrad_gemm_accum_fp32(x_SBK, dy_SBN, found)
    torch.testing.assert_close(found, 1 + torch.einsum("sbn,sbk->nk", dy_SBN, x_SBK))
