"""Whether the trackers that a run asks for can be used, found out before anything else starts."""

from __future__ import annotations

import importlib.util

from coatlm.config import ConfigError, Log
from coatlm.train.sinks import missing_package


def check_trackers(log: Log) -> None:
    """Raise ValueError where a package is missing or wandb cannot log in. Never prompts."""
    if log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise missing_package("log.tensorboard=true", "tensorboard")
    if log.wandb_project:
        _check_wandb(f"log.wandb_project={log.wandb_project}")


def _check_wandb(option: str) -> None:
    try:
        import wandb
    except ImportError:
        raise missing_package(option, "wandb") from None
    advice = "run `wandb login`, set WANDB_API_KEY, or go offline with WANDB_MODE=offline"
    try:
        if wandb.setup().settings.mode != "online":
            return
        # a wrong key and a network without a way out are found here as well
        if not wandb.login(verify=True, prompt=False):
            raise ConfigError(f"{option}: wandb is not logged in: {advice}")
    except wandb.Error as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(f"{option}: wandb cannot log in: {reason}: {advice}") from error
