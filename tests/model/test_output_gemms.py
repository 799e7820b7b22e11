"""The output layer in FP8 against plain formulas in fp64, which round as its formats do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from coatlm.config import ConfigError, make_config
from coatlm.config.recipes import ROWS
from coatlm.fp8 import emit, loaders, quantize, scaling, stochastic, tiles, transpose
from coatlm.fp8.formats import E4M3
from coatlm.fp8.gemm import matmul
from coatlm.fp8.operand import emit_transposed
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.stochastic import bits_ref
from coatlm.fp8.transpose import quantize_transposed
from coatlm.model import logits_quantize
from coatlm.model import output_gemms as module
from coatlm.model.logits_quantize import TokenTerms, quantize_logits_grad
from coatlm.model.loss import (
    IGNORE,
    all_logits,
    cross_entropy_ref,
    largest_logits,
    linear_cross_entropy,
)
from coatlm.model.loss_kernels import logits_grad_ref
from coatlm.model.output_gemms import (
    FP8_GEMMS,
    Fp8Gemms,
    Fp8GradientGemms,
    Fp8Output,
    Int8Gemms,
    PlainGemms,
    output_gemms,
)
from coatlm.model.rounding import GradientNoise
from tests.distributed import run_ranks
from tests.fp8.gluon_on_cpu import simulated
from tests.fp8.sm90 import access_bytes, launches_compiled
from tests.model.accumulation import length_without_labels, tensor_core_gemm, zipf_tensors

S, B, H = 7, 3, 48  # 21 tokens: no multiple of 16
MAX = 448.0
EMBEDDED = 2**-5  # with which logits of tied weights are below 10
CPU = torch.device("cpu")


def noisy(
    make: Callable[..., Fp8GradientGemms] = Fp8Gemms, device: torch.device | str = CPU
) -> Fp8Output:
    """GEMMs in FP8 that begin with the noise of `at_random`."""
    made = Fp8Output(make)
    GradientNoise({3: made}, seed=1, rank=0, device=torch.device(device))
    return made


def in_fp8(*arguments: Any, **options: Any) -> Tensor:
    return linear_cross_entropy(*arguments, gemms=noisy(), **options)


def tensors(vocab: int) -> tuple[Tensor, ...]:
    """hidden, weight, labels (one of them -100), dloss: the same on every call and rank.

    Tokens, channels and vocabulary entries differ in size, so that a scale of the wrong ones is
    seen, and probabilities reach from 1 down to 1e-8.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, H, generator=generator) * torch.logspace(-1, 0.5, H)
    hidden = (hidden * torch.logspace(-1, 0, S)[:, None, None]).bfloat16().requires_grad_()
    weight = torch.randn(vocab, H, generator=generator) * torch.logspace(0.5, -1, H)
    weight = (weight * torch.logspace(-0.5, 0.3, vocab)[:, None]).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (S, B), generator=generator)
    labels[2, 1] = IGNORE
    return hidden, weight, labels, torch.randn(S, B, generator=generator)


def rounded(x: Tensor, axis: int) -> Tensor:
    """x as E4M3 holds it, with a power-of-two scale for all that has the same index in `axis`."""
    amax = x.float().abs().amax(1 - axis, keepdim=True)
    scale = (amax / MAX).log2().ceil().exp2().where(amax > 0, 1.0)
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).double()


def rounded_to_int8(x: Tensor) -> Tensor:
    """Rows as integers of -127 to 127 hold them, after a rotation of each 16 elements."""
    h = torch.ones(1, 1)
    for _ in range(4):
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), h)
    y = (x.float().unflatten(1, (-1, 16)) @ (h / 4)).flatten(1)
    scale = y.abs().amax(1, keepdim=True) / 127
    codes = (y / scale.where(scale > 0, 1.0)).round().double() * scale.double()
    return (codes.unflatten(1, (-1, 16)) @ (h.double() / 4)).flatten(1)


FORMATS: dict[str | None, Callable[[Tensor], Tensor]] = {  # of operands of logits
    None: Tensor.double,
    "e4m3": lambda x: rounded(x, 0),
    "int8": rounded_to_int8,
}


