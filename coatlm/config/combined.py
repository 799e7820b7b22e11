"""The whole configuration of a run: its sections, and checks that involve several of them."""

from __future__ import annotations

from pydantic import Field, model_validator

from coatlm.config.errors import ConfigError, divides
from coatlm.config.fields import Section
from coatlm.config.flow import check_flow
from coatlm.config.log import Log
from coatlm.config.model import Model, Precision
from coatlm.config.obstacles import auto_p2p_obstacles, graph_obstacles, obstacles, step_obstacles
from coatlm.config.optim import FP32_RECIPES, Optim
from coatlm.config.parallel import ONLY_ABOVE_1, Parallel
from coatlm.config.recipes import RECIPES, fp8_weight_recipes
from coatlm.config.run import RESUMED, Checkpoint, Data, Eval, Run, Train
from coatlm.config.yaml_text import dump_yaml

# Up to this hidden size a layer was faster from a CUDA graph (docs/results/layer.md), at 4096 not;
# but two tensor-parallel ranks of 4096, which launch collectives too, took 0.77 of the time.
GRAPHS_UP_TO = 2048
LAYOUT = (  # the keys that parallel.layout=auto decides
    *(("parallel", k) for k in ("tp", "sequence_parallel", "cp", "cp_comm", "pp", "vpp", "zero")),
    ("train", "recompute"),
)


