"""Runs that start from a Hugging Face directory: the same weights in every layout."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coatlm.config import Config, ConfigError, make_config
from coatlm.convert.from_hf import from_huggingface
from coatlm.data.tokenizer import ByteTokenizer
from coatlm.hf.run_config import completed
from coatlm.hf.source import opened
from coatlm.parallel.groups import release_groups
from coatlm.train import start
from coatlm.train.checkpoint import read_state, tensor_checksums
from coatlm.train.hf_weights import check_huggingface
from coatlm.train.setup import Launch
from coatlm.train.shards import StoredTensors
from tests.bpe import train_bpe
from tests.hf.models import SMALL
from tests.train.test_resume import LAYOUTS, metrics_of, run_config, start_jobs

STILL = {"lr": 1e-60, "min_lr": 0.0, "schedule": "constant", "warmup_steps": 0}  # in fp32 it is 0
CASES: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "biased": {"model_type": "qwen2", "head_dim": 24},
    "granite": {
        **{"model_type": "granite", "embedding_multiplier": 6.0, "logits_scaling": 3.0},
        **{"residual_multiplier": 0.3, "attention_multiplier": 0.1, "pad_token_id": 0},
    },
    "olmo2": {"model_type": "olmo2", "pad_token_id": 0},
    "gemma2": {
        **{"model_type": "gemma2", "head_dim": 24, "query_pre_attn_scalar": 20},
        **{"sliding_window": 10, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "gemma3": {
        **{"model_type": "gemma3_text", "head_dim": 24, "sliding_window": 10},
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")],
    },
}
RUNS = {  # name -> (processes, model, parallel and model.vocab)
    "single": (1, "biased", {}),
    "tp2 sp": (2, "biased", {}),
    "pp2": (2, "tied", {}),
    "pp2 vpp2": (2, "biased", {}),
    "dp2 zero1": (2, "tied", {"parallel": {"zero": 2}}),
    "dp2 zero3": (2, "biased", {}),
    "biased tp2 sp": (2, "biased", {"checkpoint": {"resume": "hf:file://ROOT/biased"}}),
    "tp2 pp2": (4, "tied", {}),
    "tp2 dp2 zero1": (4, "biased", {}),
    **{f"granite {n}": (ranks, "granite", {}) for n, ranks in (("single", 1), ("tp2 pp2", 4))},
    **{f"gemma2 {n}": (ranks, "gemma2", {}) for n, ranks in (("single", 1), ("tp2 pp2", 4))},
    **{f"gemma3 {n}": (ranks, "gemma3", {}) for n, ranks in (("single", 1), ("tp2 cp2", 4))},
    **{f"olmo2 {n}": (ranks, "olmo2", {}) for n, ranks in (("single", 1), ("pp2", 2), ("cp2", 2))},
}


def job(root: Path, name: str, source: str, **sections: Any) -> Config:
    """One step whose learning rate changes nothing, then a checkpoint."""
    base = run_config(
        root / name,
        layout if (layout := name.removeprefix(f"{source} ")) in LAYOUTS else "single",
        optim=STILL,
        train={"steps": 1, "eval_every": 0},
        checkpoint={"every": 1, "resume": f"hf:{root / source}"},
    ).model_dump(mode="json")
    del base["model"], base["data"]["tokenizer"]
    changed = {section: base.get(section, {}) | values for section, values in sections.items()}
    if "checkpoint" in changed:
        changed["checkpoint"]["resume"] = changed["checkpoint"]["resume"].replace("ROOT", str(root))
    return make_config(completed(base | {"model": {"vocab": 384}} | changed))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of transformers, their conversions, and a run from each in the layouts of RUNS."""
    root = tmp_path_factory.mktemp("hf weights")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(3000)))
    for model, fields in CASES.items():
        config = AutoConfig.for_model(**{**SMALL, "num_hidden_layers": 4, **fields})
        torch.manual_seed(5)
        made = AutoModelForCausalLM.from_config(config)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        made.save_pretrained(root / model, max_shard_size="100KB")
        from_huggingface(
            root / model, root / f"{model} converted", tokenizer="byte", vocab_multiple=128
        )
    for size in (1, 2, 4):
        chosen = [name for name, (ranks, _, _) in RUNS.items() if ranks == size]
        jobs = [job(root, name, RUNS[name][1], **RUNS[name][2]) for name in chosen]
        if size == 1:
            jobs.append(
                job(root, "bf16", "biased", precision={"recipe": "bf16"}, optim={"lr": 1e-60})
            )
            again = jobs[0].model_dump(mode="json")
            again["train"]["steps"] = 2
            jobs.append(make_config(again))
        start_jobs(size, jobs)
    return root


