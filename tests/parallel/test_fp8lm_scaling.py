"""FP8-LM's mu is halved after saturation and grows without."""

from __future__ import annotations

import pytest
import torch

from coatlm.parallel.fp8lm_scaling import adjust_mu
from coatlm.parallel.wire import Tensors


def test_mu_is_halved_by_saturation_and_grows_without() -> None:
    cpu = torch.device("cpu")
    buckets = [Tensors.of((100000,) * n, n * 782, cpu) for n in (1, 2)]
    for bucket, mu in zip(buckets, ([0.5], [0.5, 0.9999]), strict=True):
        bucket.mu.copy_(torch.tensor(mu))
        bucket.saturated.fill_(1)
    for _ in range(2):
        adjust_mu(buckets, torch.tensor([1.1e-5, 1e-5, 0.0]), torch.zeros(3, dtype=torch.bool))
    for saturated in ([0.0] * 3, [1.0] * 3):  # of sums that were not finite
        adjust_mu(buckets, torch.tensor(saturated), torch.ones(3, dtype=torch.bool))
    mu = [value for bucket in buckets for value in bucket.mu.tolist()]
    growth = 2 ** (1 / 1000)  # per step: mu doubles in a thousand
    assert mu == pytest.approx([0.125, 0.5 * growth**2, 1.0])
    assert not any(bucket.saturated.any() for bucket in buckets)
