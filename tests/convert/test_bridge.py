"""Checkpoints of Megatron-Bridge: the model, the training and the counters beside the tensors.

`bridge/` has a run_config.yaml of three versions, each written by Megatron-Bridge itself, on a
machine without a GPU, with stand-ins for the packages that need one.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from coatlm.commands.convert import main
from coatlm.config import load_config, read_mapping
from coatlm.convert.from_hf import from_huggingface
from coatlm.convert.megatron_args import left_out, read_arguments
from coatlm.convert.megatron_bridge import arguments_in, read_counter
from coatlm.convert.megatron_files import find_iteration
from coatlm.train.checkpoint import read_state
from coatlm.train.dcp import ShardWriter
from coatlm.train.shards import read_tensors
from tests.hf.models import LLAMA3, SMALL, ours, theirs

FILES = Path(__file__).parent / "bridge"
TOLERANCE = 1e-4  # of logits of size 1 after three fp32 layers: sums are taken in another order
STEP, SAMPLES = 5, 37  # not the global batch of 8 times the step: an earlier one was smaller
TOKENS = torch.randint(
    0, int(SMALL["vocab_size"]), (1, 512), generator=torch.Generator().manual_seed(3)
)
LLAMA32 = LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
OWN = {"low_freq_factor": 2.0, "high_freq_factor": 8.0}  # not the defaults of either program
NEW = {"rotary_base": 500_000, "rope_scaling_factor": 32.0}
# version -> fields that differ from those in the file, and the same RoPE for transformers
VERSIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "0.2.0rc6": (OWN, LLAMA3 | OWN),
    "0.3.1": (NEW, LLAMA32),
    "0.7.0": (NEW, LLAMA32),
}
CONTENTS = {v: read_mapping(FILES / f"run_config-{v}.yaml") for v in VERSIONS}  # 1 s each


def run_config(version: str, **model: Any) -> dict[str, Any]:
    """A run_config.yaml with other values for fields of its model that it has."""
    content = copy.deepcopy(CONTENTS[version])
    for name, value in model.items():
        inner = content["model"].get("transformer", {})
        place = inner if name in inner else content["model"]
        assert name in place
        place[name] = value
    return content


def llama(rope: dict[str, Any]) -> Any:
    """transformers' Llama in fp32, with the same random weights for any RoPE."""
    config = AutoConfig.for_model(**SMALL, model_type="llama", rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in key else 0.0, 0.15)
    return model


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of `llama` under megatron-core's names, and moments of its optimizer."""
    root = tmp_path_factory.mktemp("llama")
    llama(LLAMA3).save_pretrained(root / "hf")
    from_huggingface(root / "hf", root / "converted", tokenizer="none")
    weights = dict(read_tensors(root / "converted"))
    names = ("exp_avg", "exp_avg_sq")
    moments = {f"optimizer.state.{n}.{k}": w.abs() for n in names for k, w in weights.items()}
    return weights | moments


def counters(
    path: Path, step: Any = STEP, samples: Any = SAMPLES, dtype: Any = torch.int64
) -> Path:
    """A train_state.pt, with the types that Megatron-Bridge gives its values."""
    whole = {"step": step, "consumed_train_samples": samples}
    content = {name: torch.tensor(value, dtype=dtype) for name, value in whole.items()}
    content |= {"floating_point_operations_so_far": torch.tensor(1e21, dtype=torch.float32)}
    torch.save(content | {"do_train": torch.tensor(True)}, path)
    return path


