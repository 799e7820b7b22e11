"""The chunked cross entropy on a GPU: against the fp32 definition, and the memory it takes."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.config import make_config
from coatlm.model import loss_kernels
from coatlm.model.logits_quantize import quantize_logits_grad, quantize_logits_grad_ref
from coatlm.model.loss import (
    all_logits,
    cross_entropy_ref,
    largest_logits,
    linear_cross_entropy,
)
from coatlm.model.memory import loss_bytes
from coatlm.model.output_gemms import FP8_GEMMS, Fp8Gemms
from tests.model.accumulation import length_without_labels, zipf_tensors
from tests.model.test_output_gemms import noisy, terms_of

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


# 50257 and its last chunk of 4096, 1105, are odd; 500 tokens are no multiple of 16
@pytest.mark.parametrize("vocab", [32000, 50257])
@pytest.mark.parametrize("options", [{}, {"save_logits": True}, {"z_loss": 1e-2, "cap": 5.0}])
@pytest.mark.parametrize("main_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", FP8_GEMMS)
def test_an_fp8_output_layer_equals_its_definition_on_a_cpu(
    vocab: int, options: dict[str, Any], main_dtype: torch.dtype | None, layer: str
) -> None:
    results = []
    before = 2**-4  # the main gradient
    for device in ("cuda", "cpu"):
        moved = (x.detach().to(device) for x in tensors(500, 256, vocab, torch.bfloat16))
        hidden, weight, labels, dloss = moved
        hidden = hidden + 1  # states have much in common
        for x in (hidden, weight):
            x.requires_grad_()
        if main_dtype is not None:
            weight.main_grad = torch.full(weight.shape, before, dtype=main_dtype, device=device)
        make = partial(Fp8Gemms, fast=False) if layer == "fp8" else FP8_GEMMS[layer]
        gemms = noisy(make, device)
        loss = linear_cross_entropy(hidden, weight, labels, chunk=4096, gemms=gemms, **options)
        loss.backward(dloss)
        dweight = weight.grad if main_dtype is None else weight.main_grad - before
        results.append([x.detach().cpu().float() for x in (loss, hidden.grad, dweight)])
    # a logit of either may be rounded to the next BF16, and then its gradient to the next E4M3,
    # 2^-3 away, where the logit is within 2^-8 of the boundary: 2^-4 of all; 2^-3 2^-2 = 2^-5
    (loss, *gradients), (expected, *wanted) = results
    assert (loss - expected).abs().max() < 2 * 6 * BF16_EPS
    for actual, gradient in zip(gradients, wanted, strict=True):
        assert relative(actual, gradient) < 2**-5


@pytest.mark.parametrize("columns", [4096, 1105])
@pytest.mark.parametrize("options", [{}, {"slope": True}, {"cap": 5.0}])
def test_codes_of_gradients_are_those_of_the_reference(
    columns: int, options: dict[str, Any]
) -> None:
    """An approximate exp may round to the neighboring code; few do, and none moves further."""
    torch.manual_seed(0)
    tokens = 500
    logits = (3 * torch.randn(tokens, columns, device="cuda")).bfloat16()
    labels = torch.randint(-500, columns + 500, (tokens,), device="cuda")
    dloss, slope = (torch.rand(tokens, device="cuda") + 0.1 for _ in range(2))
    dloss[7] = 0.0
    cap = options.get("cap")
    lse = (logits.float() if cap is None else cap * torch.tanh(logits / cap).float()).logsumexp(1)
    slopes = 2 * slope if "slope" in options else None
    terms = terms_of(logits, labels, dloss, lse=lse, slope=slopes, cap=cap)
    noise = torch.tensor([5, 6, 7, 8], dtype=torch.int32, device="cuda")
    made = quantize_logits_grad(logits, terms, 100, noise, direct=True, transposed=True)
    alone = [
        quantize_logits_grad(logits, terms, 100, noise, direct=side, transposed=not side)
        for side in (True, False)
    ]
    padded = torch.nn.functional.pad(logits, (0, -columns % 16), value=float("-inf"))
    noise[1] += 100
    expected = quantize_logits_grad_ref(padded, terms, 100, noise, direct=True, transposed=True)
    pairs = zip(made[:2], (alone[0].direct, alone[1].transposed), expected[:2], strict=True)
    for one, single, wanted in pairs:
        assert one.shape == wanted.shape and torch.equal(one.scale, wanted.scale)
        codes, others, right = (x.codes.view(torch.uint8).int() for x in (one, single, wanted))
        assert torch.equal(codes, others)
        assert (codes - right).abs().max() <= 1
        assert (codes != right).float().mean() < 1e-3
    direct, transposed = (x.codes.view(torch.uint8) for x in made[:2])
    assert torch.equal(direct.t(), transposed[:, :tokens]) and not transposed[:, tokens:].any()
    assert alone[0].sums is None and torch.equal(made.sums, alone[1].sums)
    torch.testing.assert_close(made.sums, expected.sums, rtol=1e-4, atol=1e-6)
    some = (labels >= 100) & (labels < 100 + columns)
    assert some.any() and not direct[some, labels[some] - 100].any()


def test_fast_accumulation_of_logits_adds_little() -> None:
    results = []
    for fast in (False, True):
        hidden, weight, labels, _ = tensors(512, 1024, 32000, torch.bfloat16)
        gemms = partial(Fp8Gemms, fast=fast)
        results.append(linear_cross_entropy(hidden, weight, labels, gemms=gemms).detach())
    assert 0 < relative(results[1], results[0]) < 2**-8


@pytest.mark.parametrize("layer", FP8_GEMMS)
def test_improbable_entries_reach_the_gradient_of_the_hidden_state(layer: str) -> None:
    """Entries other than the label keep their share of dhidden, with promoted sums.

    Fast accumulation would shorten it by 12 %: test_improbable_entries_need_promoted_sums in
    tests/model/test_output_gemms.py models both.
    """
    logits, labels, weight, hidden = zipf_tensors(256, 256, 32768)
    terms = terms_of(logits.cuda(), labels.cuda(), torch.ones(256, device="cuda"))
    dhidden = torch.zeros(256, 256, device="cuda")
    gemms = noisy(FP8_GEMMS[layer], "cuda")(hidden.cuda(), weight.cuda())
    gemms.backward_(
        slice(0, 32768), logits.cuda(), terms, 0, dhidden=dhidden, dweight=None, accumulate=False
    )
    gemms.end_backward_(terms, 0, dhidden=dhidden, dweight=None)
    assert abs(length_without_labels(dhidden.cpu(), logits, labels, weight) - 1) < 0.05


def test_predictions_of_an_fp8_output_layer_are_those_of_its_logits() -> None:
    hidden, weight, *_ = tensors(500, 256, 50257, torch.bfloat16)
    logits = all_logits(hidden, weight, gemms=Fp8Gemms)
    found = largest_logits(hidden, weight, chunk=4096, gemms=Fp8Gemms)
    # GEMMs of other sizes may sum in another order: the next BF16
    top = logits.gather(-1, found[..., None])[..., 0]
    torch.testing.assert_close(top, logits.amax(-1), rtol=2**-7, atol=0)


@pytest.mark.parametrize("layer", FP8_GEMMS)
@pytest.mark.parametrize("save", [False, True])
def test_an_fp8_output_layer_takes_the_memory_that_is_planned(save: bool, layer: str) -> None:
    hidden, weight, labels, _ = tensors(8192, 2048, 65536, torch.bfloat16)
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device="cuda")
    config = make_config(
        {
            "model": {"hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 4096},
            "data": {"text": ["unused"], "seq_len": 8192},
            "precision": {"output_layer": layer},
            "train": {
                "micro_batch": 1,
                "global_batch": 1,
                "logits": "save" if save else "recompute",
            },
        }
    )
    for _ in range(2):  # the first run compiles and allocates workspaces
        hidden.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gemms = noisy(FP8_GEMMS[layer], "cuda")
        loss = linear_cross_entropy(hidden, weight, labels, save_logits=save, gemms=gemms)
        loss.sum().backward()
        torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    planned = loss_bytes(config, 65536)
    print(f"extra peak {extra / MIB:.0f} MiB, planned {planned / MIB:.0f} MiB")
    assert 0.8 * planned < extra < 1.05 * planned + 8 * MIB  # beside it: statistics, scales
