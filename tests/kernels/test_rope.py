"""Rotary embedding: frequencies by their definition, rotations as complex products, kernels."""

import math

import pytest
import torch

from coatlm.kernels import rope as rope_module
from coatlm.kernels.rope import (
    join_qkv_rope_ref,
    rope,
    rope_frequencies,
    rope_ref,
    rope_tables,
    split_qkv_rope,
    split_qkv_rope_ref,
)
from coatlm.kernels.rope_scaling import attention_factor
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, run_interpreted

S, B, G, M, D = 5, 2, 3, 4, 16  # tokens, samples, kv heads, queries per kv head, elements per head
FP32 = 1e-6  # relative and absolute: three operations of 2^-24 on values of order one
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tables(head_dim: int = D) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_tables(torch.arange(3, 3 + S), rope_frequencies(head_dim, 100.0))


def fused(head_dim: int = D) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(S, B, G, (M + 2) * head_dim)


def test_frequencies_are_powers_of_theta() -> None:
    expected = torch.tensor([500000.0 ** (-2 * i / 128) for i in range(64)])
    torch.testing.assert_close(rope_frequencies(128, 500000.0), expected, rtol=1e-6, atol=0)


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    plain, scaled = rope_frequencies(128, 500000.0), rope_frequencies(128, 500000.0, LLAMA3)
    for frequency, result in zip(plain.tolist(), scaled.tolist(), strict=True):
        wave = 2 * math.pi / frequency  # tokens
        if wave < 8192 / 4.0:
            expected = frequency
        elif wave > 8192 / 1.0:
            expected = frequency / 8.0
        else:
            smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * frequency / 8.0 + smooth * frequency
        assert result == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "scaling", "message"),
    [
        (15, None, "head_dim is 15"),
        (16, {"factor": 8.0}, "must be"),
        (16, {"type": "linear"}, r"must be \['factor'\]"),
        (16, {"type": "dynamic", "factor": 2.0}, "one of linear, llama3, yarn, longrope"),
        (16, LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0"),
    ],
)
def test_impossible_frequencies_are_refused(head_dim: int, scaling: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_frequencies(head_dim, 10000.0, scaling)


def test_yarn_keeps_fast_turns_stretches_slow_ones_and_blends_by_index() -> None:
    """Written out for 16 frequencies of theta 10^4, of which 2 to 7 are blended."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    scaling |= {"beta_fast": 5.0, "beta_slow": 0.5, "attention_factor": None, "truncate": True}
    plain, scaled = rope_frequencies(32, 10000.0), rope_frequencies(32, 10000.0, scaling)
    # 128 f / (2 pi) is 5 at index 2.43 and 0.5 at index 6.43
    shares = [1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, *[0.0] * 9]
    for frequency, result, kept in zip(plain.tolist(), scaled.tolist(), shares, strict=True):
        assert result == pytest.approx(frequency * (kept + (1 - kept) / 4), rel=1e-6)
    assert attention_factor(scaling) == pytest.approx(1 + 0.1 * math.log(4.0))
    assert attention_factor(scaling | {"attention_factor": 1.5}) == 1.5
    assert attention_factor(LLAMA3) == attention_factor(None) == 1.0


def test_yarn_keeps_all_frequencies_that_turn_often_enough() -> None:
    """There are 4 frequencies of theta 10; blending would begin at index 5.2 and end at 11.3."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    scaling |= {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None, "truncate": True}
    assert torch.equal(rope_frequencies(8, 10.0, scaling), rope_frequencies(8, 10.0))


def test_linear_scaling_divides_every_frequency() -> None:
    scaled = rope_frequencies(64, 10000.0, {"type": "linear", "factor": 3.0})
    torch.testing.assert_close(scaled * 3, rope_frequencies(64, 10000.0), rtol=1e-6, atol=0)


def test_longrope_divides_each_frequency_by_its_factor_for_the_length_of_the_sequence() -> None:
    scaling = {"type": "longrope", "factor": 16.0, "original_max_position_embeddings": 64}
    scaling |= {"short_factor": (1.0, 2.0), "long_factor": (3.0, 5.0), "attention_factor": None}
    plain = rope_frequencies(4, 100.0)
    for length, factors in ((None, (1.0, 2.0)), (64, (1.0, 2.0)), (65, (3.0, 5.0))):
        scaled = rope_frequencies(4, 100.0, scaling, length=length)
        torch.testing.assert_close(scaled * torch.tensor(factors), plain, rtol=1e-6, atol=0)
    assert attention_factor(scaling) == pytest.approx(math.sqrt(1 + 4 / 6))  # log2 16 / log2 64
    assert attention_factor(scaling | {"attention_factor": 1.5}) == 1.5


def test_pairs_beyond_the_frequencies_do_not_turn() -> None:
    cos, sin = rope_tables(torch.arange(S), rope_frequencies(4, 100.0), factor=1.5, half=D // 2)
    x = torch.randn(S, B, G, D)
    y, still = rope(x, cos, sin), [i for i in range(D) if i % (D // 2) >= 2]
    assert torch.equal(y[..., still], x[..., still])
    turned = [0, 1, D // 2, D // 2 + 1]
    torch.testing.assert_close(y[..., turned].norm(), 1.5 * x[..., turned].norm())


def test_backward_of_a_scaled_rotation_is_its_transpose() -> None:
    cos, sin = rope_tables(torch.arange(S), rope_frequencies(D, 100.0), factor=1.5)
    x, dq = fused().requires_grad_(), torch.randn(S, B, G * M, D)
    dk, dv = torch.randn(S, B, G, D), torch.randn(S, B, G, D)
    (expected,) = torch.autograd.grad(
        split_qkv_rope_ref(x, cos, sin, queries_per_kv_head=M, head_dim=D), x, (dq, dk, dv)
    )
    (actual,) = torch.autograd.grad(
        split_qkv_rope(x, cos, sin, queries_per_kv_head=M, head_dim=D), x, (dq, dk, dv)
    )
    torch.testing.assert_close(actual, expected, rtol=FP32, atol=FP32)
    assert float(rope(torch.ones(S, B, 1, D), cos, sin).norm()) == pytest.approx(
        1.5 * math.sqrt(S * B * D), rel=1e-5
    )


def test_rotation_is_multiplication_by_a_unit_complex_number() -> None:
    x, (cos, sin) = torch.randn(S, B, 4, D), tables()
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos, sin)[:, None, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rope(x, cos, sin), expected, rtol=FP32, atol=FP32)


def test_scores_depend_on_the_distance_between_tokens_only() -> None:
    torch.manual_seed(0)
    q, k, inv_freq = torch.randn(D), torch.randn(D), rope_frequencies(D, 100.0)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        cos, sin = rope_tables(torch.tensor([at_q, at_k]), inv_freq)
        turned = rope(torch.stack((q, k))[:, None, None], cos, sin)
        return (turned[0] * turned[1]).sum()

    # angles of up to 40 radians carry an error of 40 * 2^-24; D products of order one
    torch.testing.assert_close(score(7, 2), score(40, 35), rtol=0, atol=40 * 2**-24 * D)


def test_rope_backward_equals_autograd_of_the_definition() -> None:
    x, dy = torch.randn(S, B, 4, D, requires_grad=True), torch.randn(S, B, 4, D)
    (expected,) = torch.autograd.grad(rope_ref(x, *tables()), x, dy)
    (actual,) = torch.autograd.grad(rope(x, *tables()), x, dy)
    torch.testing.assert_close(actual, expected, rtol=FP32, atol=FP32)


def test_split_takes_the_queries_of_each_kv_head_in_order() -> None:
    qkv, (cos, sin) = fused(), tables()
    q, k, v = split_qkv_rope(qkv, cos, sin, queries_per_kv_head=M, head_dim=D)
    for kv_head in range(G):
        heads = qkv[:, :, kv_head].split(D, dim=-1)
        for member in range(M):
            expected = rope(heads[member][:, :, None], cos, sin)[:, :, 0]
            assert torch.equal(q[:, :, kv_head * M + member], expected)
        assert torch.equal(k[:, :, kv_head], rope(heads[M][:, :, None], cos, sin)[:, :, 0])
        assert torch.equal(v[:, :, kv_head], heads[M + 1])
    assert all(x.is_contiguous() for x in (q, k, v))


def test_split_backward_equals_autograd_of_the_definition() -> None:
    qkv, grads = fused().requires_grad_(), [torch.randn(S, B, n, D) for n in (G * M, G, G)]
    expected = torch.autograd.grad(split_qkv_rope_ref(qkv, *tables(), M, D), qkv, grads)
    outputs = split_qkv_rope(qkv, *tables(), queries_per_kv_head=M, head_dim=D)
    actual = torch.autograd.grad(outputs, qkv, grads)
    torch.testing.assert_close(actual, expected, rtol=FP32, atol=FP32)


def test_split_saves_the_tables_alone() -> None:
    (cos, sin), saved = tables(), []
    qkv = fused().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        split_qkv_rope(qkv, cos, sin, queries_per_kv_head=M, head_dim=D)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}


def test_sizes_that_do_not_fit_are_refused() -> None:
    cos, sin = tables()
    with pytest.raises(ValueError, match="elements per key-value head"):
        split_qkv_rope(fused(), cos, sin, queries_per_kv_head=M + 1, head_dim=D)
    with pytest.raises(ValueError, match="cos has shape"):
        rope(torch.ones(S + 1, B, 1, D), cos, sin)


@pytest.mark.parametrize("head_dim", [16, 24])
def interpreted_split_and_join_equal_the_references(head_dim: int) -> None:
    qkv, (cos, sin) = fused(head_dim), tables(head_dim)
    expected = split_qkv_rope_ref(qkv, cos, sin, M, head_dim)
    strided = [x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in expected]
    actual = rope_module._split_on_gpu(qkv, cos, sin, M, head_dim)
    joined = rope_module._join_on_gpu(*strided, cos, sin)
    torch.testing.assert_close(actual, expected, rtol=FP32, atol=FP32)
    reference = join_qkv_rope_ref(*expected, cos, sin)
    torch.testing.assert_close(joined, reference, rtol=FP32, atol=FP32)


@pytest.mark.parametrize("inverse", [False, True])
def interpreted_rotation_of_a_strided_tensor_equals_the_reference(inverse: bool) -> None:
    x, (cos, sin) = torch.randn(B, 150, S, D).permute(2, 0, 1, 3), tables()
    actual = rope_module._rotate_on_gpu(x, cos, sin, inverse=inverse)
    expected = rope_ref(x, cos, -sin if inverse else sin)
    torch.testing.assert_close(actual, expected, rtol=FP32, atol=FP32)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "queries", "per_kv_head"), [(128, 4, 6), (64, 1, 3), (128, 1, 1)]
)
def test_kernel_compiles_for_sm90_with_16_byte_accesses(
    head_dim: int, queries: int, per_kv_head: int, inverse: bool, dtype: torch.dtype
) -> None:
    tensors = ("fused", "q", "k", "v")
    strides = [f"{tensor}_{dim}" for tensor in tensors for dim in "sbn"]
    signature = {f"{tensor}_ptr": POINTER[dtype] for tensor in tensors}
    signature |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    signature |= dict.fromkeys(("B", "heads", *strides), "i32")
    constexprs = rope_module._tile(head_dim)
    constexprs |= {"QUERIES": queries, "PER_KV_HEAD": per_kv_head, "INVERSE": inverse}
    compiled = compile_sm90(
        rope_module._rope_kernel,
        signature,
        constexprs,
        aligned=strides,
        num_warps=rope_module.WARPS,
    )
    assert set(access_bytes(compiled)) == {16}
