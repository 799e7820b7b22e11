"""The chunked cross entropy on a GPU: against the fp32 definition, and the memory it takes."""

import pytest
import torch
from torch import Tensor

from coatlm.model import loss_kernels
from coatlm.model.loss import cross_entropy_ref, linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MIB = 2**20
BF16_EPS = 2**-8  # a rounding errs by at most this, relative


def tensors(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """hidden, weight, labels (every tenth -100), dloss; logits are of order one."""
    torch.manual_seed(0)
    x = torch.randn(tokens // 2, 2, hidden, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, device="cuda") / hidden**0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens // 2, 2), device="cuda")
    labels.view(-1)[::10] = -100
    return x, weight, labels, torch.randn(tokens // 2, 2, device="cuda")


def definition(*arguments: Tensor) -> tuple[Tensor, ...]:
    """loss, dhidden, dweight in fp32, from the same (rounded) inputs."""
    hidden, weight, labels, dloss = arguments
    hidden, weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    loss = cross_entropy_ref(hidden, weight, labels)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight), dloss)


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("vocab", [32000, 50257])  # 50257: rows that are not 16-byte aligned
@pytest.mark.parametrize("chunk", [None, 4096, 5000])
def test_bf16_equals_the_fp32_definition_within_the_rounding_of_the_logits(
    vocab: int, chunk: int | None
) -> None:
    hidden, weight, labels, dloss = tensors(512, 1024, vocab, torch.bfloat16)
    expected, dhidden, dweight = definition(hidden, weight, labels, dloss)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    # the label's logit and lse each err by at most a rounding of the largest logit, about 6
    assert (loss - expected).abs().max() < 2 * 6 * BF16_EPS
    loss.backward(dloss)
    # an error d of a logit changes its softmax by the factor exp(d); logits are of order one, and
    # dlogits and the result are rounded once more
    assert relative(hidden.grad, dhidden) < 2 * BF16_EPS
    assert relative(weight.grad, dweight) < 2 * BF16_EPS
    assert not hidden.grad[labels == -100].any()


def test_fp32_equals_the_definition() -> None:
    arguments = tensors(256, 512, 32000, torch.float32)
    hidden, weight, labels, dloss = arguments
    expected = definition(*arguments)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=4096)
    actual = (loss, *torch.autograd.grad(loss, (hidden, weight), dloss))
    for got, wanted in zip(actual, expected, strict=True):
        assert relative(got, wanted) < 1e-5  # approximate exp and log: a few 2^-22


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_kernels_equal_their_references(dtype: torch.dtype, cap: float | None) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(300, 20000, device="cuda")).to(dtype)
    logits[1] = -1e4
    logits[2, 7] = float("-inf")
    labels = torch.randint(-500, 21000, (300,), device="cuda")
    stats = loss_kernels.row_stats(logits, labels, 100, cap)
    expected = loss_kernels.row_stats_ref(logits, labels, 100, cap)
    atol = 0 if cap is None else 1e-5  # tanh is 2 sigmoid - 1: a few 2^-24, times the cap
    torch.testing.assert_close(stats, expected, rtol=1e-5, atol=atol)  # sums of 20000 terms
    lse, dloss = expected[0] + expected[1].log(), torch.randn(300, device="cuda")
    gradient = loss_kernels.logits_grad_ref(logits.float(), labels, lse, dloss, 100, None, cap)
    actual = loss_kernels.logits_grad_(logits, labels, lse, dloss, 100, None, cap)
    assert actual.data_ptr() == logits.data_ptr()
    rtol = torch.finfo(dtype).eps / 2 + 1e-5
    atol = 1e-30 if cap is None else 1e-5  # 1 - tanh^2 cancels
    torch.testing.assert_close(actual.float(), gradient, rtol=rtol, atol=atol)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_is_added_to_main_grad(main_dtype: torch.dtype) -> None:
    arguments = tensors(512, 1024, 32000, torch.bfloat16)
    hidden, weight, labels, dloss = arguments
    weight.main_grad = torch.zeros(weight.shape, dtype=main_dtype, device="cuda")
    for _ in range(2):
        linear_cross_entropy(hidden, weight, labels, chunk=4096).backward(dloss)
    assert weight.grad is None
    assert relative(weight.main_grad, 2 * definition(*arguments)[2]) < 2 * BF16_EPS


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_saved_logits_give_the_bits_of_recomputed_ones(z_loss: float) -> None:
    results = []
    for save in (False, True):
        hidden, weight, labels, dloss = tensors(512, 1024, 50257, torch.bfloat16)
        loss = linear_cross_entropy(
            hidden, weight, labels, chunk=4096, save_logits=save, z_loss=z_loss
        )
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight), dloss)))
    for recomputed, saved in zip(*results, strict=True):
        assert torch.equal(recomputed, saved)


def test_the_z_loss_equals_the_definition() -> None:
    hidden, weight, labels, dloss = tensors(256, 512, 32000, torch.float32)
    expected = cross_entropy_ref(hidden, weight, labels, 0.01)
    expected = (expected, *torch.autograd.grad(expected, (hidden, weight), dloss))
    loss = linear_cross_entropy(hidden, weight, labels, chunk=4096, z_loss=0.01)
    actual = (loss, *torch.autograd.grad(loss, (hidden, weight), dloss))
    for got, wanted in zip(actual, expected, strict=True):
        assert relative(got, wanted) < 1e-5


def test_vocabulary_of_128k_takes_under_half_a_gib() -> None:
    """8192 tokens, hidden 4096: 256 MiB of logits, 128 MiB of dhidden in fp32, and GEMM workspace.

    Whole logits would be 2 GiB in BF16, and 4 GiB more as the usual fp32 softmax.
    """
    hidden, weight, labels, _ = tensors(8192, 4096, 131072, torch.bfloat16)
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device="cuda")
    for _ in range(2):  # the first run compiles and allocates workspaces
        hidden.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, labels).sum().backward()
        torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - hidden.numel() * 2  # dhidden
    print(f"extra peak {extra / MIB:.0f} MiB")
    assert extra < 512 * MIB
