"""The learning rate: end values, shapes, monotonicity."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatlm.config import Optim
from coatlm.optim.schedule import learning_rate, wsd_decay_steps

SCHEDULES = ("cosine", "wsd", "linear", "constant")
EPS = 2.0**-52  # of the float64 that rates are computed in


def optim(schedule: str, **fields: Any) -> Optim:
    values = {"lr": 3e-4, "min_lr": 1e-5, "warmup_steps": 10, **fields}
    return Optim.model_validate({"schedule": schedule, **values})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_is_linear_from_the_first_step_and_ends_at_exactly_lr(schedule: str) -> None:
    o = optim(schedule)
    rates = [learning_rate(step, o, 100) for step in range(10)]
    assert rates[-1] == o.lr
    assert rates == [o.lr * ((step + 1) / 10) for step in range(10)]


@pytest.mark.parametrize("schedule", ("cosine", "wsd", "linear"))
@pytest.mark.parametrize("warmup", (0, 1, 99))
def test_last_step_gives_exactly_min_lr(schedule: str, warmup: int) -> None:
    o = optim(schedule, warmup_steps=warmup)
    assert learning_rate(99, o, 100) == o.min_lr
    assert learning_rate(1000, o, 100) == o.min_lr  # beyond the end, the last value stays


def test_constant_stays_at_lr() -> None:
    o = optim("constant")
    assert {learning_rate(step, o, 100) for step in range(9, 200)} == {o.lr}


def test_cosine_is_half_way_down_in_the_middle() -> None:
    o = optim("cosine", warmup_steps=20)
    middle = learning_rate(59, o, 100)  # 60 updates: 40 of the 80 after warm-up
    # cos(pi/2) is 6e-17 in float64: one rounding of a value near 1/2, two more in the sum
    assert math.isclose(middle, (o.lr + o.min_lr) / 2, rel_tol=4 * EPS)


def test_linear_falls_by_equal_amounts() -> None:
    o = optim("linear", warmup_steps=20)
    rates = [learning_rate(step, o, 100) for step in range(19, 100)]
    falls = [a - b for a, b in pairwise(rates)]
    expected = (o.lr - o.min_lr) / 80
    # a difference of two rates <= lr, each rounded a few times
    assert all(abs(fall - expected) <= 8 * EPS * o.lr for fall in falls)


def test_wsd_decays_as_one_minus_square_root_over_decay_steps() -> None:
    o = optim("wsd", lr=1e-2, min_lr=1e-3, decay_steps=16)
    rates = [learning_rate(step, o, 100) for step in range(100)]
    assert o.min_lr + (o.lr - o.min_lr) != o.lr  # t = 0 in the formula would not give lr
    assert set(rates[9:84]) == {o.lr}
    quarter = rates[84 + 4 - 1]  # t = 4/16, so 1 - sqrt(t) = 1/2
    assert math.isclose(quarter, (o.lr + o.min_lr) / 2, rel_tol=4 * EPS)


def test_wsd_decays_during_the_last_tenth_by_default() -> None:
    o = optim("wsd")
    rates = [learning_rate(step, o, 1000) for step in range(1000)]
    assert wsd_decay_steps(o, 1000) == 100
    assert rates[899] == o.lr > rates[900]


def test_wsd_decay_that_does_not_fit_names_field_and_limit() -> None:
    with pytest.raises(ValueError, match=r"decay_steps=95 .* 90 steps .* train\.steps=100"):
        learning_rate(0, optim("wsd", decay_steps=95), 100)


def test_wsd_decays_for_a_step_at_least_and_never_during_warmup() -> None:
    assert wsd_decay_steps(optim("wsd", warmup_steps=0), 5) == 1
    assert wsd_decay_steps(optim("wsd", warmup_steps=0), 29) == 2
    assert wsd_decay_steps(optim("wsd", warmup_steps=97), 100) == 3
    assert wsd_decay_steps(optim("wsd", warmup_steps=100), 100) == 0
    assert wsd_decay_steps(optim("wsd", warmup_steps=100), 50) == 0


def test_wsd_may_decay_right_after_warmup() -> None:
    o = optim("wsd", decay_steps=90)  # all 90 steps after the warm-up of 10
    assert learning_rate(9, o, 100) == o.lr > learning_rate(10, o, 100)
    assert learning_rate(99, o, 100) == o.min_lr


def test_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step=-1"):
        learning_rate(-1, optim("cosine"), 100)


@given(
    schedule=st.sampled_from(SCHEDULES),
    total=st.integers(1, 300),
    warmup=st.integers(0, 400),
    lr=st.floats(1e-6, 1.0),
    ratio=st.floats(0.0, 1.0),
)
def test_rates_rise_during_warmup_then_never_rise_and_stay_in_range(
    schedule: str, total: int, warmup: int, lr: float, ratio: float
) -> None:
    o = optim(schedule, lr=lr, min_lr=lr * ratio, warmup_steps=warmup)
    rates = [learning_rate(step, o, total) for step in range(total)]
    rising, falling = rates[:warmup], rates[max(warmup - 1, 0) :]
    slack = 4 * EPS * lr  # min_lr + (lr - min_lr) may round past lr
    assert all(0 < a < b for a, b in pairwise(rising))
    assert all(b <= a + slack for a, b in pairwise(falling))
    assert all(o.min_lr <= rate <= lr + slack for rate in falling[1:])
