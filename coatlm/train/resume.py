"""What a start resumes from, and the state of a run that a checkpoint holds besides its tensors.

    1. newest whole checkpoint of the run    unless checkpoint.resume is `none`, or the PATH of an
                                             earlier checkpoint of the run, which goes back to it
    2. checkpoint.resume=PATH                if the run has no checkpoint
    3. fresh weights

So the command that started a run also continues it, in a requeued job or under a launcher that
starts it again as well. The two exceptions hold once, and set aside what the run directory holds
(`attempts`).
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
    return {
        "step": run.step,
        "tokens": run.tokens,
        "samples": run.samples,
        "updates": int(trainer.optimizer.optimizer.step_count),
        "skipped": run.guard.total,
        "skipped_in_row": run.guard.in_row,
        "left_out": run.left_out,
        "window": run.window,
        "spikes": None if trainer.spikes is None else trainer.spikes.state(),
        "tokenizer": tokenizer,
        "data": data,
        "flat_groups": trainer.zero_checkpoint.flat_blocks(),
        "automatic_scales": trainer.zero_checkpoint.automatic_scales(),
        "gradient_amaxes": trainer.gradient_amaxes(),
        "config": config.model_dump(mode="json"),
    }


def find_origin(config: Config, group: Group | None, *, restarted: bool) -> Origin:
    """What a start continues from, by the rules above. All ranks of a gloo group call it.

    `restarted`: a launcher or batch system has started the same command again, so that `none` was
    obeyed by an earlier start. Raises CheckpointError, as `find_checkpoint` does.
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
    if earlier:
        logger.info(
            "%s went back to %s before and continues its newest checkpoint; to begin there again, "
            "use another run.dir",
            config.run.dir,
            request,
        )
    elif not _same(target, own):
        logger.info(
            "%s continues its newest checkpoint; checkpoint.resume=%s is used only for a first "
            "start",
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
    """Load the checkpoint that `find_origin` chooses, if any, into `trainer` and `run`.

    Returns the origin. `tokenizer` is the fingerprint of the tokenizer. Raises ConfigError for a
    change that is refused, CheckpointError if the checkpoint does not fit or cannot be read, before
    anything of the run is moved or overwritten.
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


def archive_attempt(config: Config, origin: Origin) -> None:
    """On rank 0, move away what this start would write over; see `attempts`. Raises OSError."""
    attempt = None
    if origin.back:
        assert origin.path is not None
        attempt = attempts.go_back(config.run.dir, origin.path)
    elif not origin.own:
        attempt = attempts.set_aside(config.run.dir)
    if attempt is not None:
        logger.warning(
            "earlier checkpoints and metrics of %s that this run does not continue are in %s",
            config.run.dir,
            attempt,
        )


def restore(
    path: Path,
    state: dict[str, Any],
    trainer: Trainer,
    run: Progress,
    *,
    weights_only: bool = False,
) -> None:
    """Load the checkpoint at `path`, of the same model, into `trainer` and `run`.

    Tensors come from its .distcp files: weights and optimizer states, or with `weights_only` the
    weights, from which fresh optimizer states are made. Counters and scales come from `state`, its
    state.json; `weights_only` leaves `run` as it is.
    """
    zero = trainer.zero_checkpoint
    tensors = zero.tensors_to_load(state.get("flat_groups"), weights_only=weights_only)
    checkpoint.load(path, tensors, trainer.groups.checkpoint, allow_extra=weights_only)
    zero.finish_load()
    if weights_only:
        trainer.optimizer.optimizer.reload_from_weights()
        logger.info("weights of %s (step %d)", path, state["step"])
        return
    zero.set_automatic_scales(state.get("automatic_scales", {}))
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
    """The index of the next sample to read, in samples of `seq_len` tokens.

    It comes from `samples` in state.json, or from the steps done where an older version wrote none.
    Under another sequence length it is scaled to the same number of tokens, rounded up.
    """
    saved = state["config"]
    batches = state["step"] + sum(stop - first for first, stop in state.get("left_out", ()))
    samples = state.get("samples")
    if samples is None:
        samples = batches * saved["train"]["global_batch"]
    return -(-samples * int(saved["data"]["seq_len"]) // seq_len)


def _check_tokenizer(path: Path, state: Mapping[str, Any], config: Config, tokenizer: str) -> None:
    """Raise CheckpointError where the weights were trained on the ids of another tokenizer."""
    if state["tokenizer"] != tokenizer:
        raise checkpoint.CheckpointError(
            f"{path}: trained with another tokenizer than data.tokenizer={config.data.tokenizer}"
        )


def _went_back_to(target: Path, newest: Mapping[str, Any]) -> bool:
    """Whether the newest checkpoint was written by a start that had gone back to `target`."""
    return _same(Path(str(newest["config"]["checkpoint"].get("resume"))), target)


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()
