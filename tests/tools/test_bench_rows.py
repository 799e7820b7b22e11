"""How `tools/bench.py` runs rows: time limits, what a killed call leaves, and its continuation."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from tests.distributed import python_path
from tests.tools.test_command_lines import run
from tools import bench
from tools.benchmarks import layouts, row_process
from tools.benchmarks.layout_rows import LayoutRow
from tools.benchmarks.ranks import StartedRanks
from tools.benchmarks.row_process import RowProcess

FIRST = ["megatron+te bf16", "coatlm te bf16"]  # of `end-to-end`


class FakeRow:
    """Stands for the process of a row; some are interrupted, and some fail."""

    interrupted, failed = "", ""
    limits: ClassVar[dict[str, float | None]]

    def __init__(self, benchmark: str, row: str, options: list[str]) -> None:
        self.row = row

    def measure(self, limit: float | None) -> list[dict[str, Any]]:
        type(self).limits[self.row] = limit
        if self.row == self.interrupted:
            raise KeyboardInterrupt
        return [{"row": self.row, **({"missing": "X"} if self.row == self.failed else {"ms": 1})}]

    def leave_out(self) -> list[dict[str, Any]]:
        return [{"row": self.row, "missing": row_process.NO_TIME}]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRow]:
    class Row(FakeRow):
        limits: ClassVar[dict[str, float | None]] = {}

    monkeypatch.setattr(bench, "RowProcess", Row)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    return Row


def test_records_are_written_after_each_row_and_resumed(
    tmp_path: Path, fake: type[FakeRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"
    words = ["end-to-end", "steps=3", "--out", str(out)]

    def written() -> Any:
        return json.loads(out.read_text())["end-to-end"]

    fake.interrupted, fake.failed = "coatlm local bf16", FIRST[1]
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, "bench", *words)
    assert [record["row"] for record in written()] == FIRST
    assert "missing" in written()[1]

    fake.interrupted, fake.failed = "", ""
    fake.limits.clear()
    assert run(monkeypatch, "bench", *words, "--resume") == 0
    rows = bench.choose("end-to-end", [], [])
    assert list(fake.limits) == [*rows[2:], FIRST[1]]  # what failed comes last
    assert [record["row"] for record in written()] == [
        FIRST[0],
        *rows[2:],
        FIRST[1],
    ]
    assert not any("missing" in record for record in written())


def test_a_row_of_several_records_replaces_its_own_and_no_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = SimpleNamespace(measure=lambda row, _: [{"case": f"{row} {n}"} for n in range(2)])
    monkeypatch.setitem(sys.modules, "fake_benchmark", case)  # type: ignore[arg-type]
    monkeypatch.setitem(bench.BENCHMARKS, "context", "fake_benchmark")
    monkeypatch.setattr(bench, "end_with_parent", lambda: None)
    found: list[dict[str, Any]] = []
    for row in ("a", "b", "a"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("begin\n"))
        bench.run_in_this_process("context", row, {})
        printed = capsys.readouterr().out.splitlines()
        records = [json.loads(line.removeprefix(bench.RESULT)) for line in printed]
        found = bench.merged(found, records)
    assert [(r["row"], r["case"]) for r in found] == [
        *(("b", "b 0"), ("b", "b 1")),
        *(("a", "a 0"), ("a", "a 1")),
    ]
    assert bench.unmeasured(["a", "b", "c"], found) == ["c"]
    found[0]["missing"] = "no memory"  # of the first of two cases
    assert bench.unmeasured(["a", "b", "c"], found) == ["c", "b"]
    together: list[dict[str, Any]] = [{"key": 1}]
    assert bench.merged(together, [{"key": 2}]) == [{"key": 1}, {"key": 2}]


def test_a_file_of_another_call_is_not_resumed(
    tmp_path: Path,
    fake: type[FakeRow],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "found.json"
    words = ["end-to-end", "--only", "coatlm coat", "--out", str(out)]
    assert run(monkeypatch, "bench", *words, "--resume") == 0  # there is no file yet
    before = out.read_text()
    assert run(monkeypatch, "bench", *words, "--resume", "steps=3") == 2
    assert "by a call with other options" in capsys.readouterr().err
    assert out.read_text() == before
    for text in ("text", "[1]", '{"end-to-end": 1}', '{"end-to-end": [1], "options": []}'):
        out.write_text(text)
        assert run(monkeypatch, "bench", *words, "--resume") == 2
        assert "has no records of a benchmark" in capsys.readouterr().err
        assert out.read_text() == text
    assert run(monkeypatch, "bench", *words[:-2], "--resume") == 2
    assert "--resume: needs --out" in capsys.readouterr().err


def test_a_row_that_would_not_end_in_time_is_left_out_and_shorter_ones_are_not(
    fake: type[FakeRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ["7B, ZeRO-1", "7B of 131072 tokens, CP2", "7B, fp8-nccl, current"]
    needed = {row: layouts.seconds(row, {"gpus": "2"}) for row in rows}
    assert needed[rows[2]] < needed[rows[0]] < 100 < needed[rows[1]]
    records = list(bench.run_benchmark("layouts", rows, ["gpus=2"], time.monotonic() + 100))
    assert [record["missing"] for (record,) in records if "missing" in record] == ["no time left"]
    assert fake.limits.keys() == {rows[0], rows[2]}
    # twice the prediction and a minute, but no more than half a minute beyond the budget
    assert all(limit == pytest.approx(130, abs=5) for limit in fake.limits.values())
    fake.limits.clear()
    list(bench.run_benchmark("layouts", rows[:1], ["gpus=2"]))
    assert fake.limits[rows[0]] == pytest.approx(2 * needed[rows[0]] + 60)


def process_of(script: str) -> RowProcess:
    """The process of a row, with another script."""
    row = RowProcess.__new__(RowProcess)
    row.row = "slow"
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    row.process = subprocess.Popen([sys.executable, "-c", script], text=True, **pipes)
    return row


def ended(pid: int, seconds: float = 30.0) -> bool:
    """Whether a process ends in time. Nobody may have waited for it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_row_beyond_its_time_limit_is_killed_with_all_that_it_started() -> None:
    row = process_of(f"""if True:
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                                 start_new_session=True)
        print("{row_process.RESULT}" + '{{"row": "slow", "child": %d}}' % child.pid, flush=True)
        child.wait()
    """)
    begin = time.monotonic()
    first, last = row.measure(3.0)
    assert last == {"row": "slow", "missing": "did not end within 3 s"}
    assert ended(first["child"]) and time.monotonic() - begin < 45


