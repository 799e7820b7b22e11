"""A clock for the timer of phases that tells the same times however busy the machine is."""

from __future__ import annotations

LOOK_S = 0.01


class Clock:
    """Each look at it takes LOOK_S seconds; other work takes what is added to `seconds`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += LOOK_S
        return self.seconds
