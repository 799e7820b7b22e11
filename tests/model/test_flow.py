"""FP8 layers: gradients against fp32 autograd, options, what evaluation saves, interchange.

Rounding a normal number to E4M3 moves it by at most 2^-4 of it, to E5M2 by 2^-3; spread evenly
within a spacing that is at worst 2^-3 or 2^-2 of the value, by U4 and U5 in the root mean square.
Independent errors add in squares, so a tensor behind `a` E4M3 and `b` E5M2 roundings is off by
sqrt(a U4^2 + b U5^2) of its norm. That is the tolerance of every comparison with fp32 below.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coatlm.config import Config, ConfigError, make_config
from coatlm.config.operands import ROW, TENSOR, Granularity, Operand, block
from coatlm.config.recipes import RECIPES
from coatlm.fp8 import producers
from coatlm.fp8.qtensor import QTensor
from coatlm.model import flow_gemms, memory
from coatlm.model.coat_layer import CoatTransformerLayer
from coatlm.model.memory import replaced

U4, U5 = 2.0**-4 / math.sqrt(3), 2.0**-3 / math.sqrt(3)
ALONG, SQUARE = block(1, 128), block(128, 128)
FLOWS = list(RECIPES)
TENSOR_WISE = [name for name, recipe in RECIPES.items() if recipe.tensor_wise_gradients]
SIZES = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 176}
BLOCK_SIZES = SIZES | {"hidden": 128, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 256}
VOCAB = 128


def sizes_of(recipe: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Sizes that fp8-block divides by 128, for it and for what is compared with it."""
    blocks = sections.pop("blocks", False) or recipe == "fp8-block"
    return BLOCK_SIZES if blocks else SIZES


def run_config(recipe: str = "coat", *, seq: int = 48, batch: int = 2, **sections: Any) -> Config:
    """A model of one layer, unless told otherwise; `init_std` makes a layer's branches count."""
    return make_config(
        {
            "model": sizes_of(recipe, sections)
            | {"vocab": VOCAB, "init_std": 0.1}
            | sections.pop("model", {}),
            "data": {"text": "x", "seq_len": seq},
            "precision": {"recipe": recipe} | sections.pop("precision", {}),
            "train": {"micro_batch": batch, "global_batch": batch},
            **sections,
        }
    )


def build(c: Config) -> nn.Module:
    """The decoder of a model, its norms not all one and its weights numbers of BF16."""
    from megatron.core import parallel_state

    from coatlm.model.builder import build_model
    from coatlm.parallel.groups import make_groups

    parallel_state.destroy_model_parallel()
    torch.manual_seed(0)
    (model,) = build_model(c, make_groups(c.parallel), VOCAB)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_((1 + 0.2 * torch.randn(parameter.shape)).bfloat16())
            parameter.copy_(parameter.bfloat16())
    return model


def inputs(c: Config) -> tuple[Tensor, Tensor]:
    """hidden states and the gradient of the decoder's output."""
    generator = torch.Generator().manual_seed(1)
    shape = (c.data.seq_len, c.train.micro_batch, c.model.hidden)
    x, dy = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    return x, dy


def run(
    c: Config, model: nn.Module | None = None, bounds: Tensor | None = None
) -> dict[str, Tensor]:
    """y (the layers' part of it), dx and every gradient of the layers, in fp32.

    `bounds` are those of documents; hidden states are then [B S, 1, H].
    """
    model = model or build(c)
    layers = model.decoder.layers
    x, dy = (t.to(next(model.parameters()).dtype) for t in inputs(c))
    cos_sin = model.cos_sin
    if bounds is not None:
        x, dy = (t.transpose(0, 1).reshape(-1, 1, t.shape[-1]) for t in (x, dy))
        cos_sin = cos_sin.repeat(1, bounds.shape[0], 1)
    y = x.requires_grad_()
    for layer in layers:
        y, _ = layer(hidden_states=y, attention_mask=bounds, rotary_pos_emb=cos_sin)
    y.backward(dy)
    result = {"y": y.detach().float() - x.detach().float(), "dx": x.grad.float() - dy.float()}
    for name, parameter in layers.named_parameters():
        result[name.split(".", 1)[1]] = parameter.grad.float()
    return result


