"""Defaults of data.reset_attention_mask and reset_position_ids, which a resumed run inherits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from coatlm.config import ConfigError, make_config
from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from coatlm.train import phases
from coatlm.train.agreement import Peers
from coatlm.train.checkpoint import saved_config
from coatlm.train.phases import documents_as_before
from coatlm.train.setup import Launch
from tests.forks import Forks

KEY = "data.reset_attention_mask"


@pytest.mark.parametrize(
    ("given", "earlier", "expected"),
    [
        ({}, None, True),
        ({}, {"reset_attention_mask": False}, False),
        ({}, {}, False),  # of a version before there was the key
        ({"reset_attention_mask": True}, {"reset_attention_mask": False}, True),
    ],
)
def test_a_value_that_is_not_given_is_that_of_the_checkpoint(
    given: Any, earlier: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = None if earlier is None else {"data": earlier}
    monkeypatch.setattr(phases, "earlier_config", lambda *_: saved)
    config = make_config({"data": {"paths": ["a"], **given}})
    found = documents_as_before(config, Launch(), Peers(0, ("host",), None))  # type: ignore[arg-type]
    assert found.data.reset_attention_mask is expected


@pytest.mark.parametrize(
    ("given", "earlier", "expected"),
    [
        ({}, {"reset_attention_mask": True, "reset_position_ids": True}, (True, True)),
        ({}, {"reset_attention_mask": True}, (True, False)),  # of an older version
        (
            {"reset_position_ids": False},
            {"reset_attention_mask": True, "reset_position_ids": True},
            (True, False),
        ),
        ({"reset_position_ids": True}, {"reset_attention_mask": True}, (True, True)),
        (
            {"reset_attention_mask": False},
            {"reset_attention_mask": True, "reset_position_ids": True},
            (False, False),
        ),
    ],
)
def test_positions_restart_as_in_the_checkpoint_unless_told_otherwise(
    given: Any, earlier: Any, expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "earlier_config", lambda *_: {"data": earlier})
    config = make_config({"data": {"paths": ["a"], **given}})
    found = documents_as_before(config, Launch(), Peers(0, ("host",), None))  # type: ignore[arg-type]
    assert (found.data.reset_attention_mask, found.data.reset_position_ids) == expected


def test_positions_cannot_restart_in_a_run_begun_without_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(phases, "earlier_config", lambda *_: {"data": {}})
    config = make_config({"data": {"paths": ["a"], "reset_position_ids": True}})
    message = r"^data\.reset_position_ids=true needs .* to be given too: it is false in [^\n]*$"
    with pytest.raises(ConfigError, match=message):
        documents_as_before(config, Launch(), Peers(0, ("host",), None))  # type: ignore[arg-type]


def test_a_checkpoint_without_the_key_has_samples_without_documents() -> None:
    saved = make_config({"data": {"paths": ["a"]}}).model_dump(mode="json")
    assert saved_config(Path("step"), {"config": saved}).data.reset_attention_mask
    del saved["data"]["reset_attention_mask"]
    assert not saved_config(Path("step"), {"config": saved}).data.reset_attention_mask


def test_a_run_begun_without_the_default_goes_on_without_it(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{i} squared is {i * i}."}}\n' for i in range(4000)))
    preprocess([str(text)], tmp_path / "data", Options(), workers=1)
    forks = Forks(tmp_path)
    sizes = {"layers": 1, "hidden": 32, "ffn": 48, "heads": 2, "kv_heads": 2}
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    words += ["data.text=[]", f"data.paths=[{tmp_path / 'data'}]", "data.seq_len=32"]
    words += ["train.micro_batch=2", "train.global_batch=4", "train.eval_every=0", "log.every=1"]
    words += [f"data.cache_dir={tmp_path / 'cache'}", "checkpoint.every=2"]

    def run(name: str, *more: str) -> tuple[bool, str]:
        """What was trained, and the log of the start."""
        code, output = forks.run(
            "configs/quickstart.yaml", *words, f"run.dir={tmp_path / name}", *more
        )
        assert code == 0, output[-3000:]
        written = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        return written["data"]["reset_attention_mask"], output

    assert run("old", "train.steps=2", f"{KEY}=false")[0] is False
    trained, output = run("old", "train.steps=4")
    assert trained is False and "at step 2" in output and f"{KEY}:" not in output
    assert "attend to all earlier ones" in " ".join(output.split())
    trained, output = run("new", "train.steps=2")
    assert trained is True and "attend to their own document" in " ".join(output.split())
