"""precision.bf16_operands: each of a layer's operands in BF16 alone, and all of them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from coatlm.config import ConfigError, make_config
from coatlm.config.recipes import ATTENTION, RECIPES, OperandName, SavedName
from coatlm.fp8.gemm import matmul_bf16, matmul_ref
from coatlm.fp8.operand import emit_ref
from coatlm.fp8.qtensor import QTensor
from coatlm.model.coat_layer import flows_of
from coatlm.model.flow_gemms import Flow
from coatlm.model.layer_memory import layer_activation_bytes
from coatlm.model.memory import backward_bytes
from coatlm.model.numerics import watched
from tests.model.shapes import DATA, TINY
from tests.model.test_flow import SIZES, build, equal, errors, run, run_config
from tests.model.test_memory import saved_bytes_per_token_and_layer
from tests.model.test_scales import delayed

OPERANDS: tuple[OperandName, ...] = get_args(OperandName)
EXACT = [name for name, recipe in RECIPES.items() if recipe.exact_in_bf16]
LINEARS = ("qkv", "proj", "fc1", "fc2")
BACKWARD = [(gemm, name) for name in reversed(LINEARS) for gemm in ("dgrad", "wgrad")]
ORDER = [*(("forward", name) for name in LINEARS), *BACKWARD]  # of a layer's GEMMs
WEIGHTS = {
    "qkv": "self_attention.linear_qkv.weight",
    "proj": "self_attention.linear_proj.weight",
    "fc1": "mlp.linear_fc1.weight",
    "fc2": "mlp.linear_fc2.weight",
}

Gemms = dict[tuple[str, str], tuple[Any, Any, dict[str, Any], Tensor]]


def saved_of(recipe: str) -> list[str]:
    """The tensors that the recipe saves in FP8, as the key names them."""
    saved = RECIPES[recipe].saved
    return [name for name in get_args(SavedName) if getattr(saved, name[6:])]


def watched_run(
    recipe: str, names: list[str], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[dict[str, Tensor], Gemms]:
    """The results of one layer, and a, b, options and result of each of its GEMMs."""
    calls: list[tuple[Any, Any, dict[str, Any], Tensor]] = []
    gemms: list[str] = []
    multiply = Flow._multiply

    def note(flow: Flow, name: Any, a: Any, b: Any, **more: Any) -> Tensor:
        made = multiply(flow, name, a, b, **more)
        gemms.append(name)
        calls.append((a, b, more, made.clone()))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Flow, "_multiply", note)
        results = run(run_config(recipe, precision={"bf16_operands": names}, **options))
    assert gemms == [gemm for gemm, _ in ORDER]
    return results, dict(zip(ORDER, calls, strict=True))


def values(x: QTensor | Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, QTensor) else x.float()


def same(a: QTensor | Tensor, b: QTensor | Tensor) -> bool:
    """Whether two operands have the same codes and scales."""
    assert isinstance(a, QTensor) and isinstance(b, QTensor)
    codes = torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
    return codes and torch.equal(a.scale, b.scale)


def assert_rounds_to(x: Tensor, codes: QTensor, recipe: str, name: str) -> None:
    """The codes are x quantized once.

    Fused kernels quantize norms and SwiGLU before their rounding to BF16, which moves few codes.
    """
    gemm, operand = name.split(".")
    wanted = getattr(getattr(RECIPES[recipe], gemm), operand)
    scale = None if codes.scale.dim() else codes.scale
    made = emit_ref(x, direct=wanted, scale=scale).direct
    assert made is not None
    moved = (made.dequantize() != codes.dequantize()).float().mean().item()
    assert moved < 0.07, (name, moved)
    assert not torch.equal(x.float(), codes.dequantize())


@pytest.mark.parametrize("recipe", EXACT)
def test_an_operand_in_bf16_loses_its_own_rounding_and_no_other(
    recipe: str, megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, before = watched_run(recipe, [], monkeypatch)
    for name in OPERANDS:
        gemm, _, operand = name.partition(".")
        left = operand == "gradient" or name == "forward.activation"
        results, after = watched_run(recipe, [name], monkeypatch)
        for at, (a, b, options, made) in after.items():
            chosen, other = (a, b) if left else (b, a)
            assert isinstance(other, QTensor)
            assert isinstance(chosen, Tensor) == (at[0] == gemm)
            if at[0] == gemm:
                exact = values(a) @ values(b).t()
                for added in (options.get("add"), options.get("bias")):
                    exact += 0 if added is None else added.float()
                assert torch.equal(made, exact.bfloat16())
        # the first GEMM of a kind has the inputs that it had before
        first = "qkv" if gemm == "forward" else "fc2"
        a, b, _, _ = after[gemm, first]
        a8, b8, _, _ = before[gemm, first]
        x, codes, other, other8 = (a, a8, b, b8) if left else (b, b8, a, a8)
        assert same(other, other8)
        assert_rounds_to(x, codes, recipe, name)
        # nothing follows wgrad, and forward does not follow backward
        untouched = set(results) - set(WEIGHTS.values()) if gemm == "wgrad" else {"y"}
        for result in untouched if gemm != "forward" else ():
            assert torch.equal(results[result], plain[result]), (name, result)


def test_bf16_gradients_and_weights_are_those_that_are_quantized_otherwise(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not roundings of them: exactly the matrices that the codes were made of."""
    c = run_config("coat")
    model = build(c)
    weights = {n.split(".", 1)[1]: p.detach() for n, p in model.decoder.layers.named_parameters()}
    _, gemms = watched_run("coat", list(OPERANDS), monkeypatch)
    for linear, name in WEIGHTS.items():
        assert torch.equal(gemms["forward", linear][1], weights[name])
        assert torch.equal(gemms["dgrad", linear][1], weights[name].t())
        assert torch.equal(gemms["dgrad", linear][0], gemms["wgrad", linear][0].t())


