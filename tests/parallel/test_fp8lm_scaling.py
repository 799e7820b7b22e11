"""FP8-LM's mu is halved after saturation, grows without, and stays between its bounds."""

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


def test_mu_stays_between_2_to_the_minus_20_and_1() -> None:
    bucket = Tensors.of((128, 128), 2, torch.device("cpu"))
    bucket.mu.copy_(torch.tensor([1.0, 1.5 * 2.0**-20]))
    adjust_mu([bucket], torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.bool))
    assert bucket.mu.tolist() == [1.0, 2.0**-20]


def test_adjusting_mu_starts_new_counts() -> None:
    bucket = Tensors.of((128,), 1, torch.device("cpu"))
    bucket.saturated.fill_(3)
    bucket.nonfinite.fill_(True)
    adjust_mu([bucket], torch.ones(1), torch.zeros(1, dtype=torch.bool))
    assert bucket.saturated.tolist() == [0] and bucket.nonfinite.tolist() == [False]
