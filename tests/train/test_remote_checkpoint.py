"""Checkpoints at URLs: uploaded whole or not at all, downloaded, and skipped when damaged."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from coatlm import remote
from coatlm.config import ConfigError
from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from coatlm.remote import Location
from coatlm.train import manifest, remote_checkpoint
from coatlm.train.checkpoint import Checkpointer, CheckpointError, check_resume, tensor_checksums
from coatlm.train.manifest import MANIFEST, step_name, verify
from coatlm.train.remote_checkpoint import (
    check_upload,
    discard_downloads,
    download_checkpoint,
    remote_candidates,
)
from tests.forks import Forks
from tests.object_store import COMMIT, FAULTS, KEYS, REPOSITORY, Faults, hub, s3
from tests.train.layouts import names, pieces_of, tensors_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

LOG = logging.getLogger("test_remote_checkpoint")


@pytest.fixture(scope="module")
def store() -> Iterator[Faults]:
    with s3() as faults:
        yield faults


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.01, 0.01))


def save(directory: Path, upload: str, *steps: int, **options: Any) -> Path:
    """Save and upload `tensors_of(step)` for each step; returns the last checkpoint."""
    saver = Checkpointer(directory, keep=2, async_save=True, upload=upload, **options)
    for step in steps:
        saver.save(step, pieces_of(tensors_of(step), "copies"), {"step": step})
    saver.wait()
    return directory / step_name(steps[-1])


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_what_is_uploaded_is_downloaded_whole_whatever_fails_on_the_way(
    fault: str | None, store: Faults, tmp_path: Path
) -> None:
    url = f"s3://data/{fault}"
    saved = save(tmp_path / "checkpoints", url, 1, 2)
    assert [u.rsplit("/", 1)[1] for u in remote_candidates(url)] == [step_name(2), step_name(1)]
    if fault:
        store.inject(".distcp", fault, 2 if fault != "flip" else 1)
        store.inject(MANIFEST, fault if fault != "flip" else "drop", 2)
    found = download_checkpoint(url, tmp_path / "downloads", LOG)
    store.clear()
    assert found.name == saved.name and verify(found) == []
    assert {p.name: p.read_bytes() for p in found.iterdir()} == {
        p.name: p.read_bytes() for p in saved.iterdir()
    }


@pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="needs huggingface_hub")
def test_checkpoints_are_uploaded_to_the_hub_and_downloaded_again(tmp_path: Path) -> None:
    (root := tmp_path / "hub").mkdir()
    url = f"hf://datasets/{REPOSITORY}/runs/one"
    with hub(root) as faults:
        check_upload(url, tmp_path)
        assert not any(path.is_file() for path in root.rglob("*"))  # the probe is gone again
        faults.inject(COMMIT, "503", 2)
        faults.requests.clear()
        saved = save(tmp_path / "checkpoints", url, 1, 2)
        files = 2 * len(list(saved.iterdir()))
        assert sum(faults.requests[key] for key in faults.requests if key[0] == "POST") == files + 2
        save(tmp_path / "checkpoints", url, 2)  # once more, over the first
        found = download_checkpoint(url, tmp_path / "downloads", LOG)
    assert found.name == saved.name and verify(found) == []
    uploaded = root / "runs" / "one" / step_name(2)
    for directory in (found, uploaded):
        assert {p.name: p.read_bytes() for p in directory.iterdir()} == {
            p.name: p.read_bytes() for p in saved.iterdir()
        }


def test_a_download_that_was_interrupted_goes_on_with_whole_files(
    store: Faults, tmp_path: Path
) -> None:
    save(tmp_path / "checkpoints", "s3://data/again", 1)
    found = download_checkpoint("s3://data/again", tmp_path / "downloads", LOG)
    (found / "state.json").write_bytes(b"cut")
    store.clear()
    assert download_checkpoint("s3://data/again", tmp_path / "downloads", LOG) == found
    assert verify(found) == []
    fetched = {path.rsplit("/", 1)[1] for method, path in store.requests if method == "GET"}
    assert fetched >= {"state.json", MANIFEST} and "common.pt" not in fetched


def test_only_downloads_are_removed(store: Faults, tmp_path: Path) -> None:
    """A new download removes the one before, and a start that has resumed all of them."""
    save(tmp_path / "checkpoints", "s3://data/mine", 1, 2)
    own = tmp_path / "downloads" / step_name(50)
    shutil.copytree(tmp_path / "checkpoints" / step_name(1), own)
    for name in ("notes.txt", ".links.url", "....url"):
        (own.parent / name).write_text("of the user")
    before = names(own.parent)
    first = download_checkpoint(f"s3://data/mine/{step_name(1)}", own.parent, LOG)
    assert verify(first) == []
    second = download_checkpoint("s3://data/mine", own.parent, LOG)
    assert not first.exists() and second.name == step_name(2)
    assert names(own.parent) == sorted([*before, second.name, f".{second.name}.url"])
    discard_downloads(tmp_path)
    assert names(own.parent) == before and verify(own) == []
    discard_downloads(tmp_path / "checkpoints")  # without downloads
    assert verify(tmp_path / "checkpoints" / step_name(2)) == []


def test_a_download_does_not_overwrite_a_directory_of_the_user(
    store: Faults, tmp_path: Path
) -> None:
    save(tmp_path / "checkpoints", "s3://data/taken", 1)
    (own := tmp_path / "downloads" / step_name(1)).mkdir(parents=True)
    (own / MANIFEST).write_text("of the user")
    with pytest.raises(CheckpointError, match="exists and is no download of coatlm: rename it"):
        download_checkpoint("s3://data/taken", own.parent, LOG)
    discard_downloads(tmp_path)
    assert (own / MANIFEST).read_text() == "of the user" and names(own.parent) == [own.name]


def test_an_upload_that_is_cut_off_is_no_checkpoint(
    store: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Step 2 is written a second time, and its upload ends before the manifest."""
    save(tmp_path / "checkpoints", "s3://data/cut", 1, 2)
    upload = Location.upload

    def fail(self: Location, file: Path) -> None:
        if file.name == "state.json":
            raise remote.RemoteError(f"{self.url}: the network is gone")
        upload(self, file)

    monkeypatch.setattr(Location, "upload", fail)
    with caplog.at_level(logging.WARNING, logger="coatlm"):
        saved = save(tmp_path / "checkpoints", "s3://data/cut", 2)
    assert "s3://data/cut/step_00000002 was not uploaded" in caplog.text
    assert "the network is gone" in caplog.text
    assert verify(saved) == []
    assert remote_candidates("s3://data/cut") == ["s3://data/cut/step_00000001"]
    assert (Location.of("s3://data/cut") / "step_00000002/common.pt").exists()


