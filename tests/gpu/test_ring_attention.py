"""Attention of context-parallel ranks in pieces, by GPU kernels, one rank after the other."""

from __future__ import annotations

import pytest
import torch

from coatlm.kernels.attention_merge import merge_, merge_ref_
from coatlm.kernels.attention_pieces import attend_piece, attend_piece_ref, piece_backend
from coatlm.model.attention_backends import Shape, random_inputs
from tests.parallel.test_ring_attention import by_ranks, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = torch.device("cuda", 0)
# BF16 (2^-9) is rounded to in other places, and once more per piece: outputs, their gradients
RELATIVE = 2.0**-6
SHAPES = {
    "a key per query": Shape(2, 480, 4, 4, 64, None),
    "grouped": Shape(1, 768, 8, 2, 128, 0.1),
    "one key head": Shape(3, 384, 4, 1, 96, None),
}


@pytest.mark.parametrize("backend", ["cudnn", "flash", "matmul"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_compute_attention_and_its_gradients(shape: str, ranks: int, backend: str) -> None:
    scale = SHAPES[shape].scale
    q, k, v, do = (x.detach() for x in random_inputs(SHAPES[shape], GPU))
    found = by_ranks(q, k, v, do, ranks, scale=scale, backend=backend)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out = whole(*leaves, scale)
    expected = [out, *torch.autograd.grad(out, leaves, do.float())]
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual.float() - wanted).norm() <= RELATIVE * wanted.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_a_piece_has_the_statistics_of_the_definition(backend: str, causal: bool) -> None:
    q, k, v, _ = (x.detach() for x in random_inputs(SHAPES["grouped"], GPU))
    k, v = (x if causal else x[:256] for x in (k, v))
    found = attend_piece(q, k, v, scale=0.1, causal=causal, backend=backend)
    expected = attend_piece_ref(q, k, v, scale=0.1, causal=causal)
    assert found.o_SBND.shape == expected.o_SBND.shape
    assert found.lse_BNS.shape == expected.lse_BNS.shape
    # logits of BF16 inputs are summed in fp32, in another order and with another exp
    limit = 2.0**-12 * expected.lse_BNS.abs().max()
    assert (found.lse_BNS - expected.lse_BNS).abs().max() <= limit


def test_bf16_inputs_have_a_fast_backend_and_fp32_inputs_none() -> None:
    for shape in SHAPES.values():
        q, k, v, _ = random_inputs(shape, GPU)
        assert piece_backend(q, k, v) == "cudnn"
        assert piece_backend(q.float(), k.float(), v.float()) == "matmul"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_outputs_are_merged_as_the_reference_does(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    o = torch.randn(300, 2, 6, head_dim, device=GPU).to(dtype)
    other = torch.randn(2, 200, 6, head_dim, device=GPU).bfloat16().transpose(0, 1)
    lse, other_lse = (3 * torch.randn(2, 6, n, device=GPU) for n in (300, 200))
    expected = o.float().clone()
    merge_ref_(expected[100:], lse[..., 100:], other, other_lse)
    sums = torch.logaddexp(lse[..., 100:], other_lse)
    merge_(o[100:], lse[..., 100:], other, other_lse)
    # rounded once; in fp32 some ulp of exp and of a division
    torch.testing.assert_close(o.float(), expected, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)
    torch.testing.assert_close(lse[..., 100:], sums, rtol=0, atol=0)
