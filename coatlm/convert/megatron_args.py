"""Convert between the arguments of Megatron-LM or Megatron-Bridge and sections of coatlm.

Megatron-LM stores its arguments with a checkpoint, Megatron-Bridge a run_config.yaml with the same
or similar names (`megatron_bridge`). An argument is a field of coatlm's (`MODEL` and `TRAINING`),
or must have a value that coatlm supports (`FIXED`), or says nothing about the model. Of arguments
about RoPE, which no shape of a tensor shows, those that are not known here must not be set.
Arguments that a checkpoint lacks have coatlm's defaults, and the shapes of the tensors are compared
afterwards. Dropout is not read: coatlm has none.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from coatlm.config import Config, Model, RopeScaling
from coatlm.config.errors import shown
from coatlm.config.presets import Sections
from coatlm.optim.schedule import wsd_decay_steps

MODEL = {  # argument -> model.*
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "norm_epsilon": "norm_eps",
    "layernorm_epsilon": "norm_eps",
    "rotary_base": "rope_theta",
    "add_qkv_bias": "qkv_bias",
    "qk_layernorm": "qk_norm",
    "init_method_std": "init_std",
    "share_embeddings_and_output_weights": "tie_embeddings",
}
REALS = ("norm_eps", "rope_theta", "init_std")
TRAINING = {  # argument -> section.key, for a run that continues
    "seq_length": "data.seq_len",
    "lr": "optim.lr",
    "min_lr": "optim.min_lr",
    "adam_eps": "optim.eps",
    "weight_decay": "optim.weight_decay",
    "clip_grad": "optim.clip_grad",
    "lr_warmup_iters": "optim.warmup_steps",
    "train_iters": "train.steps",
    "global_batch_size": "train.global_batch",
    "micro_batch_size": "train.micro_batch",
}
FLOATS = ("optim.lr", "optim.min_lr", "optim.eps", "optim.weight_decay", "optim.clip_grad")
FIXED: Mapping[str, tuple[Any, ...]] = {  # argument -> supported values
    "normalization": (None, "RMSNorm"),
    "swiglu": (None, True),
    "gated_linear_unit": (None, True),
    "position_embedding_type": (None, "rope"),
    "add_bias_linear": (None, False),
    "rotary_percent": (None, 1),
    "rotary_interleaved": (None, False),
    "use_rope_scaling": (None, False, True),
    "rope_scaling": (None, False, True),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "seq_len_interpolation_factor": (None, 1),
    "num_experts": (None,),
    "num_moe_experts": (None,),
    "multi_latent_attention": (None, False),
    "apply_layernorm_1p": (None, False),
    "layernorm_zero_centered_gamma": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "window_size": (None,),
    "softmax_scale": (None,),
    "softmax_type": (None, "vanilla"),
    "squared_relu": (None, False),
    "quick_geglu": (None, False),
    "glu_linear_offset": (None, 0),
    "activation_func_clamp_value": (None,),
    "qk_l2_norm": (None, False),
    "no_rope_freq": (None,),
    "attention_output_gate": (None, False),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
    "use_mup": (None, False),
    "fp16": (None, False),
}
LLAMA3 = {  # of Llama31ModelProvider in Megatron-Bridge 0.1 and 0.2 -> key of model.rope_scaling
    "scale_factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "old_context_len": "original_max_position_embeddings",
}
ROPE = re.compile(r"(?:^|_)[a-z]*rope(?:_|$)|rotary|yarn|^mscale|^beta_(?:fast|slow)$|freq_factor")
HARMLESS_ROPE = (  # names that ROPE matches and whose values do not change RoPE of GPTModel
    *("rope_scaling_factor", "use_rotary_position_embeddings"),
    *("apply_rope_fusion", "fused_single_qkv_rope"),
    # of multi-latent attention, which FIXED excludes
    *("rope_type", "rotary_scaling_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
ABSENT = (  # keys of model that megatron-core lacks
    *("norm_after", "qk_norm_width", "embedding_multiplier", "residual_multiplier"),
    *("attention_multiplier", "logits_scaling", "sandwich_norm", "zero_centered_norm"),
    *("activation", "scale_embeddings", "partial_rotary_factor", "window"),
    *("attention_softcap", "logits_softcap"),
)
NOT_FOLLOWED = (  # arguments of training without a counterpart, unless they are 0 or None
    *("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_init", "lr_decay_samples"),
    *("lr_wsd_decay_samples", "decoupled_lr", "rampup_batch_size", "step_batch_size_schedule"),
)
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
WSD_DECAY = "minus_sqrt"  # the decay of coatlm's wsd, one of several of Megatron's WSD


def read_arguments(arguments: Mapping[str, Any]) -> Sections:
    """The sections model, data, optim and train that Megatron's arguments give.

    Raises ValueError with the name of an argument whose value coatlm does not support.
    """
    for name, allowed in FIXED.items():
        value = arguments.get(name)
        if type(value) not in (type(None), bool, int, float, str) or value not in allowed:
            choices = " or ".join(repr(v) for v in allowed if v is not None) or "none"
            raise ValueError(f"{name}={shown(value)} of Megatron: only {choices}")
    _check_activation(arguments.get("activation_func"))
    model = {ours: arguments[n] for n, ours in MODEL.items() if arguments.get(n) is not None}
    model |= {name: _real(f"model.{name}", model[name]) for name in REALS if name in model}
    groups = arguments.get("num_query_groups")
    if groups is not None and arguments.get("group_query_attention", True):
        model["kv_heads"] = groups
    if arguments.get("untie_embeddings_and_output_weights") is not None:
        model["tie_embeddings"] = not arguments["untie_embeddings_and_output_weights"]
    if (scaling := _rope_scaling(arguments)) is not None:
        model["rope_scaling"] = scaling
    sections: Sections = {"model": model, "data": {}, "optim": {}, "train": {}}
    for name, key in TRAINING.items():
        value = arguments.get(name)
        if value is not None:
            section, _, field = key.partition(".")
            sections[section][field] = _real(name, value) if key in FLOATS else value
    if arguments.get("end_weight_decay") is not None:  # a constant one replaces weight_decay
        decay = _real("end_weight_decay", arguments["end_weight_decay"])
        sections["optim"]["weight_decay"] = decay
    if "lr" in sections["optim"]:
        sections["optim"].setdefault("min_lr", 0.0)  # Megatron's default
    betas = [arguments.get(name) for name in ("adam_beta1", "adam_beta2")]
    if None not in betas:
        sections["optim"]["betas"] = [_real("adam_beta", beta) for beta in betas]
    style = arguments.get("lr_decay_style")
    if isinstance(style, str) and style in SCHEDULES:
        sections["optim"]["schedule"] = SCHEDULES[style]
    if style == "WSD" and arguments.get("lr_wsd_decay_iters"):
        sections["optim"]["decay_steps"] = arguments["lr_wsd_decay_iters"]
    return sections


def left_out(arguments: Mapping[str, Any]) -> str:
    """The arguments of Megatron's optimizer that a run would not follow; empty if none."""
    style, steps = arguments.get("lr_decay_style"), arguments.get("train_iters")
    names = ["lr_decay_style"] if style not in (None, *SCHEDULES) else []
    names += ["lr_decay_iters"] if arguments.get("lr_decay_iters") not in (None, steps) else []
    if style == "WSD" and arguments.get("lr_wsd_decay_style") not in (None, WSD_DECAY):
        names.append("lr_wsd_decay_style")
    names += [name for name in NOT_FOLLOWED if arguments.get(name)]
    names += ["decoupled_weight_decay"] if arguments.get("decoupled_weight_decay") is False else []
    if arguments.get("weight_decay_incr_style") not in (None, "constant"):
        names += ["weight_decay_incr_style"]
    return ", ".join(f"{name}={shown(arguments[name])}" for name in names)


