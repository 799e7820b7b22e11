"""Start a run from the weights of a Hugging Face directory, `checkpoint.resume=hf:DIR` or hf:URL.

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
from coatlm.hf.source import opened
from coatlm.hf.tokenizer import check_rows
from coatlm.remote import Info
from coatlm.train.agreement import together
from coatlm.train.manifest import CheckpointError
from coatlm.train.step import Trainer

logger = logging.getLogger("coatlm")
whole_run = logging.getLogger("coatlm.run")


def check_huggingface(place: Path | str, config: Config, tokenizer: Tokenizer, vocab: int) -> None:
    """Raise ConfigError with the field's name unless a run can start from `place`.

    It is a directory, or as text the URL of one. `vocab` is the number of rows of the run's
    embedding.
    """
    try:
        with opened(place, config.data.cache_dir) as source:
            source.check(config.model, vocab)
            check_rows(
                tokenizer, vocab, hint="; model.vocab=ROWS adds rows to those that are stored"
            )
            spec = source.tokenizer()
            if spec is not None and "data.tokenizer" not in config.checkpoint.allow_changes:
                _check_same(tokenizer, make_tokenizer(spec), config)
    except ValueError as error:
        raise ConfigError(f"checkpoint.resume={PREFIX}{place}: {error}") from error


def load_huggingface(place: Path | str, trainer: Trainer) -> None:
    """Load the weights of a directory, or of a URL as text, into `trainer`. All ranks call it.

    Raises CheckpointError on every rank if a file cannot be read on any of them, or if a file at a
    URL changed between their reads.
    """
    zero = trainer.zero_checkpoint
    tensors = zero.tensors_to_load(weights_only=True)

    def read() -> tuple[int, list[str], dict[str, Info]]:
        with opened(place, trainer.config.data.cache_dir) as source:
            more = any(t.global_shape[0] > source.plan[t.key].shape[0] for t in tensors)
            spec = trainer.config.data.tokenizer
            nbytes = source.fill(tensors, make_tokenizer(spec).vocab_size if more else 0)
            return nbytes, sorted(map(_name, source.dtypes())), source.weights.versions()

    ranks = together(read, trainer.groups.checkpoint, hurried=False)
    if any(versions != ranks[0][2] for _, _, versions in ranks):
        raise CheckpointError(f"{place}: a file has changed while the ranks read it")
    zero.finish_load()
    trainer.optimizer.optimizer.reload_from_weights()
    theirs, ours = ranks[0][1], sorted({_name(tensor.dtype) for tensor in tensors})
    if theirs != ours:
        whole_run.warning("weights of %s: %s, cast to %s", place, ", ".join(theirs), ours[0])
    size = in_bytes(sum(nbytes for nbytes, _, _ in ranks))
    logger.info("weights of %s: %s read by %d ranks", place, size, len(ranks))


def _check_same(ours: Tokenizer, theirs: Tokenizer, config: Config) -> None:
    if ours.fingerprint != theirs.fingerprint:
        raise ValueError(
            f"data.tokenizer={config.data.tokenizer} is not the directory's tokenizer, "
            f"{theirs.spec}; allow this with checkpoint.allow_changes=[data.tokenizer]"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