class Config(Section):
    """The configuration of a run."""

    run: Run = Run()
    model: Model = Field(default_factory=lambda: Model.model_validate({}))
    data: Data = Field(default_factory=lambda: Data(text=("python-stdlib",)))
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    optim: Optim = Optim()
    train: Train = Train()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        m, p, d = self.model, self.parallel, self.data
        divides("model.heads", m.heads, "parallel.tp", p.tp)
        divides("model.kv_heads", m.key_value_heads, "parallel.tp", p.tp)
        divides("model.ffn", m.ffn, "parallel.tp", p.tp)
        if m.vocab is not None:
            divides("model.vocab", m.vocab, "parallel.tp", p.tp)
        divides("model.layers", m.layers, "parallel.pp*vpp", p.pp * p.vpp)
        size = self.train.smallest_micro_batch
        divides("train.global_batch", self.train.global_batch, "train.micro_batch", size)
        if p.cp_comm == "a2a":
            divides("model.heads", m.heads, "parallel.tp*cp", p.tp * p.cp)
            divides("model.kv_heads", m.key_value_heads, "parallel.tp*cp", p.tp * p.cp)
        if p.cp > 1:
            divides("data.seq_len", d.seq_len, "2*parallel.cp", 2 * p.cp)
        self._check_documents()
        if p.sequence_parallel and p.tp == 1:
            raise ValueError("parallel.sequence_parallel=true needs parallel.tp > 1")
        if p.sequence_parallel:
            divides("data.seq_len", d.seq_len, "parallel.tp*cp", p.tp * p.cp)
        split = p.tp > 1 or p.is_open("tp")
        for name, usual in ONLY_ABOVE_1["tp"].items():
            if (value := getattr(p, name)) != usual and not (split and self.precision.flow):
                raise ValueError(
                    f"parallel.{name}={value} needs parallel.tp > 1 and FP8 layers: "
                    f"precision.recipe={' | '.join(RECIPES)}"
                )
        if p.vpp > 1 and p.pp == 1:
            raise ValueError(f"parallel.vpp={p.vpp} needs parallel.pp > 1")
        if self.train.rollbacks and not self.checkpoint.every:
            raise ValueError(f"train.rollbacks={self.train.rollbacks} needs checkpoint.every > 0")
        if self.checkpoint.weights_only and self.checkpoint.resume in ("auto", "none"):
            raise ValueError("checkpoint.weights_only=true needs checkpoint.resume=PATH")
        if self.precision.recipe.startswith("te-") and m.spec != "te":
            raise ValueError(f"precision.recipe={self.precision.recipe} needs model.spec=te")
        if p.main_grads == "fp8" and m.spec == "te":
            raise ValueError("parallel.main_grads=fp8 needs model.spec=local")
        if p.weight_gather == "fp8" and self.precision.recipe not in fp8_weight_recipes():
            raise ValueError(
                f"parallel.weight_gather=fp8 would change the weights of precision.recipe="
                f"{self.precision.recipe}; it needs one of {', '.join(fp8_weight_recipes())}"
            )
        if self.eval.tasks and self.precision.recipe == "te-delayed":
            raise ValueError(
                f"eval.tasks={list(self.eval.tasks)} with precision.recipe=te-delayed: evaluations "
                "would enter the amaxes of training; use te-current or te-blockwise"
            )
        if self.precision.output_layer != "bf16":
            if self.precision.recipe == "fp32":
                raise ValueError(
                    f"precision.output_layer={self.precision.output_layer} with "
                    "precision.recipe=fp32: must be bf16"
                )
            divides("model.hidden", m.hidden, "the alignment of FP8 GEMMs", 16)
        check_flow(self)
        for what in obstacles(self):
            raise ValueError(what)
        self._check_sharded_weights()
        self._check_decay()
        if m.qk_norm_width == "all" and p.tp > 1:
            raise ValueError(f"model.qk_norm_width=all with parallel.tp={p.tp}: must be 1")
        for name in ("norm_after", "sandwich_norm", "zero_centered_norm"):
            if getattr(m, name) and m.spec == "te":
                raise ValueError(f"model.{name}=true needs model.spec=local")
        if self.precision.recipe == "fp32" and self.optim.recipe not in FP32_RECIPES:
            raise ValueError(
                f"optim.recipe={self.optim.recipe} needs BF16 weights; precision.recipe=fp32 "
                f"needs one of {', '.join(FP32_RECIPES)}"
            )
        return self

    def _check_documents(self) -> None:
        """Raise ValueError for what attention within documents or a window does not support."""
        m, d = self.model, self.data
        for what, given in (
            ("data.reset_attention_mask=true", d.reset_attention_mask),
            ("model.window", m.window is not None),
        ):
            if given and not m.fused_heads:
                unset = "reset_attention_mask" not in d.model_fields_set and d.reset_attention_mask
                raise ValueError(
                    f"{what} with model.head_dim={m.size_per_head}: must be a multiple of 8, at "
                    f"most 256{', or data.reset_attention_mask=false be given' if unset else ''}"
                )
        if d.reset_position_ids and not d.reset_attention_mask:
            raise ValueError(
                "data.reset_position_ids=true needs data.reset_attention_mask=true: tokens that "
                "attend to other documents need positions in the sample"
            )

    def _check_decay(self) -> None:
        """Raise ValueError if the learning rate is to decay for longer than steps are left."""
        o, steps = self.optim, self.train.steps
        if o.decay_steps is not None and o.decay_steps > max(steps - o.warmup_steps, 0):
            raise ValueError(
                f"optim.decay_steps={o.decay_steps}: must be at most train.steps - "
                f"optim.warmup_steps = {steps}-{o.warmup_steps}"
            )

    def _check_sharded_weights(self) -> None:
        """Raise ValueError for options that hold whole weights, which zero=3 shards."""
        for name, value, allowed in (
            ("model.spec", self.model.spec, "local"),
            ("precision.keep_weights", self.precision.keep_weights, False),
        ):
            if self.parallel.zero == 3 and value != allowed:
                raise ValueError(f"parallel.zero=3 with {name}={value}: must be {allowed}")

    @property
    def context_comm(self) -> str:
        """a2a, p2p or all_gather: parallel.cp_comm with `auto` decided."""
        m, p = self.model, self.parallel
        if p.cp_comm != "auto":
            return p.cp_comm
        if not (m.heads % (p.tp * p.cp) or m.key_value_heads % (p.tp * p.cp)):
            return "a2a"
        return "all_gather" if any(auto_p2p_obstacles(self)) else "p2p"

    @property
    def cuda_graphs(self) -> bool:
        """Whether a GPU trains with CUDA graphs: train.cuda_graphs with `auto` decided."""
        if self.train.cuda_graphs == "auto":
            tp, most = self.parallel.tp, GRAPHS_UP_TO**2
            small = self.model.hidden**2 <= (most if tp == 1 else 2 * most * tp)
            return small and not any(graph_obstacles(self))
        return self.train.cuda_graphs

    def captures_steps(self, data_parallel: int) -> bool:
        """Whether a CUDA graph holds a whole step, not a microbatch: in one process. On two ranks
        it was no faster, and a checkpoint would delay the step instead of its update.
        """
        ranks = data_parallel * self.parallel.tp * self.parallel.cp
        return self.cuda_graphs and ranks == 1 and not any(step_obstacles(self, data_parallel))

    @property
    def undecided(self) -> str:
        """The keys that are still auto: text such as `train.micro_batch=auto`, or nothing."""
        keys = ["parallel.layout=auto"] if self.parallel.layout == "auto" else []
        if not isinstance(self.train.micro_batch, int):
            keys.append("train.micro_batch=auto")
        return " and ".join(keys)

    def data_parallel_size(self, world_size: int) -> int:
        """The data-parallel size. Raises ConfigError if `world_size` does not fit the layout."""
        p, t = self.parallel, self.train
        if self.undecided:
            raise ConfigError(f"{self.undecided}: must be given here; coatlm plan ranks layouts")
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
        microbatches = t.microbatches(dp)
        if t.update == "backward" and microbatches > 1:
            raise ConfigError(
                f"train.update=backward with train.global_batch={t.global_batch}: must be "
                f"train.micro_batch * data-parallel size = {t.micro_batch}*{dp}, one microbatch "
                "per step"
            )
        if p.vpp > 1 and microbatches % p.pp:
            raise ConfigError(
                f"parallel.vpp={p.vpp}: {microbatches} microbatches per step are not a multiple of "
                f"parallel.pp={p.pp}"
            )
        return dp

    def to_yaml(self, *, to_start: bool = False) -> str:
        """The resolved configuration as YAML; loading it gives an equal Config.

        Keys that are not set are left out: of an undecided layout and, `to_start` runs, of RESUMED.
        """
        data = self.model_dump(mode="json", warnings=False)  # micro_batch may be auto
        undecided = LAYOUT if self.parallel.layout == "auto" else ()
        for section, key in (*undecided, *(("data", key) for key in RESUMED if to_start)):
            if key not in getattr(self, section).model_fields_set:
                del data[section][key]
        return dump_yaml(data)
