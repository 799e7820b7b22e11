"""The configuration section parallel: parallelism, sharding and the formats of communication."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import StrictBool, StrictInt, model_validator

from coatlm.config.fields import MOST_RANKS, Real, Section, number

GradComm = Literal["fp32", "bf16", "fp8-nccl", "fp8-a2a"]
TpCommReduce = Literal["bf16", "fp8"]
CpCommKv = Literal["bf16", "fp8"]
# tp or cp -> the keys that need it above 1, each with its neutral value
ONLY_ABOVE_1: dict[str, dict[str, Any]] = {
    "tp": {"tp_chunks": 1, "tp_comm_reduce": "bf16"},
    "cp": {"cp_comm": "auto", "cp_comm_kv": "bf16"},
}


class Parallel(Section):
    """Parallelism, sharding and communication. Data-parallel size = processes / (tp * pp * cp)."""

    layout: Literal["given", "auto"] = "given"
    """How the layout is chosen: tp, sequence_parallel, cp, cp_comm, pp, vpp, zero and
    train.recompute. given: by these keys. auto: a run that starts on GPUs chooses the keys that are
    not set, so that the predicted step is the shortest that fits their memory. As an override auto
    also replaces the keys that the file sets. Under auto, tp_chunks and tp_comm_reduce are ignored
    where the chosen tp is 1, and cp_comm and cp_comm_kv where the chosen cp is 1. On a CPU keys
    that are not set have their defaults. A run that resumes has the same layout again if the number
    of GPUs allows it."""

    tp: StrictInt = number(1, "ranks", ge=1, le=2**16)
    """Tensor-parallel size; the ranks of a tensor-parallel group should share a node."""

    sequence_parallel: StrictBool = False
    """Shard norms and the residual stream along the sequence over the tensor-parallel ranks."""

    tp_chunks: StrictInt = number(1, "chunks", ge=1, le=64)
    """Above 1, FP8 layers split GEMMs so that they overlap with communication over the
    tensor-parallel ranks: in this many chunks of columns where results are summed, and into the
    rows of each rank where inputs are all-gathered, which then arrive rank by rank."""

    tp_comm_reduce: TpCommReduce = "bf16"
    """The format in which FP8 layers reduce-scatter partial sums over the tensor-parallel ranks
    under sequence parallelism: bf16 sums in BF16, fp8 exchanges E4M3 codes with a scale per 128
    elements by all-to-all and sums in fp32. Layers in BF16, the embedding and the output layer
    reduce-scatter BF16 with either."""

    pp: StrictInt = number(1, "ranks", ge=1, le=10_000)
    """Pipeline-parallel size: the number of pipeline stages."""

    vpp: StrictInt = number(1, "chunks", ge=1, le=10_000)
    """Model chunks per pipeline stage; above 1 the schedule is interleaved."""

    cp: StrictInt = number(1, "ranks", ge=1, le=2**16)
    """Context-parallel size: the ranks over which the tokens of a sample are sharded."""

    cp_comm: Literal["auto", "a2a", "p2p", "all_gather"] = "auto"
    """What context-parallel ranks exchange in attention: a2a exchanges heads for tokens by
    all-to-all, so that each rank attends with some heads of all tokens; p2p sends keys and values
    from rank to rank while ranks attend to those of others; all_gather all-gathers keys and values
    first. p2p does not go with data.reset_attention_mask, model.window or
    model.attention_softcap. auto is a2a where tp * cp divides model.heads and
    model.kv_heads, else p2p, the order of speed on two H100; and all_gather where p2p is excluded
    or has no fused kernel: fp32, and heads of more than 256 or no multiple of 8 elements."""

    cp_comm_kv: CpCommKv = "bf16"
    """The format in which context-parallel ranks exchange keys and values: bf16, or fp8, the E4M3
    codes and scales in which FP8 layers save them for backward. With fp8 every rank attends to the
    decoded keys and values, its own included; their gradients travel in BF16. It is for recipes
    that save keys and values in FP8 (coat-lean); layers in BF16 exchange BF16 with either."""

    zero: Literal[0, 1, 2, 3] = 1
    """The ZeRO stage, which is what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2
    gradients too, 3 weights too, which are all-gathered by layer, in forward and in backward."""

    partition: Literal["flat", "whole-tensor"] = "flat"
    """How zero=1, 2 and 3 shard: into equal flat shards, or whole tensors per rank as in
    FP8-LM."""

    main_grads: Literal["fp32", "bf16", "fp8"] = "fp32"
    """The format in which gradients are accumulated over microbatches and wait for the update: fp8
    is E4M3 with a scale per 128 elements and stochastic rounding."""

    grad_comm: GradComm = "fp8-a2a"
    """The format in which gradients are reduced over data-parallel ranks: fp8-nccl sums in FP8,
    fp8-a2a exchanges FP8 codes by all-to-all and sums in fp32."""

    grad_comm_scale: Literal["block", "tensor", "bucket"] = "block"
    """The scale granularity of fp8-a2a: one scale per block of 128 elements, or one per tensor or
    per bucket that all ranks share."""

    grad_comm_scaling: Literal["current", "delayed"] = "current"
    """How scales that all ranks share are computed: those of fp8-nccl, and of fp8-a2a with a scale
    per tensor or bucket. current: from the gradients, which are read once more for this. delayed:
    from the amaxes of the last 16 steps."""

    grad_comm_format: Literal["e4m3", "e3m4"] = "e4m3"
    """The FP8 format of fp8-a2a with block scales: e4m3 has more range, e3m4 half the rounding
    error."""

    grad_comm_nodes: StrictInt | None = number(None, "nodes", ge=1, le=MOST_RANKS)
    """Nodes of a two-level fp8-a2a, which sums gradients inside each node first and then exchanges
    these sums between nodes; 1 means a single exchange over all ranks, null means the number of
    nodes that the launcher reports."""

    weight_gather: Literal["bf16", "fp8"] = "bf16"
    """The format in which zero=1, 2 and 3 all-gather weights: bf16, as they are stored, or fp8,
    the codes to which the GEMMs would cast them."""

    bucket_size: StrictInt = number(0, "elements", ge=0, le=2**48)
    """Elements per gradient bucket; 0 means 1/48 of a rank's parameters, but at least 40
    million."""

    overlap_grad_reduce: StrictBool = True
    """Overlap the reduction of each gradient bucket with the rest of backward."""

    overlap_param_gather: StrictBool = True
    """Overlap the all-gather of weights with forward, and at zero=3 with backward."""

    start_timeout: Real = number(600.0, "seconds", gt=0.0, le=86400.0)
    """Seconds to wait at the start for all ranks to connect; the run then ends and names the
    missing ranks."""

    def is_open(self, key: str) -> bool:
        """Whether layout=auto is to choose this key of the layout."""
        return self.layout == "auto" and key not in self.model_fields_set

    def left_out(self) -> dict[str, Any]:
        """The keys that are set although tp or cp is 1, each with its neutral value."""
        return {
            key: usual
            for size, keys in ONLY_ABOVE_1.items()
            for key, usual in keys.items()
            if getattr(self, size) == 1 and getattr(self, key) != usual
        }

    @model_validator(mode="after")
    def _size(self) -> Parallel:
        if self.tp * self.pp * self.cp > MOST_RANKS:
            raise ValueError(f"tp*pp*cp={self.tp}*{self.pp}*{self.cp} is above {MOST_RANKS}")
        for name, usual in ONLY_ABOVE_1["cp"].items():
            if (value := getattr(self, name)) != usual and self.cp == 1 and not self.is_open("cp"):
                raise ValueError(f"{name}={value} needs cp > 1")
        scattered = self.sequence_parallel or self.is_open("sequence_parallel")
        if self.tp_comm_reduce != "bf16" and not scattered:
            raise ValueError(
                f"tp_comm_reduce={self.tp_comm_reduce} needs sequence_parallel=true: without it "
                "partial sums are all-reduced, which would round them twice"
            )
        return self

    @model_validator(mode="after")
    def _reduction(self) -> Parallel:
        if self.zero >= 2 and not self.overlap_grad_reduce:
            raise ValueError(
                f"zero={self.zero} needs overlap_grad_reduce=true: it frees gradients during "
                "backward"
            )
        for name in ("partition", "weight_gather"):
            if not self.zero and getattr(self, name) not in ("flat", "bf16"):
                raise ValueError(f"{name}={getattr(self, name)} needs zero=1, 2 or 3")
        if self.grad_comm != "fp8-a2a":
            if self.grad_comm_scale != "block":
                raise ValueError(f"grad_comm_scale={self.grad_comm_scale} needs grad_comm=fp8-a2a")
            if self.grad_comm_nodes not in (None, 1):
                raise ValueError(f"grad_comm_nodes={self.grad_comm_nodes} needs grad_comm=fp8-a2a")
        blocks = self.grad_comm == "fp8-a2a" and self.grad_comm_scale == "block"
        if self.grad_comm_scaling == "delayed" and (blocks or self.grad_comm in ("fp32", "bf16")):
            raise ValueError(
                "grad_comm_scaling=delayed needs grad_comm=fp8-nccl, or grad_comm=fp8-a2a with "
                "grad_comm_scale=tensor or bucket: other formats have no scales that ranks share"
            )
        if self.grad_comm_format != "e4m3" and not blocks:
            raise ValueError(
                f"grad_comm_format={self.grad_comm_format} needs grad_comm=fp8-a2a and "
                "grad_comm_scale=block: E3M4 spans a factor of only 1984, too little for one scale "
                "per tensor"
            )
        if self.partition == "whole-tensor" and self.grad_comm_nodes not in (None, 1):
            raise ValueError(
                f"grad_comm_nodes={self.grad_comm_nodes} needs partition=flat: the reduction "
                "inside and between nodes needs shards of equal size"
            )
        return self
