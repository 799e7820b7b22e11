"""Resume a run; save and restore the state that a checkpoint holds besides its tensors.

A start resumes from

    1. the newest intact checkpoint of the run   unless checkpoint.resume is `none`, or the PATH of
                                                 an earlier checkpoint of the run to go back to
    2. checkpoint.resume=PATH, URL or hf:DIR     if the run has no checkpoint
    3. newly initialized weights

So the command that started a run also continues it, in a requeued job or when a launcher repeats it
too. The two exceptions of rule 1 apply only once, and move the later files of the run directory
away (see `attempts`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from coatlm.config import Config, ConfigError, Optim
from coatlm.config.urls import is_url
from coatlm.data.identity import SourceIdentity
from coatlm.hf.run_config import hf_directory
from coatlm.optim.convert import convert_states_, optimizer_on_host
from coatlm.train import attempts, checkpoint
from coatlm.train.agreement import Group, together
from coatlm.train.changes import changed_keys, check_changes, check_same_model, describe_changes
from coatlm.train.faults import NonFiniteGuard
from coatlm.train.guard import restore_guard
from coatlm.train.hf_weights import load_huggingface
from coatlm.train.manifest import last_serial, read_checkpoint_manifest
from coatlm.train.remote_checkpoint import DOWNLOADS, download_checkpoint, last_uploaded
from coatlm.train.state import read_run_state
from coatlm.train.step import Trainer

logger = logging.getLogger("coatlm")
whole_run = logging.getLogger("coatlm.run")


@dataclass
class Progress:
    """The progress of a run.

    `pending` has (loss, norm, spike) of each step, on the device, until the next log step fetches
    them; `window` has the finite losses fetched since the last line of metrics.jsonl.
    """

    guard: NonFiniteGuard
    step: int = 0  # updates done
    tokens: int = 0  # in the global batches of these updates
    samples: int = 0  # index of the next step's first sample
    pending: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    window: list[float] = field(default_factory=list)
    left_out: list[tuple[int, int]] = field(default_factory=list)  # batches [first, stop) not read
    inherited: int = 0  # how many of these a run left out whose checkpoint this one began from
    # the highest number, in the order of writing, of the checkpoint resumed from and of those that
    # the run directory had then; checkpoints that are moved away stay where they were uploaded to
    continued: int = 0

    @property
    def batch(self) -> int:
        """The index of the global batch that the next step reads."""
        return self.step + sum(stop - first for first, stop in self.left_out)


class Known(TypedDict):
    """The identity of a run's tokenizer and data, which is saved with its checkpoints."""

    tokenizer: str  # its fingerprint
    data: list[SourceIdentity]


@dataclass(frozen=True)
class Origin:
    """The checkpoint from which a start resumes."""

    path: Path | None  # a checkpoint; None: newly initialized weights
    own: bool = False  # it is one of the run's own, so the run's records continue
    back: bool = False  # it is not the run's newest, so the run goes back to it
    huggingface: Path | str | None = None  # in place of `path`: a directory, or its URL, of which
    # weights are loaded


def state_to_save(
    config: Config,
    trainer: Trainer,
    run: Progress,
    *,
    tokenizer: str,
    data: list[SourceIdentity],
) -> dict[str, Any]:
    """The content of state.json, for `restore` and `check_changes`. A collective call."""
    shared = trainer.reduction_scales
    return {
        "step": run.step,
        "tokens": run.tokens,
        "samples": run.samples,
        "updates": int(trainer.optimizer.optimizer.step_count),
        "skipped": run.guard.total,
        "skipped_in_row": run.guard.in_row,
        "left_out": run.left_out,
        "inherited": run.inherited,
        "window": run.window,
        "guard": None if trainer.guard is None else trainer.guard.state(),
        "clip_norm": trainer.optimizer.norm_to_save(),
        "spikes": None if trainer.spikes is None else trainer.spikes.state(),
        "tokenizer": tokenizer,
        "data": data,
        "flat_groups": trainer.zero_checkpoint.flat_blocks(),
        "automatic_scales": trainer.zero_checkpoint.automatic_scales(),
        "summed_ranks": trainer.zero_checkpoint.summed_ranks(),
        "gradient_amaxes": trainer.gradient_amaxes(),
        "reduction_amaxes": {} if shared is None else shared.state(),
        "config": config.model_dump(mode="json"),
    }


