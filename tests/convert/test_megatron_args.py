"""Schedules of coatlm for megatron-core's own OptimizerParamScheduler, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coatlm.config import Config, make_config
from coatlm.convert.megatron_args import (
    left_out,
    read_arguments,
    write_arguments,
    write_schedule,
)
from coatlm.optim.schedule import learning_rate
from tests.convert.megatron_writer import schedule

STEPS, BATCH = 40, 6
RELATIVE = 2.0**-48  # a few roundings of float64, in which both compute rates
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"schedule": "cosine"},
    "linear": {"schedule": "linear"},
    "constant": {"schedule": "constant"},
    "wsd": {"schedule": "wsd", "decay_steps": 7},
    "wsd, a tenth": {"schedule": "wsd"},
    "no warm-up": {"schedule": "cosine", "warmup_steps": 0},
}


def config_of(optim: dict[str, Any]) -> Config:
    given = {"lr": 3e-4, "min_lr": 1e-5, "warmup_steps": 4, "weight_decay": 0.3, **optim}
    train = {"steps": STEPS, "global_batch": BATCH, "micro_batch": 2}
    return make_config({"data": {"text": "python-stdlib"}, "optim": given, "train": train})


def written(config: Config, step: int) -> Any:
    return write_arguments(config, vocab=384, iteration=step, samples=99, states=True)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_megatron_core_continues_a_schedule_with_the_learning_rates_of_coatlm(name: str) -> None:
    """After n updates Megatron's scheduler has the rate that coatlm's update n has."""
    config = config_of(SCHEDULES[name])
    for step in range(1, STEPS):
        groups: list[dict[str, Any]] = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
        arguments = written(config, step)
        scheduler = schedule(SimpleNamespace(param_groups=groups), arguments)
        scheduler.load_state_dict(write_schedule(arguments))
        for done in (step, step + 1):
            rate = learning_rate(done - 1, config.optim, STEPS)
            assert [g["lr"] for g in groups] == pytest.approx([rate, rate], rel=RELATIVE)
            assert [g["weight_decay"] for g in groups] == [0.3, 0.0]
            scheduler.step(BATCH)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_state_of_a_schedule_is_what_megatron_core_saves(name: str) -> None:
    arguments = written(config_of(SCHEDULES[name]), 5)
    scheduler = schedule(SimpleNamespace(param_groups=[]), arguments)
    scheduler.step(5 * BATCH)
    assert write_schedule(arguments) == scheduler.state_dict()


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule_that_is_written_is_read_as_the_same(name: str) -> None:
    config = config_of(SCHEDULES[name])
    arguments = vars(written(config, 5))
    assert left_out(arguments) == ""
    found = read_arguments(arguments)["optim"]
    steps = {"decay_steps": 4} if name == "wsd, a tenth" else {}
    expected = config.optim.model_copy(update=steps)
    assert type(expected).model_validate(found) == expected


def test_another_decay_of_wsd_than_coatlms_is_named() -> None:
    plain = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": "minus_sqrt"}
    assert left_out(plain) == ""
    assert left_out(plain | {"lr_wsd_decay_style": "exponential"}) == (
        "lr_wsd_decay_style='exponential'"
    )
    cosine = {"lr_decay_style": "cosine", "lr_wsd_decay_style": "exponential"}
    assert left_out(cosine) == ""  # Megatron's default, which cosine does not use
    assert "decay_steps" not in read_arguments(cosine | {"lr_wsd_decay_iters": 4})["optim"]
