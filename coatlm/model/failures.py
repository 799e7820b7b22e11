"""Failures of a run on many GPUs, and how often to save checkpoints.

    M = 1 / (r n)       mean time between interruptions, with n GPUs and the rate r of each
    T = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d

T is the time between checkpoints that loses the least, where saving one delays training by d < 2M
(Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps"); Young
1974 has the square root alone. Lost are d per checkpoint, and half of T + d per interruption.
"""

from __future__ import annotations

import math

DAY = 86400.0  # seconds
# Unexpected interruptions per GPU and second in 54 days of pretraining Llama 3 405B on 16,384 H100
# (arXiv 2407.21783, section 3.3.4)
RATE = 419 / (54 * DAY * 16384)


def time_between(gpus: int) -> float:
    """Mean seconds between interruptions."""
    return 1 / (RATE * gpus)


def checkpoint_interval(save: float, between: float) -> float:
    """Seconds of training between checkpoints, of which each delays training by `save` seconds."""
    if save >= 2 * between:
        return between
    share = save / (2 * between)
    return math.sqrt(2 * save * between) * (1 + math.sqrt(share) / 3 + share / 9) - save


def lost_share(save: float, between: float) -> float:
    """The share of the time that goes into saving and into steps that are repeated, at most 1."""
    interval = checkpoint_interval(save, between)
    return min(1.0, save / (interval + save) + (interval + save) / (2 * between))