@pytest.mark.parametrize("options", [{}, {"model": {"qkv_bias": True}}, {"seq": 37, "batch": 1}])
@pytest.mark.parametrize("recipe", EXACT)
def test_everything_in_bf16_is_as_accurate_as_a_bf16_layer(
    recipe: str, options: dict[str, Any], megatron: None
) -> None:
    if recipe == "fp8-block" and "seq" in options:
        options = {"seq": 36, "batch": 1}
    same_sizes = options | {"blocks": recipe == "fp8-block"}
    exact, local = (run(run_config(name, **same_sizes)) for name in ("fp32", "bf16"))
    names = [*OPERANDS, *saved_of(recipe)]
    found = run(run_config(recipe, precision={"bf16_operands": names}, **options))
    off, bound = errors(found, exact), errors(local, exact)
    assert max(bound.values()) < 0.02  # a few roundings of 2^-9
    # up to 1.31, as roundings fall differently; FP8 rounds 2^4 times as coarsely as BF16
    assert all(off[key] <= 1.5 * bound[key] for key in bound), (off, bound)


def test_each_saved_tensor_in_bf16_makes_gradients_more_accurate(megatron: None) -> None:
    exact = run(run_config("fp32"))
    parts = [*OPERANDS, *saved_of("coat-lean")]
    for name in get_args(SavedName):
        with_codes = [part for part in parts if part != name]
        all_but, none = (
            errors(run(run_config("coat-lean", precision={"bf16_operands": names})), exact)
            for names in (with_codes, parts)
        )
        first = "self_attention.linear_qkv.weight"  # the last gradient that backward computes
        weight = "self_attention.linear_proj.weight" if name == "saved.o" else first
        assert all_but[weight] > 2 * none[weight], (name, all_but, none)


def test_delayed_scales_see_the_same_gradients_where_wgrad_alone_is_bf16(megatron: None) -> None:
    """Operands in BF16 have no codes in a GEMM, but their amaxes still set the next scales."""
    scales, outputs = [], []
    for names in ([], ["wgrad.gradient", "wgrad.activation"]):
        c = run_config("coat", precision={"scaling": "delayed", "bf16_operands": names})
        model, stage = delayed(c)
        for _ in range(2):
            model.zero_grad()
            outputs.append(run(c, model))
            stage.update_()
        scales.append(stage.scale.clone())
    assert torch.equal(*scales)
    assert torch.equal(outputs[1]["dx"], outputs[3]["dx"])
    assert not equal(outputs[1], outputs[3])


def test_cached_weights_change_no_bit_beside_operands_in_bf16(megatron: None) -> None:
    names = ["forward.weight", "wgrad.gradient"]
    found = [
        run(run_config("coat", precision={"bf16_operands": names, "keep_weights": keep}))
        for keep in (False, True)
    ]
    assert equal(*found)