def errors(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert actual.keys() == exact.keys()
    return {k: ((actual[k] - exact[k]).norm() / exact[k].norm()).item() for k in exact}


def bound(e4m3: int, e5m2: int) -> float:
    return math.sqrt(e4m3 * U4**2 + e5m2 * U5**2)


BOUNDS = {  # roundings on the way: forward's operands; then a gradient, a weight and saved tensors
    "y": bound(8, 0),  # input and weight of four linears
    "mlp.linear_fc2.weight": bound(7, 1),  # SwiGLU output behind three linears, gate | up as saved
    "mlp.linear_fc1.weight": bound(9, 2),
    "pre_mlp_layernorm.weight": bound(9, 2),
    "self_attention.linear_proj.weight": bound(10, 3),
    "self_attention.linear_qkv.weight": bound(12, 4),
    "self_attention.linear_qkv.bias": bound(12, 4),
    "input_layernorm.weight": bound(13, 4),
    "dx": bound(13, 4),
}


def assert_within_bounds(found: dict[str, float]) -> None:
    over = {k: (e, BOUNDS[k]) for k, e in found.items() if not e <= BOUNDS[k]}
    assert not over


SHAPES = [
    ({}, {}),
    ({"qkv_bias": True}, {}),
    ({"ffn": 16 * 43}, {"seq": 40, "batch": 1}),  # 5504 = 128 * 43
    ({}, {"seq": 37, "batch": 1}),
    ({}, {"seq": 7, "batch": 3}),
    ({"heads": 2, "kv_heads": 2, "head_dim": 48}, {"seq": 33, "batch": 1}),
    ({"window": {"size": 9, "rope_theta": 50.0}, "partial_rotary_factor": 0.5}, {}),
]


BLOCK_SHAPES = [
    ({"qkv_bias": True}, {"seq": 52, "batch": 3}),
    ({"ffn": 384, "kv_heads": 2, "heads": 4}, {"seq": 40, "batch": 1}),
]
CASES = [
    *((recipe, *shape) for recipe in FLOWS if recipe != "fp8-block" for shape in SHAPES),
    *(("fp8-block", *shape) for shape in BLOCK_SHAPES),
]


@pytest.mark.parametrize(("recipe", "model", "shape"), CASES)
def test_gradients_are_those_of_fp32_autograd(
    recipe: str, model: dict[str, Any], shape: dict[str, int], megatron: None
) -> None:
    exact = run(run_config("fp32", model=model, blocks=recipe == "fp8-block", **shape))
    assert_within_bounds(errors(run(run_config(recipe, model=model, **shape)), exact))


@pytest.mark.parametrize("options", [{"keep_linear_inputs": True}, {"keep_linear_inputs": False}])
@pytest.mark.parametrize("recipe", ["coat-paper", "rowwise", "fp8-block"])
def test_linear_inputs_may_be_saved_or_recomputed_by_recipes_without_fused_kernels(
    recipe: str, options: dict[str, bool], megatron: None
) -> None:
    exact = run(run_config("fp32", blocks=recipe == "fp8-block"))
    assert_within_bounds(errors(run(run_config(recipe, precision=options)), exact))


@pytest.mark.parametrize(
    ("recipe", "forward", "dgrad", "wgrad"),
    [
        ("coat", (ROW, ROW), (TENSOR, TENSOR), (TENSOR, TENSOR)),
        ("coat-int8", (ROW, ROW), (TENSOR, TENSOR), (TENSOR, TENSOR)),
        ("coat-lean-int8", (ROW, ROW), (TENSOR, TENSOR), (TENSOR, TENSOR)),
        ("coat-rowgrad", (ROW, ROW), (ROW, TENSOR), (ROW, TENSOR)),
        ("coat-paper", (TENSOR, TENSOR), (TENSOR, TENSOR), (TENSOR, TENSOR)),
        ("rowwise", (ROW, ROW), (ROW, ROW), (ROW, ROW)),
        ("fp8-block", (ALONG, SQUARE), (ALONG, SQUARE), (ALONG, ALONG)),
    ],
)
def test_each_operand_is_scaled_along_its_summed_axis_as_the_recipe_says(
    recipe: str,
    forward: tuple[Granularity, Granularity],
    dgrad: tuple[Granularity, Granularity],
    wgrad: tuple[Granularity, Granularity],
    megatron: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[QTensor, QTensor]] = []
    matmul = flow_gemms.matmul
    monkeypatch.setattr(
        flow_gemms,
        "matmul",
        lambda a, b, **options: calls.append((a, b)) or matmul(a, b, **options),
    )
    c = run_config(recipe)
    run(c)
    found = [(a.granularity, b.granularity) for a, b in calls]
    assert found == [forward] * 4 + [dgrad, wgrad] * 4
    m, tokens = c.model, c.train.micro_batch * c.data.seq_len
    summed = -(-tokens // 128) * 128 if recipe == "fp8-block" else tokens
    shapes = [(tuple(a.shape), tuple(b.shape)) for a, b in calls]
    assert shapes[3] == ((tokens, m.ffn), (m.hidden, m.ffn))
    assert shapes[4] == ((tokens, m.hidden), (m.ffn, m.hidden))
    assert shapes[5] == ((m.hidden, summed), (m.ffn, summed))
    powers = [q.scale.float().log2().frac().eq(0).all() for pair in calls for q in pair]
    assert all(powers) is (recipe not in ("coat-paper", "coat-int8", "coat-lean-int8"))
    assert all(powers[8:]) is (recipe != "coat-paper")


def test_a_column_with_small_gradients_has_a_scale_of_its_own_in_wgrad(megatron: None) -> None:
    """One scale for the tensor would round the small column of a weight gradient to zero."""
    errors_of_column = []
    for recipe in ("fp32", "rowwise", "coat-rowgrad", "coat"):
        c = run_config(recipe, precision={} if recipe == "fp32" else {"grad_format": "e4m3"})
        model = build(c)
        (layer,) = model.decoder.layers
        x, dy = inputs(c)
        dy = dy.float()
        dy[..., 5] *= 2.0**-20
        x = x.to(next(model.parameters()).dtype).requires_grad_()
        y, _ = layer(hidden_states=x, attention_mask=None, rotary_pos_emb=model.cos_sin)
        y.backward(dy.to(y.dtype))
        errors_of_column.append(layer.mlp.linear_fc2.weight.grad[5].float())
    exact, *rowwise, coat = errors_of_column
    for column in rowwise:
        assert ((column - exact).norm() / exact.norm()).item() <= bound(8, 0)
    assert not coat.any()


def test_a_recipe_that_combines_what_is_there_is_one_row(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in forward, blocks in backward, what attention saves in FP8 with 32 elements a scale."""
    blocks, each = RECIPES["fp8-block"], Operand("e4m3", block(1, 32))
    saved = replace(RECIPES["coat-lean"].saved, q=each, k=each, v=each, o=each)
    row = replace(blocks, forward=RECIPES["rowwise"].forward, saved=saved)
    monkeypatch.setitem(RECIPES, "mine", row)
    c = run_config("fp8-block")
    c = replaced(c, precision={"recipe": "mine"})
    assert memory.peak_bytes(c, VOCAB, 1) < memory.peak_bytes(run_config("fp8-block"), VOCAB, 1)
    assert_within_bounds(errors(run(c), run(run_config("fp32", blocks=True))))


@pytest.mark.parametrize("recipe", FLOWS)
def test_normed_queries_and_keys_have_the_gradients_of_fp32_autograd(
    recipe: str, megatron: None
) -> None:
    model = {"qk_norm": True}
    exact = run(run_config("fp32", model=model, blocks=recipe == "fp8-block"))
    found = errors(run(run_config(recipe, model=model)), exact)
    norms = {k: found.pop(k) for k in list(found) if "q_layernorm" in k or "k_layernorm" in k}
    assert len(norms) == 2
    assert max(norms.values()) <= bound(12, 3)
    assert_within_bounds(found)


def test_coat_is_at_most_a_quarter_less_accurate_than_fp8_linears_alone(megatron: None) -> None:
    model, shape = {"hidden": 128, "head_dim": 32, "ffn": 352}, {"seq": 128, "batch": 2}
    exact = run(run_config("fp32", model=model, **shape))
    coat, linear = (
        errors(run(run_config(recipe, model=model, **shape)), exact)
        for recipe in ("coat", "fp8-linear")
    )
    assert {k: coat[k] / linear[k] for k in exact if coat[k] > 1.25 * linear[k]} == {}


@pytest.mark.parametrize("size", [32, 64])
def test_wider_groups_stay_within_the_bounds(size: int, megatron: None) -> None:
    model = {"head_dim": 64, "heads": 2, "ffn": 192}
    exact = run(run_config("fp32", model=model))
    c = run_config("coat-lean", model=model, precision={"group_size": size})
    assert_within_bounds(errors(run(c), exact))


@pytest.mark.parametrize("recipe", FLOWS)
def test_gradients_in_e4m3_are_closer_than_in_e5m2(recipe: str, megatron: None) -> None:
    exact = run(run_config("fp32", blocks=recipe == "fp8-block"))
    e5m2, e4m3 = (
        errors(run(run_config(recipe, precision={"grad_format": fmt})), exact)
        for fmt in ("e5m2", "e4m3")
    )
    assert e4m3["y"] == e5m2["y"]
    # The gradient of a norm has 64 elements. Where forward hardly errs, most of its error is that
    # of what is saved.
    most = 1.05 if RECIPES[recipe].rotated else 1.0
    slack = {k: most if "layernorm" in k else 1.0 for k in exact if k != "y"}
    assert all(e4m3[k] < e5m2[k] * most for k, most in slack.items())


def test_rotated_int8_has_a_third_of_the_error_of_e4m3_in_forward(megatron: None) -> None:
    exact = run(run_config("fp32"))
    coat, int8 = (errors(run(run_config(r)), exact) for r in ("coat", "coat-int8"))
    assert int8["y"] < coat["y"] / 3
    assert all(int8[k] < coat[k] for k in exact)


def equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(actual[k], expected[k]) for k in expected)


@pytest.mark.parametrize("recipe", FLOWS)
def test_keeping_fp8_weights_changes_no_bit(recipe: str, megatron: None) -> None:
    keeping = run_config(recipe, precision={"keep_weights": True})
    assert equal(run(keeping), run(run_config(recipe)))


def test_cached_weights_serve_the_microbatches_of_a_step_and_are_cast_again_in_the_next(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = run_config(precision={"keep_weights": True})
    model = build(c)
    (layer,) = model.decoder.layers
    cast: list[torch.Size] = []
    quantize = producers.quantize_rows
    monkeypatch.setattr(producers, "quantize_rows", lambda x: cast.append(x.shape) or quantize(x))
    matrices = {p.shape for p in layer.parameters() if p.dim() == 2}

    def weights_cast() -> int:
        cast.clear()
        run(c, model)
        return sum(shape in matrices for shape in cast)

    assert [weights_cast(), weights_cast()] == [4, 0]
    with torch.no_grad():
        layer.mlp.linear_fc2.weight.mul_(2)
    model.set_is_first_microbatch()  # as megatron's schedules do at each step
    assert weights_cast() == 4
    expected = quantize(layer.mlp.linear_fc2.weight.detach())
    assert torch.equal(layer.flow.weights[layer.mlp.linear_fc2.weight].direct.scale, expected.scale)


@pytest.mark.parametrize("recipe", ["coat", "coat-lean"])
def test_saving_linear_inputs_moves_gradients_by_the_error_of_what_is_else_recomputed(
    recipe: str, megatron: None
) -> None:
    recomputed = run(run_config(recipe))
    saved = run(run_config(recipe, precision={"keep_linear_inputs": True}))
    assert torch.equal(saved["y"], recomputed["y"])
    # two E4M3 roundings apart: of the saved norm input or gate | up, and of the transposed codes
    difference = errors(saved, recomputed)
    assert 0 < max(difference.values()) <= bound(4, 0)


def test_main_gradients_sum_over_microbatches_in_fp32(megatron: None) -> None:
    c = run_config()
    model = build(c)
    weights = dict(model.decoder.layers.named_parameters())
    for weight in weights.values():
        weight.main_grad = torch.zeros(weight.shape)
    x, dy = inputs(c)
    sums = []
    for _ in range(2):
        y, _ = model.decoder.layers[0](
            hidden_states=x.clone().requires_grad_(),
            attention_mask=None,
            rotary_pos_emb=model.cos_sin,
        )
        y.backward(dy)
        sums.append({name: weight.main_grad.clone() for name, weight in weights.items()})
    assert all(weight.grad is None for weight in weights.values())
    for name, once in sums[0].items():
        assert once.any()
        torch.testing.assert_close(sums[1][name], 2 * once, rtol=2**-22, atol=0)


def test_the_first_gradient_is_written_over_a_stale_one_and_others_are_added(
    megatron: None,
) -> None:
    c = run_config()
    model = build(c)
    (layer,) = model.decoder.layers
    x, dy = inputs(c)
    sums = []
    for stale in (False, True):
        for weight in layer.parameters():
            weight.main_grad = torch.zeros(weight.shape)
        for weight in layer.linear_weights():
            assert weight.main_grad_stale is False
            if stale:
                weight.main_grad_stale = True
                weight.main_grad.fill_(torch.nan)
        for _ in range(2):
            y, _ = layer(
                hidden_states=x.clone().requires_grad_(),
                attention_mask=None,
                rotary_pos_emb=model.cos_sin,
            )
            y.backward(dy)
        sums.append([weight.main_grad for weight in layer.parameters()])
    assert len(layer.linear_weights()) == 4
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


def test_main_gradients_are_the_gradients_before_their_rounding_to_bf16(megatron: None) -> None:
    c = run_config()
    expected, model = run(c), build(c)
    weights = dict(model.decoder.layers.named_parameters())
    for weight in weights.values():
        weight.main_grad = torch.zeros(weight.shape)
    x, dy = inputs(c)
    y, _ = model.decoder.layers[0](
        hidden_states=x.requires_grad_(), attention_mask=None, rotary_pos_emb=model.cos_sin
    )
    y.backward(dy)
    for name, weight in weights.items():
        assert torch.equal(weight.main_grad.bfloat16().float(), expected[name.split(".", 1)[1]])


@pytest.mark.parametrize("recipe", FLOWS)
def test_evaluation_saves_nothing_and_gives_the_same_output(
    recipe: str, megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = run_config(recipe, precision={"keep_weights": True})
    model = build(c)
    training = run(c, model)["y"]
    saved: list[Any] = []
    for name in ("norm_output", "swiglu_output"):
        function = getattr(producers, name)

        def record(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            saved.append(made.saved)
            return made

        monkeypatch.setattr(producers, name, record)
    model.eval()
    x, _ = inputs(c)
    with torch.no_grad():
        y, _ = model.decoder.layers[0](
            hidden_states=x, attention_mask=None, rotary_pos_emb=model.cos_sin
        )
    assert torch.equal(y.float() - x.float(), training)
    assert saved == [None, None, None]
    assert not model.decoder.layers[0].flow.weights


def test_bf16_layers_are_the_first_and_last_ones_and_bit_equal_to_local(megatron: None) -> None:
    layers = {"model": {"layers": 4}}
    mixed = build(run_config(precision={"bf16_layers": [1, 2]}, **layers))
    assert [isinstance(layer, CoatTransformerLayer) for layer in mixed.decoder.layers] == [
        *(False, True, False, False)
    ]
    whole = run_config(precision={"bf16_layers": [3, 1]}, **layers)
    # four layers in one dictionary: the gradients are those of the last one
    assert equal(run(whole), run(run_config("bf16", **layers)))


def test_fast_accumulation_is_chosen_for_each_gemm(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[bool, bool]] = []
    matmul = flow_gemms.matmul

    def record(a: Any, b: Any, *, fast: bool, **kwargs: Any) -> Tensor:
        calls.append((a.granularity == ROW, fast))
        return matmul(a, b, **kwargs)

    monkeypatch.setattr(flow_gemms, "matmul", record)
    run(run_config(precision={"fast_accumulation": ["forward", "wgrad"]}))
    forward, backward = calls[:4], calls[4:]
    assert forward == [(True, True)] * 4
    assert backward == [(False, False), (False, True)] * 4  # dgrad, wgrad of each linear


@pytest.mark.parametrize("recipe", FLOWS)
def test_names_and_shapes_of_weights_are_those_of_the_local_layer(
    recipe: str, megatron: None
) -> None:
    from coatlm.parallel.regions import sharded_tensors

    model = {"layers": 2, "qkv_bias": True, "qk_norm": True}
    found, blocks = [], recipe == "fp8-block"
    for name in ("bf16", recipe):
        c = run_config(name, model=model, blocks=blocks)
        items = [item for _, item in sharded_tensors(build(c))]
        found.append({(item.key, item.global_shape, item.dtype) for item in items})
    assert found[0] == found[1]
    assert len(found[0]) > 10


def test_weights_of_a_local_model_go_through_a_coat_model_and_back(megatron: None) -> None:
    torch.manual_seed(2)
    local = build(run_config("bf16"))
    weights = {
        name: torch.randn_like(p) / 8 for name, p in local.state_dict().items() if p is not None
    }
    local.load_state_dict(weights)
    coat = build(run_config("coat"))
    coat.load_state_dict(local.state_dict())
    back = build(run_config("bf16"))
    back.load_state_dict(coat.state_dict())
    assert all(torch.equal(back.state_dict()[name], value) for name, value in weights.items())
    tokens = torch.arange(2 * 48).view(2, 48) % VOCAB
    with torch.no_grad():
        losses = [model(tokens, labels=tokens.roll(-1, 1)) for model in (local, coat)]
    assert ((losses[0] - losses[1]).norm() / losses[0].norm()).item() <= bound(8, 0)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"hidden": 72, "head_dim": 16}}, r"model\.hidden=72"),
        ({"model": {"ffn": 168}}, r"model\.ffn/tp=168"),
        ({"model": {"ffn": 176}, "parallel": {"tp": 2}}, r"model\.ffn/tp=88"),
        ({"model": {"heads": 3, "kv_heads": 1, "head_dim": 24}}, r"model\.heads\*head_dim/tp=72"),
        ({"model": {"heads": 2, "kv_heads": 1, "head_dim": 8}}, r"model\.kv_heads\*head_dim/tp=8"),
        ({"precision": {"group_size": 32}}, r"model\.ffn/tp=176 .* precision\.group_size=32"),
        ({"precision": {"group_size": 8}}, r"precision\.group_size=8"),
        ({"precision": {"fast_accumulation": ["bgrad"]}}, r"fast_accumulation\.0='bgrad'"),
        ({"precision": {"grad_format": "e3m4"}}, r"precision\.grad_format='e3m4'"),
        ({"precision": {"bf16_layers": [1, 1]}}, r"bf16_layers=\[1, 1\]"),
        ({"precision": {"bf16_layers": [-1, 0]}}, r"bf16_layers=\[-1, 0\]"),
        ({"model": {"spec": "te"}}, r"model\.spec=local"),
    ],
)
def test_what_the_kernels_cannot_hold_is_refused_with_its_field(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(**sections)


def test_coat_lean_refuses_heads_that_its_scales_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"model\.head_dim=16 .* precision\.group_size=32"):
        run_config("coat-lean", model={"ffn": 192}, precision={"group_size": 32})


@pytest.mark.parametrize("documents", [False, True])
def test_coat_lean_trains_sequences_as_long_as_a_head(documents: bool, megatron: None) -> None:
    """What attention saves is told by identity: masks and probabilities may have any shape."""
    bounds = torch.tensor([[0, 5, 16], [0, 16, 16]], dtype=torch.int32) if documents else None
    exact, lean = (run(run_config(name, seq=16), bounds=bounds) for name in ("fp32", "coat-lean"))
    assert_within_bounds(errors(lean, exact))


@pytest.mark.parametrize(
    "option", [{"group_size": 16}, {"keep_weights": True}, {"bf16_layers": [1, 0]}]
)
def test_options_of_fp8_layers_are_refused_for_other_recipes(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ConfigError, match=rf"precision\.{name} is for fp8-linear \| coat"):
        run_config("bf16", precision=option)
