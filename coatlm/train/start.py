"""A run from start to end: join the other processes, open the data, build, resume, train."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from functools import partial

import torch

from coatlm.config import Config
from coatlm.data.dataset import open_datasets
from coatlm.data.tokenizer import make_tokenizer
from coatlm.model.accounting import flops_per_token, model_vocab
from coatlm.model.decide import expectation
from coatlm.model.fits import with_fitting
from coatlm.model.plan import plan, wrapped
from coatlm.platform import has_foreign_apex
from coatlm.train.agreement import together
from coatlm.train.alike import check_same_config, check_same_data
from coatlm.train.ending import finish, nothing_to_do
from coatlm.train.evaluations import missing
from coatlm.train.faults import ExitCode, HangWatchdog, NonFiniteGuard, StopSignal
from coatlm.train.lock import take_lock
from coatlm.train.loop import Loop
from coatlm.train.metrics import MetricsLogger
from coatlm.train.phases import (
    begun_by,
    check_gpu,
    check_inputs,
    check_size,
    check_splits,
    decide_layout,
    device_name,
    documents_as_before,
    gpu_of_all,
    join,
    make_process_groups,
    named_memory,
    open_tasks,
    upload_again,
    write_description,
)
from coatlm.train.resume import Known, Progress, resume
from coatlm.train.run_directory import prepare_directory, start_logging
from coatlm.train.setup import (
    Launch,
    environment_warnings,
    quiet_megatron,
    recorded_collectives,
)
from coatlm.train.startup import Startup
from coatlm.train.step import Trainer

logger = logging.getLogger("coatlm")


def train(config: Config, launch: Launch) -> ExitCode:
    """Train as `config` says, to the end or until a signal.

    Raises ConfigError for invalid input (with several ranks AgreedError, on all of them),
    CheckpointError if saving or loading fails, and NonFiniteError after train.max_skipped
    consecutive skipped steps.
    """
    with ExitStack() as stack:
        loop = set_up(config, launch, stack)
        code = ExitCode.OK if loop is None else loop.run_steps()
        if loop is not None:
            loop.signals.leave()
            loop.metrics.close()
            loop.watchdog.close()
            if launch.rank == 0:
                finish(loop.config, loop.run, code)
    torch.distributed.destroy_process_group()
    # torchrun --max-restarts treats any other code as a failure and would start the run again
    return ExitCode.OK if launch.restarts else code


def set_up(config: Config, launch: Launch, stack: ExitStack) -> Loop | None:
    """Join the other processes, open the data, build the model, resume.

    This is a sequence of phases. Each succeeds on all ranks, or ends all of them with one message.
    Returns None if the run has already done all its steps and evaluations; such a start writes only
    to train.log, and uploads the last checkpoint if checkpoint.upload has failed to.
    Raises ConfigError in a single process, AgreedError with several ranks.
    """
    startup = Startup()
    startup.lap("imports")
    peers = join(config, launch)
    peers.agree(lambda: check_same_config(config, peers))
    startup.lap("ranks")
    tokenizer = peers.agree(lambda: make_tokenizer(config.data.tokenizer))
    vocab = peers.agree(lambda: model_vocab(config, tokenizer.vocab_size))
    gpu, memory = peers.agree(lambda: gpu_of_all(peers, launch))
    config = peers.agree(lambda: documents_as_before(config, launch, peers))
    config, chosen = peers.agree(lambda: decide_layout(config, vocab, launch, gpu, peers))
    peers.agree(lambda: check_gpu(config, launch))
    peers.agree(lambda: check_size(config, launch, vocab))
    peers.agree(lambda: prepare_directory(config.run.dir, files=launch.rank == 0))
    lock = peers.agree(lambda: take_lock(config.run.dir, stack) if launch.rank == 0 else None)
    peers.agree(lambda: check_inputs(config, tokenizer, vocab) if launch.rank == 0 else None)
    peers.agree(lambda: start_logging(config.run.dir, launch.rank))
    if lock is not None and lock.earlier is not None:
        logger.warning("took over the run directory from %s, which no longer runs", lock.earlier)
    quiet_megatron()
    if has_foreign_apex():
        logger.warning("the installed package `apex` is not NVIDIA's: ignored")
    for warning in environment_warnings(config, launch.world_size) if gpu is not None else ():
        logger.warning("%s", warning)
    tasks = peers.rank_zero_first(lambda: open_tasks(config.eval, tokenizer, config.data.seq_len))
    startup.lap("tokenizer and run directory")
    groups = peers.agree(lambda: make_process_groups(config, launch, peers))
    startup.lap("process groups")
    data = peers.rank_zero_first(
        lambda: open_datasets(config.data, tokenizer, seed=config.run.seed)
    )
    peers.agree(lambda: check_splits(config, data))
    startup.lap("data")
    # the model's configuration; that of the run, which is saved, leaves open what depends on memory
    dp = config.data_parallel_size(launch.world_size)
    decided = peers.agree(lambda: with_fitting(config, vocab, dp, memory))
    ranks, per_node = launch.world_size, launch.local_size
    expect = partial(expectation, decided, vocab, ranks=ranks, per_node=per_node, gpu=gpu)
    expected = peers.agree(expect)
    about = peers.agree(
        lambda: plan(
            decided,
            ranks,
            tokenizer_vocab=tokenizer.vocab_size,
            device=named_memory(launch),
            chosen=chosen,
            expected=expected,
        )
    )
    logger.info("%s", about)
    trainer = peers.agree(lambda: Trainer(decided, groups, vocab, memory=memory, lap=startup.lap))
    stack.enter_context(closing(trainer))
    run = Progress(guard=NonFiniteGuard(config.train.max_skipped))
    identity = peers.agree(data.identity)
    peers.agree(lambda: check_same_data(identity, tokenizer, peers))
    known = Known(tokenizer=tokenizer.fingerprint, data=identity)
    begun = begun_by(config, launch, peers)
    resume_run = partial(resume, config, trainer, run, restarted=begun, lap=startup.lap)
    origin = peers.agree(lambda: resume_run(**known))
    startup.lap("checkpoint read")
    continues = origin.own and launch.rank == 0
    unevaluated = together(lambda: missing(config, run.step) if continues else [], peers.group)[0]
    done = run.step >= config.train.steps
    if done and config.checkpoint.upload and origin.path is not None and not origin.back:
        upload_again(config.checkpoint.upload, origin.path, peers)
    if done and not unevaluated:
        logger.info("%s", nothing_to_do(config, run.step))
        return None
    if (left := expect(done=run.step)) != expected:  # the plan counts all steps
        logger.info("%s", wrapped(left))
    peers.agree(lambda: write_description(config, launch, origin) if launch.rank == 0 else None)
    signals = stack.enter_context(StopSignal(speaks=launch.rank == 0))
    watchdog = HangWatchdog(
        config.log.hang_timeout,
        run_dir=config.run.dir,
        rank=launch.rank,
        flight=recorded_collectives,
    )
    stack.enter_context(closing(watchdog))
    open_metrics = partial(
        MetricsLogger,
        config.run.dir,
        config,
        rank=launch.rank,
        world_size=launch.world_size,
        flops_per_token=flops_per_token(config.model, vocab, config.data.seq_len),
        device_name=device_name(),
        synchronize=synchronize,
    )
    loop = peers.agree(
        lambda: Loop(
            *(config, trainer, data, run, open_metrics, signals, watchdog, known),
            *(peers.hosts, lock, tasks, startup, unevaluated),
        )
    )
    stack.callback(lambda: loop.metrics.close())  # late, since a rollback replaces loop.metrics
    stack.callback(loop.checkpoints.join)  # while this run still holds the lock, which a save needs
    return loop


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
