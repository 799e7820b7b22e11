"""The whole configuration of a run: its sections, and checks that involve several of them."""

from __future__ import annotations

from pydantic import Field, model_validator

from coatlm.config.errors import ConfigError
from coatlm.config.fields import Section
from coatlm.config.log import Log
from coatlm.config.model import Model, Precision
from coatlm.config.obstacles import auto_p2p_obstacles, graph_obstacles, obstacles, step_obstacles
from coatlm.config.optim import FP32_RECIPES, Optim
from coatlm.config.parallel import ONLY_ABOVE_1, Parallel
from coatlm.config.recipes import RECIPES, fp8_weight_recipes
from coatlm.config.run import Checkpoint, Data, Eval, Run, Train
from coatlm.config.yaml_text import dump_yaml

# keys of precision that are not only for FP8 layers
ANY_RECIPE = {"recipe", "output_layer", "tune_attention"}
LOCAL_LAYER_ONLY = (  # keys of model that FP8 layers do not compute
    *("norm_after", "sandwich_norm", "zero_centered_norm", "activation", "residual_multiplier"),
    *("attention_softcap",),
)
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
        self._check_flow()
        for what in obstacles(self):
            raise ValueError(what)
        self._check_sharded_weights()
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

    def _check_flow(self) -> None:
        """Raise ValueError for sizes and options that the FP8 kernels do not support."""
        m, p, recipe = self.model, self.precision, self.precision.recipe
        if not p.flow:
            flows = " | ".join(RECIPES)
            for name in set(Precision.model_fields) - ANY_RECIPE:
                if getattr(p, name) != Precision.model_fields[name].default:
                    raise ValueError(f"precision.{name} is for {flows}, not for {recipe}")
            if self.log.numerics_every:
                raise ValueError(
                    f"log.numerics_every={self.log.numerics_every} must be 0 with "
                    f"precision.recipe={recipe}: only {flows} have FP8 layers to measure"
                )
            return
        if m.spec != "local":
            raise ValueError(f"precision.recipe={recipe} needs model.spec=local")
        for name in LOCAL_LAYER_ONLY:
            if (value := getattr(m, name)) != (usual := Model.model_fields[name].default):
                raise ValueError(
                    f"precision.recipe={recipe} with model.{name}={value}: must be {usual}"
                )
        if min(p.bf16_layers) < 0 or sum(p.bf16_layers) > m.layers:
            raise ValueError(
                f"precision.bf16_layers={list(p.bf16_layers)}: first and last layers, >= 0, "
                f"together at most model.layers={m.layers}"
            )
        if p.guard == "off" and p.guard_every != Precision().guard_every:
            raise ValueError(
                f"precision.guard_every={p.guard_every} needs precision.guard=warn, fallback or "
                "operand"
            )
        if p.falls_back and self.parallel.weight_gather == "fp8":
            raise ValueError(
                f"precision.guard={p.guard} with parallel.weight_gather=fp8: a GEMM in BF16 would "
                "compute with weights that were rounded to FP8; use precision.guard=warn or "
                "parallel.weight_gather=bf16"
            )
        self._check_operands()

    def _check_operands(self) -> None:
        """Raise ValueError if FP8 blocks or tensor-core tiles do not divide the model's sizes."""
        m, p, tp = self.model, self.precision, self.parallel.tp
        row, operands = RECIPES[p.recipe], f"the FP8 GEMMs of precision.recipe={p.recipe}"
        if p.scaling == "delayed" and not row.tensor_wise_gradients:
            raise ValueError(
                f"precision.scaling=delayed needs one scale per gradient, which "
                f"precision.recipe={p.recipe} does not have; it needs one of "
                f"{', '.join(name for name, r in RECIPES.items() if r.tensor_wise_gradients)}"
            )
        if p.delayed_margin is not None and p.scaling != "delayed":
            raise ValueError(
                f"precision.delayed_margin={p.delayed_margin} needs precision.scaling=delayed"
            )
        powers = row.dgrad.gradient.power_of_two or p.scaling == "delayed"
        if p.grad_rounding != "nearest" and not (row.tensor_wise_gradients and powers):
            raise ValueError(
                f"precision.grad_rounding={p.grad_rounding} needs tensor-wise power-of-two scales "
                f"of gradients, which precision.recipe={p.recipe} with precision.scaling="
                f"{p.scaling} does not have"
            )
        self._check_bf16_operands()
        recipe = p.flow_recipe()
        size = p.group_size or 16  # FP8 tensor cores need multiples of 16 as well
        divides("model.hidden", m.hidden, "precision.group_size", size)
        chunks, codes = self.parallel.tp_chunks, self.parallel.tp_comm_reduce == "fp8"
        rows = max(128 if codes else 16, recipe.forward.weight.granularity.rows or 1)
        if chunks > 1 or codes:  # the scale of a code covers 128 columns of a chunk
            divides("model.hidden", m.hidden, f"{rows}*parallel.tp_chunks", rows * chunks)
        divides("model.ffn/tp", m.ffn // tp, "precision.group_size", size)
        for name, heads in (("heads", m.heads), ("kv_heads", m.key_value_heads)):
            width = heads * m.size_per_head // tp
            divides(f"model.{name}*head_dim/tp", width, "the alignment of FP8 GEMMs", 16)
        if recipe.saved.attention:
            divides("model.head_dim", m.size_per_head, "precision.group_size", size)
        summed = recipe.summed_multiple
        if summed > 16:  # a scale covers 128 elements of the summed axis, never fewer
            if p.fast_accumulation != Precision().fast_accumulation:
                raise ValueError(
                    f"precision.fast_accumulation={list(p.fast_accumulation)}: block-wise scaled "
                    f"GEMMs have no such option; remove it for precision.recipe={p.recipe}"
                )
            queries, keys = (n * m.size_per_head // tp for n in (m.heads, m.key_value_heads))
            divides("model.hidden", m.hidden, operands, summed)
            divides("model.ffn/tp", m.ffn // tp, operands, summed)
            divides("model.heads*head_dim/tp", queries, operands, summed)
            both = "model.(heads + 2*kv_heads)*head_dim/tp"
            divides(both, queries + 2 * keys, operands, summed)
            tokens = self.train.smallest_micro_batch * self.data.seq_len // self.parallel.cp
            divides("train.micro_batch*data.seq_len/cp", tokens, "the rows of 1x128 blocks", 4)

    def _check_bf16_operands(self) -> None:
        """Raise ValueError for operands and saved tensors that cannot stay in BF16."""
        p, names = self.precision, list(self.precision.bf16_operands)
        what, row = f"precision.bf16_operands={names}", RECIPES[p.recipe]
        if len(set(names)) < len(names):
            raise ValueError(f"{what}: each at most once")
        for name in names:
            if name.startswith("saved.") and not getattr(row.saved, name.removeprefix("saved.")):
                raise ValueError(f"{what}: precision.recipe={p.recipe} saves {name[6:]} in BF16")
        operands = [name for name in names if not name.startswith("saved.")]
        if operands and not row.exact_in_bf16:
            exact = ", ".join(name for name, r in RECIPES.items() if r.exact_in_bf16)
            raise ValueError(
                f"{what}: BF16 cannot represent the dequantized operands of precision.recipe="
                f"{p.recipe}; it needs one of {exact}"
            )
        if operands and self.parallel.tp > 1:
            raise ValueError(f"{what} with parallel.tp={self.parallel.tp}: must be 1")
        if "wgrad.activation" in names and p.keep_linear_inputs:
            raise ValueError(
                f"{what} with precision.keep_linear_inputs=true: must be null or false"
            )
        weights = {"forward.weight", "dgrad.weight"}.intersection(names)
        if weights and self.parallel.weight_gather == "fp8":
            raise ValueError(f"{what} with parallel.weight_gather=fp8: must be bf16")

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

    def to_yaml(self) -> str:
        """The resolved configuration as YAML; loading it gives an equal Config.

        While parallel.layout is auto, keys of the layout that are not set are left out.
        """
        data = self.model_dump(mode="json", warnings=False)  # micro_batch may be auto
        for section, key in LAYOUT if self.parallel.layout == "auto" else ():
            if key not in getattr(self, section).model_fields_set:
                del data[section][key]
        return dump_yaml(data)


def divides(name: str, value: int, by_name: str, by: int) -> None:
    """Raise ValueError unless `by` divides `value`."""
    if value % by:
        raise ValueError(f"{name}={value} is not a multiple of {by_name}={by}")