def test_numerics_are_of_what_is_held_in_fp8(megatron: None) -> None:
    names = ["forward.weight", "dgrad.gradient", "saved.gate_up"]
    c = run_config("coat", precision={"bf16_operands": names})
    model = build(c)
    with watched(flows_of(model.decoder.layers)) as probes:
        run(c, model)
    inputs = {"qkv_input", "attention_output", "fc1_input", "fc2_input"}
    assert set(probes[1].sums) == inputs | {"norm1_saved", "norm2_saved"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bf16_gemm_of_codes_is_the_fp8_gemm(dtype: torch.dtype) -> None:
    """Dequantized codes are exact in BF16, so only the order of the sum could differ."""
    wanted = RECIPES["coat"].forward.activation
    x, w = torch.randn(33, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    a, b = (emit_ref(t, direct=wanted).direct for t in (x, w))
    assert a is not None and b is not None
    out = torch.randn(33, 48).to(dtype)
    for options in ({}, {"accumulate": False}):
        mixed, fp8 = out.clone(), out.clone()
        matmul_bf16(a.dequantize(torch.bfloat16), b, out=mixed, **options)
        matmul_ref(a, b, out=fp8, **options)
        assert torch.equal(mixed, fp8)
    exact, add, bias = x.float() @ w.float().t(), torch.randn(33, 48).bfloat16(), torch.ones(48)
    assert torch.equal(matmul_bf16(x, w), exact.bfloat16())
    added = matmul_bf16(x, w, add=add, bias=bias.bfloat16())
    assert torch.equal(added, (exact + 1 + add.float()).bfloat16())


@pytest.mark.parametrize(
    ("recipe", "sections", "message"),
    [
        ("coat", {"precision": {"bf16_operands": ["wgrad"]}}, r"bf16_operands\.0='wgrad'"),
        (
            "coat",
            {"precision": {"bf16_operands": ["dgrad.weight", "dgrad.weight"]}},
            "each at most once",
        ),
        (
            "coat",
            {"precision": {"bf16_operands": ["saved.k"]}},
            "precision.recipe=coat saves k in BF16",
        ),
        (
            "coat-paper",
            {"precision": {"bf16_operands": ["dgrad.weight"]}},
            "precision.recipe=coat-paper; it needs one of fp8-linear, coat, coat-lean, coat-row",
        ),
        (
            "coat",
            {"precision": {"bf16_operands": ["dgrad.weight"]}, "parallel": {"tp": 2}},
            r"parallel\.tp=2: must be 1",
        ),
        (
            "coat",
            {
                "precision": {"bf16_operands": ["wgrad.activation"], "keep_linear_inputs": True},
            },
            r"keep_linear_inputs=true: must be null",
        ),
        (
            "coat",
            {
                "precision": {"bf16_operands": ["forward.weight"]},
                "parallel": {"weight_gather": "fp8"},
            },
            r"weight_gather=fp8: must be bf16",
        ),
        (
            "bf16",
            {"precision": {"bf16_operands": ["forward.weight"]}},
            r"precision\.bf16_operands is for fp8-linear",
        ),
    ],
)
def test_what_cannot_stay_in_bf16_is_refused(
    recipe: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(recipe, model=SIZES, **sections)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("fp8-linear", ["wgrad.activation"]),
        ("coat", OPERANDS),
        ("coat-lean", saved_of("coat-lean")),
        *(("coat-lean", [f"saved.{name}"]) for name in ATTENTION),
    ],
)
def test_layers_with_operands_in_bf16_save_the_bytes_that_are_planned(
    recipe: str, names: list[str], megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = {"recipe": recipe, "bf16_operands": names}
    sizes = TINY | {"layers": 2, "head_dim": 32, "ffn": 64}
    c = make_config({"model": sizes, "data": DATA, "precision": precision})
    m, tokens = c.model, c.train.micro_batch * 64
    rows = (m.heads + 2 * m.key_value_heads) * 32 + m.hidden + 2 * m.ffn + m.hidden
    saved = saved_bytes_per_token_and_layer(c, monkeypatch)
    assert saved == layer_activation_bytes(c) + 4 * rows / tokens


def test_a_gemm_in_bf16_is_planned_with_its_operands_and_its_result() -> None:
    """fc1 of a layer with hidden 1024 and ffn 2816: x [T, H], W [2F, H] and y [T, 2F]."""
    model = {"hidden": 1024, "ffn": 2816}
    plain, bf16, saved = (
        backward_bytes(run_config("coat", model=model, precision={"bf16_operands": names}))
        for names in ([], ["forward.weight"], ["saved.gate_up"])
    )
    assert bf16 - plain == 10 * (96 * 1024 + 2 * 2816 * 1024 + 96 * 2 * 2816)
    assert saved == plain


def test_saved_tensors_in_bf16_go_with_tensor_parallelism_and_coat_paper() -> None:
    names = ["saved.norm_input", "saved.gate_up"]
    c = run_config(
        "coat-paper", precision={"bf16_operands": names}, parallel={"tp": 2}, blocks=True
    )
    saved = c.precision.flow_recipe().saved
    assert (saved.norm_input, saved.gate_up, saved.linear_input) == (None, None, True)