@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_in_any_layout_starts_with_the_bits_of_a_conversion(root: Path, name: str) -> None:
    expected = tensor_checksums(root / f"{RUNS[name][1]} converted")
    found = tensor_checksums(root / name / "checkpoints/step_00000001")
    assert {key: found[key] for key in expected} == expected
    assert {key for key in found if not key.startswith("optimizer.")} == expected.keys()


@pytest.mark.parametrize(
    "name", ["granite tp2 pp2", "olmo2 pp2", "olmo2 cp2", "gemma2 tp2 pp2", "gemma3 tp2 cp2"]
)
def test_layers_of_other_families_have_the_same_loss_and_gradients_in_every_layout(
    root: Path, name: str
) -> None:
    (first,), (alone,) = (metrics_of(root / n) for n in (name, f"{RUNS[name][1]} single"))
    assert alone["grad_norm"] > 0.01
    for key in ("loss", "grad_norm"):  # sums in fp32 in another order
        assert first[key] == pytest.approx(alone[key], rel=1e-4)


def test_a_run_in_bf16_casts_the_weights_and_says_so(root: Path) -> None:
    key = "decoder.layers.2.self_attention.linear_qkv.weight"
    found = StoredTensors(root / "bf16/checkpoints/step_00000001").read(key)
    whole = StoredTensors(root / "biased converted").read(key)
    assert torch.equal(found, whole.bfloat16()) and found.dtype == torch.bfloat16
    assert "float32, cast to bfloat16" in (root / "bf16/train.log").read_text()


def test_the_next_start_continues_the_run_and_does_not_load_the_directory_again(
    root: Path,
) -> None:
    assert [line["step"] for line in metrics_of(root / "single")] == [1, 2]
    log = (root / "single/train.log").read_text()
    assert log.count("read by 1 ranks") == 1
    assert "continues its newest checkpoint" in log
    assert read_state(root / "single/checkpoints/step_00000002")["updates"] == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"model": {"ffn": 192}}, "model.ffn=192: "),
    "formula": ({"model": {"norm_eps": 1e-6}}, "model.norm_eps=1e-06: "),
    "rows": ({"model": {"vocab": 260}}, "model.vocab=260: "),
    "tokenizer": ({}, "data.tokenizer=byte is not the directory's tokenizer, hf:"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_does_not_fit_is_refused_before_a_model_is_built(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    changes, complaint = REFUSED[name]
    directory = root / "biased"
    if name == "tokenizer":
        directory = tmp_path / "with tokenizer"
        directory.mkdir()
        for path in (root / "biased").iterdir():
            (directory / path.name).symlink_to(path)
        train_bpe(["one two"], vocab_size=260).save(str(directory / "tokenizer.json"))
    config = job(root, "biased", "biased", **changes).model_dump(mode="json")
    config["run"]["dir"] = str(tmp_path / "run")
    config["checkpoint"]["resume"] = f"hf:{directory}"
    monkeypatch.setattr(start, "Trainer", lambda *_: pytest.fail("built before the check"))
    with ExitStack() as stack, pytest.raises(ConfigError) as caught:
        start.set_up(make_config(config), Launch(), stack)
    release_groups()
    torch.distributed.destroy_process_group()
    assert str(caught.value).startswith(f"checkpoint.resume=hf:{directory}: {complaint}")


def test_rows_may_be_added_for_a_tokenizer_that_has_more_ids_than_are_stored(root: Path) -> None:
    config = job(root, "biased", "biased")
    with opened(root / "biased", config.data.cache_dir) as source:
        assert source.rows < 384
    check_huggingface(root / "biased", config, OtherTokenizer(384), 384)
    with pytest.raises(ConfigError, match=r"ids up to 384, the embedding 384 rows; model\.vocab"):
        check_huggingface(root / "biased", config, OtherTokenizer(385), 384)


class OtherTokenizer(ByteTokenizer):
    """Bytes and more ids."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
