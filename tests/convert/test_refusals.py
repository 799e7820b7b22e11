"""A conversion that cannot be exact ends with one line, before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from coatlm.commands.convert import main
from coatlm.config.errors import LONGEST
from coatlm.convert.from_hf import from_huggingface
from coatlm.convert.to_hf import to_huggingface
from coatlm.hf.config import (
    FIXED,
    HARMLESS,
    MODEL_FIELDS,
    WINDOW,
    check_token_ids,
    read_model,
    run_config,
)
from coatlm.hf.files import WeightFiles, write_json
from coatlm.hf.rotary import ROTARY
from coatlm.train.shards import StoredTensors
from tests.hf.models import make_model
from tests.test_files import small_disk
from tests.train.test_shards import seal

Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]
NORM = "model.layers.1.self_attn.q_norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    make_model("llama bias").save_pretrained(directory)
    return directory


def edited(original: Path, directory: Path, edit: Edit) -> Path:
    """A copy of `original` with another config.json and other tensors."""
    weights = WeightFiles.open(original)
    tensors = {name: weights.read(name) for name in weights.files}
    config = json.loads((original / "config.json").read_text())
    edit(config, tensors)
    directory.mkdir()
    write_json(directory / "config.json", config)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


REFUSED: dict[str, tuple[Edit, str]] = {
    "missing": (lambda c, t: t.pop(UP), f"{UP} is missing"),
    "shape": (
        lambda c, t: t.update({UP: torch.zeros(95, 64)}),
        f"{UP} is [95, 64], config.json says [96, 64]",
    ),
    "extra": (lambda c, t: t.update({NORM: torch.ones(16)}), f"{NORM} has no place"),
    "bias": (
        lambda c, t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(64)}),
        "model.layers.0.self_attn.o_proj.bias is not zero",
    ),
    "untied": (
        lambda c, t: c.update({"tie_word_embeddings": True}),
        "tie_word_embeddings=true, but lm_head.weight differs",
    ),
    "mixed": (
        lambda c, t: t.update({UP: t[UP].half()}),
        "the weights are float16, float32: choose the dtype",
    ),
    "field": (lambda c, t: c.update({"clip_qkv": 8.0}), "clip_qkv=8.0 is not known"),
    "layers": (
        lambda c, t: c.update({"num_hidden_layers": 9999}),
        "config.json has 9999 layers, its weights only",
    ),
    "hidden": (
        lambda c, t: c.update({"hidden_size": 2**20, "head_dim": 16}),
        "model.embed_tokens.weight is [263, 64], config.json says [263, 1048576]",
    ),
    "vocab": (
        lambda c, t: c.update({"vocab_size": 2**24}),
        "model.embed_tokens.weight is [263, 64], config.json says [16777216, 64]",
    ),
    "bound": (
        lambda c, t: c.update({"num_hidden_layers": 10**6}),
        "model.layers=1000000: Input should be less than or equal to 10000",
    ),
    "eos": (lambda c, t: c.update({"eos_token_id": 10**30}), "eos_token_id=1000"),
    "family": (lambda c, t: c.update({"model_type": ["llama"]}), "model_type=['llama']"),
    "long": (lambda c, t: c.update({"x" * 5000: 1}), "config.json: xxx"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_directory_that_does_not_fit_is_refused_by_name(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    edit, complaint = REFUSED[name]
    source = edited(original, tmp_path / "hf", edit)
    target = tmp_path / "coatlm"
    arguments = ["--from", "hf", "--to", "coatlm", str(source), str(target), "--tokenizer", "byte"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1
    assert len(error) <= len("error: \n") + LONGEST
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


HOSTILE = [None, True, -1, 0, 1.5, 10**400, 1e308, "x", "", [], [[]], {}, {"a": {}}, ["x" * 1000]]
FIELDS = sorted({*MODEL_FIELDS, *HARMLESS, *ROTARY, *WINDOW, *FIXED})


@pytest.mark.parametrize("family", [None, "qwen2"])
def test_every_field_of_config_json_is_read_or_refused_by_its_name(family: str | None) -> None:
    base = json.loads(json.dumps(make_model("llama bias").config.to_dict()))
    base = {name: value for name, value in base.items() if name in FIELDS}
    changes = {} if family is None else {"model_type": family, "attention_bias": None}
    changes |= {} if family is None else {"architectures": None}
    read_model(base | changes)
    refused = 0
    for name in FIELDS:
        for value in HOSTILE:
            try:
                model = read_model(base | changes | {name: value})
                check_token_ids("config.json", base | changes | {name: value}, 263)
                run_config(model, tokenizer="byte", seq_len=32, precision="fp32")
            except ValueError as error:
                refused += 1
                assert name in str(error) or MODEL_FIELDS.get(name, "?") in str(error)
    assert refused > 3 * len(HOSTILE)


NESTED = '{"a": ' + "[" * 100_000
BROKEN = {
    "not JSON": "{",
    "nested too deeply": NESTED,
    "holds a list": "[1, 2]",
}


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    ],
)
@pytest.mark.parametrize("complaint", list(BROKEN))
def test_a_file_that_is_no_object_of_json_is_refused_on_the_way_in(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, complaint: str
) -> None:
    source = shutil.copytree(original, tmp_path / "hf")
    (source / name).write_text(BROKEN[complaint])
    arguments = ["--from", "hf", "--to", "coatlm", str(source), str(tmp_path / "coatlm")]
    own = [] if "token" in name else ["--tokenizer", "byte"]
    assert main([*arguments, *own]) == 2
    error = capsys.readouterr().err
    assert f"hf/{name}: " in error and complaint in error and len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


GENERATION = {
    "eos_token_id='</s>': a token id": {"eos_token_id": "</s>"},
    "eos_token_id=[2, 9999]: a token id from 0 to 262": {"eos_token_id": [2, 9999]},
    "bos_token_id=1.0: a token id": {"bos_token_id": 1.0},
    "eos_token_id=-1: a token id": {"eos_token_id": -1},
    "pad_token_id={}: a token id": {"pad_token_id": {}},
}


@pytest.mark.parametrize("complaint", list(GENERATION))
def test_a_generation_config_without_token_ids_is_refused_in_both_directions(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], complaint: str
) -> None:
    from_huggingface(original, tmp_path / "coatlm", tokenizer="byte")
    source = shutil.copytree(original, tmp_path / "hf")
    write_json(source / "generation_config.json", GENERATION[complaint])
    there = ["--from", "hf", "--to", "coatlm", str(source), str(tmp_path / "new")]
    back = ["--from", "coatlm", "--to", "hf", str(tmp_path / "coatlm"), str(tmp_path / "new")]
    for arguments in ([*there, "--tokenizer", "byte"], [*back, "--like", str(source)]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert f"generation_config.json: {complaint}" in error and len(error.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["coatlm", "hf"]


def test_a_small_disk_is_one_line_and_nothing_is_left_of_a_conversion(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from_huggingface(original, tmp_path / "coatlm", tokenizer="byte")
    there = ["--from", "hf", "--to", "coatlm", str(original), str(tmp_path / "in" / "new")]
    back = [
        "--from",
        "coatlm",
        "--to",
        "hf",
        str(tmp_path / "coatlm"),
        str(tmp_path / "in" / "new"),
    ]
    for arguments in ([*there, "--tokenizer", "byte"], back):
        for limit in (10, 50_000):  # within the first small file, and within the weights
            with small_disk(limit):
                assert main(arguments) == 2
            error = capsys.readouterr().err
            assert error == f"error: {tmp_path}/in/new: cannot be written: File too large\n"
            assert [path.name for path in tmp_path.iterdir()] == ["coatlm"]


def test_a_state_with_more_layers_than_weights_is_refused_before_a_plan_is_made(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from_huggingface(original, tmp_path / "coatlm", tokenizer="byte")
    path = tmp_path / "coatlm" / "state.json"
    state = json.loads(path.read_text())
    state["config"]["model"]["layers"] = 9999
    path.write_text(json.dumps(state))
    seal(tmp_path / "coatlm")
    arguments = ["--from", "coatlm", "--to", "hf", str(tmp_path / "coatlm"), str(tmp_path / "new")]
    assert main(arguments) == 2
    assert "has 9999 layers, its weights only" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_tied_head_that_is_stored_too_and_inverse_frequencies_are_left_out(
    original: Path, tmp_path: Path
) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["tie_word_embeddings"] = True
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    source = edited(original, tmp_path / "hf", edit)
    from_huggingface(source, tmp_path / "coatlm", tokenizer="byte")
    assert "output_layer.weight" not in StoredTensors(tmp_path / "coatlm").described


def test_types_are_converted_where_that_is_asked_for(original: Path, tmp_path: Path) -> None:
    def half(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})

    source = edited(original, tmp_path / "hf", half)
    from_huggingface(source, tmp_path / "coatlm", tokenizer="byte", dtype="bf16")
    to_huggingface(tmp_path / "coatlm", tmp_path / "back", dtype="fp16")
    half_up = WeightFiles.open(source).read(UP)
    assert torch.equal(WeightFiles.open(tmp_path / "back").read(UP), half_up.bfloat16().half())
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "float16"

    def large(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[UP][3, 4] = 1e5

    from_huggingface(edited(original, tmp_path / "big", large), tmp_path / "c", tokenizer="byte")
    with pytest.raises(ValueError, match=r"linear_fc1.weight has values beyond fp16's 65504"):
        to_huggingface(tmp_path / "c", tmp_path / "no", dtype="fp16")
    assert not (tmp_path / "no").exists()


def test_bad_targets_and_options_end_with_exit_code_2(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(source: Path, target: Path, kind: str, *options: str) -> tuple[int, str]:
        other = "coatlm" if kind == "hf" else "hf"
        try:
            code = main(["--from", other, "--to", kind, str(source), str(target), *options])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, capsys.readouterr().err

    checkpoint = tmp_path / "coatlm"
    assert run(original, checkpoint, "coatlm", "--tokenizer", "byte")[0] == 0
    cases = [
        (original, tmp_path / "new", "coatlm", [], "has no tokenizer.json"),
        (original, checkpoint, "coatlm", ["--tokenizer", "byte"], "exists already"),
        (original, tmp_path / "new", "coatlm", ["--like", "x"], "--like does not apply"),
        (
            original,
            tmp_path / "new",
            "coatlm",
            ["--tokenizer", "byte", "--seq-len", "0"],
            "seq_len",
        ),
        (checkpoint, tmp_path / "new", "hf", ["--vocab-size", "999"], "vocab_size=999"),
        (checkpoint, tmp_path / "new", "hf", ["--vocab-size", "0"], "vocab_size=0"),
        (checkpoint, tmp_path / "new", "hf", ["--vocab-size", "256"], "must be in 257..263"),
        (checkpoint, tmp_path / "new", "hf", ["--seq-len", "9"], "--seq-len does not apply"),
        (checkpoint, tmp_path / "new", "hf", ["--fp8-scales", "tensor"], "need --format fp8"),
        (checkpoint, tmp_path / "new", "hf", ["--max-shard-size", "2TB"], "2TB"),
        (tmp_path / "nowhere", tmp_path / "new", "coatlm", [], "No such file"),
    ]
    for source, target, kind, options, complaint in cases:
        code, error = run(source, target, kind, *options)
        assert code == 2 and complaint in error, (options, error)
        assert not (tmp_path / "new").exists()
    file = next(checkpoint.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, error = run(checkpoint, tmp_path / "new", "hf")
    assert code == 4 and "checksum differs" in error


def test_embedding_too_small_for_the_tokenizer_is_refused(original: Path, tmp_path: Path) -> None:
    def shrink(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["vocab_size"] = 200
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:200].clone()

    source = edited(original, tmp_path / "hf", shrink)
    with pytest.raises(ValueError, match="ids up to 256, the embedding 200 rows"):
        from_huggingface(source, tmp_path / "coatlm", tokenizer="byte")


def test_rows_of_special_tokens_cannot_be_left_out(original: Path, tmp_path: Path) -> None:
    source = edited(original, tmp_path / "hf", lambda c, t: c.update({"pad_token_id": 260}))
    from_huggingface(source, tmp_path / "coatlm", tokenizer="byte")
    with pytest.raises(ValueError, match=r"vocab_size=260: must be in 261\.\.263"):
        to_huggingface(tmp_path / "coatlm", tmp_path / "back", vocab_size=260)
    to_huggingface(tmp_path / "coatlm", tmp_path / "back", vocab_size=261)
    described = WeightFiles.open(tmp_path / "back").describe()
    assert described["model.embed_tokens.weight"].shape[0] == 261


def test_checkpoint_that_moved_still_exports(original: Path, tmp_path: Path) -> None:
    from_huggingface(original, tmp_path / "coatlm", tokenizer="byte")
    shutil.move(tmp_path / "coatlm", tmp_path / "elsewhere")
    to_huggingface(tmp_path / "elsewhere", tmp_path / "back")
    assert WeightFiles.open(tmp_path / "back").files == WeightFiles.open(original).files