def test_a_row_ends_with_the_call_that_started_it() -> None:
    inner = """if True:
        import os, time
        from tools.benchmarks.row_process import end_with_parent
        end_with_parent()
        print(os.getpid(), flush=True)
        time.sleep(60)
    """
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    call = subprocess.Popen(
        [sys.executable, "-c", outer],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": python_path()},
    )
    assert call.stdout is not None
    row = int(call.stdout.readline())
    assert not ended(row, 1.0)
    call.kill()
    call.stdout.close()  # the row has the other end too
    call.wait()
    assert ended(row)


def test_ranks_of_a_row_are_started_ahead_and_wait_until_they_may_measure() -> None:
    words = ["a row", "steps=1"]
    first = StartedRanks("tests.tools.waiting_ranks", words, 2)
    left_out = StartedRanks("tests.tools.waiting_ranks", words, 2)
    left_out.process.communicate("", timeout=300)  # as when the process of the row ends
    assert left_out.process.returncode == 0 and not left_out.output.read_text()
    left_out.directory.cleanup()
    begin = time.time()
    found = first()
    assert begin < found["measured"] and found["words"] == words


def test_a_command_among_the_rows_reports_its_seconds_and_what_it_said() -> None:
    def row(script: str) -> LayoutRow:
        return LayoutRow("x", "", {}, command=(sys.executable, "-c", script))

    (found,) = layouts.done(row("import time; time.sleep(0.3); print('3 passed in 1 s')"))
    assert (found["row"], found["said"]) == ("x", "3 passed in 1 s")
    assert found["seconds"] >= 0.3
    with pytest.raises(RuntimeError, match=r"exit code 3: 1 failed \| why"):
        layouts.done(
            row("import sys; print('1 failed'); print('why', file=sys.stderr); sys.exit(3)")
        )


def test_the_records_of_a_benchmark_among_the_rows_have_a_table() -> None:
    command = (sys.executable, "-c", STUB, "tools/bench.py", "reduce")
    found = layouts.done(LayoutRow("bench reduce", "", {}, command=command))
    assert found[0]["row"] == "bench reduce" and "said" not in found[0]
    assert found[1:] == [{"table": "reduce", "row": "nccl fp32", "ms": 2.5}]


STUB = """if True:
    import json, sys
    found = {"reduce": [{"row": "nccl fp32", "ms": 2.5}], "options": []}
    open(sys.argv[sys.argv.index("--out") + 1], "w").write(json.dumps(found))
"""
