"""Exact match of one forward pass is that of greedy decoding."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.evaluation.exact_match import exact_matches

CPU = torch.device("cpu")


def next_of(table: Tensor) -> Any:
    """A causal model of random logits that depend on all tokens read so far."""

    def model(tokens: Tensor) -> Tensor:
        return table[tokens.cumsum(1) % len(table)]

    return model


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by its definition."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_exact_match_is_greedy_decoding() -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    model = next_of(torch.randn(97, 5, generator=generator))
    examples = []
    for _ in range(200):
        prompt = [rng.randrange(5) for _ in range(rng.randint(1, 6))]
        completion = greedy(model, prompt, rng.randint(1, 6))
        if rng.random() < 0.5:
            completion[rng.randrange(len(completion))] = rng.randrange(5)
        examples.append((prompt, completion))
    found = exact_matches(model, examples, window=12, batch=7, device=CPU)
    expected = [greedy(model, p, len(c)) == c for p, c in examples]
    assert found == expected and 0.4 < statistics.mean(found) < 0.9


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        (([], [1]), "at least one token"),
        (([1], []), "at least one"),
        (([1] * 4, [1] * 4), "reads 7"),
    ],
)
def test_an_example_that_cannot_be_matched_is_an_error(example: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        exact_matches(lambda t: t[..., None], [example], window=6, batch=1, device=CPU)
