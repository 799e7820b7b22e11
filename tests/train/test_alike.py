"""Ranks that were started with other configurations, or find other data, end before they train."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.distributed import run_ranks

TEXT = "".join(f"{i} squared is {i * i}.\n" for i in range(500))


def start_apart(rank: int, size: int, root: str) -> dict[str, Any]:
    """What each case of a start raises on this rank: its type and message, or None."""
    import functools
    from contextlib import ExitStack

    from coatlm.config import make_config
    from coatlm.parallel.groups import release_groups
    from coatlm.train import phases, start
    from coatlm.train.setup import Launch

    phases.start_processes = functools.cache(phases.start_processes)  # joined once for all
    launch = Launch.from_environment()
    cases: dict[str, dict[str, dict[str, Any]]] = {
        "alike": {},
        "another seed": {"run": {"seed": 5 + rank}},
        "an optional section": {"model": {"window": {"size": 16}}} if rank else {},
        "paths of a host": {
            "data": {"text": [f"{root}/copy-{rank}.txt"], "cache_dir": f"{root}/cache-{rank}"}
        },
        "another text": {"data": {"text": [f"{root}/text-{rank}.txt"]}},
        "another tokenizer": {
            "data": {"tokenizer": rf"tiktoken:{root}/{rank}.tiktoken?pattern=\w+|\W+"}
        },
    }
    found: dict[str, Any] = {}
    for name, sections in cases.items():
        data: dict[str, dict[str, Any]] = {
            "run": {"dir": f"{root}/{name}"},
            "model": {"layers": 1, "hidden": 32, "heads": 2, "ffn": 48},
            "data": {"text": [f"{root}/text-0.txt"], "seq_len": 32, "cache_dir": f"{root}/cache"},
            "precision": {"recipe": "bf16"},
            "train": {"steps": 1, "micro_batch": 2, "global_batch": 4, "eval_every": 0},
        }
        for section, keys in sections.items():
            data[section] = data.get(section, {}) | keys
        try:
            with ExitStack() as stack:
                start.set_up(make_config(data), launch, stack)
            found[name] = None
        except Exception as error:
            found[name] = [type(error).__name__, str(error), getattr(error, "code", None)]
        release_groups()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The cases on two ranks."""
    root = tmp_path_factory.mktemp("apart")
    for name in ("copy-0", "copy-1", "text-0"):
        (root / f"{name}.txt").write_text(TEXT)
    (root / "text-1.txt").write_text(TEXT + "One more document.\n")
    for rank, merge in enumerate((b"is", b"re")):
        tokens = [*(bytes([byte]) for byte in range(256)), merge]
        lines = [base64.b64encode(t) + f" {at}\n".encode() for at, t in enumerate(tokens)]
        (root / f"{rank}.tiktoken").write_bytes(b"".join(lines))
    first, second = run_ranks(2, f"{__name__}:start_apart", str(root))
    assert first == second  # all ranks end, and say the same
    return [first, second]


@pytest.mark.parametrize("name", ["alike", "paths of a host"])
def test_ranks_may_have_other_paths(found: list[dict[str, Any]], name: str) -> None:
    assert found[0][name] is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("another seed", ["run.seed: 5 on rank 0 (", "and 6 on rank 1 (", "same configuration"]),
        (
            "an optional section",
            ["model.window", "None on rank 0", "on rank 1", "same configuration"],
        ),
        ("another text", ["tokens (", ") on rank 0 (", ") on rank 1 (", "same data"]),
        ("another tokenizer", ["data.tokenizer: fingerprint", "same tokenizer"]),
    ],
)
def test_ranks_that_differ_end_before_they_train(
    found: list[dict[str, Any]], name: str, says: list[str]
) -> None:
    kind, message, code = found[0][name]
    assert (kind, code) == ("AgreedError", 2)
    assert all(part in message for part in says), message
    assert "\n" not in message
