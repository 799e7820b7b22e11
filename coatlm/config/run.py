"""The configuration sections run, data, train, eval and checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    StrictBool,
    StrictInt,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from coatlm.config.fields import (
    FOREVER,
    LocalText,
    PathText,
    Real,
    ResumeText,
    Section,
    SourcePath,
    Text,
    TokenizerSpec,
    UrlText,
    UserPath,
    number,
)
from coatlm.config.urls import is_url

Guarded = Literal[
    "data.text",
    "data.paths",
    "data.split",
    "data.packing",
    "data.tokenizer",
    "run.seed",
    "optim.recipe",
]
SplitShare = Annotated[Real, Field(le=1e12)]


class Run(Section):
    """The name, directory and seed of the run."""

    name: Text = Field("run", min_length=1)
    """The name of the run on the console and in Weights & Biases."""

    dir: UserPath = Path("runs/run")
    """The run directory, for everything that the run writes except data.cache_dir."""

    seed: StrictInt = number(1234, ge=0, le=2**63 - 1)  # megatron adds some thousands to it
    """The seed of the initial weights and of the order of training samples."""

    @field_validator("dir", mode="before")
    @classmethod
    def _no_url(cls, value: Any) -> Any:
        if isinstance(value, str) and is_url(value):
            raise ValueError(
                "a path on this machine; checkpoint.upload=URL copies its checkpoints to a URL"
            )
        return value


# keys of data that, unless they are set, a resumed run takes from its checkpoint
RESUMED = ("reset_attention_mask", "reset_position_ids")


class DataSource(Section):
    """One indexed dataset of a blend."""

    path: SourcePath
    """The path or URL of an indexed dataset without suffix: PREFIX for PREFIX.bin and PREFIX.idx.
    """

    weight: Real = number(1.0, gt=0.0, le=1e12)
    """The share of samples from this dataset, relative to the weights of the others."""


class Data(Section):
    """The training data, given as either text or paths, and how it is cut into samples."""

    text: tuple[PathText, ...] = ()
    """Text files and globs, also at URLs, tokenized once into cache_dir; python-stdlib means the
    source code of Python's standard library."""

    paths: tuple[DataSource, ...] = ()
    """Prefixes of indexed datasets, paths or URLs, each as PREFIX or as {path: PREFIX, weight: W}.
    """

    tokenizer: TokenizerSpec = "byte"
    """The tokenizer: byte, hf:tokenizer.json, sentencepiece:FILE.model, tiktoken:NAME, or
    tiktoken:FILE?pattern=REGEX; hf and sentencepiece take ?eod=TOKEN behind the file."""

    seq_len: StrictInt = number(256, "tokens", ge=2, le=2**27)
    """Tokens per sample, which is the context length of training."""

    split: tuple[SplitShare, SplitShare, SplitShare] = (96, 2, 2)
    """Relative sizes of the training, validation and test splits, as [train, validation, test];
    each is >= 0 and the first is > 0."""

    reset_attention_mask: StrictBool = Field(
        default_factory=lambda data: bool(data.get("paths")),
        json_schema_extra={"default": "true with paths, else false"},
    )
    """Let tokens attend only to tokens of their own document, not to others in the same sample. A
    run that resumes has the value of its own checkpoint again unless one is given."""

    reset_position_ids: StrictBool = False
    """Restart positions at 0 in every document; needs reset_attention_mask=true. A run that resumes
    has the value of its own checkpoint again unless one is given."""

    eod_mask_loss: StrictBool = False
    """Exclude from the loss the first token of each document, which is predicted from the end of
    another. The documents are those of reset_attention_mask: the index divides them, and so does an
    end-of-document token, except in conversations and packed samples."""

    loss_mask: Literal["all", "completion"] = "all"
    """The tokens that count in the loss: all, or with completion those that are marked in the loss
    mask of each dataset in paths, which coatlm prepare --chat writes."""

    packing: Literal["concat", "best-fit"] = "concat"
    """How documents become samples. concat: they are put end to end and cut every seq_len tokens.
    best-fit: only documents longer than a sample are cut; the end of a sample may be padding, which
    does not count in the loss."""

    cache_dir: UserPath = Path(".cache/coatlm")
    """The directory of the datasets tokenized from text, of the blocks that are read from URLs in
    paths, and of what precision.tune_gemms and precision.tune_attention chose, shared by all
    runs."""

    remote_cache: StrictInt = number(64 << 30, "bytes", ge=1 << 20, le=2**50)
    """The most bytes of blocks of datasets at URLs that cache_dir holds, beside their indexes and
    checksums; the blocks that were read the longest time ago are removed first. At least 64 times
    remote_block."""

    remote_block: StrictInt = number(8 << 20, "bytes", ge=1 << 14, le=2**30, multiple_of=1 << 14)
    """Bytes of a dataset at a URL that one request reads, a multiple of 16384."""

    workers: StrictInt = number(0, "processes", ge=0, le=4096)
    """Processes that tokenize text; 0 means one per CPU core."""

    max_expansion: Real = number(1000.0, ge=1.0, le=1e9)
    """The most bytes of text that a compressed file (.gz, .zst, .parquet) may hold per byte on
    disk; a file with a larger ratio is refused as a decompression bomb."""

    max_record: StrictInt = number(128 << 20, "bytes", ge=1024, le=2**40)
    """The largest JSON line, parquet value or zstd window that is read into memory."""

    @field_validator("paths", mode="before")
    @classmethod
    def _bare_paths(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [{"path": v} if isinstance(v, str | Path) else v for v in value]
        return value

    @field_validator("text", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _sources(self) -> Data:
        if bool(self.text) == bool(self.paths):
            raise ValueError("give either text (raw files) or paths (prepared datasets)")
        if self.loss_mask == "completion" and self.text:
            raise ValueError(
                "loss_mask=completion needs paths of datasets that coatlm prepare --chat "
                "has prepared: text has no loss mask"
            )
        if self.remote_cache < 64 * self.remote_block:
            raise ValueError(
                f"remote_cache={self.remote_cache} is less than 64 * "
                f"remote_block={self.remote_block}"
            )
        if min(self.split) < 0 or self.split[0] <= 0:
            raise ValueError(f"split={list(self.split)}: all are >= 0 and the first is > 0")
        return self


class Train(Section):
    """The training loop. A sample has data.seq_len tokens."""

    steps: StrictInt = number(150, "steps", ge=1, le=FOREVER)
    """Optimizer steps of the whole run, which are also the length of the learning-rate schedule."""

    micro_batch: StrictInt = number(4, "samples", ge=1, le=2**24)
    """Samples per forward pass on each data-parallel rank. auto is decided when the run starts: the
    size with the shortest predicted step that fits the memory of the GPUs. On a CPU it is 1. A run
    that resumes has the same size again if it divides the global batch."""

    global_batch: StrictInt = number(16, "samples", ge=1, le=2**30)
    """Samples per optimizer step over all ranks, a multiple of micro_batch times the data-parallel
    size."""

    eval_every: StrictInt = number(50, "steps", ge=0, le=FOREVER)
    """Steps between evaluations on the validation split; another one follows the last step. 0 means
    never."""

    eval_batches: StrictInt = number(8, "global batches", ge=1, le=2**30)
    """Global batches per evaluation; every evaluation reads the same ones. If the validation split
    has fewer samples, it is read more than once, with a warning."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward recomputes instead of saving them: none, those of attention, or
    those of whole layers."""

    logits: Literal["auto", "save", "recompute"] = "auto"
    """The logits of a microbatch: forward saves them for backward, or backward recomputes them in
    chunks of the vocabulary. Results have the same bits. Saving spares one of the output layer's
    four GEMMs. auto saves them if the estimated peak leaves room on every rank's GPU."""

    z_loss: Real = number(0.0, ge=0.0, le=1.0)
    """The coefficient of the squared logarithm of the softmax's denominator, which is added to the
    loss of each token in training, not in evaluation; 1e-4 is common, 0 means off."""

    update: Literal["step", "backward"] = "step"
    """When weights are updated. step: after backward, by all gradients of the step. backward:
    during backward, bucket by bucket, where a step has one microbatch; each gradient is released as
    soon as it is applied, and optim.clip_grad clips by the norm of the step before. A NaN or an
    infinity skips the rest of the update."""

    cuda_graphs: Literal[True, False, "auto"] = False
    """Capture each microbatch as a CUDA graph and replay it, which helps small models that are
    bound by kernel launches. On one GPU a step of up to 32 microbatches and its update are one
    graph. auto: true on a GPU if model.hidden is at most 2048, or with tensor parallelism
    model.hidden^2 / parallel.tp at most 2 * 2048^2 and the graphs fit, and no other key excludes
    graphs."""

    max_skipped: StrictInt = number(10, "steps", ge=1, le=FOREVER)
    """Consecutive skipped steps (NaN, Inf or a spike) at which the run ends with exit code 3."""

    rollbacks: StrictInt = number(0, "times", ge=0, le=2**20)
    """How many times a run that reaches max_skipped may go back to its newest checkpoint from
    before the skipped steps and continue without the batches read since then, instead of ending."""

    spike_sigma: Real = number(0.0, "standard deviations", ge=0.0)
    """Skip the update of a step whose loss or gradient norm is more than this many standard
    deviations above its mean over the last spike_window steps; 0 means off."""

    spike_window: StrictInt = number(128, "steps", ge=2, le=2**20)
    """Steps over which spike_sigma takes the mean and the standard deviation."""

    @field_validator("micro_batch", mode="wrap")
    @classmethod
    def _auto(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        return value if value == "auto" else check(value)

    @property
    def smallest_micro_batch(self) -> int:
        """`micro_batch`, or 1 while it is auto."""
        return self.micro_batch if isinstance(self.micro_batch, int) else 1

    def microbatches(self, data_parallel: int) -> int:
        """Microbatches of a rank in one step, of `data_parallel` ranks with other samples."""
        return self.global_batch // (self.micro_batch * data_parallel)


class Eval(Section):
    """Evaluation on tasks of lm-evaluation-harness during training; needs coatlm[eval]."""

    tasks: tuple[LocalText, ...] = ()
    """YAML files that define a task, names of shipped ones (python-lines, python-words), and names
    of tasks, groups or tags of lm-evaluation-harness. Relative data files of a task are those
    beside its file, else those of the working directory. A task's file can name Python functions,
    which are run; tasks may download their data sets."""

    tasks_every: StrictInt = number(1000, "steps", ge=1, le=FOREVER)
    """Steps between evaluations on the tasks; another one follows the last step."""

    tasks_limit: StrictInt | None = number(None, "examples", ge=1, le=FOREVER)
    """The first examples of each task to evaluate; null means all."""

    tasks_shots: StrictInt | None = number(None, "examples", ge=0, le=2**20)
    """Solved examples in each prompt; null means as many as the task defines. A task that defines 0
    stays at 0."""

    tasks_new_tokens: StrictInt = number(256, "tokens", ge=1, le=2**27)
    """The most tokens of an answer where a task generates text, at most half of data.seq_len; a
    task may define fewer. Each token takes a forward pass over prompt and answer."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _one_task(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _no_options_without_tasks(self) -> Eval:
        for name, field in type(self).model_fields.items():
            if not self.tasks and getattr(self, name) != field.default:
                raise ValueError(f"{name}={getattr(self, name)} needs tasks")
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks={list(self.tasks)}: each at most once")
        return self


class Checkpoint(Section):
    """When checkpoints are saved, and which checkpoint the run resumes from."""

    every: StrictInt = number(50, "steps", ge=0, le=FOREVER)
    """Steps between checkpoints; another one follows the last step. 0 saves only when a signal
    stops the run."""

    keep: StrictInt = number(3, "checkpoints", ge=1, le=2**20)
    """How many of the newest checkpoints stay on disk. With train.rollbacks, the newest one from
    before skipped steps stays as well."""

    resume: ResumeText = "auto"
    """The checkpoint that the run resumes from. auto: its newest one, or newly initialized weights
    if it has none. A path of a checkpoint or a run: that checkpoint, or the newest of that run, but
    only if this run has none of its own; the path of an earlier checkpoint of this run goes back to
    it, once. hf:DIR: the weights of a Hugging Face directory with safetensors, or with hf:URL of
    one at a URL, such as hf:hf://OWNER/NAME, if this run has no checkpoint; it also gives
    data.tokenizer and the keys of model that are not set. A URL is as a path of another run: its
    checkpoint is downloaded to downloads/. none: newly initialized weights; earlier files of the
    run move to attempts/."""

    weights_only: StrictBool = False
    """Load only the weights from the path in resume, which must not be of this run itself; the run
    starts at step 0 with newly initialized optimizer states. The keys of model that change no
    tensor, such as rope_theta, may differ then. resume=hf:DIR and hf:URL always load only the
    weights."""

    allow_changes: tuple[Guarded, ...] = ()
    """Which of these keys may differ from the checkpoint's; a change of the others is refused.
    data.text and data.paths count as changed only if the tokens, their order or the shares of
    their weights differ. With optim.recipe the optimizer states are decoded from the checkpoint's
    formats and encoded in this run's."""

    async_save: StrictBool = True
    """Write checkpoints in the background while training continues."""

    upload: UrlText | None = None
    """A URL to which each finished checkpoint is copied, in the background with async_save; null
    means none. Checkpoints there are never removed."""

    @property
    def imports_weights(self) -> bool:
        """Whether a run that has no checkpoint of its own loads only weights.

        It does with weights_only, and with resume=hf:DIR or hf:URL, such as hf:hf://OWNER/MODEL.
        resume=hf://PLACE, without the prefix hf:, is the URL of a checkpoint, whose whole state is
        loaded.
        """
        return self.weights_only or (self.resume.startswith("hf:") and not is_url(self.resume))
