"""The metrics of a checkpoint on tasks of lm-evaluation-harness, as in training (train.harness)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coatlm.evaluation.model import open_model
from coatlm.train.harness import Tasks
from coatlm.train.predict import Predictor
from coatlm.train.run_directory import task_scores


def score_tasks(
    tasks: Tasks, checkpoint: Path, saved: dict[str, Any], *, batch: int, precision: str
) -> dict[str, float]:
    """The metrics by `NAME/METRIC`; a pass takes `batch` texts of the length `tasks.seq_len`.

    `saved` and `precision` are those of `open_model`, which says what is raised.
    """
    window = tasks.seq_len
    with open_model(checkpoint, saved, window=window, precision=precision) as model:
        predictor = Predictor([model], model.groups, seq_len=window, micro_batch=batch)
        return task_scores(tasks.evaluate(predictor))
