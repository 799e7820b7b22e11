"""Signals and closed streams, in real processes that import nothing heavy."""

from __future__ import annotations

import ast
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import ROOT, python_path

SCRIPTS = [
    str(path.relative_to(ROOT))
    for path in (*sorted(ROOT.glob("coatlm/commands/*.py")), *sorted(ROOT.glob("tools/*.py")))
    if '__name__ == "__main__"' in path.read_text() and "runpy.run_module(" not in path.read_text()
]
INTERRUPTS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
START = "import os, sys, time\nfrom coatlm import process\n"
WAIT = """
def main():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        process.say("cleaned up")
"""
BLOCKED = """
import ctypes
process.CLEAN_UP_S = 0.3
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
def main():
    print("ready", flush=True)
    lock(mutex)
    lock(mutex)  # for ever, and no signal interrupts it
"""
FINALIZER = """
class Slow:
    def __del__(self):
        print("ready", flush=True)
        time.sleep(60)
def main():
    Slow()
    time.sleep(60)
"""


def started(script: str, *, options: tuple[str, ...] = (), **streams: Any) -> Any:
    """A process that runs `script`, its streams pipes unless they are given."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *options, "-c", START + script],
        text=True,
        env=os.environ | {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": ""},
        **{"stdout": pipe, "stderr": pipe} | streams,
    )


def interrupted(script: str, number: int) -> tuple[int, str]:
    """Exit code and stderr of a process that gets a signal when it has printed `ready`."""
    process = started(script)
    assert process.stdout.readline() == "ready\n", process.communicate()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize(("number", "code"), INTERRUPTS)
def test_a_signal_is_one_line_and_its_code_after_clean_up(number: int, code: int) -> None:
    found, said = interrupted(WAIT + "process.run(main, hint='go on')", number)
    name = signal.Signals(number).name
    assert found == code
    assert sorted(said.splitlines()) == ["cleaned up", f"error: interrupted by {name}; go on"]


@pytest.mark.parametrize(("number", "code"), INTERRUPTS)
def test_a_signal_during_imports_is_one_line_and_its_code(number: int, code: int) -> None:
    script = "process.listen()\nprint('ready', flush=True)\ntime.sleep(60)"
    name = signal.Signals(number).name
    assert interrupted(script, number) == (code, f"error: interrupted by {name}\n")


def test_an_import_in_main_cannot_swallow_a_signal(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(
        "import time\nprint('ready', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
    )
    script = f"sys.path.append({str(tmp_path)!r})\n"
    script += "def main():\n    import greedy\n    time.sleep(60)\nprocess.run(main)"
    assert interrupted(script, signal.SIGTERM) == (143, "error: interrupted by SIGTERM\n")


def test_a_process_that_waits_in_c_is_ended_too() -> None:
    found, said = interrupted(BLOCKED + "process.run(main)", signal.SIGTERM)
    assert (found, said) == (143, "error: interrupted by SIGTERM\n")


def test_a_finalizer_cannot_swallow_a_signal() -> None:
    found, said = interrupted(FINALIZER + "process.run(main)", signal.SIGINT)
    assert (found, said) == (130, "error: interrupted by SIGINT\n")


def test_what_a_library_makes_of_a_signal_is_still_one_line() -> None:
    script = "def main():\n    try:\n        print('ready', flush=True)\n        time.sleep(60)\n"
    script += "    except BaseException:\n        raise RuntimeError('lost')\nprocess.run(main)"
    assert interrupted(script, signal.SIGINT) == (130, "error: interrupted by SIGINT\n")


def test_a_process_that_does_not_speak_says_nothing() -> None:
    script = "process.listen(speaks=False)\nprint('ready', flush=True)\ntime.sleep(60)"
    assert interrupted(script, signal.SIGTERM) == (143, "")
    script = "def main():\n    print('ready', flush=True)\n    time.sleep(60)\n"
    assert interrupted(script + "process.run(main, speaks=False)", signal.SIGTERM) == (143, "")


def test_nohup_keeps_sighup_ignored() -> None:
    process = started(
        "import signal\nprocess.listen()\n"
        "def main():\n    os.kill(os.getpid(), signal.SIGHUP)\n    return 7\nprocess.run(main)",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 7


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "body",
    [
        "for i in range(50000): print(i)",
        "print('a little')",
        "import argparse; argparse.ArgumentParser().parse_args(['--help'])",
    ],
)
def test_a_closed_stdout_is_quiet(body: str, options: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    process = started(f"def main():\n    {body}\nprocess.run(main)", options=options, stdout=write)
    os.close(write)
    _, said = process.communicate(timeout=60)
    if "argparse" not in body or not options:  # argparse itself drops the error of its message
        assert process.returncode == 141
    assert said == ""


def test_another_broken_pipe_is_not_hidden() -> None:
    process = started("def main():\n    raise BrokenPipeError(32, 'a socket')\nprocess.run(main)")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "BrokenPipeError: [Errno 32] a socket" in said


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        process = started("def main():\n    print('x')\nprocess.run(main)", stdout=full)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, "error: <stdout>: No space left on device\n")


SWALLOWS = "def main():\n    try: print('x')\n    except OSError: return 7\nprocess.run(main)"


def test_on_a_terminal_a_line_replaces_a_progress_bar() -> None:
    main, terminal = pty.openpty()
    script = "print('bar', end='', file=sys.stderr, flush=True)\nprocess.say('x')"
    process = started(script, stderr=terminal)
    assert process.wait(timeout=60) == 0
    assert os.read(main, 1000) == b"bar\r\x1b[Kx\r\n"
    os.close(main)
    os.close(terminal)


def test_an_error_of_stdout_is_none_of_a_commands_files() -> None:
    """Without a buffer it is raised where a command prints."""
    with open("/dev/full", "w") as full:
        process = started(SWALLOWS, options=("-u",), stdout=full)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, "error: <stdout>: No space left on device\n")


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_work_that_outlives_its_streams_survives_a_full_disk(options: tuple[str, ...]) -> None:
    script = (
        "def main():\n    process.outlive_streams()\n    print('x', flush=True)\n    print('y')\n"
    )
    with open("/dev/full", "w") as full:
        process = started(f"{script}    return 5\nprocess.run(main)", options=options, stdout=full)
    _, said = process.communicate(timeout=60)
    told = "error: <stdout>: No space left on device; output is discarded from here on\n"
    assert (process.returncode, said) == (5, told)


def test_what_the_encoding_lacks_is_escaped() -> None:
    script = (
        "sys.stdout.reconfigure(encoding='ascii')\ndef main(): print('f\\u00fc')\nprocess.run(main)"
    )
    process = started(script)
    assert process.communicate(timeout=60) == ("f\\xfc\n", "")


def test_files_do_not_get_the_number_of_a_closed_stream() -> None:
    process = started(
        "def main():\n    print('lost')\n    return open('/dev/null').fileno()\nprocess.run(main)",
        preexec_fn=lambda: [os.close(0), os.close(1)],
    )
    _, said = process.communicate(timeout=60)
    assert process.returncode > 2 and said == ""


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout and stderr"])
def test_work_that_outlives_its_streams_ends_as_if_they_were_open(
    tmp_path: Path, both: bool
) -> None:
    read, write = os.pipe()
    done = tmp_path / "done"
    script = f"""
