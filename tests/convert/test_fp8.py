"""Exports in E4M3: decoded by the layout's definition, by compressed-tensors and transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
)

from coatlm.convert.from_hf import from_huggingface
from coatlm.convert.to_hf import to_huggingface
from coatlm.fp8.formats import E4M3
from coatlm.hf.files import WeightFiles
from coatlm.hf.fp8 import Fp8Export
from tests.hf.models import ours, save_model, theirs, tokens

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


def decoded(weights: WeightFiles, name: str) -> Tensor:
    """What the layout says that a stored weight stands for."""
    return weights.read(name).float() * weights.read(f"{name}_scale")


@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_weights_decode_to_within_half_a_step_of_e4m3(exported: Path, scales: str) -> None:
    original, stored = WeightFiles.open(exported / "hf"), WeightFiles.open(exported / scales)
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
    stored = WeightFiles.open(exported / scales)
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
    # three layers, with errors of eps / 4 = 0.03 per weight, in "channel" per activation too
    assert 0.01 < errors[0] < errors[1] < 0.3


WIDE = {  # every linear layer is a whole number of blocks
    **{"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 384, "num_hidden_layers": 2},
    **{"vocab_size": 263, "max_position_embeddings": 128},
}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model, and its export with a scale per 128 x 128 elements."""
    root = tmp_path_factory.mktemp("blocks")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**WIDE))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.split(".")[-2] in PROJECTIONS:  # blocks of very different sizes
                weight *= 4.0 ** (torch.arange(weight.shape[0]) // 128)[:, None]
                weight *= 8.0 ** (torch.arange(weight.shape[1]) // 128)
    model.save_pretrained(root / "hf")
    from_huggingface(root / "hf", root / "coatlm", tokenizer="none")
    to_huggingface(root / "coatlm", root / "block", fp8=Fp8Export("block"))
    return root


def test_blocks_have_the_scales_and_codes_that_deepseeks_layout_defines(blocks: Path) -> None:
    original, stored = WeightFiles.open(blocks / "hf"), WeightFiles.open(blocks / "block")
    linears = [n for n in original.files if n.split(".")[-2] in PROJECTIONS]
    assert len(linears) == 7 * 2
    assert stored.files.keys() == original.files.keys() | {f"{name}_scale_inv" for name in linears}
    for name in linears:
        weight, codes = original.read(name), stored.read(name).float()
        scales = stored.read(f"{name}_scale_inv")
        assert scales.shape == (weight.shape[0] // 128, weight.shape[1] // 128)
        for i, j in ((i, j) for i in range(scales.shape[0]) for j in range(scales.shape[1])):
            cut = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            assert float(scales[i, j]) == float(weight[cut].abs().amax() / 448)
            # half a step of E4M3: 2^-4 of a normal number, 2^-10 of the scale below those
            bound = torch.maximum(weight[cut].abs() * 2**-4, scales[i, j] * 2**-10)
            error = (codes[cut] * scales[i, j] - weight[cut]).abs()
            assert bool((error <= bound * (1 + 1e-6)).all())
    written = json.loads((blocks / "block/config.json").read_text())["quantization_config"]
    assert (written["quant_method"], written["weight_block_size"]) == ("fp8", [128, 128])
    assert (written["activation_scheme"], written["fmt"]) == ("dynamic", "e4m3")


@pytest.fixture(scope="module")
def loaded(blocks: Path) -> Any:
    """The export in blocks, loaded by transformers, which dequantizes it without a GPU."""
    return AutoModelForCausalLM.from_pretrained(
        blocks / "block",
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=FineGrainedFP8Config(dequantize=True),
    ).eval()


def test_transformers_loads_blocks_with_the_weights_that_the_layout_defines(
    blocks: Path, loaded: Any
) -> None:
    stored = WeightFiles.open(blocks / "block")
    for name, weight in loaded.named_parameters():
        expected = stored.read(name).float()
        if f"{name}_scale_inv" in stored.files:
            scale = stored.read(f"{name}_scale_inv")
            expected *= scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=0)


def test_logits_of_blocks_in_transformers_are_those_of_coatlm(
    blocks: Path, loaded: Any, tmp_path: Path
) -> None:
    """coatlm reads the weights that transformers has decoded, converted back."""
    (tmp_path / "decoded").mkdir()
    shutil.copy(blocks / "hf/config.json", tmp_path / "decoded")
    weights = {name: weight.detach().clone() for name, weight in loaded.named_parameters()}
    save_file(weights, tmp_path / "decoded/model.safetensors")
    from_huggingface(tmp_path / "decoded", tmp_path / "coatlm", tokenizer="none")
    found = theirs(loaded, tokens())
    expected = ours(tmp_path / "coatlm", tokens())
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    original = theirs(blocks / "hf", tokens())
    error = float((found - original).norm() / original.norm())
    assert 0.01 < error < 0.3  # as of the other layouts


def test_compressed_tensors_quantizes_and_decodes_blocks_as_the_export(blocks: Path) -> None:
    """Its own functions for the strategy `block`, which vLLM's layers of both formats follow."""
    original, stored = WeightFiles.open(blocks / "hf"), WeightFiles.open(blocks / "block")
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    for part in ("self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"):
        name = f"model.layers.1.{part}.weight"
        codes, scale = stored.read(name), stored.read(f"{name}_scale_inv")
        again = quantize(original.read(name), scale, None, args, dtype=torch.float8_e4m3fn)
        assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(dequantize(codes, scale, None, args), codes.float() * spread)


def test_sizes_that_blocks_do_not_divide_are_refused_by_the_name_of_the_tensor(
    exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"q_proj\.weight is \[64, 64\]: .* multiples of 128"):
        to_huggingface(exported / "coatlm", tmp_path / "new", fp8=Fp8Export("block"))
    with pytest.raises(ValueError, match="fp8_activations=none"):
        Fp8Export("block", dynamic_activations=False)


def test_weights_with_nan_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"x\.weight: has NaN or Inf"):
        Fp8Export().encode("x.weight", torch.tensor([[1.0, float("nan")]]))
