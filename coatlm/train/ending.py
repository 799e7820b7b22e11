"""The end of a run on rank 0: loss.png, and one line that says where the results are."""

from __future__ import annotations

import logging

from coatlm.config import Config
from coatlm.config.errors import one_line
from coatlm.console import explain
from coatlm.optim.schedule import learning_rate
from coatlm.train.faults import ExitCode
from coatlm.train.resume import Progress
from coatlm.train.run_directory import loss_plot

logger = logging.getLogger("coatlm")


def finish(config: Config, run: Progress, code: ExitCode) -> None:
    """Draw loss.png and log the last line. A plot that fails is a warning: training succeeded."""
    plot = None
    try:
        plot = loss_plot(config.run.dir)
    except Exception as error:  # drawing fails in as many ways as matplotlib and disks do
        logger.warning("loss.png could not be drawn: %s", one_line(explain(error)))
    latest = ["checkpoints/latest"] if (config.run.dir / "checkpoints/latest").exists() else []
    parts = ["metrics.jsonl", *latest, *([plot.name] if plot else [])]
    where = f"{config.run.dir}/{{{','.join(parts)}}}"
    if code == ExitCode.OK:
        logger.info("done: step %d, see %s; %s", run.step, where, how_to_train_on(config, run.step))
    else:
        how = "checkpoint.resume=auto" if config.checkpoint.resume == "none" else "the same command"
        logger.info("stopped at step %d, see %s; %s resumes", run.step, where, how)


def nothing_to_do(config: Config, done: int) -> str:
    """The last line of a start that finds all steps done."""
    return (
        f"done: {config.run.dir} is at step {done}, train.steps={config.train.steps}: nothing to "
        f"train; {how_to_train_on(config, done)}"
    )


def how_to_train_on(config: Config, done: int) -> str:
    """The override that doubles the steps of a run with `done` updates.

    The learning rate is a function of train.steps, so most schedules jump where such a run
    continues; the hint then has the rates of the last update and of the next one.
    """
    steps = 2 * max(done, config.train.steps)
    hint = f"to train on, run again with train.steps={steps}"
    last = learning_rate(max(done - 1, 0), config.optim, config.train.steps)
    following = learning_rate(done, config.optim, steps)
    if following == last:
        return hint
    return f"{hint}, which changes the schedule (lr {last:.1e} -> {following:.1e})"