def _rope_scaling(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """model.rope_scaling; None if frequencies are not scaled.

    Raises ValueError for arguments that contradict each other, and for unknown ones about RoPE.
    """
    known = {*MODEL, *FIXED, *LLAMA3, *HARMLESS_ROPE}
    for name, value in arguments.items():
        if ROPE.search(name) and name not in known and value is not None and value is not False:
            raise ValueError(f"{name}={shown(value)} of Megatron: not known to coatlm")
    scaled = bool(arguments.get("use_rope_scaling") or arguments.get("rope_scaling"))
    given = [name for name in LLAMA3 if arguments.get(name) is not None]
    if given and (scaled or len(given) < len(LLAMA3)):
        raise ValueError(
            f"{given[0]}={shown(arguments[given[0]])} of Megatron: only all of "
            f"{', '.join(LLAMA3)}, without rope_scaling"
        )
    if given:
        values = {ours: arguments[name] for name, ours in LLAMA3.items()}
        reals = {n: _real(n, values[ours]) for n, ours in LLAMA3.items() if n != "old_context_len"}
        return values | {LLAMA3[name]: real for name, real in reals.items()}
    factor = arguments.get("rope_scaling_factor") or 8.0
    return {"factor": _real("rope_scaling_factor", factor)} if scaled else None


def _check_activation(function: Any) -> None:
    """Raise ValueError unless Megatron-Bridge's activation_func is SiLU, as of SwiGLU."""
    name = function.get("_target_") if isinstance(function, Mapping) else function
    if name is not None and str(name).rpartition(".")[2] not in ("silu", "swiglu"):
        raise ValueError(f"activation_func={shown(name)} of Megatron: only torch's silu")


def _real(name: str, value: Any) -> float:
    """A number of Megatron's arguments. Raises ValueError with its name."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise ValueError(f"{name}={shown(value)} of Megatron: must be a number")
    return float(value)


def write_arguments(
    config: Config, *, vocab: int, iteration: int, samples: int, states: bool
) -> argparse.Namespace:
    """The arguments of Megatron-LM for a model of coatlm, as its checkpoints hold them.

    `states`: whether the checkpoint has optimizer states; it has no states of random generators,
    for which Megatron-LM asks unless `no_save_rng` says so. Raises ValueError for what
    megatron-core's GPTModel lacks.
    """
    m = config.model
    for name in ABSENT:
        if (value := getattr(m, name)) != (usual := Model.model_fields[name].default):
            raise ValueError(f"model.{name}={value}: megatron-core's GPTModel has only {usual}")
    if m.rope_scaling is not None:
        fixed = RopeScaling(factor=m.rope_scaling.factor)
        if m.rope_scaling != fixed:
            raise ValueError(
                f"model.rope_scaling={m.rope_scaling.parameters()}: megatron-core has only "
                f"{fixed.parameters()}, with any factor"
            )
    arguments: dict[str, Any] = {
        name: getattr(m, ours)
        for name, ours in MODEL.items()
        if name not in ("layernorm_epsilon", "share_embeddings_and_output_weights")
    }
    arguments |= {
        "group_query_attention": m.key_value_heads < m.heads,
        "num_query_groups": m.key_value_heads,
        "untie_embeddings_and_output_weights": not m.tie_embeddings,
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_rope_scaling": m.rope_scaling is not None,
        "rope_scaling_factor": 8.0 if m.rope_scaling is None else m.rope_scaling.factor,
        "max_position_embeddings": config.data.seq_len,
        "padded_vocab_size": vocab,
        "bf16": config.precision.recipe != "fp32",
        "fp16": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "iteration": iteration,
        "consumed_train_samples": samples,
        "consumed_valid_samples": 0,
        "no_save_optim": not states,
        "no_save_rng": True,
    }
    return argparse.Namespace(**arguments, **_training_arguments(config))


def _training_arguments(config: Config) -> dict[str, Any]:
    """The arguments of Megatron's optimizer, its schedule and its batches."""
    o, t = config.optim, config.train
    sections = {"data": config.data, "optim": o, "train": t}
    keys = {name: key.split(".") for name, key in TRAINING.items()}
    arguments = {name: getattr(sections[s], field) for name, (s, field) in keys.items()}
    if o.schedule == "wsd":
        arguments["lr_wsd_decay_iters"] = wsd_decay_steps(o, t.steps)
        arguments["lr_wsd_decay_style"] = WSD_DECAY
    return arguments | {
        "adam_beta1": o.betas[0],
        "adam_beta2": o.betas[1],
        "lr_decay_style": {v: k for k, v in SCHEDULES.items()}[o.schedule],
        "lr_decay_iters": t.steps,
        "lr_warmup_init": 0.0,
        "start_weight_decay": o.weight_decay,
        "end_weight_decay": o.weight_decay,
        "weight_decay_incr_style": "constant",
    }


def write_schedule(arguments: argparse.Namespace) -> dict[str, Any]:
    """The state of megatron-core's OptimizerParamScheduler at the iteration of the arguments.

    It counts samples, of which an iteration has a global batch.
    """
    a, batch = arguments, arguments.global_batch_size
    return {
        "max_lr": a.lr,
        "min_lr": a.min_lr,
        "lr_warmup_steps": a.lr_warmup_iters * batch,
        "num_steps": a.iteration * batch,
        "lr_decay_style": a.lr_decay_style,
        "lr_decay_steps": a.lr_decay_iters * batch,
        "start_wd": a.start_weight_decay,
        "end_wd": a.end_weight_decay,
        "wd_incr_style": a.weight_decay_incr_style,
        "wd_incr_steps": a.train_iters * batch,
    }
