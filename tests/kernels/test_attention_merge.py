"""Sums of attentions to disjoint keys: the definition, and the kernel in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.kernels import attention_merge
from coatlm.kernels.attention_merge import merge_, merge_ref_
from coatlm.kernels.attention_pieces import attend_piece
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, run_interpreted

STRIDES = ("o_s", "o_b", "o_n", "other_s", "other_b", "other_n")


@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("keys", [1, 7, 22])
def test_outputs_over_disjoint_keys_are_merged_exactly(keys: int, size: float) -> None:
    """Also where the logits of one part are so large that the other part has no weight."""
    how: dict[str, Any] = {"scale": 1.0, "causal": False, "backend": "matmul"}
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 2, 3, 8, dtype=torch.float64) for n in (5, 24, 24))
    k *= size
    first, second = (attend_piece(q, k[s], v[s], **how) for s in (slice(keys), slice(keys, None)))
    expected = attend_piece(q, k, v, **how)
    merge_(first.o_SBND, first.lse_BNS, second.o_SBND, second.lse_BNS)
    torch.testing.assert_close(first.o_SBND, expected.o_SBND, rtol=0, atol=1e-12)
    torch.testing.assert_close(first.lse_BNS, expected.lse_BNS, rtol=1e-12, atol=0)


def test_bf16_outputs_are_merged_in_fp32_and_rounded_once() -> None:
    """2/3 of 1 and 1/3 of -2 are 0; with a third in BF16 they are -2^-9."""
    o, lse = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16), torch.tensor([[[2.0]]]).log()
    merge_(o, lse, -2 * o, torch.zeros(1, 1, 1))
    assert o.dtype == torch.bfloat16 and o.abs().max() <= 2.0**-20
    assert float(lse) == pytest.approx(1.0986123)  # ln 3


def tensors(head_dim: int) -> tuple[Tensor, ...]:
    """o and lse of the last of some queries, and those of other keys, in another layout."""
    torch.manual_seed(1)
    o, other = torch.randn(9, 2, 3, head_dim)[2:], torch.randn(2, 7, 3, head_dim).transpose(0, 1)
    lse, other_lse = 3 * torch.randn(2, 3, 9)[..., 2:], 3 * torch.randn(2, 3, 7)
    return o, lse, other, other_lse


@pytest.mark.parametrize("head_dim", [8, 24, 128])
def interpreted_kernel_equals_the_reference(head_dim: int) -> None:
    found, expected = tensors(head_dim), tensors(head_dim)
    attention_merge._launch(*found)
    merge_ref_(*expected)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-6)  # some ulp of about one
    assert all(map(torch.equal, found[1:], expected[1:]))


def test_kernel_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_kernel_compiles_for_sm90_with_16_byte_accesses(head_dim: int, dtype: torch.dtype) -> None:
    signature = {"o_ptr": POINTER[dtype], "lse_ptr": "*fp32"}
    signature |= {"other_ptr": "*bf16", "other_lse_ptr": "*fp32"}
    others = ("rows", "B", "N", "lse_b", "lse_n", "other_lse_b", "other_lse_n")
    compiled = compile_sm90(
        attention_merge._merge_kernel,
        signature | dict.fromkeys((*others, *STRIDES), "i32"),
        attention_merge._tile(head_dim),
        aligned=STRIDES,
        num_warps=attention_merge.WARPS,
    )
    assert 16 in access_bytes(compiled)
