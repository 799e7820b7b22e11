"""Every option of a run: frozen, strict, checked before anything is allocated.

A run is described by one YAML file and dotted overrides (`optim.lr=3e-4`). They are merged as
defaults < file < command line, then validated here. Whatever is wrong is reported as
`path=value: reason`, one line each, through `ConfigError`.

What depends on the number of processes (the data-parallel size) is checked by `Config.check_world`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import pydantic
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StrictBool,
    StrictInt,
    field_validator,
    model_validator,
)

PrecisionRecipe = Literal[
    "fp32", "bf16", "te-delayed", "te-current", "te-blockwise", "fp8-linear", "coat", "coat-lean"
]
OptimRecipe = Literal[  # how weights and moments are stored: coatlm.optim.adamw.RECIPES
    "adamw-fp32",
    "adamw-bf16",
    "adamw-bf16-fp32state",
    "kahan",
    "collage-light",
    "collage-plus",
    "fp8lm",
    "coat",
    "coat-lean",
    "coat-24",
    "fp8-plain",
]
GradComm = Literal["fp32", "bf16", "fp8-nccl", "fp8-a2a"]
# recipes whose GEMMs cast a weight by an amax of this step, so that it can be gathered cast: of the
# tensor, or of its rows
FP8_WEIGHT_RECIPES = ("te-current", "fp8-linear", "coat", "coat-lean")
FP32_RECIPES = ("adamw-fp32", "coat", "fp8-plain")  # those that can update fp32 weights


class ConfigError(ValueError):
    """A run that cannot be started; the message names the field and what is allowed."""


class Section(BaseModel):
    """A YAML mapping: no unknown keys, no silent conversions, no changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(Section):
    """Where the run lives and what makes it repeatable."""

    name: str = Field("run", min_length=1)  # shown in trackers and in the console
    dir: Path = Path("runs/run")  # everything the run writes
    seed: StrictInt = Field(1234, ge=0)  # initial weights and the order of samples


