"""Where the seconds went from the start of the process to the end of its first step."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

SHORT = 0.05  # seconds: shorter parts are left out of the line


class Startup:
    """The seconds of each part of a start, in order. `begin`: None is the start of the process."""

    def __init__(
        self, begin: float | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.begin = psutil.Process().create_time() if begin is None else begin
        self.clock, self.parts, self._last = clock, dict[str, float](), self.begin

    def lap(self, part: str) -> None:
        """Add the time since the previous call to `part`."""
        now = self.clock()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = [f"{part} {s:.1f} s" for part, s in self.parts.items() if s >= SHORT]
        return f"{self._last - self.begin:.1f} s to the end of the first step: {', '.join(parts)}"