@pytest.mark.parametrize("part", [1 << 26, 1000])
def test_a_checkpoint_that_is_damaged_at_its_url_is_skipped_with_a_warning(
    store: Faults, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Whether its files have one checksum or several."""
    monkeypatch.setattr(manifest, "PART", part)
    save(tmp_path / "checkpoints", "s3://data/bad", 1, 2)
    state = Location.of("s3://data/bad/step_00000002/state.json")
    whole = state.fs.cat_file(state.path)
    for content, reason in ((whole[::-1], "its checksum differs"), (b"x", "has 1 bytes")):
        state.write(content)
        found = download_checkpoint("s3://data/bad", tmp_path / "downloads", LOG)
        assert found.name == step_name(1)
        assert f"{state.url}" in caplog.text and reason in caplog.text
    state.remove()
    with pytest.raises(CheckpointError, match="no intact checkpoint") as error:
        download_checkpoint("s3://data/bad/step_00000002", tmp_path / "downloads", LOG)
    assert f"{state.url} is missing" in str(error.value)


def test_a_manifest_at_a_url_names_no_file_outside(store: Faults, tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", "s3://data/evil", 1)
    at = Location.of("s3://data/evil/step_00000001") / MANIFEST
    content = json.loads(at.fs.cat_file(at.path))
    content["files"]["../../stolen"] = content["files"]["state.json"]
    at.write(json.dumps(content).encode())
    with pytest.raises(CheckpointError, match="which is not a file's name"):
        download_checkpoint("s3://data/evil", tmp_path / "a" / "downloads", LOG)
    assert not (tmp_path / "stolen").exists() and not (tmp_path / "a" / "stolen").exists()


def test_urls_that_cannot_be_used_are_refused_before_work_starts(
    store: Faults, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"resume=s3://data/empty: .*holds no checkpoint"):
        check_resume("s3://data/empty", tmp_path)
    check_upload("s3://data/new/run", tmp_path)
    assert Location.of("s3://data/new/run").names() == []
    with pytest.raises(ConfigError, match=r"checkpoint\.upload=s3://nowhere/run: s3://nowhere"):
        check_upload("s3://nowhere/run", tmp_path)
    own = tmp_path / "run" / "checkpoints"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "run")
    for target in (own, f"{own}/", link / "checkpoints"):
        with pytest.raises(ConfigError, match=r"must not be .*, where the run itself saves"):
            check_upload(f"file://{target}", own)
    check_upload(f"file://{own}/copies", own)


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Forks:
    return Forks(tmp_path_factory.mktemp("output"))


def test_a_run_on_another_machine_goes_on_from_urls_alone(
    store: Faults, tmp_path: Path, forks: Forks
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(4000)))
    preprocess([str(text)], tmp_path / "data", Options(), workers=1)
    for path in tmp_path.glob("data.*"):
        Location.of(f"s3://data/corpus/{path.name}").upload(path)
    sizes = {"layers": 1, "hidden": 32, "ffn": 48, "heads": 2, "kv_heads": 2}
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    words += ["data.text=[]", "data.paths=[s3://data/corpus/data]", "data.seq_len=32"]
    words += ["train.steps=4", "train.micro_batch=2", "train.global_batch=4", "train.eval_every=0"]
    words += ["data.remote_block=16384", "checkpoint.every=2", "log.every=1", "checkpoint.keep=9"]

    def run(name: str, *more: str) -> Path:
        own = [f"run.dir={tmp_path / name}", f"data.cache_dir={tmp_path / name}-cache"]
        code, output = forks.run("configs/quickstart.yaml", *words, *own, *more)
        assert code == 0, output[-3000:]
        return tmp_path / name

    first = run("first", "checkpoint.upload=s3://data/run")
    second = run("second", "checkpoint.resume=s3://data/run/step_00000002")
    last = f"checkpoints/{step_name(4)}"
    assert tensor_checksums(second / last) == tensor_checksums(first / last)
    assert remote_candidates("s3://data/run")[0] == f"s3://data/run/{step_name(4)}"
    assert not (second / remote_checkpoint.DOWNLOADS).exists()
    log = (second / "train.log").read_text()
    assert "downloaded s3://data/run/step_00000002" in log and "at step 2" in log
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in log
    on = ["checkpoint.resume=s3://data/run", "checkpoint.upload=s3://data/run"]
    run("third", *on, "train.steps=6")  # writes its first checkpoint, of step 6
    assert remote_candidates("s3://data/run")[0] == f"s3://data/run/{step_name(6)}"


@pytest.mark.parametrize("resume", [f"checkpoints/{step_name(2)}", "none", "elsewhere"])
def test_what_a_run_uploads_after_it_went_back_is_newer_than_what_it_left(
    store: Faults, tmp_path: Path, forks: Forks, resume: str
) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(4000)))
    url, directory = f"s3://data/back-{resume}", tmp_path / "run"
    sizes = {"layers": 1, "hidden": 32, "ffn": 48, "heads": 2, "kv_heads": 2}
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    words += [f"data.text=[{tmp_path / 'text.txt'}]", f"data.cache_dir={tmp_path / 'cache'}"]
    words += ["data.seq_len=32", "train.micro_batch=2", "train.global_batch=4"]
    words += ["train.eval_every=0", "checkpoint.every=2", f"checkpoint.upload={url}"]
    words += [f"run.dir={directory}"]
    last = "none" if resume == "none" else f"{directory}/{resume}"
    if resume == "elsewhere":  # another machine, which has nothing but the URL
        last = f"{url}/{step_name(2)} run.dir={tmp_path / 'other'}"
    back = f"train.steps=3 checkpoint.resume={last}".split()
    for more in (["train.steps=4"], back):
        code, output = forks.run("configs/quickstart.yaml", *words, *more)
        assert code == 0, output[-3000:]
    assert remote_candidates(url)[0] == f"{url}/{step_name(3)}"
