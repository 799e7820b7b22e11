"""Hugging Face to coatlm and back: the same logits, the same bits, whatever the layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coatlm.commands.convert import main
from coatlm.config import Config, make_config, read_mapping
from coatlm.convert.from_hf import from_huggingface
from coatlm.convert.to_hf import to_huggingface
from coatlm.data.tokenizer import make_tokenizer
from coatlm.hf.files import WeightFiles
from coatlm.parallel.groups import release_groups
from coatlm.train import start
from coatlm.train.checkpoint import tensor_checksums, verify
from coatlm.train.setup import Launch
from coatlm.train.shards import StoredTensors
from tests.hf.models import CASES, ours, save_model, theirs, tokens
from tests.train.test_resume import run_config, start_jobs

TOLERANCE = 1e-4  # of logits of size 1 after three fp32 layers: sums are taken in another order
STILL = {"lr": 1e-60, "min_lr": 0.0, "schedule": "constant", "warmup_steps": 0}  # in fp32 it is 0


def bits(directory: Path) -> dict[str, bytes]:
    """Every tensor of a Hugging Face directory, with its type."""
    weights = WeightFiles.open(directory)
    return {
        name: str(weights.read(name).dtype).encode()
        + weights.read(name).reshape(-1).view(torch.uint8).numpy().tobytes()
        for name in weights.files
    }


def train_here(jobs: Sequence[Config]) -> None:
    """Run each job in this process."""
    for config in jobs:
        with ExitStack() as stack:
            assert start.set_up(config, Launch(), stack).run_steps() == 0
        release_groups()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=list(CASES))
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(model of transformers, its directory, its checkpoint, what that was converted back to)."""
    root = tmp_path_factory.mktemp("converted")
    model = save_model(request.param, root / "hf")
    from_huggingface(root / "hf", root / "coatlm", tokenizer="byte")
    to_huggingface(root / "coatlm", root / "back", shard_bytes=100_000)
    return model, root / "hf", root / "coatlm", root / "back"


def test_logits_of_a_converted_model_are_those_of_transformers(converted: Any) -> None:
    model, _, checkpoint, _ = converted
    expected = theirs(model, tokens())
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(checkpoint, tokens()), expected, atol=TOLERANCE, rtol=0)


def test_there_and_back_gives_the_same_tensors_bit_by_bit(converted: Any) -> None:
    _, directory, _, back = converted
    assert (back / "model.safetensors.index.json").exists()
    assert bits(back) == bits(directory)


def test_transformers_loads_what_came_back_and_computes_the_same(converted: Any) -> None:
    model, directory, _, back = converted
    assert torch.equal(theirs(back, tokens()), theirs(model, tokens()))
    loaded = AutoModelForCausalLM.from_pretrained(back)
    assert type(loaded) is type(model)
    original, written = (json.loads((d / "config.json").read_text()) for d in (directory, back))
    for name in ("bos_token_id", "eos_token_id", "max_position_embeddings", "rms_norm_eps"):
        assert written[name] == original[name]


