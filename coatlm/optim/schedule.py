"""The learning rate as a pure function of the step.

With n = step + 1 updates done after step `step`, W warm-up steps, T total steps, D decay steps:

    n <= W      lr n / W
    cosine      min_lr + (lr - min_lr) (1 + cos(pi t)) / 2,   t = (n - W) / (T - W)
    linear      min_lr + (lr - min_lr) (1 - t),               t = (n - W) / (T - W)
    wsd         lr until T - D, then min_lr + (lr - min_lr) (1 - sqrt(t)),   t = (n - (T - D)) / D
    constant    lr

So the rate of the first update is not zero, update W uses `lr`, and the last update (n = T) uses
exactly `min_lr`, except with `constant`. Cosine: Loshchilov & Hutter 2017 (arXiv 1608.03983),
without restarts. Warm-up, stable, decay: Hu et al. 2024 (MiniCPM, arXiv 2404.06395, section 4); its
decay is 1 - sqrt(t), the best shape in Hägele et al. 2024 (arXiv 2405.18392, section 3).
"""

from __future__ import annotations

import math

from coatlm.config import Optim

DECAY_SHARE = 10  # without optim.decay_steps, wsd decays during the last tenth of the steps


def wsd_decay_steps(optim: Optim, total_steps: int) -> int:
    """D: `optim.decay_steps`, or a tenth of all steps, at most as many as follow the warm-up.

    Raises ValueError if `optim.decay_steps` is more than the steps after the warm-up.
    """
    after_warmup = max(total_steps - optim.warmup_steps, 0)
    if optim.decay_steps is None:
        return min(max(total_steps // DECAY_SHARE, 1), after_warmup)
    if optim.decay_steps > after_warmup:
        raise ValueError(
            f"optim.decay_steps={optim.decay_steps} is more than the {after_warmup} steps that "
            f"follow warmup_steps={optim.warmup_steps} of train.steps={total_steps}"
        )
    return optim.decay_steps


def learning_rate(step: int, optim: Optim, total_steps: int) -> float:
    """The learning rate of step `step` (0-based); after the last step, that of the last step.

    A run of at most `warmup_steps` steps only warms up. Raises ValueError if step < 0, or if the
    decay_steps of wsd are more than the steps after the warm-up.
    """
    if step < 0:
        raise ValueError(f"step={step}: steps count from 0")
    decay = wsd_decay_steps(optim, total_steps) if optim.schedule == "wsd" else 0
    n, warmup = min(step + 1, total_steps), optim.warmup_steps
    if n <= warmup:
        return optim.lr * (n / warmup)
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "wsd":
        if n <= total_steps - decay:
            return optim.lr
        share = 1.0 - math.sqrt((n - (total_steps - decay)) / decay)
    else:
        t = (n - warmup) / (total_steps - warmup)
        share = 1.0 - t if optim.schedule == "linear" else (1.0 + math.cos(math.pi * t)) / 2.0
    return optim.min_lr + (optim.lr - optim.min_lr) * share
