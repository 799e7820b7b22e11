"""Exact match of greedy decoding: the share of prompts whose completion is decoded as it is.

Greedy decoding appends the argmax of the logits to the text, again and again. It gives exactly the
tokens c_0 .. c_(m-1) if and only if every c_i is the argmax where the prompt and c_0 .. c_(i-1) are
read: as long as each token was right, the text that decoding reads is that of the example, and a
wrong token ends the match. So one forward pass over prompt and completion decides, and nothing
needs to be generated. The completion ends with end-of-document, which must be predicted too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def exact_matches(
    model: Callable[[Tensor], Tensor],
    examples: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    window: int,
    batch: int,
    device: torch.device,
) -> list[bool]:
    """For each example, the ids of a prompt and of its completion, whether it is decoded exactly.

    `model` returns logits [B, window, V] for tokens [B, window] and reads causally, so that the
    padding behind an example does not matter. Raises ValueError for an empty prompt or completion,
    and for an example that is longer than the window.
    """
    for prompt, completion in examples:
        if not prompt or not completion:
            raise ValueError("an example needs a prompt and a completion of at least one token")
        if len(prompt) + len(completion) - 1 > window:
            raise ValueError(
                f"an example reads {len(prompt) + len(completion) - 1} tokens, window={window}"
            )
    found: list[bool] = []
    for start in range(0, len(examples), batch):
        part = examples[start : start + batch]
        tokens = torch.zeros(len(part), window, dtype=torch.int64)
        wanted = torch.full((len(part), window), -1, dtype=torch.int64)
        for row, (prompt, completion) in enumerate(part):
            ids = torch.tensor([*prompt, *completion])
            tokens[row, : len(ids) - 1] = ids[:-1]
            wanted[row, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
        decoded = model(tokens.to(device)).argmax(-1).cpu()
        found += ((decoded == wanted) | (wanted == -1)).all(1).tolist()
    return found
