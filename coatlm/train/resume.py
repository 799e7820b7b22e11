"""What a run continues from: how far it has come, and what a checkpoint knows besides tensors."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from coatlm.config import Config
from coatlm.train import checkpoint
from coatlm.train.faults import NonFiniteGuard
from coatlm.train.state import read_run_state
from coatlm.train.step import Trainer

logger = logging.getLogger("coatlm")


@dataclass
class Progress:
    """How far a run has come. `pending`: (loss, norm, spike) of steps still on the device."""

    guard: NonFiniteGuard
    step: int = 0  # updates done
    pending: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    left_out: list[tuple[int, int]] = field(default_factory=list)  # batches [first, stop) not read

    @property
    def batch(self) -> int:
        """The number of the global batch that the next step reads."""
        return self.step + sum(stop - first for first, stop in self.left_out)


def state_to_save(
    config: Config, trainer: Trainer, run: Progress, fingerprint: str
) -> dict[str, Any]:
    """What `restore` and `check_same_model` read. All ranks call it together."""
    optimizer = trainer.optimizer
    return {
        "step": run.step,
        "tokens": run.step * config.train.global_batch * config.data.seq_len,
        "updates": int(optimizer.optimizer.step_count),
        "skipped": run.guard.total,
        "skipped_in_row": run.guard.in_row,
        "left_out": run.left_out,
        "spikes": None if trainer.spikes is None else trainer.spikes.state(),
        "tokenizer": fingerprint,
        "flat_groups": optimizer.flat_groups(),
        "automatic_scales": optimizer.automatic_scales(),
        "gradient_amaxes": trainer.gradient_amaxes(),
        "config": config.model_dump(mode="json"),
    }


def resume(config: Config, trainer: Trainer, run: Progress, fingerprint: str) -> None:
    """Continue from the checkpoint that `checkpoint.resume` asks for, if there is one."""
    groups = trainer.groups
    path = checkpoint.find_checkpoint(
        config.checkpoint.resume, config.run.dir / "checkpoints", logger, groups.checkpoint
    )
    if path is None:
        return
    state = read_run_state(path)
    check_same_model(path, state, config, fingerprint)
    restore(path, state, trainer, run, weights_only=config.checkpoint.weights_only)


def restore(
    path: Path,
    state: dict[str, Any],
    trainer: Trainer,
    run: Progress,
    *,
    weights_only: bool = False,
) -> None:
    """Take up the checkpoint at `path`, of the same model, whose `state` has been read: everything,
    or the weights for a new run.
    """
    tensors = trainer.optimizer.tensors_to_load(state.get("flat_groups"), weights_only=weights_only)
    checkpoint.load(path, tensors, trainer.groups.checkpoint, allow_extra=weights_only)
    trainer.optimizer.finish_load()
    if weights_only:
        trainer.optimizer.optimizer.reload_from_weights()
        logger.info("weights of %s (step %d)", path, state["step"])
        return
    trainer.optimizer.set_automatic_scales(state.get("automatic_scales", {}))
    if trainer.scales is not None:
        trainer.scales.restore(state.get("gradient_amaxes", {}))
    trainer.optimizer.optimizer.step_count.fill_(state["updates"])
    run.step, run.guard.total = state["step"], state["skipped"]
    run.guard.in_row = state.get("skipped_in_row", 0)
    run.left_out = [(first, stop) for first, stop in state.get("left_out", ())]
    if trainer.spikes is not None:
        trainer.spikes.restore(state.get("spikes"))
    logger.info("resumed from %s at step %d", path, run.step)


def check_same_model(path: Path, state: dict[str, Any], config: Config, fingerprint: str) -> None:
    """Raise CheckpointError, naming the field, for a checkpoint of another model or tokenizer."""
    saved, current = state["config"], config.model_dump(mode="json")
    compared = [("model", name) for name in current["model"] if name != "spec"]
    if not config.checkpoint.weights_only:
        compared.append(("optim", "recipe"))
    for section, name in compared:
        if saved[section].get(name) != current[section][name]:
            raise checkpoint.CheckpointError(
                f"{path}: {section}.{name}={saved[section].get(name)!r} there, "
                f"{current[section][name]!r} here: a checkpoint of another {section}"
            )
    if state["tokenizer"] != fingerprint:
        raise checkpoint.CheckpointError(
            f"{path}: trained with another tokenizer than data.tokenizer={config.data.tokenizer}"
        )
