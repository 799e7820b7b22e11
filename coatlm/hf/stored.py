"""Compare the tensors of a Hugging Face directory with those of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from coatlm.config import Model
from coatlm.hf.files import Described, WeightFiles
from coatlm.hf.layout import EMBEDDING, HEAD, Entry, zero_biases

COMPUTED = ".rotary_emb.inv_freq"  # in early checkpoints; computed from config.json


def check_stored(
    weights: WeightFiles,
    stored: Mapping[str, Described],
    plan: Mapping[str, Entry],
    *,
    biases: bool,
    model: Model,
) -> None:
    """Raise ValueError unless the directory has exactly the tensors of the model."""
    wanted = {name: shape for entry in plan.values() for name, shape in entry.stored.items()}
    zeros = zero_biases(model) if biases else {}
    for name, shape in {**wanted, **zeros}.items():
        if name not in stored:
            raise ValueError(f"{weights.directory}: {name} is missing")
        if stored[name].shape != shape:
            found = list(stored[name].shape)
            raise ValueError(
                f"{weights.directory}: {name} is {found}, config.json says {list(shape)}"
            )
    for name in zeros:
        if bool(weights.read(name).any()):
            raise ValueError(
                f"{weights.directory}: {name} is not zero: attention_bias=true gives the output "
                "projection a bias, which coatlm does not have"
            )
    extra = [n for n in stored if n not in wanted | zeros and not n.endswith(COMPUTED)]
    if HEAD in extra and model.tie_embeddings:
        if not torch.equal(weights.read(HEAD), weights.read(EMBEDDING)):
            raise ValueError(f"{weights.directory}: tie_word_embeddings=true, but {HEAD} differs")
        extra.remove(HEAD)
    if extra:
        raise ValueError(f"{weights.directory}: {extra[0]} has no place in coatlm's model")