class RopeScaling(Section):
    """Llama-3 stretching of the rotary frequencies; the names are those of Hugging Face."""

    factor: FiniteFloat = Field(8.0, ge=1.0)  # how much longer than the original context
    low_freq_factor: FiniteFloat = Field(1.0, gt=0.0)
    high_freq_factor: FiniteFloat = Field(4.0, gt=0.0)
    original_max_position_embeddings: StrictInt = Field(8192, ge=1)  # tokens

    @model_validator(mode="after")
    def _band(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        return self


class Model(Section):
    """A Llama-family transformer. Sizes are elements, counts are counts."""

    spec: Literal["local", "te"] = "local"  # own layers, or TransformerEngine's
    layers: StrictInt = Field(4, ge=1)
    hidden: StrictInt = Field(256, ge=1)
    heads: StrictInt = Field(8, ge=1)
    kv_heads: StrictInt | None = Field(None, ge=1)  # null: as many as heads
    head_dim: StrictInt | None = Field(None, ge=2)  # null: hidden / heads
    ffn: StrictInt = Field(704, ge=1)
    vocab: StrictInt | None = Field(None, ge=1)  # null: the tokenizer's, padded to 128 n
    rope_theta: FiniteFloat = Field(10000.0, gt=0.0)
    rope_scaling: RopeScaling | None = None
    norm_eps: FiniteFloat = Field(1e-5, gt=0.0)
    tie_embeddings: StrictBool = False
    qkv_bias: StrictBool = False
    qk_norm: StrictBool = False
    init_std: FiniteFloat = Field(0.02, gt=0.0)  # output projections: / sqrt(2 * layers)

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        heads, hidden = data.get("heads", 8), data.get("hidden", 256)
        if data.get("kv_heads") is None:
            data["kv_heads"] = heads
        if data.get("head_dim") is None and all(type(n) is int and n > 0 for n in (heads, hidden)):
            if hidden % heads:
                raise ValueError(f"hidden={hidden} is not a multiple of heads={heads}")
            data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _sizes(self) -> Model:
        if self.heads % self.queries_groups:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.size_per_head % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings rotate pairs")
        return self

    @property
    def queries_groups(self) -> int:
        assert self.kv_heads is not None  # filled in by _derive
        return self.kv_heads

    @property
    def size_per_head(self) -> int:
        assert self.head_dim is not None  # filled in by _derive
        return self.head_dim


class Source(Section):
    """One prepared dataset of a blend: PATH stands for PATH.bin and PATH.idx."""

    path: Path
    weight: FiniteFloat = Field(1.0, gt=0.0)


class Data(Section):
    """Either `text` (raw files, tokenised once into the cache) or `paths` (prepared datasets)."""

    text: tuple[str, ...] = ()  # files, globs, or `python-stdlib`
    paths: tuple[Source, ...] = ()  # prefixes of indexed datasets, or {path, weight}
    tokenizer: str = "byte"  # byte | hf:tokenizer.json | sentencepiece:FILE.model | tiktoken:NAME
    seq_len: StrictInt = Field(256, ge=2)  # tokens a sample
    split: tuple[FiniteFloat, FiniteFloat, FiniteFloat] = (96, 2, 2)  # train, validation, test
    reset_attention_mask: StrictBool = False  # no attention across end-of-document
    eod_mask_loss: StrictBool = False  # no loss for predicting what follows an end-of-document
    cache_dir: Path = Path(".cache/coatlm")  # datasets made from `text`
    workers: StrictInt = Field(0, ge=0)  # tokenising processes; 0: one a core
    max_expansion: FiniteFloat = Field(1e3, ge=1.0, le=1e9)  # text bytes per compressed byte
    # bytes of a JSON line, a parquet value or a zstandard window, which are held in memory whole
    max_record: StrictInt = Field(128 << 20, ge=1024, le=1 << 40)

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
        if min(self.split) < 0 or self.split[0] <= 0:
            raise ValueError(f"split={list(self.split)}: parts are >= 0 and the first is > 0")
        return self


class Parallel(Section):
    """How the model and the batch are spread. data-parallel size = processes / (tp * pp * cp)."""

    tp: StrictInt = Field(1, ge=1)  # tensor-parallel ranks, inside one node
    sequence_parallel: StrictBool = False  # split norms and residuals along the sequence over tp
    pp: StrictInt = Field(1, ge=1)  # pipeline stages
    vpp: StrictInt = Field(1, ge=1)  # model chunks a stage (interleaved schedule when > 1)
    cp: StrictInt = Field(1, ge=1)  # context-parallel ranks
    zero: Literal[0, 1, 2] = 1  # shard over data parallel: nothing | states | gradients too
    partition: Literal["flat", "whole-tensor"] = "flat"  # zero > 0: equal parts | FP8-LM's
    main_grads: Literal["fp32", "bf16"] = "fp32"  # gradients are accumulated in this
    grad_comm: GradComm = "fp8-a2a"  # and summed over data parallel in this: parallel/wire.py
    grad_comm_scale: Literal["block", "tensor", "bucket"] = "block"  # fp8-a2a: own 1x128 | shared
    grad_comm_format: Literal["e4m3", "e3m4"] = "e4m3"  # fp8-a2a in blocks: range | half the error
    grad_comm_nodes: StrictInt | None = Field(None, ge=1)  # fp8-a2a, 2 levels; null: the launcher's
    weight_gather: Literal["bf16", "fp8"] = "bf16"  # zero > 0: as stored | as GEMMs cast them
    bucket_size: StrictInt = Field(0, ge=0)  # elements a collective; 0: by the model (buckets.py)
    overlap_grad_reduce: StrictBool = True  # reduce a bucket as soon as backward has filled it
    tp_comm: Literal["fp8", "bf16"] = "fp8"  # gathers of an FP8 flow under sequence_parallel
    overlap_param_gather: StrictBool = True  # with zero > 0: gather weights while forward runs

    @model_validator(mode="after")
    def _reduction(self) -> Parallel:
        if self.zero == 2 and not self.overlap_grad_reduce:
            raise ValueError("zero=2 frees gradients while backward runs: overlap_grad_reduce=true")
        for name in ("partition", "weight_gather"):
            if not self.zero and getattr(self, name) not in ("flat", "bf16"):
                raise ValueError(f"{name}={getattr(self, name)} needs zero=1 or 2")
        if self.grad_comm != "fp8-a2a":
            if self.grad_comm_scale != "block":
                raise ValueError(f"grad_comm_scale={self.grad_comm_scale} needs grad_comm=fp8-a2a")
            if self.grad_comm_nodes not in (None, 1):
                raise ValueError(f"grad_comm_nodes={self.grad_comm_nodes} needs grad_comm=fp8-a2a")
        blocks = self.grad_comm == "fp8-a2a" and self.grad_comm_scale == "block"
        if self.grad_comm_format != "e4m3" and not blocks:
            raise ValueError(
                f"grad_comm_format={self.grad_comm_format} needs grad_comm=fp8-a2a and "
                "grad_comm_scale=block: its largest number is 1984 times the smallest"
            )
        if self.partition == "whole-tensor" and self.grad_comm_nodes not in (None, 1):
            raise ValueError(
                f"grad_comm_nodes={self.grad_comm_nodes}: two levels need parts of one size, "
                "partition=flat"
            )
        return self


class Precision(Section):
    """What the GEMMs compute in, and what is kept for backward: coatlm.fp8.recipe.

    All but `recipe` is for fp8-linear, coat and coat-lean.
    """

    recipe: PrecisionRecipe = "bf16"
    group_size: Literal[16, 32, 64, 128] | None = None  # elements a kept scale; null: the recipe's
    grad_format: Literal["e5m2", "e4m3"] = "e5m2"  # of gradients that enter a GEMM
    scaling: Literal["current", "delayed"] = "current"  # of these: own amax | of the last 16 steps
    fast_accumulation: tuple[Literal["forward", "dgrad", "wgrad"], ...] = (
        "forward",
        "dgrad",
        "wgrad",
    )
    keep_linear_inputs: StrictBool | None = None  # else made again; null: the recipe's
    keep_weights: StrictBool = False  # FP8 weights live for a step: 2 bytes a weight, fewer casts
    tune_gemms: StrictBool = True  # time the GEMM algorithms at start; else cuBLASLt's first choice
    bf16_layers: tuple[StrictInt, StrictInt] = (0, 0)  # the first and the last ones that stay BF16

    @property
    def flow(self) -> bool:
        """The layers are coatlm's FP8 flow."""
        return self.recipe in ("fp8-linear", "coat", "coat-lean")


class Optim(Section):
    """AdamW, its state formats and its schedule."""

    recipe: OptimRecipe = "adamw-fp32"
    lr: FiniteFloat = Field(1e-3, gt=0.0)  # peak
    min_lr: FiniteFloat = Field(1e-4, ge=0.0)  # at the end of the schedule
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    warmup_steps: StrictInt = Field(20, ge=0)
    decay_steps: StrictInt | None = Field(None, ge=1)  # wsd: of the final decay; null: a tenth
    weight_decay: FiniteFloat = Field(0.1, ge=0.0)  # matrices only, not norms and biases
    betas: tuple[float, float] = (0.9, 0.95)
    eps: FiniteFloat = Field(1e-8, gt=0.0)
    clip_grad: FiniteFloat = Field(1.0, ge=0.0)  # global L2 norm; 0: off

    @model_validator(mode="after")
    def _ranges(self) -> Optim:
        if not all(0.0 <= b < 1.0 for b in self.betas):
            raise ValueError(f"betas={list(self.betas)}: each is in [0, 1)")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ValueError(f"decay_steps={self.decay_steps} is for schedule=wsd alone")
        return self


class Train(Section):
    """The loop. Batches are counted in samples of data.seq_len tokens."""

    steps: StrictInt = Field(150, ge=1)
    micro_batch: StrictInt = Field(4, ge=1)  # samples a forward pass and rank
    global_batch: StrictInt = Field(16, ge=1)  # samples a step over all ranks
    eval_every: StrictInt = Field(50, ge=0)  # steps; 0: never
    eval_batches: StrictInt = Field(8, ge=1)  # global batches an evaluation
    recompute: Literal["none", "selective", "full"] = "none"  # selective: attention only
    cuda_graphs: StrictBool = (
        False  # replay a microbatch from a recording: small, launch-bound models
    )
    max_skipped: StrictInt = Field(10, ge=1)  # give up after so many skipped steps in a row
    rollbacks: StrictInt = Field(0, ge=0)  # times to go back to a checkpoint, on other data, before
    spike_sigma: FiniteFloat = Field(0.0, ge=0.0)  # deviations above the mean: skipped; 0: off
    spike_window: StrictInt = Field(128, ge=2)  # steps of that mean and deviation


class Checkpoint(Section):
    """What is kept, and what a start continues from."""

    every: StrictInt = Field(50, ge=0)  # steps, and at the end; 0: only when a signal ends the run
    keep: StrictInt = Field(3, ge=1)  # newest checkpoints that stay
    resume: str = "auto"  # auto | none | a checkpoint or run directory
    weights_only: StrictBool = False  # a new run from the weights of `resume`: step 0, fresh states
    async_save: StrictBool = True  # write while training goes on


class Log(Section):
    """What is reported, and how often."""

    every: StrictInt = Field(10, ge=1)  # steps
    states_every: StrictInt = Field(0, ge=0)  # steps: what storing loses; 0: never
    numerics_every: StrictInt = Field(0, ge=0)  # steps: what FP8 loses in layers; 0: never
    tensorboard: StrictBool = False
    wandb_project: str | None = None
    profile: tuple[int, int] | None = None  # first and last step of a torch profiler trace
    hang_timeout: FiniteFloat = Field(0.0, ge=0.0)  # seconds without a step; 0: off
    straggler_factor: FiniteFloat = Field(2.0, ge=0.0)  # warn above so many medians; 0: no report

    @model_validator(mode="after")
    def _window(self) -> Log:
        if self.profile and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(f"profile={list(self.profile)}: [first, last] with 1 <= first <= last")
        return self


class Config(Section):
    """A whole run."""

    run: Run = Run()
    model: Model = Field(default_factory=lambda: Model.model_validate({}))
    data: Data = Field(default_factory=lambda: Data(text=("python-stdlib",)))
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    optim: Optim = Optim()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        m, p, d = self.model, self.parallel, self.data
        divides("model.heads", m.heads, "parallel.tp", p.tp)
        divides("model.kv_heads", m.queries_groups, "parallel.tp", p.tp)
        divides("model.ffn", m.ffn, "parallel.tp", p.tp)
        if m.vocab is not None:
            divides("model.vocab", m.vocab, "parallel.tp", p.tp)
        divides("model.layers", m.layers, "parallel.pp*vpp", p.pp * p.vpp)
        divides(
            "train.global_batch",
            self.train.global_batch,
            "train.micro_batch",
            self.train.micro_batch,
        )
        if p.cp > 1:
            divides("data.seq_len", d.seq_len, "2*parallel.cp", 2 * p.cp)
        if p.sequence_parallel and p.tp == 1:
            raise ValueError("parallel.sequence_parallel=true needs parallel.tp > 1")
        if p.sequence_parallel:
            divides("data.seq_len", d.seq_len, "parallel.tp*cp", p.tp * p.cp)
        if p.vpp > 1 and p.pp == 1:
            raise ValueError(f"parallel.vpp={p.vpp} needs parallel.pp > 1")
        if self.train.rollbacks and not self.checkpoint.every:
            raise ValueError(f"train.rollbacks={self.train.rollbacks} needs checkpoint.every > 0")
        if self.checkpoint.weights_only and self.checkpoint.resume in ("auto", "none"):
            raise ValueError("checkpoint.weights_only=true needs checkpoint.resume=PATH")
        if self.precision.recipe.startswith("te-") and m.spec != "te":
            raise ValueError(f"precision.recipe={self.precision.recipe} needs model.spec=te")
        if p.weight_gather == "fp8" and self.precision.recipe not in FP8_WEIGHT_RECIPES:
            raise ValueError(
                f"parallel.weight_gather=fp8: precision.recipe={self.precision.recipe} would see "
                f"other weights; it goes with {', '.join(FP8_WEIGHT_RECIPES)}"
            )
        self._check_flow()
        self._check_graphs()
        if self.precision.recipe == "fp32" and self.optim.recipe not in FP32_RECIPES:
            raise ValueError(
                f"optim.recipe={self.optim.recipe} keeps BF16 weights; precision.recipe=fp32 "
                f"goes with {', '.join(FP32_RECIPES)}"
            )
        return self

    def _check_flow(self) -> None:
        """FP8 layers: what their kernels can hold. Raises ValueError."""
        m, p, recipe = self.model, self.precision, self.precision.recipe
        if not p.flow:
            for name in set(Precision.model_fields) - {"recipe"}:
                if getattr(p, name) != Precision.model_fields[name].default:
                    raise ValueError(
                        f"precision.{name} is for fp8-linear, coat and coat-lean, not {recipe}"
                    )
            if self.log.numerics_every:
                raise ValueError(
                    f"log.numerics_every={self.log.numerics_every} is for precision.recipe="
                    f"fp8-linear, coat and coat-lean, not {recipe}: 0"
                )
            return
        if m.spec != "local":
            raise ValueError(f"precision.recipe={recipe} needs model.spec=local")
        size = p.group_size or 16  # also what the tensor cores need of every matrix
        tp = self.parallel.tp
        divides("model.hidden", m.hidden, "precision.group_size", size)
        divides("model.ffn/tp", m.ffn // tp, "precision.group_size", size)
        for name, heads in (("heads", m.heads), ("kv_heads", m.queries_groups)):
            width = heads * m.size_per_head // tp
            divides(f"model.{name}*head_dim/tp", width, "the alignment of FP8 GEMMs", 16)
        if recipe == "coat-lean":
            divides("model.head_dim", m.size_per_head, "precision.group_size", size)
            if self.data.seq_len == m.size_per_head:
                raise ValueError(
                    f"precision.recipe=coat-lean: data.seq_len={self.data.seq_len} must differ "
                    "from model.head_dim, by which kept tensors are told from masks"
                )
        if min(p.bf16_layers) < 0 or sum(p.bf16_layers) > m.layers:
            raise ValueError(
                f"precision.bf16_layers={list(p.bf16_layers)}: first and last layers, >= 0, "
                f"together at most model.layers={m.layers}"
            )

    def _check_graphs(self) -> None:
        """What a recorded microbatch cannot hold. Raises ValueError."""
        if not self.train.cuda_graphs:
            return
        for name, value, allowed in (
            ("parallel.pp", self.parallel.pp, 1),
            ("model.spec", self.model.spec, "local"),
            ("train.recompute", self.train.recompute, "none"),
            ("precision.keep_weights", self.precision.keep_weights, False),
            ("log.numerics_every", self.log.numerics_every, 0),
        ):
            if value != allowed:
                raise ValueError(f"train.cuda_graphs=true with {name}={value}: must be {allowed}")
        if self.parallel.zero == 2:  # the memory of gradients comes and goes
            raise ValueError("train.cuda_graphs=true with parallel.zero=2: must be 0 or 1")

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that see different samples. Raises ConfigError where `world_size` does not fit."""
        p, t = self.parallel, self.train
        ranks = p.tp * p.pp * p.cp
        if world_size % ranks:
            raise ConfigError(
                f"{world_size} processes cannot hold parallel.tp*pp*cp={p.tp}*{p.pp}*{p.cp}: "
                f"start a multiple of {ranks}"
            )
        dp = world_size // ranks
        if p.grad_comm_nodes is not None and dp * p.cp % p.grad_comm_nodes:
            raise ConfigError(
                f"parallel.grad_comm_nodes={p.grad_comm_nodes} does not divide the {dp * p.cp} "
                "ranks that gradients are summed over"
            )
        if t.global_batch % (t.micro_batch * dp):
            raise ConfigError(
                f"train.global_batch={t.global_batch} is not a multiple of train.micro_batch * "
                f"data-parallel size = {t.micro_batch}*{dp}"
            )
        microbatches = t.global_batch // (t.micro_batch * dp)
        if p.vpp > 1 and microbatches % p.pp:
            raise ConfigError(
                f"parallel.vpp={p.vpp}: {microbatches} microbatches a step are not a multiple of "
                f"parallel.pp={p.pp}"
            )
        return dp

    def to_yaml(self) -> str:
        """The resolved configuration; loading it gives the same Config."""
        return OmegaConf.to_yaml(OmegaConf.create(self.model_dump(mode="json")))


def divides(name: str, value: int, by_name: str, by: int) -> None:
    """Raise ValueError unless `by` divides `value`."""
    if value % by:
        raise ValueError(f"{name}={value} is not a multiple of {by_name}={by}")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read YAML, apply `a.b=c` overrides, validate. Raises ConfigError with one line a mistake."""
    path = Path(path)
    merged: Any
    try:
        merged = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    except Exception as error:  # YAML syntax errors share no base class with the above
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from error
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"{item!r}: overrides read key=value, for example optim.lr=3e-4")
    try:
        merged = OmegaConf.merge(merged, OmegaConf.from_dotlist(list(overrides)))
        data = OmegaConf.to_container(merged, resolve=True)
    except Exception as error:
        raise ConfigError(f"{path} with {list(overrides)}: {_one_line(error)}") from error
    return make_config(data)


def make_config(data: Any) -> Config:
    """Validate a nested mapping. Raises ConfigError with one line a mistake."""
    try:
        return Config.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def _explain(error: Any) -> str:
    """One line for one pydantic error: dotted path, value, what is allowed."""
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _known_keys(error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.0)
        return (
            f"{path}: unknown key; the nearest known one is {near[0]}"
            if near
            else f"{path}: unknown key"
        )
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path}={error['input']!r}: {message}"


def _known_keys(loc: tuple[Any, ...]) -> list[str]:
    """The keys allowed in the section at `loc`."""
    section: Any = Config
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        candidates = [
            annotation,
            *get_args(annotation),
            *(a for t in get_args(annotation) for a in get_args(t)),
        ]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, Section))
    return list(section.model_fields)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
