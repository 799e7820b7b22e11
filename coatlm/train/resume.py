"""What a run continues from: how far it has come, and what a checkpoint knows besides tensors.

    the run's own checkpoints, the newest whole one       whatever checkpoint.resume says, but none
    checkpoint.resume=PATH                                only where the run has none of its own
    fresh weights                                         else

So the command that started a run also continues it, from a requeued job or a launcher that starts
it again as well. Two requests set aside what the run directory holds (`attempts`): `none`, and the
PATH of one of the run's own earlier checkpoints, which goes back to it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from coatlm.config import Config, ConfigError
from coatlm.data.identity import SourceIdentity
from coatlm.train import attempts, checkpoint
from coatlm.train.agreement import Group
from coatlm.train.changes import changed_keys, check_changes, check_same_model
from coatlm.train.faults import NonFiniteGuard
from coatlm.train.state import read_run_state
from coatlm.train.step import Trainer

logger = logging.getLogger("coatlm")


@dataclass
class Progress:
    """How far a run has come. `pending`: (loss, norm, spike) of steps still on the device;
    `window`: the finite losses fetched since the last line of metrics.jsonl.
    """

    guard: NonFiniteGuard
    step: int = 0  # updates done
    tokens: int = 0  # in the global batches of these updates
    samples: int = 0  # where the next step begins in the order of samples
    pending: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    window: list[float] = field(default_factory=list)
    left_out: list[tuple[int, int]] = field(default_factory=list)  # batches [first, stop) not read

    @property
    def batch(self) -> int:
        """The number of the global batch that the next step reads."""
        return self.step + sum(stop - first for first, stop in self.left_out)


class Known(TypedDict):
    """What tells a run from others, and is saved with its checkpoints."""

    tokenizer: str  # its fingerprint
    data: list[SourceIdentity]


@dataclass(frozen=True)
class Origin:
    """What a start continues from."""

    path: Path | None  # a checkpoint; None: fresh weights
    own: bool = False  # it is one of the run's own, so its records go on
    back: bool = False  # it is not the newest of these: the run goes back to it


def state_to_save(
    config: Config,
    trainer: Trainer,
    run: Progress,
    *,
    tokenizer: str,
    data: list[SourceIdentity],
) -> dict[str, Any]:
    """What `restore` and `check_changes` read. All ranks call it together."""
    optimizer = trainer.optimizer
    return {
        "step": run.step,
        "tokens": run.tokens,
        "samples": run.samples,
        "updates": int(optimizer.optimizer.step_count),
        "skipped": run.guard.total,
        "skipped_in_row": run.guard.in_row,
        "left_out": run.left_out,
        "window": run.window,
        "spikes": None if trainer.spikes is None else trainer.spikes.state(),
        "tokenizer": tokenizer,
        "data": data,
        "flat_groups": optimizer.flat_groups(),
        "automatic_scales": optimizer.automatic_scales(),
        "gradient_amaxes": trainer.gradient_amaxes(),
        "config": config.model_dump(mode="json"),
    }


def find_origin(config: Config, group: Group | None, *, restarted: bool) -> Origin:
    """Where a start continues, by the rules above. All ranks of a gloo group call it.

    `restarted`: a launcher or batch system has started the same command again, so that `none`
    does not mean to begin anew once more. Raises CheckpointError, as `find_checkpoint` does.
    """
    directory = config.run.dir / checkpoint.CHECKPOINTS
    request = config.checkpoint.resume
    if request == "none" and not restarted:
        return Origin(None)
    own = checkpoint.find_checkpoint("auto", directory, logger, group)
    if own is None:
        if request in ("auto", "none"):
            return Origin(None)
        return Origin(checkpoint.find_checkpoint(request, directory, logger, group))
    if request in ("auto", "none"):
        return Origin(own, own=True)
    target = Path(request)
    earlier = _same(target.parent, directory) and not _same(target, own) and target.is_dir()
    if earlier and not _went_back_to(target, read_run_state(own)):
        found = checkpoint.find_checkpoint(request, directory, logger, group)
        return Origin(found, own=True, back=True)
    if not _same(target, own):
        logger.info(
            "%s has checkpoints of its own and continues them; checkpoint.resume=%s was for the "
            "first start",
            config.run.dir,
            request,
        )
    return Origin(own, own=True)


def resume(
    config: Config,
    trainer: Trainer,
    run: Progress,
    *,
    tokenizer: str,
    data: list[SourceIdentity],
    restarted: bool = False,
) -> Origin:
    """Take up the checkpoint that a start continues from, if there is one, and return the origin.

    `tokenizer` is the fingerprint of the tokenizer. Nothing has been written when ConfigError or
    CheckpointError is raised.
    """
    origin = find_origin(config, trainer.groups.checkpoint, restarted=restarted)
    if origin.path is None:
        return origin
    state = read_run_state(origin.path)
    if config.checkpoint.weights_only and not origin.own:
        check_same_model(origin.path, changed_keys(state["config"], config), weights_only=True)
        _check_tokenizer(origin.path, state, config, tokenizer)
        restore(origin.path, state, trainer, run, weights_only=True)
        return origin
    if not origin.own and state["step"] >= config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps}: {origin.path} is at step {state['step']} already"
        )
    lines = check_changes(origin.path, state, config, tokenizer=tokenizer, data=data)
    restore(origin.path, state, trainer, run)
    for line in lines:
        logger.warning("changed since step %d: %s", run.step, line)
    return origin


def set_aside(config: Config, origin: Origin) -> None:
    """On rank 0, move away what this start would write over; see `attempts`. Raises OSError."""
    attempt = None
    if origin.back:
        assert origin.path is not None
        attempt = attempts.go_back(config.run.dir, origin.path)
    elif not origin.own:
        attempt = attempts.set_aside(config.run.dir)
    if attempt is not None:
        logger.warning("what %s held before is in %s now", config.run.dir, attempt)


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
    run.tokens = state["tokens"]
    run.samples = _next_sample(state, trainer.config.data.seq_len)
    run.window = [float(loss) for loss in state.get("window", ())]
    if trainer.spikes is not None:
        trainer.spikes.restore(state.get("spikes"))
    logger.info("resumed from %s at step %d", path, run.step)


def _next_sample(state: Mapping[str, Any], seq_len: int) -> int:
    """Where the order of samples is gone on with, in samples of `seq_len` tokens.

    Another sequence length orders other samples; the run goes on behind as many tokens of it.
    """
    saved = state["config"]
    batches = state["step"] + sum(stop - first for first, stop in state.get("left_out", ()))
    samples = state.get("samples", batches * saved["train"]["global_batch"])
    return -(-samples * int(saved["data"]["seq_len"]) // seq_len)


def _check_tokenizer(path: Path, state: Mapping[str, Any], config: Config, tokenizer: str) -> None:
    """Raise CheckpointError where the weights were trained on the ids of another tokenizer."""
    if state["tokenizer"] != tokenizer:
        raise checkpoint.CheckpointError(
            f"{path}: trained with another tokenizer than data.tokenizer={config.data.tokenizer}"
        )


def _went_back_to(target: Path, newest: Mapping[str, Any]) -> bool:
    """Whether the newest checkpoint was written by a start that had gone back to `target`."""
    return _same(Path(str(newest["config"]["checkpoint"]["resume"])), target)


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()