def find_origin(config: Config, group: Group | None, *, restarted: bool) -> Origin:
    """The checkpoint to resume from, by the module's rules. All ranks of a gloo group call it.

    `restarted`: a launcher or batch system has started the same command again, so an earlier start
    has already applied `none`. Raises CheckpointError as `find_checkpoint` does.
    """
    directory = config.run.dir / checkpoint.CHECKPOINTS
    request = config.checkpoint.resume
    if request == "none" and not restarted:
        return Origin(None)
    own = checkpoint.find_checkpoint("auto", directory, logger, group)
    if own is None:
        if request in ("auto", "none"):
            return Origin(None)
        if (source := hf_directory(request)) is not None:
            return Origin(None, huggingface=source)
        if is_url(request):
            downloads = config.run.dir / DOWNLOADS
            return Origin(download_checkpoint(request, downloads, logger, group))
        return Origin(checkpoint.find_checkpoint(request, directory, logger, group))
    if request in ("auto", "none"):
        return Origin(own, own=True)
    if goes_back(config, own):
        found = checkpoint.find_checkpoint(request, directory, logger, group)
        return Origin(found, own=True, back=True)
    if _is_earlier(Path(request), own):
        logger.info(
            "%s went back to %s before and continues its newest checkpoint; to begin there again, "
            "use another run.dir",
            config.run.dir,
            request,
        )
    elif not _same(Path(request), own):
        logger.info(
            "%s continues its newest checkpoint; checkpoint.resume=%s is used only for a first "
            "start",
            config.run.dir,
            request,
        )
    return Origin(own, own=True)


def goes_back(config: Config, own: Path) -> bool:
    """Whether checkpoint.resume names an earlier checkpoint of the run than `own`, its newest, to
    which the run has not gone back before."""
    target = Path(config.checkpoint.resume)
    return _is_earlier(target, own) and not _went_back_to(target, read_run_state(own))


def _is_earlier(target: Path, own: Path) -> bool:
    """Whether `target` is another checkpoint of the run whose newest is `own`."""
    return _same(target.parent, own.parent) and not _same(target, own) and target.is_dir()


def resume(
    config: Config,
    trainer: Trainer,
    run: Progress,
    *,
    tokenizer: str,
    data: list[SourceIdentity],
    restarted: bool = False,
    lap: Callable[[str], None] = lambda part: None,
) -> Origin:
    """Load the checkpoint that `find_origin` chooses, if any, into `trainer` and `run`.

    Returns the origin. `tokenizer` is the tokenizer's fingerprint; `lap` is called once the files
    are verified, with the name of that part of the start. Raises ConfigError for a change
    that is not allowed and CheckpointError if the checkpoint does not fit or cannot be read, before
    any file of the run is moved or overwritten.
    """
    origin = find_origin(config, trainer.groups.checkpoint, restarted=restarted)
    lap("checkpoint verified")
    run.continued = last_serial(config.run.dir / checkpoint.CHECKPOINTS)
    if (url := config.checkpoint.upload) is not None:  # new checkpoints count as newer there too
        group = trainer.groups.checkpoint
        first = group is None or group.rank() == 0
        uploaded = together(lambda: last_uploaded(url) if first else 0, group)
        run.continued = max(run.continued, *uploaded)
    if origin.huggingface is not None:
        load_huggingface(origin.huggingface, trainer)
    if origin.path is None:
        return origin
    state = read_run_state(origin.path)
    run.continued = max(run.continued, read_checkpoint_manifest(origin.path).serial)
    if config.checkpoint.weights_only and not origin.own:
        keys = changed_keys(state["config"], config)
        keys = check_same_model(origin.path, keys, weights_only=True)
        _check_tokenizer(origin.path, state, config, tokenizer)
        restore(origin.path, state, trainer, run, weights_only=True)
        other = {key: change for key, change in keys.items() if key.startswith("model.")}
        for line in describe_changes(other):
            whole_run.warning("differs from %s, whose weights are loaded: %s", origin.path, line)
        return origin
    if not origin.own and state["step"] >= config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps}: {origin.path} is at step {state['step']} already"
        )
    lines = check_changes(origin.path, state, config, tokenizer=tokenizer, data=data)
    restore(origin.path, state, trainer, run)
    if not origin.own:
        run.inherited = len(run.left_out)
    for line in lines:
        whole_run.warning("changed since step %d: %s", run.step, line)
    return origin


