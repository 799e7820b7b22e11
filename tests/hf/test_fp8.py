"""Exports in E4M3: decoded by the layout's definition, and by compressed-tensors itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from coatlm.fp8.formats import E4M3
from coatlm.hf.files import Weights
from coatlm.hf.fp8 import Fp8Export
from coatlm.hf.from_hf import from_huggingface
from coatlm.hf.to_hf import to_huggingface
from tests.hf.models import save_model, theirs, tokens

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hf`, and of it `channel` and `tensor` with E4M3 weights."""
    root = tmp_path_factory.mktemp("fp8")
    save_model("qwen2.5", root / "hf")
    from_huggingface(root / "hf", root / "coatlm", tokenizer="byte")
    for scales, dynamic in (("channel", True), ("tensor", False)):
        fp8 = Fp8Export(scales, dynamic_activations=dynamic)
        to_huggingface(root / "coatlm", root / scales, fp8=fp8)
    return root


def decoded(weights: Weights, name: str) -> Tensor:
    """What the layout says that a stored weight stands for."""
    return weights.read(name).float() * weights.read(f"{name}_scale")


@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_weights_decode_to_within_half_a_step_of_e4m3(exported: Path, scales: str) -> None:
    original, stored = Weights.open(exported / "hf"), Weights.open(exported / scales)
    described = stored.describe()
    linears = [n for n in original.files if n.split(".")[-2] in PROJECTIONS and n[-6:] == "weight"]
    assert len(linears) == 7 * 3
    assert described.keys() == original.files.keys() | {f"{name}_scale" for name in linears}
    for name in linears:
        weight, codes = original.read(name), stored.read(name)
        scale = stored.read(f"{name}_scale")
        assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        assert scale.shape == ((weight.shape[0], 1) if scales == "channel" else (1,))
        amax = weight.abs().amax(-1, keepdim=True) if scales == "channel" else weight.abs().amax()
        assert torch.equal(scale.view_as(amax), amax / E4M3.max)
        error = (decoded(stored, name) - weight).abs()
        step = torch.maximum(weight.abs() * E4M3.eps, scale * E4M3.smallest_subnormal)
        assert bool((error <= step / 2 * (1 + 1e-6)).all())
    for name in original.files.keys() - set(linears):
        assert torch.equal(stored.read(name), original.read(name))


def test_config_describes_what_is_stored(exported: Path) -> None:
    configs = {}
    for scales in ("channel", "tensor"):
        text = (exported / scales / "config.json").read_text()
        configs[scales] = json.loads(text)["quantization_config"]
        group = configs[scales]["config_groups"]["group_0"]
        assert group["targets"] == ["Linear"] and configs[scales]["ignore"] == ["lm_head"]
        assert group["weights"]["strategy"] == scales
        assert (group["weights"]["type"], group["weights"]["num_bits"]) == ("float", 8)
    groups = [configs[s]["config_groups"]["group_0"] for s in ("channel", "tensor")]
    assert groups[0]["input_activations"]["dynamic"] is True
    assert groups[0]["input_activations"]["strategy"] == "token"
    assert groups[1]["input_activations"] is None


def load_decompressed(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )


@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_compressed_tensors_loads_the_weights_that_decoding_gives(
    exported: Path, scales: str
) -> None:
    model = load_decompressed(exported / scales)
    stored = Weights.open(exported / scales)
    for layer in range(3):
        for part in ("self_attn.q_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{part}.weight"
            found = model.get_parameter(name).float()
            torch.testing.assert_close(found, decoded(stored, name), rtol=1e-6, atol=0)


def test_logits_of_the_fp8_model_are_near_those_of_the_original(exported: Path) -> None:
    expected = theirs(exported / "hf", tokens())
    errors = [
        float((theirs(exported / scales, tokens()) - expected).norm() / expected.norm())
        for scales in ("tensor", "channel")
    ]
    # three layers of relative errors of eps / 4 = 0.03 a weight, in "channel" an activation too
    assert 0.01 < errors[0] < errors[1] < 0.3


def test_weights_with_nan_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"x\.weight: has NaN or Inf"):
        Fp8Export().encode("x.weight", torch.tensor([[1.0, float("nan")]]))