def at_random(x: Tensor, bound: Tensor, slot: int, start: int, microbatch: int) -> Tensor:
    """x of a chunk as E4M3 holds it, with the power of two at or above bound / MAX as its scale.

    x is rounded to sign(x) floor(|x| / u + r) u, with the noise of a slot.
    """
    scale = (bound.double() / MAX).log2().ceil().exp2()
    noise = noisy().noise.noise[slot].clone()
    noise[1] += start
    noise[3] = microbatch
    r = (bits_ref(noise, *x.shape) + 0.5) / 2**16
    x = x.double() / scale
    u = x.abs().clamp(min=2.0**-6).log2().floor().exp2() / 8
    return x.sign() * (x.abs() / u + r).floor() * u * scale


def expected(
    vocab: int,
    chunk: int,
    z: float = 0.0,
    cap: float | None = None,
    *,
    forward: str | None = "e4m3",
    microbatch: int = 0,
    ranks: int = 1,
) -> list[Tensor]:
    """loss, dhidden, dweight by the formulas of loss.py and the table of output_gemms.py.

    `forward`: the format of the operands of logits.
    """
    hidden, weight, labels, dloss = (x.detach() for x in tensors(vocab))
    hidden, labels, dloss = hidden.flatten(0, 1), labels.flatten(), dloss.flatten().double()
    operands = [FORMATS[forward](x) for x in (hidden, weight)]
    raw = (operands[0] @ operands[1].t()).bfloat16().double()
    logits = raw if cap is None else cap * torch.tanh(raw / cap)
    lse, counts = logits.logsumexp(1), labels != IGNORE
    label = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    loss = (lse - label + z * lse**2).where(counts, 0.0)
    d = (logits - lse[:, None]).exp() * (1 + 2 * z * lse)[:, None]
    d -= F.one_hot(labels.clamp(min=0), vocab)
    dloss = dloss.where(counts, 0.0)
    d *= dloss[:, None]
    d = d if cap is None else d * (1 - (logits / cap) ** 2)
    bound = (dloss * (1 + 2 * z * lse)).abs().max()
    mean = hidden.float().mean(0).bfloat16()
    of_labels = d * F.one_hot(labels.clamp(min=0), vocab)
    d -= of_labels
    not_rounded = d.sum(0)[:, None] * mean.double() + of_labels.t() @ hidden.double()
    dhidden, dweight = of_labels @ weight.double(), []
    for start in range(0, vocab, chunk):
        rows, shard = slice(start, start + chunk), start // (vocab // ranks)
        own = weight[shard * (vocab // ranks) :][: vocab // ranks]
        codes = at_random(d[:, rows], bound, 0, start, microbatch)
        dhidden += codes @ at_random(weight[rows], own.abs().max(), 1, start, microbatch)
        dweight.append(codes.t() @ rounded(hidden - mean, 1))
    return [loss.view(S, B), dhidden.view(S, B, H), torch.cat(dweight) + not_rounded]


def relative(actual: Tensor, wanted: Tensor) -> float:
    return ((actual.double() - wanted.double()).norm() / wanted.double().norm()).item()


# a logit and a result are rounded to BF16; where fp32 and fp64 differ, a logit may be rounded to
# the next BF16 and a code flip: 2^-3 of one value among hundreds
CLOSE = 2**-8
CASES: list[tuple[int, int, dict[str, Any]]] = [  # vocabulary, chunk, options
    (80, 80, {}),
    (80, 32, {"save_logits": True}),
    (77, 77, {}),  # neither the vocabulary nor a chunk is a multiple of 16
    (77, 24, {"z_loss": 0.3}),
    (80, 48, {"cap": 2.0}),
    (77, 48, {"cap": 2.0, "z_loss": 0.3, "save_logits": True}),
]


GEMMS: dict[str | None, type[Fp8GradientGemms]] = {  # by the format of the operands of logits
    None: Fp8GradientGemms,
    "e4m3": Fp8Gemms,
    "int8": Int8Gemms,
}


@pytest.mark.parametrize("forward", GEMMS)
@pytest.mark.parametrize(("vocab", "chunk", "options"), CASES)
def test_loss_and_gradients_are_those_of_operands_rounded_to_8_bits(
    vocab: int, chunk: int, options: dict[str, Any], forward: str | None
) -> None:
    hidden, weight, labels, dloss = tensors(vocab)
    made = noisy(GEMMS[forward])
    loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk, gemms=made, **options)
    actual = (loss, *torch.autograd.grad(loss, (hidden, weight), dloss))
    z, cap = options.get("z_loss", 0.0), options.get("cap")
    wanted = expected(vocab, chunk, z, cap, forward=forward)
    assert [relative(a, w) < CLOSE for a, w in zip(actual, wanted, strict=True)] == [True] * 3
    assert loss.dtype == torch.float32 and not actual[1][labels == IGNORE].any()


@pytest.mark.parametrize("vocab", [77, 80])
def test_errors_of_the_loss_and_its_gradients_are_within_those_of_the_formats(vocab: int) -> None:
    """A value of E4M3 errs by at most 2^-4, twice that if rounded stochastically."""
    hidden, weight, labels, dloss = tensors(vocab)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact_loss = F.cross_entropy(
        (exact[0] @ exact[1].t()).transpose(1, 2), labels, reduction="none", ignore_index=IGNORE
    )
    wanted = torch.autograd.grad(exact_loss, exact, dloss.double())
    loss = in_fp8(hidden, weight, labels, chunk=32)
    actual = torch.autograd.grad(loss, (hidden, weight), dloss)
    largest = 2 * 2**-4 * (hidden.double().abs() @ weight.double().abs().t()).amax(-1)
    assert ((loss - exact_loss).abs() <= 2 * 1.1 * largest).all()  # 1.1: also BF16, and 2^-4 twice
    assert 2**-9 < relative(loss, exact_loss) < 2**-4
    # a logit that errs by d changes its softmax by the factor exp(d), besides rounding it
    assert all(2**-6 < relative(a, w) < 2**-2 for a, w in zip(actual, wanted, strict=True))


def test_logits_of_fp8_gradients_are_those_of_bf16() -> None:
    hidden, weight, labels, _ = tensors(77)
    loss = linear_cross_entropy(hidden, weight, labels, gemms=Fp8GradientGemms)
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, labels))
    logits = all_logits(hidden, weight, gemms=Fp8GradientGemms)
    assert torch.equal(logits, all_logits(hidden, weight, gemms=PlainGemms))