def write(root: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """A checkpoint in the files and formats of Megatron-Bridge."""
    iteration = root / f"iter_{STEP:07d}"
    iteration.mkdir(parents=True)
    dcp.save(tensors, storage_writer=ShardWriter(iteration), no_dist=True)
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    optimizer = {"optimizer": {"param_groups": [{"step": STEP}]}}
    torch.save({"iteration": STEP, "optimizer": optimizer}, iteration / "common.pt")
    (iteration / "run_config.yaml").write_text(json.dumps(config))
    counters(iteration / "train_state.pt")
    counters(root / "latest_train_state.pt")
    return root


def convert(source: Path, target: Path, *options: str) -> int:
    return main(["--from", "megatron", "--to", "coatlm", str(source), str(target), *options])


def arguments_of(config: dict[str, Any]) -> dict[str, Any]:
    return arguments_in(config, Path("run_config.yaml"))


@pytest.mark.parametrize("version", list(VERSIONS))
def test_logits_with_scaled_rope_are_those_of_transformers(
    tensors: dict[str, Tensor], tmp_path: Path, version: str
) -> None:
    fields, rope = VERSIONS[version]
    source = write(tmp_path / "bridge", tensors, run_config(version, **fields))
    assert convert(source, tmp_path / "new", "--weights-only") == 0
    state = read_state(tmp_path / "new")
    assert (state["step"], state["samples"], state["tokens"]) == (0, 0, 0)
    expected = theirs(llama(rope), TOKENS)
    unscaled = theirs(llama({"rope_type": "default", "rope_theta": rope["rope_theta"]}), TOKENS)
    assert (unscaled - expected).abs().max() > 100 * TOLERANCE
    found = ours(tmp_path / "new", TOKENS)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("version", list(VERSIONS))
def test_a_run_continues_with_the_training_and_the_counters_of_bridge(
    tensors: dict[str, Tensor], tmp_path: Path, version: str
) -> None:
    source = write(tmp_path / "bridge", tensors, run_config(version))
    assert convert(source, tmp_path / "new") == 0
    text = [f"data.text={tmp_path}/text.txt", "data.tokenizer=byte"]
    config = load_config(tmp_path / "new/config.yaml", text)
    optim, train = config.optim, config.train
    assert (optim.lr, optim.min_lr, optim.betas, optim.eps) == (3e-4, 3e-5, (0.9, 0.96), 1e-5)
    assert (optim.weight_decay, optim.clip_grad) == (0.033, 0.5)  # the scheduler sets the decay
    assert (optim.schedule, optim.warmup_steps) == ("linear", 2)
    assert (train.steps, train.global_batch, train.micro_batch) == (20, 8, 2)
    assert config.data.seq_len == 48  # the dataset's; the model's is 128
    state = read_state(tmp_path / "new")
    assert (state["step"], state["updates"], state["samples"]) == (STEP, STEP, SAMPLES)
    assert state["tokens"] == SAMPLES * 48


def test_weights_that_bridge_imported_bring_no_training() -> None:
    """Its optimizer has the defaults of megatron-core's OptimizerConfig and no learning rate."""
    config = run_config("0.3.1")
    config["optimizer"] |= {"lr": None, "adam_beta2": 0.999}
    config |= {"scheduler": None, "train": None, "dataset": None}
    sections = read_arguments(arguments_of(config))
    assert (sections["optim"], sections["train"]) == ({}, {})
    assert sections["data"] == {"seq_len": 128}


MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("0.7.0", {"num_moe_experts": 8}, "num_moe_experts=8 of Megatron: only none"),
    ("0.7.0", {"normalization": "LayerNorm"}, "normalization='LayerNorm' of Megatron"),
    ("0.7.0", {"activation_func": "gelu"}, "activation_func='gelu' of Megatron"),
    ("0.7.0", {"use_mup": True}, "use_mup=True of Megatron"),
    ("0.7.0", {"activation_func": None}, "activation_func is in neither model nor model.transf"),
    ("0.7.0", {"transformer": None}, "num_layers is in neither model nor model.transformer"),
    ("0.7.0", {"transformer": [1]}, "transformer=[1]: a mapping"),
    ("0.7.0", {"rope_scaling": {"factor": 8.0}}, "rope_scaling={'factor': 8.0} of Megatron: only"),
    ("0.7.0", {"mrope_section": [2, 3, 3]}, "mrope_section=[2, 3, 3] of Megatron: not known"),
    ("0.3.1", {"seq_len_interpolation_factor": 4.0}, "seq_len_interpolation_factor=4.0"),
    ("0.3.1", {"position_embedding_type": "yarn"}, "position_embedding_type='yarn'"),
    ("0.2.0rc6", {"old_context_len": None}, "scale_factor=4.0 of Megatron: only all of"),
    ("0.2.0rc6", {"high_freq_factor": "x"}, "high_freq_factor='x' of Megatron: must be a number"),
]


@pytest.mark.parametrize(("version", "fields", "complaint"), MODELS, ids=[c for *_, c in MODELS])
def test_a_model_that_coatlm_lacks_is_refused_by_the_name_of_the_field(
    version: str, fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError) as caught:
        read_arguments(arguments_of(run_config(version, **fields)))
    assert complaint in str(caught.value)


UNKNOWN = {
    **{"rope_new": 1.0, "partial_rope": True, "rotary_base_per_layer": [500.0], "yarn_mscale": 1.0},
    **{"mscale_new": 0, "sliding_window_rope_base": 1e4, "mid_freq_factor": 2.0},
}


