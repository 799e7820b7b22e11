"""Start pretrain.py many times without importing torch each time.

`Forks.start` gives a `Child` that runs `pretrain.main(arguments)` with its output in a file: a
process of tests/distributed.py, which can be signaled and killed. `Forked` takes the place of
subprocess.Popen in tools that start pretrain.py.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed import ROOT, python_path, start


@dataclass
class Child:
    """A run that was started; `process` is of multiprocessing."""

    process: Any
    output: Path

    def wait(self) -> int:
        """Exit code; negative: the signal that ended it."""
        self.process.join()
        return int(self.process.exitcode)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)

    def text(self) -> str:
        return self.output.read_text(errors="replace")


class Forks:
    """Runs with their output in `directory`, started in `cwd`."""

    def __init__(self, directory: Path, cwd: Path = ROOT) -> None:
        self.directory, self.cwd, self.count = directory, cwd, 0

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> Child:
        """`python pretrain.py ARGUMENTS` with `env` added to the environment."""
        self.count += 1
        output = self.directory / f"output{self.count}.txt"
        return Child(self.into(output, *arguments, env=env), output)

    def into(self, output: Path, *arguments: str, env: dict[str, str] | None = None) -> Any:
        """The process alone, with its output in any file, also a pipe that has a reader."""
        whole = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()} | (env or {})
        return start(pretrain, *arguments, env=whole, log=output, cwd=self.cwd)

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """(exit code, output) of a run that ends by itself."""
        child = self.start(*arguments, env=env)
        return child.wait(), child.text()


class Forked:
    """What a tool uses of subprocess.Popen, for the command `python pretrain.py ARGUMENTS`."""

    def __init__(self, command: Sequence[str], *, env: dict[str, str], stdout: Any, **_: Any):
        script, *arguments = command[1:]
        assert Path(script) == ROOT / "pretrain.py"
        self.process = start(pretrain, *arguments, env=env, log=Path(stdout.name))

    def poll(self) -> int | None:
        """Exit code, None while it runs; negative: the signal that ended it."""
        code: int | None = self.process.exitcode
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.process.pid, number)


def pretrain(*arguments: str) -> None:
    """What a child does."""
    from coatlm import process
    from coatlm.commands import train as pretrain

    warnings.simplefilter("ignore")
    process.run(lambda: pretrain.main(list(arguments)), signal.SIGUSR1)