def terms_of(logits: Tensor, labels: Tensor, dloss: Tensor, **options: Any) -> TokenTerms:
    """The terms of tokens without a soft cap, whose vocabulary is that of the logits."""
    logits = logits.float()
    column = labels.clamp(0, logits.shape[1] - 1)[:, None]
    terms = {"target": logits.gather(1, column)[:, 0], "lse": logits.logsumexp(1)}
    return TokenTerms(labels, dloss=dloss, **{**terms, "slope": None, "cap": None, **options})


def test_gradients_below_the_smallest_number_are_right_on_average() -> None:
    """One token's weight is 2^12 of the others', whose gradients are between numbers of E4M3."""
    tokens, vocab = 8192, 48
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, vocab, generator=generator).expand(tokens, -1).contiguous()
    dloss = torch.full((tokens,), 2.0**-12)
    dloss[0] = 1.0
    terms = terms_of(logits, torch.zeros(tokens, dtype=torch.int64), dloss)
    noise = noisy().noise.noise[0]
    codes = quantize_logits_grad(logits, terms, 0, noise, direct=True, transposed=False).direct
    assert codes is not None
    exact = logits_grad_ref(logits[1:2], *(x[1:2] for x in terms.arguments(0)[:3]), 0)[0, 1:]
    spacing = terms.scale * 2.0**-9
    assert (exact < spacing / 2).any() and (exact > spacing).any()
    error = codes.dequantize().double()[1:, 1:].mean(0) - exact
    # the variance of a code between two numbers is at most a quarter of their distance squared
    assert (error.abs() < 4 * spacing / 2 / tokens**0.5).all()