@pytest.mark.parametrize("name", list(UNKNOWN))
@pytest.mark.parametrize("place", ["model", "transformer"])
def test_an_unknown_setting_of_rope_is_refused_by_its_name(name: str, place: str) -> None:
    config = run_config("0.7.0")
    section = config["model"] if place == "model" else config["model"]["transformer"]
    for unset in (None, False):
        section[name] = unset
        read_arguments(arguments_of(config))
    section[name] = UNKNOWN[name]
    with pytest.raises(ValueError, match=f"^{name}=.* of Megatron: not known to coatlm"):
        read_arguments(arguments_of(config))


def test_both_kinds_of_scaled_rope_at_once_are_refused() -> None:
    config = run_config("0.2.0rc6")
    config["model"]["rope_scaling"] = True
    with pytest.raises(ValueError, match=r"scale_factor=4\.0 of Megatron: .*without rope_scaling"):
        read_arguments(arguments_of(config))


def test_defaults_of_megatron_lm_about_rope_are_no_unknown_settings() -> None:
    """What arguments.py of Megatron-LM 0.16 and 0.19 gives a model without any of its flags."""
    defaults = {
        **{"rotary_base": 10000, "rotary_percent": 1.0, "rotary_interleaved": False},
        **{"rotary_seq_len_interpolation_factor": None, "rotary_scaling_factor": 1.0},
        **{"rope_type": None, "rope_scaling_factor": 8.0, "use_rope_scaling": False},
        **{"use_rotary_position_embeddings": True, "position_embedding_type": "rope"},
        **{"apply_rope_fusion": True, "fused_single_qkv_rope": False, "no_rope_freq": None},
        **{"mscale": 1.0, "mscale_all_dim": 0.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"mrope_section": None, "original_max_position_embeddings": 4096},
        **{"max_position_embeddings": 4096, "muon_extra_scale_factor": 1.0},
        **{"yarn_beta_fast": None, "yarn_correction_range_round_to_int": None},
    }
    model = read_arguments(defaults)["model"]
    assert model == {"rope_theta": 10000.0}


def test_training_that_a_run_would_not_follow_is_named() -> None:
    config = run_config("0.7.0")
    assert left_out(arguments_of(config)) == ""
    config["scheduler"] |= {"weight_decay_incr_style": "cosine", "lr_warmup_init": 1e-6}
    config["optimizer"]["decoupled_weight_decay"] = False
    config["train"]["rampup_batch_size"] = [2, 2, 80]
    assert left_out(arguments_of(config)) == (
        "lr_warmup_init=1e-06, rampup_batch_size=[2, 2, 80], decoupled_weight_decay=False, "
        "weight_decay_incr_style='cosine'"
    )
    assert left_out({"lr_decay_style": [1]}) == "lr_decay_style=[1]"


def test_the_newest_iteration_is_found_from_either_file(tmp_path: Path) -> None:
    assert find_iteration(tmp_path) == tmp_path
    counters(tmp_path / "latest_train_state.pt", step=12)
    assert find_iteration(tmp_path) == tmp_path / "iter_0000012"
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    for text, name in (("9", "0000012"), ("release", "0000012"), ("20", "0000020")):
        latest.write_text(text)
        assert find_iteration(tmp_path) == tmp_path / f"iter_{name}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counters_are_whole_numbers_of_either_width(tmp_path: Path, dtype: torch.dtype) -> None:
    path = counters(tmp_path / "train_state.pt", samples=2**31 - 1, dtype=dtype)
    assert read_counter(path, "consumed_train_samples") == 2**31 - 1


BAD: dict[str, Any] = {
    "float": {"step": torch.tensor(5.0)},
    "negative": {"step": torch.tensor(-5)},
    "two": {"step": torch.tensor([5, 6])},
    "none": {"step": torch.zeros(0, dtype=torch.int64)},
    "without storage": {"step": torch.zeros((), dtype=torch.int64, device="meta")},
    "missing": {"steps": torch.tensor(5)},
    "not a tensor": {"step": 5},
    "not a mapping": [torch.tensor(5)],
}


@pytest.mark.parametrize("kind", list(BAD))
def test_other_counters_are_refused_with_the_name_of_the_file(tmp_path: Path, kind: str) -> None:
    torch.save(BAD[kind], tmp_path / "latest_train_state.pt")
    with pytest.raises(ValueError, match=r"latest_train_state\.pt: step.*whole number"):
        find_iteration(tmp_path)


class Command:
    """A pickle that would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", ["iter_0000005/train_state.pt", "latest_train_state.pt"])
def test_counters_with_code_are_refused_and_not_run(
    tensors: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = write(tmp_path / "bridge", tensors, run_config("0.7.0"))
    torch.save({"step": Command(tmp_path / "executed")}, source / name)
    assert convert(source, tmp_path / "new") == 2
    assert "holds posix.system, which is not allowed: refused" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists() and not (tmp_path / "new").exists()
