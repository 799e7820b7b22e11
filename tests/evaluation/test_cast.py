"""Post-training casts reach the tensors that they name, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.convert.from_hf import from_huggingface
from coatlm.evaluation.cast import Cast, casting
from coatlm.evaluation.model import load_weights, open_model
from coatlm.fp8.formats import E4M3
from coatlm.train.checkpoint import read_state
from tests.hf.models import save_model, tokens

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    root = tmp_path_factory.mktemp("cast")
    save_model("qwen3", root / "hf")
    from_huggingface(root / "hf", root / "coatlm", tokenizer="byte")
    saved = read_state(root / "coatlm")["config"]
    with open_model(root / "coatlm", saved, window=96, precision="fp32") as model:
        yield model, root / "coatlm"


def run(opened: tuple[Any, Path], how: Cast | None, seen: dict[str, Tensor] | None = None) -> Any:
    """Logits under a cast; `seen` gets the inputs and outputs of all modules."""
    model, checkpoint = opened
    load_weights(model, checkpoint)

    def watch(name: str) -> Any:
        def hook(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
            assert seen is not None
            for i, x in enumerate(inputs):
                if isinstance(x, Tensor):
                    seen[f"{name}.{i}"] = x.clone()
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor):
                seen[f"{name}.out"] = output.clone()

        return hook

    if how is None:
        return model(tokens())
    with casting(model, how):
        modules = model.named_modules() if seen is not None else ()
        hooks = [m.register_forward_hook(watch(name)) for name, m in modules if name]
        logits = model(tokens())
        for hook in hooks:
            hook.remove()
        if seen is not None:
            seen |= {f"weight {n}": p.clone() for n, p in model.named_parameters()}
    return logits


def is_cast(x: Tensor, how: Cast) -> bool:
    """Casting again changes nothing but the last bit of a product with the scale."""
    return bool((how(x) - x).abs().max() <= x.abs().max() * 1e-6)


@pytest.mark.parametrize("what", ["gemm", "residual"])
@pytest.mark.parametrize("scales", ["tensor", "channel", "bias9"])
def test_casts_reach_what_the_table_says_and_nothing_else(
    opened: tuple[Any, Path], scales: str, what: Any
) -> None:
    how, seen = Cast("e4m3", scales, what), dict[str, Tensor]()
    run(opened, how, seen)
    for layer in range(3):
        at = f"decoder.layers.{layer}."
        gemms = [f"{at}self_attention.core_attention.{i}" for i in range(3)]
        for name in LINEARS:
            module = "self_attention." if name in LINEARS[:2] else "mlp."
            gemms.append(f"{at}{module}{name}.0")
            assert is_cast(seen[f"weight {at}{module}{name}.weight"], how)
        assert all(is_cast(seen[name], how) for name in gemms)
        residuals = [f"{at}input_layernorm.0", f"{at}pre_mlp_layernorm.0"]
        residuals += [f"{at}self_attention.out", f"{at}mlp.out"]
        assert all(is_cast(seen[name], how) == (what == "residual") for name in residuals)
        assert not is_cast(seen[f"{at}self_attention.linear_qkv.out"], how)
    assert is_cast(seen["decoder.final_layernorm.out"], how)
    assert is_cast(seen["weight output_layer.weight"], how)
    assert not is_cast(seen["weight embedding.word_embeddings.weight"], how)


def test_residual_casts_act_on_the_tensor_that_is_added(opened: tuple[Any, Path]) -> None:
    """The stream after a layer is the sum of two cast tensors, and so is cast at the next only."""
    seen: dict[str, Tensor] = {}
    run(opened, Cast("e4m3", "bias9", "residual"), seen)
    for layer in range(2):
        at = f"decoder.layers.{layer}."
        total = seen[f"{at}input_layernorm.0"] + seen[f"{at}self_attention.out"]
        how = Cast("e4m3", "bias9")
        assert torch.equal(how(total), seen[f"{at}pre_mlp_layernorm.0"])


def test_finer_scales_and_more_mantissa_disturb_less(opened: tuple[Any, Path]) -> None:
    expected = run(opened, None)

    def error(*names: Any) -> float:
        return float((run(opened, Cast(*names)) - expected).norm() / expected.norm())

    e4m3, e5m2 = error("e4m3", "tensor", "gemm"), error("e5m2", "tensor", "gemm")
    assert 0.01 < e4m3 < 0.7 * e5m2  # half the step; E5M2's range is not needed here
    assert error("e4m3", "channel", "gemm") < 1.1 * e4m3
    assert error("e4m3", "tensor", "residual") > e4m3
    assert error("e4m3", "bias20", "gemm") > 3 * e4m3  # all above 448 / 2^13 is cut off
    assert torch.equal(run(opened, None), expected)  # nothing is left behind


def test_fixed_bias_moves_the_range_by_powers_of_two() -> None:
    x = torch.tensor([448.0, 1000.0, 2.0**-9, 2.0**-10, 1.0])
    assert Cast("e4m3", "bias7")(x).tolist() == [448.0, 448.0, 2.0**-9, 0.0, 1.0]
    assert Cast("e4m3", "bias6")(x).tolist() == [448.0, 896.0, 0.0, 0.0, 1.0]
    assert Cast("e5m2", "bias15")(x).tolist() == [448.0, 1024.0, 2.0**-9, 2.0**-10, 1.0]
    assert E4M3.bias == 7


@pytest.mark.parametrize(
    ("names", "complaint"),
    [(("int8",), "format="), (("e4m3", "row"), "scales="), (("e4m3", "tensor", "all"), "what=")],
)
def test_unknown_names_are_refused(names: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Cast(*names)
