"""Largest magnitudes and codes at +-MAX by tensor, on a GPU: the integers of the reference."""

import pytest
import torch

from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.segments import count_saturated, largest_magnitudes
from tests.fp8.test_segments import COUNT, owners, some_codes, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_largest_magnitudes_are_those_of_the_reference(dtype: torch.dtype) -> None:
    x, owner = values(dtype), owners()
    expected = largest_magnitudes(x, owner, COUNT).view(torch.float32)
    found = largest_magnitudes(x.cuda(), owner.cuda(), COUNT).cpu().view(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    nothing = largest_magnitudes(x[:0].cuda(), owner[:0].cuda(), COUNT)
    assert nothing.tolist() == [0] * COUNT


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_counts_are_those_of_the_reference(fmt: Fp8Format) -> None:
    codes, owner = some_codes(fmt), owners()
    expected, found = torch.arange(COUNT), torch.arange(COUNT).cuda()
    count_saturated(codes, owner, expected, fmt)
    count_saturated(codes.cuda(), owner.cuda(), found, fmt)
    assert found.tolist() == expected.tolist()
