"""How parameters are cut into buckets."""

from __future__ import annotations

import torch
from torch import nn

from coatlm.parallel.buckets import MOST, SMALLEST, Cut, bucket_elements, make_buckets


def cut(bucket_size: int) -> Cut:
    return Cut(rank=0, ranks=2, zero=1, grad_dtype=torch.float32, bucket_size=bucket_size)


def elements(model: nn.Module, bucket_size: int) -> list[int]:
    buckets = make_buckets(list(model.parameters()), cut(bucket_size))
    return [sum(p.numel() for p in bucket.params) for bucket in buckets]


def test_a_bucket_closes_with_the_parameter_that_fills_it() -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in (50, 60, 30, 80))
    assert elements(model, 100) == [80 + 30, 60 + 50]
    assert elements(model, 81) == [80 + 30, 60 + 50]
    assert elements(model, 80) == [80, 30 + 60, 50]


def test_without_a_size_small_models_have_few_buckets_and_large_ones_no_more_than_48() -> None:
    assert bucket_elements(1000, 10**10) == 1000
    assert bucket_elements(0, 10**8) == SMALLEST
    assert SMALLEST < bucket_elements(0, 6_800_000_000) == 6_800_000_000 // MOST
    model = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in (50, 60, 30, 80))
    assert elements(model, 0) == [80 + 30 + 60 + 50]
