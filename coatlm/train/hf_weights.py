"""Start a run from the weights of a Hugging Face directory, `checkpoint.resume=hf:DIR`.

`check_huggingface` compares the directory with the configuration before anything is allocated.
`load_huggingface` then fills the weights: each rank reads its slices from the safetensors files
(see `coatlm.hf.source`), converted to the type that the run trains in. Optimizer states are
initialized from the weights, as with `checkpoint.weights_only`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from coatlm.config import Config, ConfigError
from coatlm.console import in_bytes
from coatlm.data.tokenizer import Tokenizer, make_tokenizer
from coatlm.hf.run_config import PREFIX
from coatlm.hf.source import HfSource
from coatlm.hf.tokenizer import check_rows
from coatlm.train.agreement import together
from coatlm.train.step import Trainer

logger = logging.getLogger("coatlm")


def check_huggingface(directory: Path, config: Config, tokenizer: Tokenizer, vocab: int) -> None:
    """Raise ConfigError with the field's name unless a run can start from `directory`.

    `vocab` is the number of rows of the run's embedding.
    """
    try:
        source = HfSource.open(directory)
        source.check(config.model, vocab)
        check_rows(tokenizer, source.rows)
        spec = source.tokenizer()
        if spec is not None and "data.tokenizer" not in config.checkpoint.allow_changes:
            _check_same(tokenizer, make_tokenizer(spec), config)
    except ValueError as error:
        raise ConfigError(f"checkpoint.resume={PREFIX}{directory}: {error}") from error


def load_huggingface(directory: Path, trainer: Trainer) -> None:
    """Load the weights of `directory` into `trainer`. All ranks call it.

    Raises CheckpointError on every rank if a file cannot be read on any of them.
    """
    zero = trainer.zero_checkpoint
    tensors = zero.tensors_to_load(weights_only=True)

    def read() -> tuple[int, list[str]]:
        source = HfSource.open(directory)
        return source.fill(tensors), sorted(map(_name, source.dtypes()))

    ranks = together(read, trainer.groups.checkpoint)
    zero.finish_load()
    trainer.optimizer.optimizer.reload_from_weights()
    theirs, ours = ranks[0][1], sorted({_name(tensor.dtype) for tensor in tensors})
    if theirs != ours:
        logger.warning("weights of %s: %s, cast to %s", directory, ", ".join(theirs), ours[0])
    size = in_bytes(sum(read for read, _ in ranks))
    logger.info("weights of %s: %s read by %d ranks", directory, size, len(ranks))


def _check_same(ours: Tokenizer, theirs: Tokenizer, config: Config) -> None:
    if ours.fingerprint != theirs.fingerprint:
        raise ValueError(
            f"data.tokenizer={config.data.tokenizer} is not the directory's tokenizer, "
            f"{theirs.spec}; allow this with checkpoint.allow_changes=[data.tokenizer]"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
