"""URLs in a configuration: which are taken, which are refused, and that no secret is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from coatlm.config import ConfigError, make_config
from coatlm.config.urls import BACK_ENDS, checked_url, is_url, without_secrets
from coatlm.remote import Location

DATA = {"data": {"paths": ["data/a"]}}


def test_urls_stay_as_they_are_and_paths_stay_paths() -> None:
    text = make_config({"data": {"text": ["s3://b//a*.jsonl", "~/x"]}}).data.text
    assert text == ("s3://b//a*.jsonl", str(Path.home() / "x"))
    paths = [s.path for s in make_config({"data": {"paths": ["gs://b/c/d", "a//b"]}}).data.paths]
    assert paths == ["gs://b/c/d", Path("a/b")]
    resume = {"checkpoint": {"resume": "hf://datasets/a/b@main/run", "upload": "s3://b/run/"}}
    checkpoint = make_config({**DATA, **resume}).checkpoint
    assert checkpoint.resume == "hf://datasets/a/b@main/run" and checkpoint.upload == "s3://b/run"
    model = make_config({**DATA, "checkpoint": {"resume": "hf:hf://owner/name/"}})
    assert model.checkpoint.resume == "hf:hf://owner/name"
    with pytest.raises(ConfigError, match=r"resume.*a URL with a user or password"):
        make_config({**DATA, "checkpoint": {"resume": "hf:s3://key:SECRET@bucket/model"}})


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://host/file", "ftp:// is not supported; s3, gs, hf, https, http, file, memory are"),
        ("simplecache::s3://b/c", None),  # no URL, but the path of a file
        ("s3://", "s3:// names nothing"),
        ("s3://key:SECRET@bucket/file", "a URL with a user or password"),
        ("https://user@host/file", "a URL with a user or password"),
        ("https://host/file?X-Amz-Signature=SECRET", "a URL with a query"),
        ("https://[host/file", "not a URL"),
    ],
)
def test_urls_with_secrets_or_unknown_protocols_are_refused(url: str, reason: str | None) -> None:
    if reason is None:
        assert not is_url(url)
        return
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        checked_url(url)
    assert reason in str(error.value) and "SECRET" not in str(error.value)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        Location.of(url)
    assert "SECRET" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        make_config({**DATA, "checkpoint": {"upload": url}})
    assert reason in str(error.value) and "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    "section",
    [
        {"run": {"dir": "s3://b/run"}},
        {"data": {"text": "x", "cache_dir": "s3://b/cache"}},
        {"checkpoint": {"upload": "/a/path"}},
        {"data": {"paths": ["s3://b/a"], "remote_block": 1 << 20, "remote_cache": 63 << 20}},
        {"data": {"paths": ["s3://b/a"], "remote_block": 20_000}},
    ],
)
def test_what_is_no_place_for_a_url_or_too_small_is_refused(section: dict) -> None:  # type: ignore[type-arg]
    ((name, fields),) = section.items()
    with pytest.raises(ConfigError, match=rf"{name}"):
        make_config({**DATA, name: fields})


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("run.dir", "s3://b/x", "checkpoint.upload=URL copies its checkpoints to a URL"),
        ("data.cache_dir", "gs://b/x", "a URL is not read here"),
        ("data.tokenizer", "hf:s3://b/tokenizer.json", "a URL is not read here"),
        ("data.tokenizer", "hf://a/b/tokenizer.json", "a URL is not read here"),
        ("eval.tasks", "s3://b/task.yaml", "a URL is not read here"),
    ],
)
def test_a_path_that_is_a_url_is_refused_with_what_is_allowed(
    key: str, value: str, allowed: str
) -> None:
    section, name = key.split(".")
    data = {**DATA, section: {**DATA.get(section, {}), name: value}}
    with pytest.raises(ConfigError, match=rf"^{key}.*'{value}': a path on this machine; {allowed}"):
        make_config(data)


def test_a_missing_back_end_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACK_ENDS, "s3", "no_such_module")
    with pytest.raises(ValueError, match=r"s3://b/c: s3:// needs .*pip install 'coatlm\[remote\]'"):
        Location.of("s3://b/c")


def test_signatures_in_messages_of_back_ends_are_left_out() -> None:
    said = "403 for url: https://host/a/b?X-Amz-Signature=SECRET&x=1 and more"
    assert without_secrets(said) == "403 for url: https://host/a/b?... and more"