def archive_attempt(config: Config, origin: Origin) -> None:
    """Move away files that this start would overwrite, on rank 0. Raises OSError."""
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
    """Load the checkpoint at `path`, which is of the same model, into `trainer` and `run`.

    Its .distcp files give weights and optimizer states, or with `weights_only` the weights alone;
    the optimizer states are then initialized from them. States of another recipe are converted.
    `state`, the content of its state.json, gives counters and scales; `weights_only` leaves `run`
    unchanged.
    """
    zero, optimizer = trainer.zero_checkpoint, trainer.optimizer.optimizer
    source, convert = None, None
    recipe = state["config"]["optim"].get("recipe", Optim().recipe)
    if recipe != trainer.config.optim.recipe and not weights_only:
        source = optimizer_on_host(optimizer, recipe)
        convert = partial(convert_states_, optimizer, source)
    tensors = zero.tensors_to_load(
        state.get("flat_groups"), weights_only=weights_only, states_of=source
    )
    checkpoint.load(path, tensors, trainer.groups.checkpoint, allow_extra=weights_only)
    zero.finish_load(convert)
    if weights_only:
        optimizer.reload_from_weights()
        logger.info("weights of %s (step %d)", path, state["step"])
        return
    zero.set_automatic_scales(state.get("automatic_scales", {}), state.get("summed_ranks"))
    restore_guard(trainer.guard, state.get("guard"), trainer.config)
    # gradients are of a mean over the global batch: with another one the first step calibrates
    saved, now = state["config"], trainer.config
    batch = saved["train"]["global_batch"] * saved["data"]["seq_len"]
    kept = state if batch == now.train.global_batch * now.data.seq_len else {}
    if trainer.scales is not None:
        trainer.scales.restore(kept.get("gradient_amaxes", {}), idle=trainer.fallen)
    if trainer.reduction_scales is not None:
        trainer.reduction_scales.restore(kept.get("reduction_amaxes", {}))
    for noise in (trainer.noise, trainer.sum_noise):
        if noise is not None:
            noise.step = state["step"]
    optimizer.step_count.fill_(state["updates"])
    trainer.optimizer.restore_norm(state.get("clip_norm"))
    run.step, run.guard.total = state["step"], state["skipped"]
    run.guard.in_row = state.get("skipped_in_row", 0)
    run.left_out = [(first, stop) for first, stop in state.get("left_out", ())]
    run.inherited = state.get("inherited", 0)
    run.tokens = state["tokens"]
    run.samples = _next_sample(state, trainer.config.data.seq_len)
    run.window = [float(loss) for loss in state.get("window", ())]
    if trainer.spikes is not None:
        trainer.spikes.restore(state.get("spikes"))
    if (reason := begins_anew(trainer.config)) is not None:
        logger.warning("%s", reason)
    logger.info("resumed from %s at step %d", path, run.step)


def begins_anew(config: Config) -> str | None:
    """What a resumed run has not from its checkpoint; None if it resumes exactly."""
    if config.precision.recipe != "te-delayed":
        return None
    return (
        "precision.recipe=te-delayed: a checkpoint has no amax histories of TransformerEngine, so "
        "its scales begin at 1 again, as in a new run"
    )


def _next_sample(state: Mapping[str, Any], seq_len: int) -> int:
    """The index of the next sample, in samples of `seq_len` tokens.

    It is `samples` in state.json, or derived from the steps done if an older version wrote none. If
    the sequence length has changed, it is scaled to the same number of tokens and rounded up.
    """
    saved = state["config"]
    batches = state["step"] + sum(stop - first for first, stop in state.get("left_out", ()))
    samples = state.get("samples")
    if samples is None:
        samples = batches * saved["train"]["global_batch"]
    return -(-samples * int(saved["data"]["seq_len"]) // seq_len)


def _check_tokenizer(path: Path, state: Mapping[str, Any], config: Config, tokenizer: str) -> None:
    """Raise CheckpointError if the weights were trained with another tokenizer.

    A checkpoint that was converted without a tokenizer has an empty fingerprint.
    """
    if state["tokenizer"] and state["tokenizer"] != tokenizer:
        raise checkpoint.CheckpointError(
            f"{path}: trained with another tokenizer than data.tokenizer={config.data.tokenizer}"
        )


def _went_back_to(target: Path, newest: Mapping[str, Any]) -> bool:
    """Whether the start that wrote the newest checkpoint had gone back to `target`."""
    return _same(Path(str(newest["config"]["checkpoint"].get("resume"))), target)


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()
