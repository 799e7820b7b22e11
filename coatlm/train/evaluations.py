"""The evaluations of a run between its steps: the validation loss and the metrics of eval.tasks.

    val_loss = sum of losses of counted tokens / counted tokens, over train.eval_batches global
               batches, the same in every evaluation

Both take minutes in large runs. So the loop saves a checkpoint that is due at the same step first,
and ranks agree on signals after each global batch and each forward pass of the tasks. A signal
stops them at the same batch; nothing of the evaluation is logged then. A run that resumes first
does the evaluations that `missing` lists.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from coatlm.config import Config
from coatlm.data.batches import microbatches
from coatlm.data.dataset import Dataset
from coatlm.platform import device
from coatlm.train.predict import Predictor
from coatlm.train.run_directory import TASK, read_metrics
from coatlm.train.step import Trainer

if TYPE_CHECKING:
    from coatlm.train.harness import Tasks

whole_run = logging.getLogger("coatlm.run")
LOSS = "val_loss"  # the kinds of evaluations: keys of metrics.jsonl, or what these begin with
KINDS = (LOSS, TASK)


class StoppedError(Exception):
    """The ranks have agreed on a signal during an evaluation."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


class Evaluations:
    """Evaluates the model of `trainer`.

    All ranks call `check` after each global batch or forward pass; StoppedError that it raises on
    all of them ends the evaluation.
    """

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        validation: Dataset | None,
        tasks: Tasks | None,
        *,
        check: Callable[[], None],
    ) -> None:
        self.config, self.trainer, self.validation, self.tasks = config, trainer, validation, tasks
        self.check = check
        self.predictor = Predictor(
            trainer.chunks,
            trainer.groups,
            seq_len=config.data.seq_len,
            micro_batch=config.train.micro_batch,
            after_pass=check,
        )

    def evaluate(self, kind: str) -> dict[str, float]:
        """The values of one of KINDS, by their keys in metrics.jsonl. Raises StoppedError."""
        if kind == LOSS:
            return {LOSS: self._loss()}
        assert self.tasks is not None
        return self.tasks.evaluate(self.predictor)

    def _loss(self) -> float:
        """The mean validation loss per token; NaN, and a warning, where no token counts."""
        assert self.validation is not None
        groups, batch = self.trainer.groups, self.config.train.global_batch
        share = batch_share(self.config, self.trainer)
        losses, tokens = [], []
        for index in range(self.config.train.eval_batches):
            batches = list(microbatches(self.validation, index * batch, **share))
            tokens.append(torch.stack([batch["loss_mask"].sum() for batch in batches]).sum())
            losses.append(self.trainer.evaluate(self.trainer.place(batches)))
            self.check()
        counted = torch.stack(tokens).double()
        dist.all_reduce(counted, group=groups.dp_cp)  # of whole samples: cp times the sum
        total = counted.sum()
        if not total:
            whole_run.warning(
                "data.loss_mask=%s: no token counts in the %d validation samples, so there is no "
                "validation loss; are prompts longer than data.seq_len=%d?",
                *(self.config.data.loss_mask, self.config.train.eval_batches * batch),
                self.config.data.seq_len,
            )
        sums = torch.stack(losses) * counted
        return float(torch.where(counted > 0, sums, 0.0).sum() / total)


def batch_share(config: Config, trainer: Trainer) -> dict[str, Any]:
    """The arguments that select this rank's share of a global batch, and its device."""
    return {
        "global_batch": config.train.global_batch,
        "micro_batch": config.train.micro_batch,
        "dp_rank": trainer.groups.dp.rank(),
        "dp_size": trainer.groups.dp.size(),
        "device": device(),
    }


def is_due(every: int, step: int, steps: int) -> bool:
    """Whether something is due at `step`: every so many steps and at the last one; 0 for never."""
    return bool(every) and (step % every == 0 or step == steps)


def due(config: Config, step: int) -> list[str]:
    """The kinds of evaluations that are due at `step`."""
    every = (config.train.eval_every, config.eval.tasks_every if config.eval.tasks else 0)
    pairs = zip(KINDS, every, strict=True)
    return [kind for kind, steps in pairs if is_due(steps, step, config.train.steps)]


def missing(config: Config, step: int) -> Sequence[str]:
    """The evaluations that are due at `step` above 0 and not in metrics.jsonl of the run."""
    wanted = due(config, step) if step else []
    records = read_metrics(config.run.dir) if wanted else []
    done = {key for record in records if record["step"] == step for key in record}
    return [kind for kind in wanted if not any(key.startswith(kind) for key in done)]
