"""file://: a local directory is a store for datasets, text and checkpoints, like any other."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from coatlm.data.dataset import open_datasets
from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from coatlm.train.checkpoint import Checkpointer
from coatlm.train.manifest import step_name, verify
from coatlm.train.remote_checkpoint import download_checkpoint, remote_candidates
from tests.data.test_remote import BYTE, batches, options
from tests.train.layouts import pieces_of, tensors_of


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_of_this_machine_is_a_store_for_data_and_checkpoints(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"{n} and {n * n}" * 9}) + "\n" for n in range(300))
    (tmp_path / "in.jsonl").write_text(lines)
    preprocess([f"file://{tmp_path}/*.jsonl"], tmp_path / "text", Options(), workers=1)
    here = open_datasets(options(tmp_path / "text", tmp_path / "cache"), BYTE, seed=3)
    there = open_datasets(options(f"file://{tmp_path}/text", tmp_path / "cache"), BYTE, seed=3)
    assert there.identity() == here.identity()
    assert batches(there.train, 6) == batches(here.train, 6)
    url, own = f"file://{tmp_path}/up", tmp_path / "own"
    saver = Checkpointer(own, keep=1, async_save=False, upload=url)
    for step in (1, 2):
        saver.save(step, pieces_of(tensors_of(step), "copies"), {"step": step})
    saver.wait()
    assert list(remote_candidates(url)) == [f"{url}/{step_name(step)}" for step in (2, 1)]
    fetched = download_checkpoint(url, tmp_path / "downloads", logging.getLogger("test"))
    assert fetched.name == step_name(2) and verify(fetched) == []
    assert {p.name: p.read_bytes() for p in fetched.iterdir()} == {
        p.name: p.read_bytes() for p in (own / step_name(2)).iterdir()
    }
