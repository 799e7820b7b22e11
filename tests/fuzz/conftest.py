"""Whether the fuzz takes its share of CI or hours, and the good files of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed import processes
from tests.fuzz import good
from tests.fuzz.sandbox import Sandbox


@dataclass
class Lab:
    """Where inputs are tried."""

    sandbox: Sandbox
    good: Path
    minutes: float  # 0: the examples of CI, which are the same each time

    def files(self, target: str) -> dict[str, bytes]:
        """The good files of a target."""
        root = self.good / target
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }


@pytest.fixture(scope="session")
def fuzz_minutes() -> float:
    """FUZZ_MINUTES: how long to look for inputs, at random; none: the examples of CI."""
    return float(os.environ.get("FUZZ_MINUTES") or 0)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, fuzz_minutes: float) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("fuzz")
    process = processes.Process(target=good.build, args=(str(root),))
    process.start()
    process.join()
    assert process.exitcode == 0, "the good files could not be made"
    sandbox = Sandbox(root)
    yield Lab(sandbox, root / "good", fuzz_minutes)
    sandbox.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A long fuzz sets its own time."""
    if os.environ.get("FUZZ_MINUTES"):
        for item in items:
            if "fuzz" in item.path.parts:
                item.add_marker(pytest.mark.timeout(0))