@pytest.mark.parametrize("dloss", [1.0, 1.1, 1.9])
def test_a_tokens_gradients_add_up_to_zero_on_average(dloss: float) -> None:
    """As the exact ones do; rounded to nearest, those of improbable entries are lost.

    All entries but the label have probabilities of some 10^-7, and 0.004 together.
    """
    tokens, vocab = 256, 8192
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocab, generator=generator)
    logits[:, 0] = 15.0
    labels = torch.zeros(tokens, dtype=torch.int64)
    terms = terms_of(logits, labels, torch.full((tokens,), dloss))
    noise = noisy().noise.noise[0]
    codes = quantize_logits_grad(logits, terms, 0, noise, direct=True, transposed=False).direct
    assert codes is not None
    exact = logits_grad_ref(logits, *terms.arguments(0))
    each = torch.arange(tokens)
    torch.testing.assert_close(terms.label_grad, exact[each, labels])
    assert exact.sum(1).abs().max() < 1e-5
    assert not codes.codes.float()[each, labels].any()
    exact[each, labels] = 0.0
    nearest = E4M3.encode(exact / terms.scale).float() * terms.scale
    sums, biased = (
        (x.double().sum(1) + terms.label_grad) / dloss for x in (codes.dequantize(), nearest)
    )
    error = (sums.var() / tokens).sqrt()
    assert sums.mean().abs() < 3 * error and error < 1e-4
    assert biased.mean() < -0.003


@pytest.mark.parametrize("tokens", [37, 300])
@pytest.mark.parametrize("slope", [False, True])
def test_the_kernel_has_the_codes_and_sums_of_the_reference(tokens: int, slope: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(tokens, 160, generator=generator).bfloat16()
    labels = torch.randint(-100, 200, (tokens,), generator=generator)
    dloss = torch.rand(tokens, generator=generator) - 0.3
    terms = terms_of(logits, labels, dloss, slope=2 * dloss if slope else None)
    arguments = logits, terms, 0, noisy().noise.noise[0]
    wanted = logits_quantize.quantize_logits_grad_ref(*arguments, direct=True, transposed=True)
    with simulated(emit, logits_quantize, quantize, scaling, stochastic, tiles):
        made = logits_quantize._launch(*arguments, direct=True, transposed=True)
    for actual, codes in zip(made[:2], wanted[:2], strict=True):
        assert actual.shape == codes.shape  # exponentials differ in their last bits
        assert (actual.codes.float() != codes.codes.float()).float().mean() < 1e-3
    torch.testing.assert_close(made.sums, wanted.sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)])
def test_kernel_of_quantized_gradients_compiles_for_sm90(
    cap: float | None, sides: tuple[bool, bool]
) -> None:
    tokens = torch.empty(500, device="meta")
    logits = torch.empty(500, 160, device="meta", dtype=torch.bfloat16)
    labels = torch.empty(500, device="meta", dtype=torch.int64)
    terms = TokenTerms(labels, tokens, tokens, tokens, None if cap is None else tokens, cap)
    noise = torch.empty(4, device="meta", dtype=torch.int32)
    with launches_compiled(emit) as made:
        grads = logits_quantize._launch(
            logits, terms, 128, noise, direct=sides[0], transposed=sides[1]
        )
    assert [None if x is None else list(x.shape) for x in grads] == [
        [500, 160] if sides[0] else None,
        [160, 512] if sides[1] else None,
        [160] if sides[1] else None,
    ]
    assert len(made) == 1 and access_bytes(made[0]).count(16) >= 4


def test_kernel_of_the_weights_codes_compiles_for_sm90_and_has_those_of_the_reference() -> None:
    weight = torch.randn(160, 48).bfloat16()
    noise, scale = noisy().noise.noise[1], torch.tensor(2.0**-7)
    wanted = quantize_transposed(weight, scale, noise=noise).codes.view(torch.uint8)
    with simulated(emit, loaders, quantize, scaling, stochastic, tiles):
        _, made = transpose._quantize(weight, scale, E4M3, noise=noise, transposed=True)
    assert made is not None and torch.equal(made.view(torch.uint8), wanted)
    on_meta = (x.to("meta") for x in (weight, scale, noise))
    with launches_compiled(emit) as compiled:
        weight, scale, noise = on_meta
        transpose._quantize(weight, scale, E4M3, noise=noise, transposed=True)
    assert len(compiled) == 1 and 16 in access_bytes(compiled[0])


