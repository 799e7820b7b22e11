"""The line that says where the seconds of a start went."""

from __future__ import annotations

import time

from coatlm.train.startup import Startup


def test_parts_add_up_in_order_and_short_ones_are_left_out() -> None:
    times = iter([104.0, 104.01, 106.0, 107.5])
    startup = Startup(100.0, clock=lambda: next(times))
    for part in ("imports", "ranks", "model", "imports"):
        startup.lap(part)
    line = "7.5 s to the end of the first step: imports 5.5 s, model 2.0 s"
    assert str(startup) == line


def test_a_start_begins_with_its_process() -> None:
    assert 0 < time.time() - Startup().begin < 24 * 3600
