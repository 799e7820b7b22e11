"""The FP8 flow on a GPU: kernels against their references on CPU copies, GEMMs, a whole layer.

Kernels multiply by powers of two and round once, so codes are the reference's bit for bit, but
where approximate exponentials, square roots or sums in another order come before the rounding: a
few 2^-23 of a value then decide a tie differently, which is rarer than 1e-4 and moves a code by
one. Scales are equal: they change only where an amax is that close to 1.75 * 2^n.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from coatlm.config.recipes import FAST
from coatlm.fp8 import gemm
from coatlm.fp8.attention import Packed, SavedInFp8, attend_saving_fp8, dequantize_blocks
from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.gemm import PAIRS, ROW_BLOCK, Plans, matmul
from coatlm.fp8.norm_backward import norm_backward
from coatlm.fp8.norm_quantize import norm_quantize, quantize_rows
from coatlm.fp8.qtensor import ROW, TENSOR, QTensor, block
from coatlm.fp8.quantize import quantize
from coatlm.fp8.rope_quantize import join_quantize
from coatlm.fp8.scaling import current_scale, tensor_scale
from coatlm.fp8.swiglu_quantize import swiglu_backward_quantize, swiglu_quantize
from coatlm.fp8.transpose import (
    quantize_both,
    quantize_direct,
    quantize_rows_transposed,
    quantize_transposed,
    transpose_codes,
    transpose_rows,
)
from coatlm.kernels.rope import rope_frequencies, rope_tables
from coatlm.model.attention_backends import ORDER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EPS = 1e-5
E8M0 = torch.float8_e8m0fnu
OVER_INT32 = 2**31 + 2**20  # elements
LAST = slice(-3, None)  # rows
both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
sizes = pytest.mark.parametrize("size", [0, 16, 32, 64, 128])
shapes = pytest.mark.parametrize("shape", [(300, 4096), (37, 384), (1, 11008), (129, 5504)])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def on(device: str, x: Any) -> Any:
    """Copy tensors, also of tuples, to a device; other values stay as they are."""
    if isinstance(x, QTensor):
        return QTensor(x.codes.to(device), x.scale.to(device), x.granularity, x.fmt)
    if isinstance(x, tuple):
        return tuple(on(device, part) for part in x)
    return x.to(device) if isinstance(x, Tensor) else x


def steps_apart(actual: Tensor, expected: Tensor) -> Tensor:
    """Distance in codes, as they are ordered; both zeros are one."""

    def ordered(codes: Tensor) -> Tensor:
        byte = codes.cpu().contiguous().view(torch.uint8).int()
        return torch.where(byte < 128, byte, 128 - byte)

    return (ordered(actual) - ordered(expected)).abs()


def same(actual: QTensor | None, expected: QTensor | None, *, flips: float = 0.0) -> None:
    """Scales equal; codes equal but for a part `flips` of them, which are one apart."""
    if expected is None:
        assert actual is None
        return
    assert actual is not None
    assert (actual.granularity, actual.fmt) == (expected.granularity, expected.fmt)
    assert actual.codes.shape == expected.codes.shape
    scales = actual.scale.cpu().float(), expected.scale.float()
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
    apart = steps_apart(actual.codes, expected.codes)
    assert apart.max() <= (1 if flips else 0)
    assert apart.count_nonzero() <= flips * apart.numel() + (1 if flips else 0)


FLIPS = 1e-4


def mixed(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of very different sizes, one of zeros; CPU."""
    x = torch.randn(m, k) * 10.0 ** torch.randint(-3, 4, (m, 1))
    x[m // 2] = 0.0
    return x.to(dtype)


# norm


def fits(size: int, k: int) -> None:
    if size and k % size:
        pytest.skip("blocks do not divide the rows")


@dtypes
@sizes
@shapes
@pytest.mark.parametrize("added", [False, True])
def test_norm_quantize_equals_its_reference(
    shape: tuple[int, int], size: int, dtype: torch.dtype, added: bool
) -> None:
    fits(size, shape[1])
    a, weight = mixed(*shape, dtype), (1 + 0.2 * torch.randn(shape[1])).to(dtype)
    add = mixed(*shape, dtype) if added else None
    expected = norm_quantize(a, weight, EPS, add=add, block_size=size)
    actual = norm_quantize(a.cuda(), weight.cuda(), EPS, add=on("cuda", add), block_size=size)
    same(actual.y, expected.y, flips=FLIPS)
    same(actual.saved, expected.saved)
    assert torch.equal(actual.x.cpu(), expected.x)
    torch.testing.assert_close(actual.rstd.cpu(), expected.rstd, rtol=1e-5, atol=0)


@dtypes
@shapes
def test_quantize_rows_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = mixed(*shape, dtype)
    same(quantize_rows(x.cuda()), quantize_rows(x))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_norm_quantize_marks_rows_and_blocks_that_are_not_finite(bad: float) -> None:
    a = torch.randn(50, 512).bfloat16()
    a[7, 100] = bad
    made = norm_quantize(a.cuda(), torch.ones(512, device="cuda"), EPS, block_size=16)
    rows = made.y.codes.float().isnan()
    assert rows[7].all()
    assert rows.any(1).nonzero().flatten().tolist() == [7]
    assert made.saved.codes.float().isnan().nonzero().tolist() == [[7, i] for i in range(96, 112)]


@dtypes
@sizes
@shapes
def test_norm_backward_equals_its_reference(
    shape: tuple[int, int], size: int, dtype: torch.dtype
) -> None:
    fits(size, shape[1])
    a, weight = torch.randn(shape).to(dtype), (1 + 0.2 * torch.randn(shape[1])).to(dtype)
    made = norm_quantize(a, weight, EPS, block_size=size)
    x = made.x if made.saved is None else made.saved
    dy, dresidual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    expected = norm_backward(dy, x, made.rstd, weight, dresidual=dresidual)
    inputs = on("cuda", (dy, x, made.rstd, weight))
    dx, dweight, amaxes = norm_backward(*inputs, dresidual=dresidual.cuda())
    half = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(dx.cpu(), expected[0], rtol=2 * half, atol=1e-5)
    torch.testing.assert_close(dweight.cpu(), expected[1], rtol=1e-4, atol=1e-3)
    assert amaxes.amax() == dx.float().abs().amax()


# transposes


@both
@dtypes
@pytest.mark.parametrize("shape", [(300, 4096), (37, 48), (1, 16), (129, 5504), (1024, 2752)])
def test_transposes_equal_their_reference(
    shape: tuple[int, int], dtype: torch.dtype, fmt: Fp8Format
) -> None:
    x = mixed(*shape, dtype)
    scale = current_scale(x, fmt, power_of_two=True)
    expected = quantize_both(x, scale, fmt=fmt)
    xg, sg = x.cuda(), scale.cuda()
    assert torch.equal(current_scale(xg, fmt, power_of_two=True).cpu(), scale)
    made = quantize_both(xg, sg, fmt=fmt)
    direct = quantize_direct(xg, sg, fmt=fmt)
    for actual in (made.direct, direct):
        same(actual, expected.direct)
    for actual in (
        made.transposed,
        quantize_transposed(xg, sg, fmt=fmt),
        transpose_codes(direct),
    ):
        same(actual, expected.transposed)


@sizes
@shapes
def test_recomputed_norms_equal_their_reference(shape: tuple[int, int], size: int) -> None:
    fits(size, shape[1])
    x, weight = torch.randn(shape).bfloat16(), (1 + 0.2 * torch.randn(shape[1])).bfloat16()
    made = norm_quantize(x, weight, EPS, block_size=size)
    saved, one = made.x if made.saved is None else made.saved, made.y.scale.amax()
    options: dict[str, Any] = {"row": made.rstd, "column": weight}
    gpu = {name: value.cuda() for name, value in options.items()}
    for function in (quantize_transposed, quantize_direct):
        expected = function(saved, one, **options)
        same(function(on("cuda", saved), one.cuda(), **gpu), expected, flips=FLIPS)
    # FP8 rows under one scale
    expected = quantize_transposed(made.y.codes, one, row=made.y.scale)
    codes, scale = made.y.codes.cuda(), made.y.scale.cuda()
    same(quantize_transposed(codes, one.cuda(), row=scale), expected)


@pytest.mark.parametrize("shape", [(300, 4096), (37, 48), (1, 16), (129, 5504), (1024, 2752)])
def test_weights_transposed_have_the_codes_of_forward(shape: tuple[int, int]) -> None:
    w = mixed(*shape)  # rows 10^6 apart: subnormal under one scale
    rows = quantize_rows(w)
    expected = quantize_rows_transposed(w, rows.scale)
    made = quantize_rows(w.cuda())
    same(quantize_rows_transposed(w.cuda(), made.scale), expected)
    same(transpose_rows(made), expected)


@both
def test_transposes_of_a_scale_that_is_not_finite_are_nan(fmt: Fp8Format) -> None:
    x = torch.randn(20, 64, device="cuda").bfloat16()
    made = quantize_both(x, torch.tensor(math.inf, device="cuda"), fmt=fmt)
    assert made.direct.codes.float().isnan().all()
    assert made.transposed.codes.float()[:, :20].isnan().all()


# SwiGLU


def gate_up(m: int, f: int, dtype: torch.dtype) -> Tensor:
    x = 3 * torch.randn(m, 2 * f)
    x[:, 0], x[:, 1] = 30.0, -30.0
    return x.to(dtype)


@dtypes
@sizes
@shapes
def test_swiglu_quantize_equals_its_reference(
    shape: tuple[int, int], size: int, dtype: torch.dtype
) -> None:
    fits(size, shape[1])
    x = gate_up(*shape, dtype)
    expected, actual = swiglu_quantize(x, block_size=size), None
    actual = swiglu_quantize(x.cuda(), block_size=size)
    same(actual.a, expected.a, flips=FLIPS)
    same(actual.saved, expected.saved)


@both
@sizes
@shapes
@pytest.mark.parametrize("with_a", [True, False])
def test_swiglu_backward_equals_its_reference(
    shape: tuple[int, int], size: int, fmt: Fp8Format, with_a: bool
) -> None:
    fits(size, shape[1])
    x, da = gate_up(*shape, torch.bfloat16), torch.randn(shape).bfloat16()
    made = swiglu_quantize(x, block_size=size)
    seen, one = x if made.saved is None else made.saved, made.a.scale.amax()
    expected = swiglu_backward_quantize(da, seen, one, fmt=fmt, with_a=with_a)
    inputs = on("cuda", (da, seen, one))
    actual = swiglu_backward_quantize(*inputs, fmt=fmt, with_a=with_a)
    for got, want in zip(actual, expected, strict=True):
        same(got, want, flips=FLIPS)
    m = shape[0]
    assert torch.equal(  # one kernel writes both
        actual.dx_t.codes.view(torch.uint8)[:, :m], actual.dx.codes.view(torch.uint8).t()
    )
    assert not actual.dx_t.codes.view(torch.uint8)[:, m:].any()


# rotary gradients


def head_gradients(s: int, b: int, kv_heads: int, queries: int, d: int) -> tuple[Tensor, ...]:
    heads = (kv_heads * queries, kv_heads, kv_heads)
    parts = (torch.randn(s, b, n, d).bfloat16() for n in heads)
    return *parts, *rope_tables(torch.arange(s), rope_frequencies(d, 10000.0))


@both
@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize(("s", "b", "kv_heads", "queries"), [(257, 3, 8, 4), (37, 1, 2, 1)])
def test_join_quantize_equals_its_reference(
    s: int, b: int, kv_heads: int, queries: int, d: int, fmt: Fp8Format
) -> None:
    parts = head_gradients(s, b, kv_heads, queries, d)
    expected, actual = (join_quantize(*on(t, parts), fmt=fmt) for t in ("cpu", "cuda"))
    for got, want in zip(actual, expected, strict=True):
        same(got, want, flips=FLIPS)  # products of a rotation may be fused with their sum


def test_join_quantize_takes_the_strides_that_attention_returns() -> None:
    dq, dk, dv, cos, sin = on("cuda", head_gradients(129, 2, 4, 2, 128))
    expected = join_quantize(dq, dk, dv, cos, sin, fmt=E5M2)
    dq, dk = (x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in (dq, dk))
    dv = dv.transpose(2, 3).contiguous().transpose(2, 3)
    actual = join_quantize(dq, dk, dv, cos, sin, fmt=E5M2)
    for got, want in zip(actual, expected, strict=True):
        same(got, on("cpu", want))


# GEMMs


def operand(rows: int, k: int, granularity: Any, fmt: Fp8Format = E4M3) -> QTensor:
    shape = granularity.scale_shape(torch.Size((rows, k)))
    scale = 2.0 ** torch.randint(-4, 4, shape).float()
    return QTensor(fmt.encode(torch.randn(rows, k)), scale, granularity, fmt)


def assert_close_gemm(actual: Tensor, a: QTensor, b: QTensor, more: Any, fast: bool) -> None:
    """Tensor cores add 32 products at a time to about 14 bits; without `fast`, 128 at most.

    A GEMM's BF16 result may be rounded before something is added to it.
    """
    a64, b64 = (x.codes.double() * x.granularity.spread(x.scale.double(), x.shape) for x in (a, b))
    expected, magnitude = a64 @ b64.t() + more, a64.abs() @ b64.abs().t()
    allowed = (2.0**-9 if fast else 2.0**-11) * magnitude + 1e-6 * expected.abs()
    if actual.dtype == torch.bfloat16:
        allowed = allowed + 2.0**-8 * (expected.abs() + (expected - more).abs())
    assert ((actual.cpu().double() - expected).abs() <= allowed).all()


gemm_sizes = pytest.mark.parametrize(
    ("m", "n", "k"), [(37, 48, 528), (512, 4096, 1024), (1, 16, 16)]
)


@gemm_sizes
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("granularity", [TENSOR, ROW], ids=["tensor", "row"])
@pytest.mark.parametrize("kind", ["plain", "bias", "add"])
def test_gemms_of_forward(m: int, n: int, k: int, granularity: Any, fast: bool, kind: str) -> None:
    a, b = operand(m, k, granularity), operand(n, k, granularity)
    shape = {"plain": (1,), "bias": (n,), "add": (m, n)}[kind]
    more = torch.randn(shape).bfloat16() * (kind != "plain")
    options = {} if kind == "plain" else {kind: more.cuda()}
    out = matmul(on("cuda", a), on("cuda", b), fast=fast, **options)
    assert (out.dtype, out.shape) == (torch.bfloat16, (m, n))
    assert_close_gemm(out, a, b, more.double(), fast)


@gemm_sizes
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("granularity", [TENSOR, ROW], ids=["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemms_that_accumulate_into_a_main_gradient(
    m: int, n: int, k: int, granularity: Any, fast: bool, dtype: torch.dtype
) -> None:
    a, b = operand(m, k, granularity, E5M2), operand(n, k, granularity)
    before = torch.randn(m, n).to(dtype)
    out = before.clone().cuda()
    assert matmul(on("cuda", a), on("cuda", b), out=out, fast=fast) is out
    assert_close_gemm(out, a, b, before.double(), fast)


def test_weight_gradients_of_many_tokens_that_agree_keep_their_length() -> None:
    tokens, rows = 131072, 64
    terms = torch.rand(2, rows, tokens).square()  # of one sign, and mostly small
    dy_t, x_t = quantize_wgrad(terms)
    exact = dy_t.dequantize().double() @ x_t.dequantize().double().t()
    out = torch.zeros(rows, rows, device="cuda")
    lengths = {}
    for fast in ("wgrad" in FAST, True):
        found = matmul(on("cuda", dy_t), on("cuda", x_t), out=out, accumulate=False, fast=fast)
        lengths[fast] = ((found.cpu().double() * exact).sum() / exact.square().sum()).item()
    assert abs(lengths[False] - 1) < 1e-3  # as recipes compute it
    assert lengths[True] < 0.98  # with fast accumulation


def quantize_wgrad(terms: Tensor) -> tuple[QTensor, QTensor]:
    """Two operands of a weight gradient, with tensor-wise scales."""
    one = torch.ones(())
    return tuple(  # type: ignore[return-value]
        QTensor(fmt.encode(x), one, TENSOR, fmt) for x, fmt in zip(terms, (E5M2, E4M3), strict=True)
    )


@gemm_sizes
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemms_that_overwrite_their_output(
    m: int, n: int, k: int, fast: bool, dtype: torch.dtype
) -> None:
    a, b = on("cuda", (operand(m, k, TENSOR, E5M2), operand(n, k, TENSOR)))
    out = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
    assert matmul(a, b, out=out, accumulate=False, fast=fast) is out
    added = matmul(a, b, out=torch.zeros_like(out), fast=fast)
    assert torch.equal(out, added)


@pytest.mark.parametrize("accumulate", [True, False])
def test_tuned_gemms_are_as_exact_as_the_first_choice(accumulate: bool) -> None:
    m, n, k = 384, 512, 1024
    dtype = torch.float32 if accumulate else torch.bfloat16
    kinds: dict[str, Any] = {"a_fmt": E5M2, "b_fmt": E4M3, "out_dtype": dtype, "fast": True}
    plans = Plans()
    plans.tune(m, n, k, accumulate=accumulate, device=torch.cuda.current_device(), **kinds)
    a, b = operand(m, k, TENSOR, E5M2), operand(n, k, TENSOR)
    before = torch.randn(m, n) if accumulate else torch.zeros(1)
    out = before.cuda() if accumulate else None
    y = matmul(*on("cuda", (a, b)), out=out, plans=plans)
    assert_close_gemm(y, a, b, before.double(), True)


def test_a_gemm_is_tuned_once_and_its_algorithm_found_by_name_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds: dict[str, Any] = {"a_fmt": E5M2, "b_fmt": E4M3, "out_dtype": torch.float32, "fast": True}
    choices: dict[str, str] = {}
    kinds |= {"accumulate": True, "device": torch.cuda.current_device(), "choices": choices}
    Plans().tune(384, 512, 1024, **kinds)
    [name] = choices.values()
    monkeypatch.setattr(gemm, "_times", None)  # a second timing fails
    later = Plans()
    later.tune(384, 512, 1024, **kinds)
    assert [plan.heuristic.name for plan in later._plans.values()] == [name]


@pytest.mark.parametrize(("first", "second"), PAIRS[2:])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("a_fmt", "b_fmt"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_gemms_of_blocks(
    first: Any, second: Any, dtype: torch.dtype | None, a_fmt: Fp8Format, b_fmt: Fp8Format
) -> None:
    for m, n, k in ((256, 512, 1024), (4, 16, 128), (512, 384, 384)):
        a, b = operand(m, k, first, a_fmt), operand(n, k, second, b_fmt)
        before = torch.zeros(1) if dtype is None else torch.randn(m, n).to(dtype)
        out = None if dtype is None else before.cuda()
        y = matmul(on("cuda", a), on("cuda", b), out=out)
        assert_close_gemm(y, a, b, before.double(), False)


def test_gemms_that_tensor_cores_cannot_compute_are_refused() -> None:
    a, b = (on("cuda", operand(rows, 128, ROW_BLOCK)) for rows in (6, 16))
    with pytest.raises(ValueError, match="multiple of 4 rows"):
        matmul(a, b)
    a, b = (on("cuda", operand(rows, 24, TENSOR)) for rows in (16, 16))
    with pytest.raises(ValueError, match="multiples of 16"):
        matmul(a, b)
    a, b = (on("cuda", operand(rows, 32, TENSOR)) for rows in (16, 24))
    with pytest.raises(ValueError, match="multiples of 16"):
        matmul(a, b)
    a, b = (on("cuda", operand(16, 32, TENSOR, E5M2)) for _ in range(2))
    with pytest.raises(ValueError, match="E5M2"):
        matmul(a, b)
    a, b = (on("cuda", operand(16, 32, TENSOR)) for _ in range(2))
    apart = QTensor(a.codes, torch.ones(2, device="cuda")[1], TENSOR, a.fmt)
    with pytest.raises(ValueError, match="16 bytes"):
        matmul(apart, b)


# attention


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@dtypes
def test_dequantize_blocks_equals_its_reference(size: int, dtype: torch.dtype) -> None:
    x = mixed(333, 128 * 7).bfloat16()
    made = quantize(x, fmt=E4M3, granularity=block(1, size), scale_dtype=E8M0)
    actual = dequantize_blocks(on("cuda", made), dtype)
    assert torch.equal(actual.cpu(), made.dequantize(dtype))


def attention_inputs(kv_heads: int, s: int = 256, d: int = 128) -> list[Tensor]:
    heads = (8, kv_heads, kv_heads)
    parts = [torch.randn(s, 2, n, d, device="cuda").bfloat16() for n in heads]
    return [*parts, torch.randn(s, 2, 8 * d, device="cuda").bfloat16()]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    gqa = q.shape[2] != k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    with sdpa_kernel(ORDER, set_priority=True):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa
        )
    return out.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_that_saves_fp8(kv_heads: int, masked: bool) -> None:
    *qkv, dout = attention_inputs(kv_heads)
    length = qkv[0].shape[0]
    mask = torch.ones(2, 1, length, length, dtype=torch.bool, device="cuda").tril()
    if not masked:
        mask = None
    qkv = [x.requires_grad_() for x in qkv]
    out = attend(*qkv, mask)
    exact = torch.autograd.grad(out, qkv, dout)
    fp8, saved = attend_saving_fp8(lambda: attend(*qkv, mask), 16, *qkv)
    assert torch.equal(fp8, out)
    error = (saved.dequantize().view(out.shape) - out.float()).norm() / out.float().norm()
    assert error <= 2.0**-4 / math.sqrt(3)
    # q, k, v and the output are each off by that much; errors add in squares
    errors = [
        (actual.float() - expected.float()).norm() / expected.float().norm()
        for actual, expected in zip(torch.autograd.grad(fp8, qkv, dout), exact, strict=True)
    ]
    assert 0 < max(errors) <= math.sqrt(4 / 3) * 2.0**-4


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [256, 128], ids=["", "as long as head_dim"])
def test_attention_saves_q_k_v_and_the_output_once_each(
    masked: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []
    pack = SavedInFp8._pack
    monkeypatch.setattr(
        SavedInFp8, "_pack", lambda self, x: saved.append(pack(self, x)) or saved[-1]
    )
    *qkv, _ = (x.requires_grad_() for x in attention_inputs(8, s=length))
    mask = torch.ones(2, 1, length, length, dtype=torch.bool, device="cuda").tril()
    attend_saving_fp8(lambda: attend(*qkv, mask if masked else None), 16, *qkv)
    held = [x if isinstance(x, Tensor) else x.held for x in saved]
    assert len({x.codes.codes.data_ptr() for x in held if isinstance(x, Packed)}) == 4
    exact = [x for x in held if isinstance(x, Tensor)]
    # statistics, and the mask as a bias
    limit = max(4 * 2 * 8 * length, 4 * mask.numel() if masked else 0)
    assert max((x.nbytes for x in exact), default=0) <= limit


# beyond 31 bits


def rows_of(x: QTensor, rows: slice) -> QTensor:
    scale = x.scale if x.granularity == TENSOR else x.scale[rows]
    return QTensor(x.codes[rows], scale, x.granularity, x.fmt)


def big(columns: int) -> Tensor:
    """Zeros but for the last rows."""
    x = torch.zeros(OVER_INT32 // columns, columns, dtype=torch.bfloat16, device="cuda")
    x[LAST] = torch.randn(3, columns, device="cuda").bfloat16()
    return x


def transposed_rows(x: QTensor, m: int) -> QTensor:
    """The last rows of what was transposed, without the padding."""
    return QTensor(x.codes[:, m - 3 : m].contiguous(), x.scale, TENSOR, x.fmt)


def test_norm_quantize_indexes_beyond_31_bits() -> None:
    x, weight = big(4096), torch.ones(4096, device="cuda")
    made = norm_quantize(x, weight, EPS, block_size=16)
    expected = norm_quantize(x[LAST].cpu(), weight.cpu(), EPS, block_size=16)
    same(rows_of(made.y, LAST), expected.y, flips=FLIPS)
    same(rows_of(made.saved, LAST), expected.saved)
    saved, rstd = made.saved, made.rstd
    del made
    dx, dweight, _ = norm_backward(x, saved, rstd, weight)
    last = norm_backward(x[LAST].cpu(), expected.saved, expected.rstd, weight.cpu())
    torch.testing.assert_close(dx[LAST].cpu(), last[0], rtol=2**-7, atol=2e-3)
    torch.testing.assert_close(dweight.cpu(), last[1], rtol=1e-4, atol=1e-4)


def test_transposes_index_beyond_31_bits() -> None:
    x = big(4096)
    m = x.shape[0]
    scale = current_scale(x, E4M3, power_of_two=True)
    expected = quantize_both(x[LAST].cpu(), scale.cpu(), fmt=E4M3)
    made = quantize_both(x, scale, fmt=E4M3)
    same(rows_of(made.direct, LAST), expected.direct)
    wanted = QTensor(expected.transposed.codes[:, :3].contiguous(), scale.cpu(), TENSOR, E4M3)
    same(transposed_rows(made.transposed, m), wanted)
    direct = made.direct
    del made
    same(transposed_rows(transpose_codes(direct), m), wanted)
    del direct
    same(transposed_rows(quantize_transposed(x, scale), m), wanted)
    scale = quantize_rows(x[LAST].cpu()).scale
    expected_rows = quantize_rows_transposed(x[LAST].cpu(), scale)
    scales = torch.full((m, 1), 2.0**-100, device="cuda")
    scales[LAST] = scale.cuda()
    wanted = QTensor(expected_rows.codes[:, :3].contiguous(), expected_rows.scale, TENSOR, E4M3)
    same(transposed_rows(quantize_rows_transposed(x, scales), m), wanted)


def test_swiglu_indexes_beyond_31_bits() -> None:
    x = big(4096)
    m = x.shape[0]
    made = swiglu_quantize(x, block_size=16)
    expected = swiglu_quantize(x[LAST].cpu(), block_size=16)
    same(rows_of(made.a, LAST), expected.a, flips=FLIPS)
    same(rows_of(made.saved, LAST), expected.saved)
    saved, one = made.saved, made.a.scale[LAST].amax()
    del made
    da = x[:, :2048].contiguous()
    grads = swiglu_backward_quantize(da, saved, one, fmt=E5M2)
    last = swiglu_backward_quantize(da[LAST].cpu(), expected.saved, one.cpu(), fmt=E5M2)
    same(rows_of(grads.dx, LAST), last.dx, flips=1e-3)
    for got, want in ((grads.dx_t, last.dx_t), (grads.a_t, last.a_t)):
        wanted = QTensor(want.codes[:, :3].contiguous(), want.scale, TENSOR, want.fmt)
        same(transposed_rows(got, m), wanted, flips=1e-3)


def test_rotary_gradients_index_beyond_31_bits() -> None:
    d, kv_heads, queries = 128, 2, 14
    tokens = OVER_INT32 // (kv_heads * (queries + 2) * d)
    parts = []
    for heads in (kv_heads * queries, kv_heads, kv_heads):
        part = torch.zeros(tokens, 1, heads, d, dtype=torch.bfloat16, device="cuda")
        part[LAST] = torch.randn(3, 1, heads, d, device="cuda").bfloat16()
        parts.append(part)
    cos, sin = on("cuda", rope_tables(torch.arange(tokens), rope_frequencies(d, 1e4)))
    made = join_quantize(*parts, cos, sin, fmt=E5M2)
    last = join_quantize(
        *(part[LAST].cpu() for part in parts), cos[LAST].cpu(), sin[LAST].cpu(), fmt=E5M2
    )
    same(rows_of(made.direct, LAST), last.direct, flips=1e-3)
    wanted = QTensor(last.transposed.codes[:, :3].contiguous(), last.direct.scale, TENSOR, E5M2)
    same(transposed_rows(made.transposed, tokens), wanted, flips=1e-3)


def test_dequantize_blocks_indexes_beyond_31_bits() -> None:
    x = big(4096)
    made = quantize(x, fmt=E4M3, granularity=block(1, 16), scale_dtype=E8M0)
    expected = rows_of(made, LAST).dequantize(torch.bfloat16)
    assert torch.equal(dequantize_blocks(made, torch.bfloat16)[LAST], expected)


def test_the_scale_of_amaxes_is_found_without_waiting_for_the_gpu() -> None:
    amaxes = torch.rand(40000, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        scale = tensor_scale(amaxes, E5M2, power_of_two=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(scale.cpu(), tensor_scale(amaxes.cpu(), E5M2, power_of_two=True))
