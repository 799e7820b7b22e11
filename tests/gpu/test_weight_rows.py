"""Rows of weights on a GPU: the codes, largest numbers and decoded values of the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coatlm.fp8 import weight_rows
from coatlm.fp8.norm_quantize import quantize_rows
from coatlm.fp8.transpose import quantize_rows_transposed
from coatlm.fp8.weight_rows import Rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MATRICES = [(0, 300, 4096), (1228800, 37, 1376), (1279744, 5, 16), (1279872, 65, 11008)]
TOTAL = 1279872 + 65 * 11008 + 128
ranges = pytest.mark.parametrize(
    ("begin", "end"), [(0, TOTAL), (0, 0), (4096 * 7 + 128, 1279872 + 128 * 97), (1279872, TOTAL)]
)


def weights() -> Tensor:
    """BF16 with rows of sizes from subnormal to 2^100; one of zeros, and one with a NaN."""
    torch.manual_seed(0)
    rows = Rows.of(MATRICES, torch.device("cpu"))
    number = weight_rows.row_numbers_ref(rows, 0, TOTAL)
    w = torch.randn(TOTAL) * 2.0 ** ((number * 37) % 230 - 130)
    w[number % 11 == 3] = 0.0
    w[5 * 4096 + 17] = torch.nan
    w[7 * 4096] = torch.inf
    for row in (0, 20, 301, 338, 350):  # a largest number whose code is 224
        inside = number == row
        w[inside] = w[inside].clamp(-1, 1) * 100
        w[inside.nonzero()[3]] = -226.0
    return w.bfloat16()


def bits(x: Tensor) -> Tensor:
    return x.cpu().contiguous().view(torch.uint8 if x.element_size() == 1 else torch.int16)


@ranges
def test_rows_are_cast_and_decoded_as_by_the_references(begin: int, end: int) -> None:
    w, cpu = weights(), Rows.of(MATRICES, torch.device("cpu"))
    gpu = Rows.of(MATRICES, torch.device("cuda"))
    on_gpu = w.cuda()
    assert torch.equal(
        weight_rows.row_amax(on_gpu, gpu, begin, end).cpu(),
        weight_rows.row_amax(w, cpu, begin, end),
    )
    amax = weight_rows.row_amax(w, cpu, 0, TOTAL)
    codes = [torch.full((TOTAL,), 7, dtype=torch.uint8, device=d) for d in ("cpu", "cuda")]
    weight_rows.encode_rows(w, codes[0], amax, cpu, begin, end)
    weight_rows.encode_rows(on_gpu, codes[1], amax.cuda(), gpu, begin, end)
    nan = (codes[0] & 0x7F) == 0x7F
    assert torch.equal((codes[1].cpu() & 0x7F) == 0x7F, nan)
    assert torch.equal(codes[1].cpu()[~nan], codes[0][~nan])
    weight_rows.encode_rows(w, codes[0], amax, cpu, 0, TOTAL)
    seen = [torch.full((TOTAL,), 0.3, dtype=torch.bfloat16, device=d) for d in ("cpu", "cuda")]
    weight_rows.decode_rows(codes[0], seen[0], amax, cpu, begin, end)
    weight_rows.decode_rows(codes[0].cuda(), seen[1], amax.cuda(), gpu, begin, end)
    nan = seen[0].isnan()
    assert torch.equal(seen[1].cpu().isnan(), nan)
    assert torch.equal(bits(seen[1])[~nan], bits(seen[0])[~nan])


def test_layers_on_a_gpu_make_the_same_codes_of_what_arrives() -> None:
    """Forward's kernel and backward's, of weights from 2^-130 on and of those decoded here."""
    rows = Rows.of(MATRICES, torch.device("cuda"))
    w = weights().nan_to_num(1.0, 1.0, 1.0).cuda()
    amax = weight_rows.row_amax(w, rows, 0, TOTAL)
    codes = torch.empty(TOTAL, dtype=torch.uint8, device="cuda")
    weight_rows.encode_rows(w, codes, amax, rows, 0, TOTAL)
    seen = w.clone()
    weight_rows.decode_rows(codes, seen, amax, rows, 0, TOTAL)
    assert (seen != w).float().mean() > 0.5
    for start, count, width in MATRICES:
        exact, here = (x[start : start + count * width].view(count, width) for x in (w, seen))
        expected, found = quantize_rows(exact), quantize_rows(here)
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(bits(found.codes), bits(expected.codes))
        transposed = [quantize_rows_transposed(x, found.scale).codes for x in (exact, here)]
        assert torch.equal(*(bits(x) for x in transposed))
