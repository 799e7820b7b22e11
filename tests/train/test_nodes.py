"""Runs on two nodes with a slow link: losses, bytes on the link, a node that dies, a slow node.

Times are only compared with what the link allows at best, as the machine may be busy.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed import ROOT, python_path, start
from tests.forks import Forks, pretrain
from tests.train.clocks import Clock
from tools.benchmarks import nodes as benchmark
from tools.benchmarks.shaped_link import LINK, enter
from tools.benchmarks.two_nodes import (
    LATENCY,
    NEEDS,
    PORT,
    RATE,
    Node,
    measure_link,
    rank_environment,
    run_on_nodes,
    two_nodes,
)

pytestmark = pytest.mark.slow

STEPS, EVERY, LOCAL = 16, 4, 2  # train.steps, checkpoint.every, ranks per node
SLOW_S = 0.2
LIMIT = 250  # seconds for a start, and for a restart and the rest of a run
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"layers": 2, "hidden": 128, "heads": 4, "ffn": 192},
    "data": {"seq_len": 32, "workers": 1},
    "parallel": {"start_timeout": 60.0},
    "precision": {"recipe": "fp32"},
    "train": {"steps": STEPS, "micro_batch": 2, "global_batch": 8, "eval_every": 0},
    "checkpoint": {"every": EVERY},
    "log": {"every": 1},
}
FP32 = "parallel.grad_comm=fp32"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with two_nodes() as nodes:
        if nodes is None:
            pytest.skip(f"needs {NEEDS}")
        yield nodes


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nodes")
    text = directory / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    data = {"text": [str(text)], "cache_dir": str(directory / "cache")}
    sections = SECTIONS | {"data": SECTIONS["data"] | data}
    path = directory / "config.yaml"
    path.write_text(json.dumps(sections))
    return path


def settle(pid: int) -> None:
    """Move this process, which must have one thread, to the node that process `pid` is on."""
    for kind in ("net", "uts"):
        enter(f"/proc/{pid}/ns/{kind}")
    platform.node = socket.gethostname  # its own value was cached before the fork


def rank_on(pid: int, delay: float, *arguments: str) -> None:
    """A rank on the node that `pid` is on, which takes `delay` seconds longer to read a batch."""
    settle(pid)
    from coatlm.train import step

    place, clock = step.Trainer.place, Clock()

    def late(self: step.Trainer, batches: Any) -> Any:
        clock.seconds += delay
        return place(self, batches)

    step.PhaseTimer = partial(step.PhaseTimer, clock=clock)  # type: ignore[assignment]
    step.Trainer.place = late  # type: ignore[method-assign]
    pretrain(*arguments)


def ranks_on(
    nodes: list[Node], log: Path, function: Callable[..., None], *words: str, slow: float = 0.0
) -> None:
    """Call `function(pid, delay, *words)` in LOCAL ranks on each node; all have to exit with 0.

    `delay` is 0 on the first node and `slow` on the second. Outputs go to files beside `log`.
    """
    ranks, logs = [], []
    for rank in range(LOCAL * len(nodes)):
        node = nodes[rank // LOCAL]
        env = os.environ | rank_environment(node, rank, LOCAL * len(nodes), LOCAL)
        logs.append(log.with_name(f"{log.name}-{rank}.txt"))
        where = (node.holder.pid, slow * node.index)
        env["PYTHONPATH"] = python_path()
        ranks.append(start(function, *where, *words, env=env, log=logs[-1]))
    for process in ranks:
        process.join(LIMIT)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * len(ranks), logs[0].read_text()


def train(nodes: list[Node], config: Path, name: str, *overrides: str, slow: float = 0.0) -> Path:
    """A run of LOCAL ranks on each node, the second of which may be slow. Returns its directory."""
    run = config.parent / name
    ranks_on(nodes, run, rank_on, str(config), f"run.dir={run}", *overrides, slow=slow)
    return run


def records(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one may not be whole yet."""
    if not (run / "metrics.jsonl").exists():
        return []
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


def launch(nodes: list[Node], node: Node, log: Path, *words: str) -> subprocess.Popen[bytes]:
    """torchrun's agent on a node, which starts LOCAL ranks; its rendezvous is on the first node."""
    options = (
        "--nnodes=2",
        f"--nproc-per-node={LOCAL}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={nodes[0].address}:{PORT}",
        "--rdzv-id=nodes",
        "--rdzv-conf=keep_alive_interval=1",  # second between signs of life, of which 3 may be lost
        f"--local-addr={node.address}",
        "--max-restarts=3",
    )
    env = os.environ | {"GLOO_SOCKET_IFNAME": LINK, "PYTHONPATH": python_path()}
    with log.open("ab") as output:
        return subprocess.Popen(
            node.command(sys.executable, "tools/elastic.py", *options, "pretrain.py", *words),
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env=env,
        )


