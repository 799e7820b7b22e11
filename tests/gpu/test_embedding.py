"""The gradient of the embedding has the same bits every time, and is the sum that it should be."""

from __future__ import annotations

import pytest
import torch

from coatlm.model.embedding import lookup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("vocab", [4, 128, 384, 32000, 151936])
@pytest.mark.parametrize("hidden", [64, 896, 2048])
@pytest.mark.parametrize("count", [3000, 40000])
def test_the_same_gradient_of_an_embedding_has_the_same_bits(
    vocab: int, hidden: int, count: int
) -> None:
    """Half of all tokens are entry 3, as a rank of a vocabulary-parallel group has entry 0."""
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(0, vocab, (2, count // 2), device="cuda", generator=generator)
    tokens[torch.rand(tokens.shape, device="cuda", generator=generator) < 0.5] = 3
    dhidden = torch.randn(2, count // 2, hidden, device="cuda", generator=generator).bfloat16()
    weight = torch.zeros(vocab, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    first, *others = (
        torch.autograd.grad(lookup(tokens, weight), weight, dhidden)[0] for _ in range(8)
    )
    assert first.shape == weight.shape
    for other in others:
        assert torch.equal(first.view(torch.int16), other.view(torch.int16))
    exact = torch.zeros(vocab, hidden, dtype=torch.float64, device="cuda")
    exact.index_add_(0, tokens.flatten(), dhidden.flatten(0, 1).double())
    # below 3072 tokens torch rounds to BF16 after each of the sums of 32 tokens, up to 94 times
    roundings = 94 if count < 3072 else 2
    size = exact.abs().amax(1, keepdim=True)
    assert ((first - exact).abs() <= roundings * 2.0**-8 * size + 1e-3).all()
