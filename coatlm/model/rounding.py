"""The random numbers with which the gradients of a stage's FP8 layers are rounded stochastically.

Every rounding is a function of run.seed, the rank, the layer, the gradient, the step and the
microbatch, and of nothing else (fp8/stochastic.py):

    key       k0 from (seed, rank), k1 from (layer, gradient)
    counter   place of the element, step, microbatches of the step that the layer has finished

An FP8 output layer has the number after the last layer's. In place of gradients 0 and 1 it has that
of the logits and its weight, and in each chunk of the vocabulary k1 of their own (output_gemms.py).
A resumed run therefore rounds as an undisturbed one does, in the same layout. Both numbers of the
counter are on the device, where a CUDA graph reads and advances them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from coatlm.model.scales import GRADIENTS

STEP, MICROBATCH = 2, 3  # where in `noise` they are


class LayerNoise:
    """The noise of one layer's gradients: views of the tensor of its stage."""

    def __init__(self, noise: Tensor) -> None:
        self.noise = noise  # int32 [4 gradients, 4]
        self.slots = dict(zip(GRADIENTS, noise, strict=True))

    def advance_(self) -> None:
        """Advance the noise to the layer's next microbatch."""
        self.noise[:, MICROBATCH].add_(1)


class Rounded(Protocol):
    """A layer that takes the noise of its gradients from `noise`; None of layers: to nearest."""

    noise: LayerNoise | None


class GradientNoise:
    """The noise of the layers of this rank's stage, keyed by layer number in the model."""

    def __init__(
        self, layers: Mapping[int, Rounded], *, seed: int, rank: int, device: torch.device
    ) -> None:
        digest = hashlib.sha256(f"gradient rounding/{seed}/{rank}".encode()).digest()
        noise = torch.zeros(len(layers), len(GRADIENTS), 4, dtype=torch.int32)
        noise[..., 0] = int.from_bytes(digest[:4], "little", signed=True)
        numbers = torch.tensor(sorted(layers), dtype=torch.int32)
        noise[..., 1] = numbers[:, None] * len(GRADIENTS) + torch.arange(len(GRADIENTS))
        self.noise, self.step = noise.to(device), 0
        for number, slots in zip(sorted(layers), self.noise, strict=True):
            layers[number].noise = LayerNoise(slots)

    def begin_(self) -> None:
        """Begin the next step. Does not wait for the device."""
        self.noise[..., STEP].fill_(self.step)
        self.noise[..., MICROBATCH].zero_()
        self.step += 1

    def repeat_(self) -> None:
        """Begin the step that was begun last once more, with the same random numbers."""
        self.step -= 1
        self.begin_()
