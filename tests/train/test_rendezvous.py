"""How ranks come together: who is missing, who failed and where, and what listens meanwhile."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from coatlm.train.agreement import Peers
from coatlm.train.rendezvous import _listen
from tests.distributed import ROOT, free_port, python_path, run_ranks
from tests.forks import Child, Forks
from tests.test_pretrain import wait_for_line

HOST = socket.gethostname()
MISSING = "data.tokenizer=hf:/nonexistent.json"
START_TIMEOUT = 7  # seconds: a little more than rendezvous.NOTICE_S


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("one two three four\n" * 3000)
    sections = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96},
        "data": {
            "text": [str(tmp_path / "text.txt")],
            "seq_len": 32,
            "cache_dir": str(tmp_path / "cache"),
            "workers": 1,
        },
        "precision": {"recipe": "fp32"},
        "train": {"steps": 2, "micro_batch": 2, "global_batch": 12, "eval_every": 0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(sections))
    return str(path)


class Launcher:
    """Starts single ranks of a world, as srun does."""

    def __init__(self, directory: Path, config: str) -> None:
        self.forks, self.config, self.port = Forks(directory), config, free_port()

    def start(self, rank: int, size: int, *overrides: str) -> Child:
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }
        return self.forks.start(self.config, *overrides, env=env)


@pytest.fixture
def launcher(tmp_path: Path, config: str) -> Launcher:
    return Launcher(tmp_path, config)


def errors(ranks: list[Child]) -> list[list[str]]:
    """The lines with an error that each rank has printed."""
    for rank in ranks:
        assert "Traceback" not in rank.text(), rank.text()
    return [[x for x in rank.text().splitlines() if x.startswith("error: ")] for rank in ranks]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["", MISSING, MISSING], f"error: ranks 1, 2 ({HOST}): data.tokenizer='hf:/nonexistent"),
        (["", "", "train.stesp=3"], f"error: rank 2 ({HOST}): train.stesp: unknown key"),
        (["train.stesp=3"] * 3, "error: train.stesp: unknown key"),
        (["parallel.tp=2"] * 3, "error: 3 processes cannot hold"),
    ],
)
def test_equal_errors_of_ranks_are_one_line_and_end_all_ranks_with_code_2(
    launcher: Launcher, overrides: list[str], expected: str
) -> None:
    ranks = [launcher.start(r, 3, *filter(None, [text])) for r, text in enumerate(overrides)]
    assert [rank.wait() for rank in ranks] == [2, 2, 2], ranks[0].text()
    first, *others = errors(ranks)
    assert len(first) == 1 and first[0].startswith(expected)
    assert others == [[], []]


def test_a_missing_peer_is_named_and_ends_the_others_after_start_timeout(
    launcher: Launcher,
) -> None:
    patience = f"parallel.start_timeout={START_TIMEOUT}"
    ranks = [launcher.start(rank, 6, patience) for rank in (0, 3)]
    assert [rank.wait() for rank in ranks] == [1, 1], ranks[0].text()  # a launcher may try again
    where = f"127.0.0.1:{launcher.port}"
    assert f"waiting for ranks 1, 2, 4, 5 of 6 at {where}\n" in ranks[0].text()
    expected = f"error: ranks 1, 2, 4, 5 of 6 did not connect to {where} within {patience} s"
    assert errors(ranks) == [[expected], []]


def test_without_rank_0_the_others_say_whom_they_waited_for(launcher: Launcher) -> None:
    rank = launcher.start(1, 2, "parallel.start_timeout=1")
    assert rank.wait() == 1
    ((line,),) = errors([rank])
    assert f"[rank 1, {HOST}]" in line and f"does not answer at 127.0.0.1:{launcher.port}" in line


def test_two_processes_with_one_rank_are_told_so(launcher: Launcher) -> None:
    ranks = [launcher.start(rank, 3) for rank in (0, 1, 1)]
    assert [rank.wait() for rank in ranks] == [2, 2, 2], ranks[0].text()
    said = errors(ranks)
    assert "RANK=1: process" in said[0][0] and "has the same rank" in said[0][0]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK='a'"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere.invalid"},
            "MASTER_ADDR='nowhere.invalid': must be a host that this one can resolve",
        ),
    ],
)
def test_a_bad_environment_is_one_line_from_any_rank(
    tmp_path: Path, config: str, env: dict[str, str], expected: str
) -> None:
    code, output = Forks(tmp_path).run(config, env=env)
    lines = output.splitlines()
    assert code == 2 and len(lines) == 1 and expected in lines[0], output
    assert not (tmp_path / "run").exists()


def cases_of_two_ranks(rank: int, size: int, arguments: Any) -> dict[str, Any]:
    """What phases with and without failures do, and what listens on this host."""
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    import torch.distributed as dist

    from coatlm.train.agreement import Peers
    from coatlm.train.reports import AgreedError, report_error
    from coatlm.train.setup import Launch, start_processes

    hosts = start_processes(Launch.from_environment())
    peers = Peers(rank, hosts, dist.new_group(backend="gloo"))
    dist.all_reduce(torch_one(), group=peers.group)
    found: dict[str, Any] = {
        "hosts": hosts,
        "listens": [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"],
        "value": peers.agree(lambda: rank * 10),
        "order": peers.rank_zero_first(lambda: rank),
    }

    def fail(error: Exception, who: int) -> int:
        if rank == who:
            raise error
        return rank

    for name, error, who in (
        ("user", ValueError("data.text: no"), 1),
        ("unexpected", KeyError("config"), 1),
        ("rank 0", OSError(28, "No space left on device"), 0),
    ):
        try:
            peers.agree(lambda error=error, who=who: fail(error, who))  # type: ignore[misc]
        except AgreedError as agreed:
            found[name] = (
                str(agreed),
                agreed.code,
                report_error(agreed, rank=rank, world_size=size),
            )
    error_file = Path(arguments) / f"{rank}.json"
    codes = [report_error(ValueError("ours"), rank=rank, world_size=size, file=error_file)]
    from coatlm.train.faults import NonFiniteError

    codes.append(report_error(NonFiniteError("step 3", 3), rank=rank, world_size=size))
    found["codes"] = codes
    found["slow"] = slow_phases(rank, hosts)
    found["late"] = late(rank, hosts)
    found["stuck"] = stuck(peers)  # the last one: the group does not survive it
    return found


def slow_phases(rank: int, hosts: tuple[str, ...]) -> list[Any]:
    """Phases that take longer than the timeout of the group, on rank 0 and on rank 1."""
    import torch.distributed as dist

    from coatlm.train import agreement
    from coatlm.train.manifest import CheckpointError
    from coatlm.train.reports import AgreedError

    agreement.ROUND_S = 0.3
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=4))

    def sleep(who: int) -> int:
        if rank == who:
            time.sleep(5.5)
        elif who == 1:
            raise ValueError("data.text: no")
        return rank

    peers, found = agreement.Peers(rank, hosts, group), []
    found.append(peers.rank_zero_first(lambda: sleep(0)))
    found.append(agreement.together(lambda: sleep(0), group, hurried=False))
    for case in (
        lambda: peers.rank_zero_first(lambda: sleep(1)),
        lambda: agreement.together(lambda: sleep(1), group, hurried=False),
    ):
        try:
            case()
        except (AgreedError, CheckpointError) as error:
            found.append(str(error))
    return found


def late(rank: int, hosts: tuple[str, ...]) -> str:
    """What each rank says where rank 1 comes after the timeout of the group."""
    import torch.distributed as dist

    from coatlm.train.agreement import Peers
    from coatlm.train.manifest import LostPeerError

    peers = Peers(rank, hosts, dist.new_group(backend="gloo", timeout=timedelta(seconds=1.5)))
    try:
        peers.agree(lambda: time.sleep(3 * rank))
    except LostPeerError as error:
        return str(error).partition(";")[0]
    return "in time"


def stuck(peers: Any) -> str:
    """How a phase ends in which rank 1 fails while rank 0 waits for it in a collective."""
    import torch.distributed as dist

    from coatlm.train import agreement
    from coatlm.train.reports import lost_peer

    agreement.PATIENCE_S = 1.0

    def phase() -> None:
        if peers.rank == 1:
            raise ValueError("data.text: no")
        dist.all_reduce(torch_one())

    try:
        peers.agree(phase)
    except Exception as error:
        return "lost" if lost_peer(error) else str(error)
    return "done"


def torch_one() -> Any:
    import torch

    return torch.ones(1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    directory = tmp_path_factory.mktemp("results")
    function = "tests.train.test_rendezvous:cases_of_two_ranks"
    return run_ranks(2, function, str(directory)), directory


def test_on_one_host_nothing_listens_but_on_the_loopback_address(results: Any) -> None:
    for found in results[0]:
        assert found["listens"]
        assert {ip.removeprefix("::ffff:") for ip in found["listens"]} <= {"127.0.0.1", "::1"}
    assert len(results[0][0]["listens"]) > len(results[0][1]["listens"])  # the store is rank 0's


def test_a_phase_that_fails_on_one_rank_ends_on_all_with_its_reason(results: Any) -> None:
    first, second = results[0]
    assert first["hosts"] == [HOST, HOST]
    assert [first["value"], second["value"]] == [0, 10]
    assert [first["order"], second["order"]] == [0, 1]
    for found in results[0]:
        assert found["user"] == [f"rank 1 ({HOST}): data.text: no", 2, 2]
        assert found["unexpected"] == [f"rank 1 ({HOST}): KeyError: 'config'", 1, 1]
        assert found["rank 0"][1:] == [4, 4]
        assert found["codes"] == [1, 3]


@pytest.mark.parametrize(("rank", "turn"), [(0, 0), (1, 2), (2, 1), (3, 2)])
def test_the_first_rank_of_each_host_goes_before_the_others(rank: int, turn: int) -> None:
    turns = []

    class Counting(Peers):
        def agree(self, phase: Any) -> Any:
            turns.append(None)
            return phase()

    peers = Counting(rank, ("a", "a", "b", "b"), None)
    assert peers.rank_zero_first(lambda: len(turns) - 1) == turn
    assert len(turns) == 3


def test_a_phase_may_take_longer_than_the_timeout_of_the_group(results: Any) -> None:
    for rank, found in enumerate(results[0]):
        order, both, agreed, failed = found["slow"]
        assert (order, both) == (rank, [0, 1])
        assert agreed == f"rank 0 ({HOST}): data.text: no"
        assert failed == "ValueError: data.text: no (rank 0)"


def test_a_rank_that_waits_in_vain_says_that_another_is_late(results: Any) -> None:
    assert results[0][0]["late"] == "another rank did not join a collective within 0.025 minutes"


def test_a_rank_that_fails_before_a_collective_leaves_instead_of_waiting(results: Any) -> None:
    assert [found["stuck"] for found in results[0]] == ["lost", "data.text: no"]


def test_a_rank_whose_peer_was_killed_says_so_in_one_line(launcher: Launcher) -> None:
    ranks = [launcher.start(rank, 2, "train.steps=100000", "log.every=1") for rank in range(2)]
    wait_for_line(ranks[0].output, "step 2/")
    ranks[1].kill()
    assert ranks[0].wait() == 1
    ((line,),) = errors(ranks[:1])
    assert line.startswith(f"error: [rank 0, {HOST}] a connection to another rank was closed")


def test_a_port_that_is_taken_is_named(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", launcher.port)):
        rank = launcher.start(0, 2)
        assert rank.wait() == 2
    ((line,),) = errors([rank])
    assert f"MASTER_ADDR=127.0.0.1, MASTER_PORT={launcher.port}: rank 0 cannot listen there" in line


@pytest.mark.parametrize("one_host", [True, False])
def test_only_ranks_of_several_hosts_have_a_store_that_listens_everywhere(one_host: bool) -> None:
    with _listen("127.0.0.1", free_port(), one_host) as listener:
        everywhere = listener.getsockname()[0] in ("::", "0.0.0.0")
    assert everywhere is not one_host


def test_torchrun_is_given_the_reason_of_each_rank(results: Any) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    paths = [results[1] / f"{rank}.json" for rank in range(2)]
    failures = {r: ProcessFailure(r, 1, 1, str(path)) for r, path in enumerate(paths)}
    lines = str(ChildFailedError("pretrain.py", failures)).splitlines()  # what torchrun ends with
    assert lines[-2].endswith(f"error: [rank 0, {HOST}] ValueError: ours") or lines[-2].endswith(
        f"error: [rank 1, {HOST}] ValueError: ours"
    )


def test_the_launcher_listens_to_no_network_and_ends_with_the_reason(
    tmp_path: Path, config: str
) -> None:
    elastic = [sys.executable, "tools/elastic.py", "--standalone", "--nproc-per-node=2"]
    listening: set[str] = set()
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*elastic, "pretrain.py", config, MISSING],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": python_path()},
        )
        while process.poll() is None:
            listening |= addresses(process.pid)
            time.sleep(0.05)
    output = (tmp_path / "log.txt").read_text()
    assert process.returncode == 2, output
    assert output.splitlines()[-1].startswith("error: data.tokenizer='hf:/nonexistent.json'")
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def addresses(pid: int) -> set[str]:
    """Where a process and those that it has started listen."""
    found = set()
    try:
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            found |= {c.laddr.ip for c in member.net_connections() if c.status == "LISTEN"}
    except psutil.Error:  # one has just ended
        pass
    return found