def test_converted_checkpoint_is_whole_and_its_manifest_lists_all_files(converted: Any) -> None:
    _, _, checkpoint, _ = converted
    assert verify(checkpoint) == []
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert {*listed, "manifest.json"} == {path.name for path in checkpoint.iterdir()}
    assert {"config.json", "generation_config.json", "config.yaml"} <= listed.keys()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of untrained weights from one process and from TP2 x PP2, and of a few recipes.

    `from hf` loads a converted checkpoint into TP2 x PP2 by the keys that came with it.
    """
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(3000)))
    save_model("llama gqa rope3 tied", root / "hf")
    main(["--from", "hf", "--to", "coatlm", str(root / "hf"), str(root / "converted"),
          "--tokenizer", "byte", "--vocab-multiple", "128"])  # fmt: skip
    model = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "qkv_bias": True}
    model |= {"tie_embeddings": True, "vocab": 384}
    short = {"steps": 1, "eval_every": 0}

    def job(name: str, layout: str, **sections: Any) -> Any:
        base: dict[str, Any] = {"model": model, "optim": STILL, "train": short}
        base |= {"checkpoint": {"every": 1}}
        return run_config(root / name, layout, **(base | sections))

    keys = read_mapping(root / "converted/config.yaml")
    keys["data"] |= {"text": [str(root / "text.txt")], "cache_dir": str(root / "cache")}
    keys["model"] |= {"layers": 3}
    trained = {"steps": 3, "eval_every": 0}
    recipes = [
        job(
            recipe,
            "single",
            precision={"recipe": "bf16"},
            optim={"recipe": recipe, "lr": 1e-3},
            train=trained,
            checkpoint={"every": 3},
        )
        for recipe in ("coat-lean", "adamw-fp32", "fp8lm", "collage-light")
    ]
    train_here([job("single", "single"), *recipes])
    start = {
        **keys,
        "run": {"dir": str(root / "from hf")},
        "parallel": {"tp": 2, "pp": 1, "sequence_parallel": True},
        "optim": STILL,
        "train": {**short, "micro_batch": 2, "global_batch": 4},
        "checkpoint": {**keys["checkpoint"], "every": 1},
    }
    start_jobs(4, [job("tp2 pp2", "tp2 pp2"), make_config(start)])
    return root


def test_checkpoint_of_tp2_pp2_converts_as_one_of_a_single_process(runs: Path) -> None:
    for name in ("single", "tp2 pp2"):
        to_huggingface(runs / name, runs / f"{name} exported")
    assert bits(runs / "single exported") == bits(runs / "tp2 pp2 exported")


def test_logits_of_an_exported_run_are_those_of_coatlm(runs: Path) -> None:
    to_huggingface(runs / "tp2 pp2", runs / "exported", vocab_size=300)
    checkpoint = runs / "tp2 pp2/checkpoints/step_00000001"
    actual = theirs(runs / "exported", tokens(300)[:, :32])
    expected = ours(checkpoint, tokens(300)[:, :32], vocab=300)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_run_in_tp2_starts_from_a_converted_checkpoint_without_changing_a_bit(runs: Path) -> None:
    trained = tensor_checksums(runs / "from hf/checkpoints/step_00000001")
    start = tensor_checksums(runs / "converted")
    assert {key: trained[key] for key in start} == start


def test_padding_of_the_vocabulary_is_left_behind_on_the_way_back(runs: Path) -> None:
    described = StoredTensors(runs / "converted").described
    assert described["embedding.word_embeddings.weight"][1] == (384, 64)
    to_huggingface(runs / "converted", runs / "unpadded")
    assert bits(runs / "unpadded") == bits(runs / "hf")
    to_huggingface(runs / "from hf", runs / "like", like=runs / "hf")
    assert bits(runs / "like") == bits(runs / "hf")


@pytest.mark.parametrize("recipe", ["coat-lean", "adamw-fp32", "fp8lm", "collage-light"])
def test_fp32_export_is_the_master_and_the_default_is_the_weight(runs: Path, recipe: str) -> None:
    to_huggingface(runs / recipe, runs / f"{recipe} bf16")
    to_huggingface(runs / recipe, runs / f"{recipe} fp32", dtype="fp32")
    stored = StoredTensors(runs / recipe / "checkpoints/step_00000003")
    key, name = "decoder.layers.1.mlp.linear_fc2.weight", "model.layers.1.mlp.down_proj.weight"
    weight = stored.read(key)
    master = f"optimizer.state.fp32_param{{}}.{key}"
    if recipe == "coat-lean":
        low = stored.read(master.format(".remainder")).int()
        expected = ((weight.view(torch.int16).int() << 16) + low).view(torch.float32)
    elif recipe == "adamw-fp32":
        expected = stored.read(master.format(""))
    elif recipe == "collage-light":
        expected = weight.float() + stored.read(master.format(".low")).float()
    else:  # a scale for each 128 elements, in the order of rows
        codes = stored.read(master.format("")).float().view(-1, 128)
        expected = (codes * stored.read(master.format(".scale"))[:, None]).view(weight.shape)
    found = WeightFiles.open(runs / f"{recipe} fp32").read(name)
    assert torch.equal(found, expected)
    assert not torch.equal(found, weight.float())
    assert torch.equal(WeightFiles.open(runs / f"{recipe} bf16").read(name), weight)
    loaded = AutoModelForCausalLM.from_pretrained(runs / f"{recipe} bf16", dtype="auto")
    assert loaded.dtype == torch.bfloat16


def test_run_of_bytes_is_exported_with_a_tokenizer_that_gives_the_same_ids(runs: Path) -> None:
    to_huggingface(runs / "single", runs / "with tokenizer")
    theirs_, ours_ = AutoTokenizer.from_pretrained(runs / "with tokenizer"), make_tokenizer("byte")
    every = bytes(range(256)).decode("latin-1") + " é\u4e2d\U0001f600\n\t  x"
    ids = theirs_.encode(every, add_special_tokens=False)
    assert ids == ours_.encode(every)
    assert theirs_.decode(ids) == every
    assert theirs_.eos_token_id == ours_.eod
    model = AutoModelForCausalLM.from_pretrained(runs / "with tokenizer")
    made = model.generate(torch.tensor([ids[:8]]), max_new_tokens=4, do_sample=False)
    assert made.shape[0] == 1 and 9 <= made.shape[1] <= 12
    assert model.generation_config.eos_token_id == ours_.eod