import logging
def main():
    process.outlive_streams()
    logging.basicConfig(stream=sys.stdout)
    for i in range(1000):
        print(i)
        logging.warning("line %d", i)
        print(i, file=sys.stderr)
    open({str(done)!r}, "w").close()
    return 5
process.run(main)
"""
    streams = {"stdout": write, "stderr": write if both else subprocess.PIPE}
    process = started(script, **streams)
    os.close(write)
    assert os.read(read, 1)
    os.close(read)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 5 and done.exists()
    assert both or said.split() == [str(i) for i in range(1000)]


def test_a_wait_that_is_bounded_ends_with_a_line_and_code_1() -> None:
    script = "with process.within({}, 'nobody came'):\n    time.sleep({})\nos._exit(7)"
    command = [sys.executable, "-c"]
    environment = os.environ | {"PYTHONPATH": python_path()}
    for seconds, slept, code, said in ((0.2, 60, 1, "error: nobody came\n"), (60, 0, 7, "")):
        words = [*command, START + script.format(seconds, slept)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize("options", [(), ("-u",)])
def test_lasting_streams_keep_the_order_of_what_is_written(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """A progress bar ends with a line feed that it does not flush."""
    script = START + (
        "process.outlive_streams()\n"
        "sys.stderr.write('\\rbar')\nsys.stderr.write('\\n')\nprint('after', flush=True)\n"
    )
    path = tmp_path / "out.txt"
    environment = os.environ | {"PYTHONPATH": python_path()}
    environment.pop("PYTHONUNBUFFERED", None)
    with path.open("wb") as out:
        command = [sys.executable, *options, "-c", script]
        subprocess.run(command, stdout=out, stderr=out, env=environment, check=True)
    assert path.read_bytes() == b"\rbar\nafter\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_listens_before_it_imports_and_ends_in_run(script: str) -> None:
    body = ast.parse((ROOT / script).read_text()).body
    texts = [ast.unparse(statement) for statement in body]
    listens = next(i for i, text in enumerate(texts) if "process.listen(" in text)
    before = [text for text in texts[1:listens] if not text.startswith('"""')]
    assert set(before) <= {
        "from __future__ import annotations",
        "from coatlm import process",
        "import os",
        "import signal",
    }
    assert "process.run(main" in texts[-1]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ctrl_c_while_tokenising_is_one_line_and_keeps_what_is_done(tmp_path: Path) -> None:
    """The terminal sends it to all processes, also to workers that are still importing."""
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("some words to tokenize " * 80000)
    command = [sys.executable, "tools/preprocess_data.py", "--input", f"{tmp_path}/*.txt"]
    command += ["--output-prefix", str(tmp_path / "out"), "--workers", "2", "--shard-mb", "1"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path()},
        start_new_session=True,
    )
    end = time.monotonic() + 120
    while len(children(process.pid)) < 3:  # a tracker and two workers
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said and "KeyboardInterrupt" not in said
    assert said.count("error: interrupted by SIGINT; the same command resumes") == 1
    assert (tmp_path / "out.shards").is_dir()
