"""A small byte-level BPE tokenizer, trained on the spot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def train_bpe(lines: Iterable[str], *, vocab_size: int) -> Any:
    """A tokenizers.Tokenizer of `lines` with all bytes and <|endoftext|>."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    model.train_from_iterator(lines, trainer)
    return model
