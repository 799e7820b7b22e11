"""Scaling of rotary frequencies for contexts longer than those of pretraining.

    linear   f / factor, position interpolation (Chen et al. 2023)
    llama3   f / factor for long waves, f for short ones; in between by the number of turns
    yarn     f / factor for long waves, f for short ones; in between by the index of the frequency,
             and cos and sin are multiplied by attention_factor (Peng et al. 2023, s3.2 and s3.4)
    longrope f / short_factor[i], or f / long_factor[i] in sequences longer than the original
             context; cos and sin are multiplied by attention_factor (Ding et al. 2024, s3)

f = theta^(-2 i / D) turns f * L / (2 pi) times within the original context of L tokens. In YaRN the
blend runs from the index at which that is `beta_fast` times to that of `beta_slow`, both rounded
outwards if `truncate`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KEYS = {  # type -> its keys
    "linear": {"factor"},
    "llama3": {
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    },
    "yarn": {
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "truncate"),
    },
    "longrope": {
        *("factor", "original_max_position_embeddings", "attention_factor"),
        *("short_factor", "long_factor"),
    },
}


def stretch(
    inv_freq: Tensor, theta: float, scaling: Mapping[str, Any], length: int | None
) -> Tensor:
    """Scale inv_freq[D/2]. `scaling` has a type (llama3 if missing) and the keys of KEYS.

    `length`: tokens of a sequence, by which longrope chooses its factors; None means a short one.
    Raises ValueError for other types and keys, and for impossible values.
    """
    kind = scaling.get("type", "llama3")
    if kind not in KEYS:
        raise ValueError(f"rope scaling has the type {kind!r}, must be one of {', '.join(KEYS)}")
    given = set(scaling) - {"type"}
    if given != KEYS[kind]:
        raise ValueError(f"rope scaling has the keys {sorted(given)}, must be {sorted(KEYS[kind])}")
    if kind == "linear":
        return inv_freq / scaling["factor"]
    if kind == "longrope":
        long = length is not None and length > scaling["original_max_position_embeddings"]
        return inv_freq / torch.tensor(scaling["long_factor" if long else "short_factor"])
    kept = _llama3(inv_freq, scaling) if kind == "llama3" else _yarn(inv_freq, theta, scaling)
    return inv_freq * (kept + (1 - kept) / scaling["factor"])


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What cos and sin are multiplied by, so that scores grow by its square.

    It is 1 except for YaRN and LongRoPE.
    """
    kind = None if scaling is None else scaling.get("type", "llama3")
    if scaling is None or kind not in ("yarn", "longrope"):
        return 1.0
    given, log = scaling["attention_factor"], math.log(scaling["factor"])
    if given is not None:
        return float(given)
    if kind == "yarn":
        return 0.1 * log + 1.0
    return math.sqrt(1.0 + log / math.log(scaling["original_max_position_embeddings"]))


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """The share of each frequency that stays: linear in the turns in the original context."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if not high > low:
        raise ValueError(f"rope scaling: high_freq_factor is {high}, must be above {low}")
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn(inv_freq: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """The share of each frequency that stays: linear in its index."""
    half = len(inv_freq)
    fast, slow = scaling["beta_fast"], scaling["beta_slow"]
    if not fast > slow:
        raise ValueError(f"rope scaling: beta_fast is {fast}, must be above beta_slow, {slow}")

    def index(turns: float) -> float:
        ratio = scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return half * math.log(ratio) / math.log(theta)

    first, last = index(fast), index(slow)
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first or 0.001  # as everyone does, so that a single index is a step
    ramp = (torch.arange(half, dtype=torch.float32) - first) / width
    return 1 - ramp.clamp(0, 1)
