"""The embedding gives the bits of torch's in fp32; a BF16 gradient is their sum, rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from coatlm.model.embedding import lookup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lookup_and_its_gradient_equal_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 20, (3, 50), generator=generator)
    weight = torch.randn(24, 16, generator=generator).to(dtype).requires_grad_()
    dhidden = torch.randn(3, 50, 16, generator=generator).to(dtype)
    outputs = lookup(tokens, weight), F.embedding(tokens, weight)
    assert torch.equal(*outputs)
    (gradient,) = torch.autograd.grad(outputs[0], weight, dhidden)
    exact = weight.detach().float().requires_grad_()
    (summed,) = torch.autograd.grad(F.embedding(tokens, exact), exact, dhidden.float())
    assert gradient.dtype == dtype and torch.equal(gradient, summed.to(dtype))
    assert gradient[:20].any() and not gradient[20:].any()
