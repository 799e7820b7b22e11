"""Checks of the keys of FP8 layers (coatlm's FP8 recipes) against all other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coatlm.config.errors import divides
from coatlm.config.model import Model, Precision
from coatlm.config.recipes import IN_BLOCKS, RECIPES

if TYPE_CHECKING:
    from coatlm.config.combined import Config

# keys of precision that are not only for FP8 layers
ANY_RECIPE = {"recipe", "output_layer", "tune_attention"}
LOCAL_LAYER_ONLY = (  # keys of model that FP8 layers do not compute
    *("norm_after", "sandwich_norm", "zero_centered_norm", "activation", "residual_multiplier"),
    *("attention_softcap",),
)


def check_flow(config: Config) -> None:
    """Raise ValueError for sizes and options that the FP8 kernels do not support."""
    m, p, recipe = config.model, config.precision, config.precision.recipe
    if not p.flow:
        flows = " | ".join(RECIPES)
        for name in set(Precision.model_fields) - ANY_RECIPE:
            if getattr(p, name) != Precision.model_fields[name].default:
                raise ValueError(f"precision.{name} is for {flows}, not for {recipe}")
        return
    if m.spec != "local":
        raise ValueError(f"precision.recipe={recipe} needs model.spec=local")
    for name in LOCAL_LAYER_ONLY:
        if (value := getattr(m, name)) != (usual := Model.model_fields[name].default):
            raise ValueError(
                f"precision.recipe={recipe} with model.{name}={value}: must be {usual}"
            )
    if min(p.bf16_layers) < 0 or sum(p.bf16_layers) > m.layers:
        raise ValueError(
            f"precision.bf16_layers={list(p.bf16_layers)}: first and last layers, >= 0, "
            f"together at most model.layers={m.layers}"
        )
    if p.guard == "off" and p.guard_every != Precision().guard_every:
        raise ValueError(
            f"precision.guard_every={p.guard_every} needs precision.guard=warn, fallback or operand"
        )
    if p.falls_back and config.parallel.weight_gather == "fp8":
        raise ValueError(
            f"precision.guard={p.guard} with parallel.weight_gather=fp8: a GEMM in BF16 would "
            "compute with weights that were rounded to FP8; use precision.guard=warn, which does "
            "not measure weights then, or parallel.weight_gather=bf16"
        )
    _check_operands(config)


def _check_operands(config: Config) -> None:
    """Raise ValueError if FP8 blocks or tensor-core tiles do not divide the model's sizes."""
    m, p, tp = config.model, config.precision, config.parallel.tp
    row, operands = RECIPES[p.recipe], f"the FP8 GEMMs of precision.recipe={p.recipe}"
    if p.scaling == "delayed" and not row.tensor_wise_gradients:
        raise ValueError(
            f"precision.scaling=delayed needs one scale per gradient, which "
            f"precision.recipe={p.recipe} does not have; it needs one of "
            f"{', '.join(name for name, r in RECIPES.items() if r.tensor_wise_gradients)}"
        )
    if p.delayed_margin is not None and p.scaling != "delayed":
        raise ValueError(
            f"precision.delayed_margin={p.delayed_margin} needs precision.scaling=delayed"
        )
    powers = row.dgrad.gradient.power_of_two or p.scaling == "delayed"
    if p.grad_rounding != "nearest" and not (row.tensor_wise_gradients and powers):
        raise ValueError(
            f"precision.grad_rounding={p.grad_rounding} needs tensor-wise power-of-two scales "
            f"of gradients, which precision.recipe={p.recipe} with precision.scaling="
            f"{p.scaling} does not have"
        )
    if row.rotated and p.keep_linear_inputs:
        raise ValueError(
            f"precision.keep_linear_inputs=true with precision.recipe={p.recipe}: must be null or "
            "false, because wgrad does not take the INT8 codes of forward"
        )
    _check_bf16_operands(config)
    recipe = p.flow_recipe()
    if p.group_size is not None and not any(getattr(recipe.saved, name) for name in IN_BLOCKS):
        raise ValueError(f"precision.group_size={p.group_size}: {p.recipe} saves no blocks")
    size = p.group_size or 16  # FP8 tensor cores need multiples of 16 as well
    divides("model.hidden", m.hidden, "precision.group_size", size)
    chunks, codes = config.parallel.tp_chunks, config.parallel.tp_comm_reduce == "fp8"
    rows = max(128 if codes else 16, recipe.forward.weight.granularity.rows or 1)
    if chunks > 1 or codes:  # the scale of a code covers 128 columns of a chunk
        divides("model.hidden", m.hidden, f"{rows}*parallel.tp_chunks", rows * chunks)
    divides("model.ffn/tp", m.ffn // tp, "precision.group_size", size)
    for name, heads in (("heads", m.heads), ("kv_heads", m.key_value_heads)):
        width = heads * m.size_per_head // tp
        divides(f"model.{name}*head_dim/tp", width, "the alignment of FP8 GEMMs", 16)
    if recipe.saved.attention:
        divides("model.head_dim", m.size_per_head, "precision.group_size", size)
    summed = recipe.summed_multiple
    if summed > 16:  # a scale covers 128 elements of the summed axis, never fewer
        if p.fast_accumulation != Precision().fast_accumulation:
            raise ValueError(
                f"precision.fast_accumulation={list(p.fast_accumulation)}: block-wise scaled "
                f"GEMMs have no such option; remove it for precision.recipe={p.recipe}"
            )
        queries, keys = (n * m.size_per_head // tp for n in (m.heads, m.key_value_heads))
        divides("model.hidden", m.hidden, operands, summed)
        divides("model.ffn/tp", m.ffn // tp, operands, summed)
        divides("model.heads*head_dim/tp", queries, operands, summed)
        both = "model.(heads + 2*kv_heads)*head_dim/tp"
        divides(both, queries + 2 * keys, operands, summed)
        tokens = config.train.smallest_micro_batch * config.data.seq_len // config.parallel.cp
        divides("train.micro_batch*data.seq_len/cp", tokens, "the rows of 1x128 blocks", 4)


def _check_bf16_operands(config: Config) -> None:
    """Raise ValueError for operands and saved tensors that cannot stay in BF16."""
    p, names = config.precision, list(config.precision.bf16_operands)
    what, row = f"precision.bf16_operands={names}", RECIPES[p.recipe]
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: each at most once")
    for name in names:
        if name.startswith("saved.") and not getattr(row.saved, name.removeprefix("saved.")):
            raise ValueError(f"{what}: precision.recipe={p.recipe} saves {name[6:]} in BF16")
    operands = [name for name in names if not name.startswith("saved.")]
    if operands and not row.exact_in_bf16:
        exact = ", ".join(name for name, r in RECIPES.items() if r.exact_in_bf16)
        raise ValueError(
            f"{what}: BF16 cannot represent the dequantized operands of precision.recipe="
            f"{p.recipe}; it needs one of {exact}"
        )
    if operands and config.parallel.tp > 1:
        raise ValueError(f"{what} with parallel.tp={config.parallel.tp}: must be 1")
    if "wgrad.activation" in names and p.keep_linear_inputs:
        raise ValueError(f"{what} with precision.keep_linear_inputs=true: must be null or false")
    weights = {"forward.weight", "dgrad.weight"}.intersection(names)
    if weights and config.parallel.weight_gather == "fp8":
        raise ValueError(f"{what} with parallel.weight_gather=fp8: must be bf16")
