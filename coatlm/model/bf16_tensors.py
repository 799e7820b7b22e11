"""Single tensors of an FP8 layer in BF16, in place of the whole layer (precision.guard=operand).

`Flow.bf16_tensors` has the names that numerics.py gives a layer's tensors. A tensor there enters
each of its GEMMs in BF16, or is saved for backward in BF16:

    tensor                           operands                                or saved as
    qkv_input, fc1_input, fc2_input  forward.activation, wgrad.activation
    attention_output                 the same
    *_weight                         forward.weight, dgrad.weight
    *_grad                           dgrad.gradient, wgrad.gradient
    norm1_saved, norm2_saved                                                 norm_input
    gate_up_saved                                                            gate_up
    q_saved, k_saved, v_saved, o_saved                                       q, k, v, o

This is `precision.bf16_operands` for one linear instead of all four, with the same computation: the
GEMM runs in BF16, on the dequantized codes of its other operand, so one rounding is removed and all
others stay. Therefore it has the same limits (`alone`).

Over all layers a tensor has the key LAYER/TENSOR, with layers numbered from 1.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Literal, get_args

from coatlm.config import Config
from coatlm.config.operands import Operand
from coatlm.config.recipes import ATTENTION, FlowRecipe, OperandName
from coatlm.model.numerics import TENSORS

LinearName = Literal["qkv", "proj", "fc1", "fc2"]
LINEARS: tuple[LinearName, ...] = get_args(LinearName)
INPUTS = {name: f"{name}_input" for name in LINEARS} | {"proj": "attention_output"}
SAVED_AS = {  # a tensor that is saved for backward -> its field in SavedTensors
    "norm1_saved": "norm_input",
    "norm2_saved": "norm_input",
    "gate_up_saved": "gate_up",
    **{f"{name}_saved": name for name in ATTENTION},
}
JOINT = "attention_saved"  # in older checkpoints: q, k, v and o, of which o was measured


@cache
def tensor_of(linear: LinearName, operand: OperandName) -> str:
    """The tensor that is this operand of the linear's GEMM."""
    kind = operand.partition(".")[2]
    if kind == "activation":
        return INPUTS[linear]
    return f"{linear}_{'grad' if kind == 'gradient' else kind}"


def format_saved(recipe: FlowRecipe, tensor: str, bf16: Collection[str]) -> Operand | None:
    """How a layer with the tensors `bf16` in BF16 saves a tensor of SAVED_AS; None means BF16."""
    if tensor in bf16:
        return None
    wanted: Operand | None = getattr(recipe.saved, SAVED_AS[tensor])
    return wanted


def alone(config: Config, tensor: str) -> bool:
    """Whether the tensor can be in BF16 in a layer that computes in FP8.

    A saved tensor can, except keys and values with parallel.cp_comm_kv=fp8: ranks send them in the
    format in which they are saved, which is chosen for a whole layer (traffic.py). Under tensor
    parallelism GEMM operands are all-gathered as codes, and BF16 represents dequantized codes
    exactly only if their scales are powers of two.
    """
    if tensor in ("k_saved", "v_saved") and config.parallel.cp_comm_kv == "fp8":
        return False
    exact = config.precision.flow_recipe().exact_in_bf16
    return tensor in SAVED_AS or (config.parallel.tp == 1 and exact)


def key_of(layer: int, tensor: str) -> str:
    """LAYER/TENSOR, as 3/fc2_input."""
    return f"{layer}/{tensor}"


def layer_of(key: str) -> int:
    """The number of the layer in LAYER/TENSOR."""
    return int(key.partition("/")[0])


def name_of(key: str) -> str:
    """The tensor in LAYER/TENSOR."""
    return key.partition("/")[2]


def split_keys(keys: Collection[str]) -> set[str]:
    """Keys LAYER/TENSOR of a checkpoint, with the keys of q, k, v and o in place of a JOINT one."""
    return {
        key_of(layer_of(key), name)
        for key in keys
        for name in ([f"{x}_saved" for x in ATTENTION] if name_of(key) == JOINT else [name_of(key)])
    }


def names_in(keys: Collection[str], layer: int) -> frozenset[str]:
    """The tensors of one layer among keys LAYER/TENSOR."""
    return frozenset(name for name in TENSORS if key_of(layer, name) in keys)
