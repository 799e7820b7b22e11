"""How parameters are cut into buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coatlm.parallel.buckets import MOST, SMALLEST, Bucket, Cut, bucket_elements, make_buckets


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


def cleared(zero: int) -> tuple[Bucket, list[nn.Parameter]]:
    """A bucket of NaN gradients that was cleared; parameters 1 and 2 of 4 are written over."""
    params = [nn.Parameter(torch.ones(n)) for n in (50, 256, 130, 80)]
    for param in params[1:3]:
        param.main_grad_stale = False  # type: ignore[attr-defined]
    options = Cut(rank=0, ranks=2, zero=zero, grad_dtype=torch.float32, bucket_size=0)
    (bucket,) = make_buckets(params, options)
    if zero == 2:
        bucket.allocate()
    bucket.grads.fill_(torch.nan)
    if zero == 2:
        bucket.release()
        bucket.allocate()
    else:
        bucket.clear()
    return bucket, params


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_all_is_zeroed_but_gradients_that_are_written_over(zero: int) -> None:
    bucket, params = cleared(zero)
    _, *overwritten, _ = params
    for param in overwritten:
        assert param.main_grad_stale
        param.main_grad.fill_(1)
    assert bucket.grads.sum() == sum(p.numel() for p in overwritten)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_gradient_that_accumulates_for_now_is_zeroed_and_not_stale(zero: int) -> None:
    bucket, (_, first, second, _) = cleared(zero)
    bucket.grads.fill_(torch.nan)
    first.main_grad_accumulates = True  # type: ignore[attr-defined]
    bucket.clear()
    assert not first.main_grad_stale and second.main_grad_stale  # type: ignore[attr-defined]
    assert not first.main_grad.any() and second.main_grad.isnan().all()  # type: ignore[attr-defined]
    first.main_grad.fill_(1)  # type: ignore[attr-defined]
    bucket.settle()
    assert bucket.grads.sum() == first.numel()
    first.main_grad_accumulates = False  # type: ignore[attr-defined]
    bucket.clear()
    assert first.main_grad_stale  # type: ignore[attr-defined]


def test_a_gradient_that_never_came_is_zeroed_in_the_end() -> None:
    bucket, (_, came, missing, _) = cleared(1)
    came.main_grad.fill_(1)  # type: ignore[attr-defined]
    came.main_grad_stale = False  # type: ignore[attr-defined]
    bucket.settle()
    assert bucket.grads.sum() == came.numel()
    assert not missing.main_grad_stale  # type: ignore[attr-defined]
