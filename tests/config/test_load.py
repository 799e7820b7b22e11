"""Overrides are taken as they stand, paths lead home, and messages are short and harmless."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from coatlm.config import Config, ConfigError, load_config, make_config
from coatlm.config.errors import LONGEST, MOST_LINES, shortened


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("{}")
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a #b", "a #b"),
        ("a: b", "a: b"),
        ("1e5", "1e5"),
        ("on", "on"),
        ("12", "12"),
        ("{a}", "{a}"),
        ("*a", "*a"),
        ("a=b", "a=b"),
        ("${oc.env:HOME}", "${oc.env:HOME}"),
        ('"a #b"', "a #b"),
        ("'it''s'", "it's"),
        ("'a' and 'b'", "'a' and 'b'"),
    ],
)
def test_an_override_of_text_is_taken_as_it_stands(empty: Path, given: str, name: str) -> None:
    assert load_config(empty, [f"run.name={given}"]).run.name == name


def test_an_override_of_a_path_is_taken_as_it_stands(empty: Path) -> None:
    config = load_config(
        empty,
        ["run.dir=runs/a #1: b", "data.text=c #2.txt", "checkpoint.resume=x #3", "run.name=010"],
    )
    assert config.run.dir == Path("runs/a #1: b")
    assert config.data.text == ("c #2.txt",)
    assert config.checkpoint.resume == "x #3"
    assert config.run.name == "010"


def test_an_override_of_anything_else_is_yaml(empty: Path) -> None:
    config = load_config(
        empty,
        [
            "data.paths=[a, {path: b, weight: 3}]",
            "data.text=[]",
            "model.rope_scaling={factor: 4}",
            "log.profile=null",
            "log.wandb_project=null",
            "log.tensorboard=true",
            "run.seed=0x10",
        ],
    )
    assert [(str(s.path), s.weight) for s in config.data.paths] == [("a", 1.0), ("b", 3.0)]
    assert config.model.rope_scaling is not None and config.model.rope_scaling.factor == 4
    assert (config.log.wandb_project, config.log.tensorboard, config.run.seed) == (None, True, 16)


@pytest.mark.parametrize("given", ["run.dir=", "run.name=", "checkpoint.resume=", "run.dir=null"])
def test_an_override_without_a_value_is_refused_where_one_is_needed(
    empty: Path, given: str
) -> None:
    assert message(empty, given).startswith(f"{given.partition('=')[0]}=null: ")


def test_a_mapping_of_an_override_is_merged_into_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {rope_scaling: {factor: 2.0, high_freq_factor: 8.0}}")
    scaling = load_config(path, ["model.rope_scaling={factor: 4.0}"]).model.rope_scaling
    assert scaling is not None and (scaling.factor, scaling.high_freq_factor) == (4.0, 8.0)


def test_an_override_changes_one_of_two_aliases_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("log: &x {every: 7}\ncheckpoint: *x\n")
    config = load_config(path, ["log.every=9"])
    assert (config.log.every, config.checkpoint.every) == (9, 7)


def test_nothing_is_interpolated_and_the_resolved_file_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: '${oc.env:SECRET}', dir: '${run.name}/$SECRET'}")
    config = load_config(path)
    assert config.run.name == "${oc.env:SECRET}"
    path.write_text(config.to_yaml())
    assert "hunter2" not in path.read_text()
    assert load_config(path) == config


def test_every_path_leads_home_from_a_tilde(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(
        empty,
        [
            "run.dir=~/run",
            "data.text=[~/a*.txt, b]",
            "data.cache_dir=~",
            "data.tokenizer=hf:~/t.json?eod=~",
            "checkpoint.resume=~/old",
        ],
    )
    assert (config.run.dir, config.data.cache_dir) == (tmp_path / "run", tmp_path)
    assert config.data.text == (f"{tmp_path}/a*.txt", "b")
    assert config.data.tokenizer == f"hf:{tmp_path}/t.json?eod=~"
    assert config.checkpoint.resume == f"{tmp_path}/old"
    paths = load_config(empty, ["data.text=[]", "data.paths=[~/d, {path: ~/e}]"]).data.paths
    assert [source.path for source in paths] == [tmp_path / "d", tmp_path / "e"]


@pytest.mark.parametrize("value", ["~no-such-user/x", "", "a\x1b[2Jb", "a\nb", "a\0b", "\udcff"])
@pytest.mark.parametrize("key", ["run.dir", "data.cache_dir", "checkpoint.resume", "data.text"])
def test_a_path_that_no_file_should_have_is_refused(key: str, value: str) -> None:
    section, name = key.split(".")
    fill = {} if section != "data" or name == "text" else {"text": "a"}
    with pytest.raises(ConfigError) as error:
        make_config({section: {**fill, name: value}})
    assert str(error.value).startswith(key) and str(error.value).isprintable()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"run: {name: \xff}", "not valid UTF-8 at byte 12"),
        (b"\xff\xfea\x00", "not valid UTF-8 at byte 0"),
        (b"a" * 2_000_000, "longer than"),
        (b"\x00" * 10, "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert message(path).startswith(f"{path}: ") and told in message(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfrun: {name: a}")
    assert load_config(path).run.name == "a"


def test_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    assert message(tmp_path) == f"{tmp_path}: Is a directory"


def test_an_endless_file_is_refused() -> None:
    assert "/dev/zero: " in message(Path("/dev/zero"))


@pytest.mark.parametrize(
    "data",
    [
        {"x" * 10_000: 1},
        {"run": {"name": 3, "dir": list(range(10_000))}},
        {"train": {"steps": "9" * 10_000}},
        {"train": {"steps": 16**10_000}},
        {"optim": {"lr": 16**10_000}},
        {"train": dict.fromkeys((f"key{i}" for i in range(500)), 1)},
        {"data": {"text": ["a"], "paths": [{"x" * 1000: 1}] * 100}},
        {"run": {"\x1b]0;title\x07": "\x1b[2J"}},
    ],
    ids=range(8),
)
def test_a_message_is_short_and_printable(data: Any) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(data)
    lines = str(error.value).split("\n")
    assert len(lines) <= MOST_LINES + 1
    assert all(line.isprintable() and 0 < len(line) <= LONGEST for line in lines)


def test_a_long_message_keeps_its_head_and_its_tail() -> None:
    told = shortened(f"run.name={'x' * 1000}: at most this")
    assert told.startswith("run.name=xxx") and told.endswith("xxx: at most this")
    assert " ... " in told and len(told) == LONGEST


def test_many_mistakes_are_counted() -> None:
    told = shortened("\n".join(f"mistake {i}" for i in range(25))).split("\n")
    assert told[:2] + told[-2:] == ["mistake 0", "mistake 1", "mistake 9", "and 15 more"]


def test_a_hostile_name_of_a_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    told = message(tmp_path / "\x1b[2J\nerror: all is lost.yaml")
    assert told.isprintable() and "\\x1b[2J\\nerror" in told


def test_a_name_that_is_not_utf_8_is_refused(empty: Path) -> None:
    assert "run.name=" in message(empty, os.fsdecode(b"run.name=\xff"))


def test_a_configuration_survives_its_own_defaults() -> None:
    assert make_config(Config().model_dump(mode="json")) == make_config({})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"train": 5}, "train=5: must be a mapping"),
        ({"train": None}, "train=null: must be a mapping"),
        ({"model": {"rope_scaling": [1]}}, "model.rope_scaling=[1]: must be a mapping or null"),
        ({"data": {"text": None}}, "data.text=null: must be a list of text"),
        ({"data": {"text": ["a", 3]}}, "data.text.1=3: must be text"),
        ({"data": {"paths": 3}}, "data.paths=3: must be a list of paths or of mappings"),
        ({"data": {"paths": [3]}}, "data.paths.0=3: must be a path or a mapping"),
        ({"data": {"paths": [{"path": 3}]}}, "data.paths.0.path=3: must be a path or text"),
        ({"data": {"paths": [{"weight": 3}]}}, "data.paths.0.path: must be given"),
        ({"run": {"dir": None}}, "run.dir=null: must be a path"),
        ({"optim": {"betas": [1]}}, "optim.betas=[1]: must be [number, number]"),
        ({"optim": {"betas": [1, 2, 3]}}, "optim.betas=[1, 2, 3]: must be [number, number]"),
        ({"precision": {"bf16_operands": 3}}, "precision.bf16_operands=3: must be a list of names"),
        (
            {"train": {"cuda_graphs": 3}},
            "train.cuda_graphs=3: Input should be true, false or 'auto'",
        ),
    ],
)
def test_a_value_of_another_type_is_reported_with_the_type_of_the_key(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(given)
    assert str(error.value) == told