def test_saved_logits_give_the_bits_of_recomputed_ones() -> None:
    results = []
    for save in (False, True):
        hidden, weight, labels, dloss = tensors(77)
        loss = in_fp8(hidden, weight, labels, chunk=24, save_logits=save)
        gradients = torch.autograd.grad(loss, (hidden, weight), dloss, retain_graph=True)
        again = torch.autograd.grad(loss, (hidden, weight), dloss)
        results.append((loss, *gradients, *again))
    for recomputed, saved in zip(*results, strict=True):
        assert torch.equal(recomputed, saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_is_added_to_main_grad(dtype: torch.dtype) -> None:
    hidden, weight, labels, dloss = tensors(77)
    weight.main_grad = torch.zeros(weight.shape, dtype=dtype)
    gemms = noisy()
    for _ in range(2):
        linear_cross_entropy(hidden, weight, labels, chunk=24, gemms=gemms).backward(dloss)
    assert weight.grad is None
    wanted = [expected(77, 24, microbatch=each)[2] for each in range(2)]
    assert relative(weight.main_grad, wanted[0] + wanted[1]) < CLOSE
    assert relative(2 * wanted[0], wanted[0] + wanted[1]) > 2 * CLOSE


def test_the_weight_alone_or_the_hidden_state_alone_has_the_same_gradient() -> None:
    wanted = expected(77, 24)
    for frozen in (0, 1):
        inputs = tensors(77)
        inputs[frozen].requires_grad_(False)
        in_fp8(*inputs[:3], chunk=24).backward(inputs[3])
        assert relative(inputs[1 - frozen].grad, wanted[2 - frozen]) < CLOSE


def test_a_label_outside_the_vocabulary_gives_nan() -> None:
    hidden, weight, labels, _ = tensors(80)
    labels[0, 0] = 80
    loss = in_fp8(hidden, weight, labels)
    assert loss.isnan().nonzero().tolist() == [[0, 0]]
    loss.sum().backward()
    assert hidden.grad[0, 0].isnan().all() and hidden.grad[1:].isfinite().all()
    assert weight.grad.isnan().all()


@pytest.mark.parametrize("vocab", [77, 80])
def test_all_logits_and_the_largest_are_those_of_the_loss(vocab: int) -> None:
    hidden, weight, labels, _ = tensors(vocab)
    logits = all_logits(hidden, weight, gemms=Fp8Gemms)
    loss = F.cross_entropy(
        logits.double().transpose(1, 2), labels, reduction="none", ignore_index=IGNORE
    )
    torch.testing.assert_close(in_fp8(hidden, weight, labels), loss.float())
    assert not torch.equal(logits, all_logits(hidden, weight, gemms=PlainGemms))
    top = logits.gather(-1, largest_logits(hidden, weight, chunk=24, gemms=Fp8Gemms)[..., None])
    assert torch.equal(top[..., 0], logits.amax(-1))


@pytest.mark.parametrize(
    ("hidden", "weight", "message"),
    [
        (torch.zeros(2, 48), torch.zeros(3, 48), "hidden is torch.float32 with rows of 48"),
        (torch.zeros(2, 40).bfloat16(), torch.zeros(3, 40).bfloat16(), "rows of 40 elements"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(hidden: Tensor, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        in_fp8(hidden, weight, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("layer", "gemms"),
    [("fp8", Fp8Gemms), ("fp8-gradients", Fp8GradientGemms), ("int8", Int8Gemms)],
)
@pytest.mark.parametrize("recipe", ["bf16", "te-current", "coat-lean", "rowwise"])
def test_every_recipe_of_bf16_weights_takes_an_fp8_output_layer(
    recipe: str, layer: str, gemms: type
) -> None:
    model = {"spec": "te"} if recipe.startswith("te") else {}
    sections = {"model": model, "precision": {"recipe": recipe, "output_layer": layer}}
    config = make_config(sections)
    hidden = weight = torch.zeros(16, 16).bfloat16()
    made = output_gemms(config.precision)
    assert isinstance(made, Fp8Output) and type(made(hidden, weight)) is gemms


@pytest.mark.parametrize("fast", [[], ["forward", "dgrad", "wgrad"]])
@pytest.mark.parametrize("layer", FP8_GEMMS)
def test_gemms_of_backward_never_accumulate_fast(
    fast: list[str], layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = {"recipe": "coat", "output_layer": layer, "fast_accumulation": fast}
    config = make_config({"precision": precision})
    calls: list[bool] = []

    def watched(*operands: Any, fast: bool, **options: Any) -> Tensor:
        calls.append(fast)
        return matmul(*operands, fast=fast, **options)

    monkeypatch.setattr(module, "matmul", watched)
    hidden, weight, labels, dloss = tensors(80)
    gemms = output_gemms(config.precision)
    assert isinstance(gemms, Fp8Output)
    GradientNoise({1: gemms}, seed=0, rank=0, device=CPU)
    linear_cross_entropy(hidden, weight, labels, gemms=gemms, save_logits=True).backward(dloss)
    of_logits = {"fp8": [bool(fast)], "int8": [True], "fp8-gradients": []}  # INT8 ignores it
    assert calls == [*of_logits[layer], False, False]


def modeled_matmul(
    gemm: Callable[..., Tensor],
    a: QTensor,
    b: QTensor,
    *,
    out: Tensor,
    fast: bool,
    accumulate: bool = True,
) -> Tensor:
    """`matmul` of one scale by scales of rows, which adds as `gemm` does."""
    total = gemm(a.codes.float(), b.codes.float(), fast=fast) * a.scale
    return (out if accumulate else out.zero_()).add_(total * b.scale.view(1, -1))


def exact_gemm(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    return a.double() @ b.double().t()


def test_improbable_entries_need_promoted_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 14 bits that contains the terms of probable entries loses an eighth of all.

    More than a third of the probability is in entries below 2^-10 of the label's gradient.
    """
    tokens, vocab = 64, 32768
    logits, labels, weight, hidden = zipf_tensors(tokens, 32, vocab)
    terms = terms_of(logits, labels, torch.ones(tokens))

    def length(gemm: Callable[..., Tensor]) -> float:
        monkeypatch.setattr(module, "matmul", partial(modeled_matmul, gemm))
        dhidden = torch.zeros(tokens, 32)
        gemms = noisy(Fp8GradientGemms)(hidden, weight)
        gemms.backward_(
            slice(0, vocab), logits, terms, 0, dhidden=dhidden, dweight=None, accumulate=False
        )
        gemms.end_backward_(terms, 0, dhidden=dhidden, dweight=None)
        return length_without_labels(dhidden, logits, labels, weight)

    exact, promoted = length(exact_gemm), length(tensor_core_gemm)
    always_fast = length(lambda a, b, fast: tensor_core_gemm(a, b, fast=True))

    assert abs(exact - 1) < 0.02 and abs(promoted - exact) < 0.01
    assert always_fast < 0.9


def test_sums_of_a_tensor_core_do_not_push_all_logits_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """wgrad loses small positive terms beside larger ones, which would push all logits up.

    The sum of all rows along the mean hidden state, per token, in units of the label's gradient:
    with labels it is zero, and where it is smaller, an update raises all logits. wgrad sums over
    hidden states without their mean, of which terms of either sign lose as much.
    """
    tokens, vocab, size = 512, 1024, 32
    logits, labels, weight, hidden = zipf_tensors(tokens, size, vocab)
    hidden = (hidden + 1).bfloat16()  # states have a common part
    terms = terms_of(logits, labels, torch.ones(tokens))
    mean = hidden.double().mean(0)

    def along_mean(dweight: Tensor) -> float:
        return (dweight.double().sum(0) @ mean / mean.square().sum() / tokens).item()

    def gradient(gemm: Callable[..., Tensor]) -> Tensor:
        monkeypatch.setattr(module, "matmul", partial(modeled_matmul, gemm))
        dweight = torch.empty(vocab, size)
        noisy(Fp8GradientGemms)(hidden, weight).backward_(
            slice(0, vocab), logits, terms, 0, dhidden=None, dweight=dweight, accumulate=False
        )
        return dweight

    codes = quantize_logits_grad(
        logits, terms, 0, noisy().noise.noise[0], direct=False, transposed=True
    ).transposed
    assert codes is not None
    operands = codes, emit_transposed(hidden, ROWS)
    whole = {
        gemm: modeled_matmul(gemm, *operands, out=torch.zeros(vocab, size), fast=False)
        for gemm in (exact_gemm, tensor_core_gemm)
    }
    lost = along_mean(whole[tensor_core_gemm] - whole[exact_gemm])
    assert -3e-3 < lost < -5e-4
    assert abs(along_mean(gradient(tensor_core_gemm) - gradient(exact_gemm))) < abs(lost) / 10
    exact = logits_grad_ref(logits.float(), *terms.arguments(0)).double()
    exact[torch.arange(tokens), labels] = 0.0
    wanted = exact.t() @ hidden.double()
    assert relative(gradient(exact_gemm), wanted) < 0.8 * relative(whole[exact_gemm], wanted)


@pytest.mark.parametrize("slope", [-3.0, -0.9, 0.0, 0.4, 2.5])
def test_no_gradient_is_beyond_the_codes_whatever_the_sign_of_the_slope(slope: float) -> None:
    logits = torch.tensor([[0.0, -9.0]])
    labels = torch.tensor([1])
    terms = terms_of(logits, labels, torch.tensor([0.7]), slope=torch.full((1,), slope))
    largest = logits_grad_ref(logits, *terms.arguments(0))[0, 0].abs().item()
    assert largest <= terms.scale.item() * E4M3.max
    # without any gradient the scale is 1
    assert terms.scale == 1.0 if slope == 0.0 else terms.scale.item() * E4M3.max < 4 * largest


@pytest.mark.parametrize("layer", FP8_GEMMS)
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"precision": {"recipe": "fp32"}}, r"output_layer=LAYER with .*recipe=fp32: must be bf16"),
        ({"model": {"hidden": 72, "heads": 4}}, r"model\.hidden=72 is not a multiple of .*=16"),
    ],
)
def test_what_fp8_gemms_cannot_compute_is_refused(
    sections: dict[str, Any], message: str, layer: str
) -> None:
    precision = {"output_layer": layer} | sections.get("precision", {})
    sections = {**sections, "precision": precision}
    with pytest.raises(ConfigError, match=message.replace("LAYER", layer)):
        make_config(sections)


def vocabulary_parallel(rank: int, size: int, _: None) -> list[float]:
    """Relative errors of loss, dhidden (summed over ranks) and dweight, and of what is largest."""
    dist.init_process_group("gloo")
    found: list[float] = []
    for forward, gemms in GEMMS.items():
        hidden, weight, labels, dloss = tensors(80)
        # the scale of W^T is that of a rank's part
        wanted = expected(80, 40, forward=forward, ranks=2)
        rows = slice(rank * 40, rank * 40 + 40)
        shard, group = weight.detach()[rows].clone().requires_grad_(), dist.group.WORLD
        made = noisy(gemms)
        loss = linear_cross_entropy(hidden, shard, labels, group=group, gemms=made)
        dhidden, dweight = torch.autograd.grad(loss, (hidden, shard), dloss)
        dhidden = dhidden.float()
        dist.all_reduce(dhidden)
        largest = largest_logits(hidden, shard, group=group, gemms=gemms)
        differ = (largest != largest_logits(hidden, weight, gemms=gemms)).sum()
        pairs = zip((loss.detach(), dhidden, dweight), (*wanted[:2], wanted[2][rows]), strict=True)
        found += [*(relative(a, w) for a, w in pairs), float(differ)]
    return found


def test_two_ranks_equal_one() -> None:
    for errors in run_ranks(2, f"{__name__}:vocabulary_parallel"):
        assert len(errors) == 12 and max(errors) < CLOSE


@pytest.mark.parametrize("gemms", FP8_GEMMS.values())
def test_a_tied_weight_gets_both_gradients(gemms: Any) -> None:
    _, weight, labels, dloss = tensors(80)
    ids, options = labels.clamp(min=0), {"chunk": 32, "gemms": noisy(gemms)}
    linear_cross_entropy(F.embedding(ids, weight), weight, labels, **options).backward(dloss)
    plain = tensors(80)[1]
    cross_entropy_ref(F.embedding(ids, plain), plain, labels).backward(dloss)
    assert 2**-6 < relative(weight.grad, plain.grad) < 2**-2


def bf16_errors(
    hidden: Tensor,
    weight: Tensor,
    losses: Tensor,
    gradients: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...],
) -> list[float]:
    """Errors of losses and gradients against fp64, over what BF16 may cause: at most 1.

    A logit and its gradient are rounded to BF16, which errs by at most 2^-8, relative. `wanted` are
    fp64 losses and gradients.
    """
    exact, *exact_gradients = wanted
    logits = (hidden.double() @ weight.double().t()).detach()
    # the label's logit and the logarithm of the sum each err by a rounding of the largest logit
    bound = 2 * 2**-8 * logits.abs().amax(-1) + 1e-5
    # an error d of a logit changes its softmax by the factor exp(d); two more roundings
    spread = 2 * 2**-8 * float(logits.abs().max()) + 2 * 2**-8
    errors = (relative(*pair) for pair in zip(gradients, exact_gradients, strict=True))
    return [float(((losses - exact).abs() / bound).max()), *(error / spread for error in errors)]


def fp64(
    hidden: Tensor, weight: Tensor, labels: Tensor, dloss: Tensor, *, tied: bool = False
) -> tuple[Tensor, ...]:
    """Losses and gradients of the hidden state and the weight; `tied`: of the weight alone, where
    EMBEDDED of its rows of the labels is the hidden state."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    inputs = EMBEDDED * F.embedding(labels.clamp(min=0), leaves[1]) if tied else leaves[0]
    logits = (inputs @ leaves[1].t()).transpose(1, 2)
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)
    gradients = torch.autograd.grad(losses, leaves[tied:], dloss.double())
    return (losses.detach(), *gradients)


@pytest.mark.parametrize("vocab", [77, 80])
@pytest.mark.parametrize("save", [False, True])
def test_a_bf16_output_layer_is_exact_to_its_rounding_against_fp64(vocab: int, save: bool) -> None:
    hidden, weight, labels, dloss = tensors(vocab)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=32, save_logits=save)
    actual = torch.autograd.grad(loss, (hidden, weight), dloss)
    wanted = fp64(hidden, weight, labels, dloss)
    errors = bf16_errors(hidden, weight, loss.detach(), actual, wanted)
    assert all(0 < error <= 1 for error in errors)


def test_a_tied_bf16_weight_is_exact_to_its_rounding_against_fp64() -> None:
    _, weight, labels, dloss = tensors(77)
    hidden = EMBEDDED * F.embedding(labels.clamp(min=0), weight)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=32)
    actual = torch.autograd.grad(loss, (weight,), dloss)
    wanted = fp64(hidden, weight, labels, dloss, tied=True)
    errors = bf16_errors(hidden, weight, loss.detach(), actual, wanted)
    assert all(0 < error <= 1 for error in errors)


def bf16_shards(rank: int, size: int, saves: list[bool]) -> list[list[float]]:
    """`bf16_errors` of half of the vocabulary, for each way to keep logits."""
    dist.init_process_group("gloo")
    found = []
    for save in saves:
        hidden, weight, labels, dloss = tensors(154)
        rows = slice(rank * 77, rank * 77 + 77)
        shard, group = weight.detach()[rows].clone().requires_grad_(), dist.group.WORLD
        options: dict[str, Any] = {"group": group, "save_logits": save, "chunk": 32}
        loss = linear_cross_entropy(hidden, shard, labels, **options)
        dhidden, dweight = torch.autograd.grad(loss, (hidden, shard), dloss)
        dhidden = dhidden.float()
        dist.all_reduce(dhidden)
        losses, whole, of_weight = fp64(hidden, weight, labels, dloss)
        wanted = (losses, whole, of_weight[rows])
        actual = (dhidden, dweight)
        found.append(bf16_errors(hidden, weight, loss.detach(), actual, wanted))
    return found


def test_a_bf16_output_layer_on_two_ranks_is_exact_to_its_rounding_against_fp64() -> None:
    for errors in run_ranks(2, f"{__name__}:bf16_shards", [False, True]):
        assert len(errors) == 2 and all(0 < error <= 1 for case in errors for error in case)