def kill(launcher: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its ranks at once, as a node that loses its power."""
    agent = psutil.Process(launcher.pid)
    for process in (agent, *agent.children(recursive=True)):
        process.kill()
    launcher.wait()


def test_a_node_dies_and_comes_back_and_losses_are_those_of_one_process(
    nodes: list[Node], config: Path
) -> None:
    run, log = config.parent / "killed", config.parent / "killed.txt"
    words = (str(config), f"run.dir={run}", FP32)
    launchers = [launch(nodes, node, log, *words) for node in nodes]
    try:
        end = time.monotonic() + LIMIT
        saved = run / "checkpoints" / f"step_{2 * EVERY:08}"
        while len(records(run)) < 2 * EVERY + 2 or not saved.is_dir():
            assert time.monotonic() < end and launchers[1].poll() is None, log.read_text()
            time.sleep(0.02)
        kill(launchers[1])
        launchers[1] = launch(nodes, nodes[1], log, *words)
        assert [launcher.wait(LIMIT) for launcher in launchers] == [0, 0], log.read_text()
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                kill(launcher)
    text = (run / "train.log").read_text()
    assert text.count("4 = tp 1 x pp 1 x cp 1 x dp 4") == 2, text  # started twice
    assert "at step 8" in text or "at step 12" in text
    assert losses(run) == losses(train(nodes, config, "undisturbed", FP32))
    single = config.parent / "single"
    code, output = Forks(config.parent).run(str(config), f"run.dir={single}", FP32)
    assert code == 0, output
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)  # sums in another order


def test_two_levels_halve_the_gradients_on_the_link_and_a_slow_node_is_named(
    nodes: list[Node], config: Path
) -> None:
    sent, runs = [], []
    for levels, slow in ((2, 0.0), (1, SLOW_S)):
        before = nodes[0].sent()
        override = f"parallel.grad_comm_nodes={'null' if levels == 2 else 1}"
        runs.append(train(nodes, config, f"levels{levels}", override, slow=slow))
        sent.append(nodes[0].sent() - before)
    # A rank sends 3 of 4 parts of its N bytes. With one level 2 of them go to the other node, of
    # each of 2 ranks; with two levels 1 does. Weights and the start send the same in both runs.
    size = records(runs[0])[-1]["comm_bytes_grad"] * 4 / 3
    assert sent[1] - sent[0] == pytest.approx(STEPS * size / 2, rel=0.05)
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-3)  # rounded once more
    reports = [record["slowest"] for record in records(runs[1])[1:]]
    for report in reports:
        assert (report["rank"], report["phase"]) == (LOCAL, "data")
        assert report["ms"] - report["median_ms"] == pytest.approx(1000 * SLOW_S)
    log = (runs[1] / "train.log").read_text()
    named = re.findall(r"step \d+: rank \d \((.*?)\) is slow in data: ", log)
    assert named == [nodes[1].address] * len(reports)


def test_the_link_is_not_faster_than_its_rate_and_latency(nodes: list[Node]) -> None:
    size = 4 << 20
    before = nodes[0].sent()
    ping, stream = measure_link(nodes, pings=9, size=size)
    assert ping >= 2 * LATENCY
    assert stream >= 8 * size / RATE + LATENCY
    assert size < nodes[0].sent() - before < 1.02 * size  # with headers; nothing was sent twice


def benchmark_ways(pid: int, _: float, result: str) -> None:
    """The rows `exchange` and `step` of the benchmark, for one repetition."""
    settle(pid)
    launch = benchmark.Launch.from_environment()
    benchmark.start_processes(launch)
    found = [
        benchmark.in_turn(ways, 1)
        for ways in (benchmark.exchanges(1 << 18), benchmark.steps(launch))
    ]
    if launch.rank == 0:
        Path(result).write_text(json.dumps(found))
    benchmark.dist.barrier()
    os._exit(0)


def test_the_benchmark_counts_half_of_the_bytes_in_two_levels_and_no_time_shorter_than_the_links(
    nodes: list[Node], tmp_path: Path
) -> None:
    ranks_on(nodes, tmp_path / "log", benchmark_ways, str(tmp_path / "found"))
    exchanges, steps = json.loads((tmp_path / "found").read_text())
    codes = (1 << 18) * (1 + 4 / 128)  # with an fp32 scale per 128 of the values
    for way, share in (("one level", 1), ("two levels", 1 / 2)):
        for kind in ("codes", "fp8-a2a"):
            seconds, nbytes = exchanges[f"{kind}, {way}"]
            assert nbytes == pytest.approx(share * codes, rel=0.1)  # headers, a barrier, ACKs
            assert seconds >= 8 * share * codes / RATE / 2  # a rank's half passes before its end
    parameters = 5_508_096
    apart = steps["fp8-a2a, one level"][1] - steps["fp8-a2a, two levels"][1]
    assert apart == pytest.approx(parameters * (1 + 4 / 128) / 2, rel=0.05)
    # gloo's sum in BF16 is an all-reduce: a ring, which passes 3/2 of the values over the link
    assert steps["bf16, one level"][1] > steps["fp8-a2a, one level"][1] + parameters


def test_ranks_on_nodes_send_a_record_or_name_the_error(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), python_path()]))
    (tmp_path / "speaks.py").write_text(
        "import os, socket, sys, time\n"
        "from tools.benchmarks.ranks import send_record\n"
        "rank = os.environ['RANK']\n"
        "if rank == sys.argv[1]: send_record({'host': socket.gethostname()})\n"
        "elif rank == sys.argv[2]: raise ValueError(f'rank {rank}')\n"
        "elif sys.argv[2] != '-': time.sleep(600)\n"
    )
    assert run_on_nodes(nodes, "speaks", ["2", "-"], local=2) == {"host": nodes[1].address}
    with pytest.raises(RuntimeError, match="ValueError: rank 3"):
        run_on_nodes(nodes, "speaks", ["2", "3"], local=2)
    with pytest.raises(RuntimeError, match="no output"):
        run_on_nodes(nodes, "speaks", ["-", "-"], local=2)
