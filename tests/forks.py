"""Start pretrain.py many times without importing torch each time.

A server process imports what a run needs, then forks a child for each request: `Forks.start` gives
a `Child` that runs `pretrain.main(arguments)` with its output in a file. A child is an ordinary
process: it can be signalled and killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed import python_path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Child:
    """A run that was started; `pid` is its process."""

    server: Forks
    pid: int
    output: Path

    def wait(self) -> int:
        """Exit code; negative: the signal that ended it."""
        return int(self.server.ask({"wait": self.pid}))

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def text(self) -> str:
        return self.output.read_text(errors="replace")


class Forks:
    """The server; close it, or use it in `with`."""

    def __init__(self, directory: Path, cwd: Path = ROOT) -> None:
        self.directory, self.count = directory, 0
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
        )
        assert self.ask({"ping": 1}) == 1

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> Child:
        """`python pretrain.py ARGUMENTS` with `env` added to the environment."""
        self.count += 1
        output = self.directory / f"output{self.count}.txt"
        request = {"arguments": arguments, "output": str(output), "env": env or {}}
        return Child(self, int(self.ask(request)), output)

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """(exit code, output) of a run that ends by itself."""
        child = self.start(*arguments, env=env)
        return child.wait(), child.text()

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def serve() -> None:
    """Answer requests from stdin; a forked child never comes back here."""
    import coatlm.train.loop  # noqa: F401  what a run imports, once
    import pretrain

    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "arguments" in request:
            pid = os.fork()
            if pid == 0:
                os.environ.update(request["env"])
                descriptor = os.open(request["output"], os.O_WRONLY | os.O_CREAT, 0o644)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                code = 1
                try:
                    code = pretrain.main(request["arguments"])
                except SystemExit as stop:
                    code = stop.code if isinstance(stop.code, int) else 1
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            reply: Any = pid
        elif "wait" in request:
            reply = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            reply = request["ping"]
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve()
