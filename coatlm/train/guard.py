"""precision.guard: find what FP8 hurts, and let it be in BF16.

Every precision.guard_every steps the FP8 tensors of each layer are measured (`model.numerics`).
With u = eps / 2, the largest relative error of a normal number in the tensor's format (2^-4 in
E4M3, 2^-3 in E5M2; twice that with stochastic rounding; for INT8 0.026, from where on E4M3 would
lose less), and d the dequantized codes of a tensor x, FP8 hurts x if a measure exceeds its limit:

    relative_error > u     |d - x| / |x|. Rounding of normal numbers gives 0.42 u (0.026 in E4M3;
                           0.3 u with stochastic rounding) and never more than u, so values were
                           lost or clipped.
    underflow > u / 0.72   The share of x that becomes zero. Let x be Gaussian around zero with
                           standard deviation s, and let codes near zero be t apart. Values below
                           t / 2 become zero, a share of z = 0.4 t / s, and the rms error of the
                           others is t / sqrt(12) = 0.72 z s, which is u s at the limit. An outlier
                           channel that makes up most of |x| hides this error from relative_error,
                           although the next weights may scale that channel down. Gradients have no
                           such limit: those of well-predicted tokens are small, and no weight
                           amplifies single tokens, so nothing is lost with them.
    saturated > 1e-5       The share at the largest code, with FP8-LM's limit. Only with delayed
                           scaling, whose scale is fixed before the values are known. With current
                           scaling nothing is clipped: the codes at the largest value are the
                           amaxes themselves.

The guard acts if two measurements in a row find the same tensor of a layer above a limit; a single
spike changes nothing. A measure that is NaN or Inf is ignored, since the update of such a step is
skipped anyway.

Rank 0 has the numbers reduced over its model replica. It decides and broadcasts the decision, so
that all ranks act alike.

guard=fallback lets the layer compute in BF16, guard=operand the tensor alone where it can
(`model.bf16_tensors.alone`), else the layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from coatlm.config import Config
from coatlm.config.model import Precision
from coatlm.fp8.formats import E4M3
from coatlm.fp8.operand import format_of
from coatlm.model.bf16_tensors import JOINT, alone, key_of, layer_of, name_of, split_keys
from coatlm.model.fits import peak_with
from coatlm.model.numerics import TENSORS
from coatlm.parallel.fp8lm_scaling import SATURATED
from coatlm.train.reports import number_list

whole_run = logging.getLogger("coatlm.run")

NEAREST = 0.42  # error of numbers rounded to nearest, relative to the largest, u
BULK = math.sqrt(2 * math.pi / 12)  # 0.72: rms error in units of s, per share of zeros z
GuardLimits = dict[str, dict[str, float]]  # tensor -> measure -> limit
NO_MEMORY = "no memory"
ACTIONS = {
    "warned": "it stays in FP8",
    "bf16": "the layer computes in BF16 from the next step on",
    "operand": "this tensor is in BF16 from the next step on, and the rest of the layer in FP8",
    "layer": "the layer computes in BF16 from the next step on, because this tensor cannot be in "
    "BF16 alone in this run",
    NO_MEMORY: "the layer stays in FP8, because in BF16 a step would not fit the device's memory",
}


@dataclass(frozen=True)
class Finding:
    """A tensor that FP8 hurts, and the measure that exceeds its limit most.

    `action` is a key of ACTIONS.
    """

    layer: int
    tensor: str
    measure: str
    value: float
    limit: float
    action: str = "warned"

    @property
    def key(self) -> str:
        return key_of(self.layer, self.tensor)

    def record(self) -> dict[str, Any]:
        """The values of a line in metrics.jsonl."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"FP8 hurts layer {self.layer}, {self.tensor}: {self.measure} {self.value:.3g} is "
            f"above {self.limit:.3g}; {ACTIONS[self.action]}"
        )


def limits_of(precision: Precision) -> GuardLimits:
    """The limits of each tensor's measures, from its format and scaling."""
    recipe = precision.flow_recipe()
    limits: GuardLimits = {}
    for tensor in TENSORS:
        operand = recipe.forward.activation
        if tensor.endswith("_weight"):
            operand = recipe.forward.weight
        elif tensor.endswith("_grad"):
            operand = recipe.dgrad.gradient
        saved = tensor.endswith("_saved")
        integers = operand.fmt == "int8" and not saved
        fmt = E4M3 if saved or integers else format_of(operand)
        most = fmt.eps / 2 * (NEAREST if integers else 1)
        if tensor.endswith("_grad") and operand.rounding == "stochastic":
            most = fmt.eps
        limits[tensor] = {"relative_error": most}
        if not tensor.endswith("_grad"):
            limits[tensor]["underflow"] = most / BULK
        if operand.scaling == "delayed":
            limits[tensor]["saturated"] = SATURATED
    return limits


def find(records: Iterable[Mapping[str, Any]], limits: GuardLimits) -> Iterator[Finding]:
    """The tensors in `numerics.report` that exceed a limit."""
    for record in records:
        over = {
            measure: record[measure] / limit
            for measure, limit in limits.get(record["tensor"], {}).items()
            if math.isfinite(record[measure]) and record[measure] > limit
        }
        if over:
            worst = max(over, key=over.__getitem__)
            limit = limits[record["tensor"]][worst]
            yield Finding(record["layer"], record["tensor"], worst, record[worst], limit)


@dataclass(frozen=True)
class Decision:
    """What rank 0 found in a measurement, and what all ranks do about it."""

    found: list[str]  # keys of everything above a limit
    acted: list[Finding]  # found twice in a row, and not reported before
    fallen: Fallen  # from the next step on


class Fallen(NamedTuple):
    """What has fallen back to BF16: layers by number, from 1, and tensors of other layers."""

    layers: frozenset[int] = frozenset()
    tensors: frozenset[str] = frozenset()  # keys LAYER/TENSOR

    def with_layers(self, layers: Iterable[int]) -> Fallen:
        """The same and these whole layers."""
        more = self.layers.union(layers)
        return Fallen(more, frozenset(key for key in self.tensors if layer_of(key) not in more))

    def with_tensors(self, keys: Iterable[str]) -> Fallen:
        """The same and these tensors."""
        return Fallen(self.layers, self.tensors.union(keys)).with_layers(())


class PrecisionGuard:
    """What the measurements of a run have found, and the layers and tensors that fell back.

    `fits`: whether a step with these layers and tensors in BF16 fits the memory. `change`: lets
    these, and no others, be in BF16. `alone`: whether a tensor, by its name, can be in BF16 in a
    layer that computes in FP8.
    """

    def __init__(
        self,
        mode: str,
        limits: GuardLimits,
        *,
        fits: Callable[[Collection[int], Collection[str]], bool],
        change: Callable[[Collection[int], Collection[str]], None],
        alone: Callable[[str], bool],
    ) -> None:
        self.mode, self.limits, self.fits, self.change = mode, limits, fits, change
        self.alone, self.fallen = alone, Fallen()
        self.suspected: set[str] = set()  # what the last measurement found
        self.reported: set[str] = set()
        self.refused: set[str] = set()  # for lack of memory, since the start

    def observe(
        self, records: Iterable[Mapping[str, Any]], group: dist.ProcessGroup
    ) -> list[Finding]:
        """Act on a measurement: returns what is new. All ranks of the gloo `group` call it.

        Only the records of its rank 0 count. What falls back does so in the next step.
        """
        message: list[Any] = [self._decide(records) if group.rank() == 0 else None]
        dist.broadcast_object_list(message, src=0, group=group)
        decision: Decision = message[0]
        self.suspected = set(decision.found)
        for finding in decision.acted:
            (self.refused if finding.action == NO_MEMORY else self.reported).add(finding.key)
        if decision.fallen != self.fallen:
            self.fallen = decision.fallen
            self.change(*self.fallen)
        for finding in decision.acted:
            whole_run.warning("%s", finding)
        return decision.acted

    def _decide(self, records: Iterable[Mapping[str, Any]]) -> Decision:
        found, fallen, acted = list(find(records, self.limits)), self.fallen, []
        for finding in found:
            if finding.key not in self.suspected - self.reported - self.refused:
                continue
            action = "warned"
            if self.mode != "warn":
                action, more = self._fall_back(finding, fallen)
                fits = self.fits(*more)
                action, fallen = (action, more) if fits else (NO_MEMORY, fallen)
            acted.append(Finding(**asdict(finding) | {"action": action}))
        return Decision([finding.key for finding in found], acted, fallen)

    def _fall_back(self, finding: Finding, fallen: Fallen) -> tuple[str, Fallen]:
        """The action, and what is in BF16 after it, if the memory suffices."""
        if self.mode == "fallback" or finding.layer in fallen.layers:
            return "bf16", fallen.with_layers([finding.layer])
        if not self.alone(finding.tensor):
            return "layer", fallen.with_layers([finding.layer])
        return "operand", fallen.with_tensors([finding.key])

    def counts(self) -> dict[str, int]:
        """For metrics: layers in BF16, tensors above a limit in the last measurement.

        With guard=operand also tensors in BF16 of other layers.
        """
        tensors = {"guard_bf16_tensors": len(self.fallen.tensors)}
        return {
            "guard_bf16_layers": len(self.fallen.layers),
            **(tensors if self.mode == "operand" else {}),
            "guard_findings": len(self.suspected),
        }

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint's state for `restore`."""
        return {
            "mode": self.mode,
            "in_bf16": sorted(self.fallen.layers),
            "tensors": sorted(self.fallen.tensors),
            "suspected": sorted(self.suspected),
            "reported": sorted(self.reported),
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state` returned; None clears it.

        Only guard=fallback and operand restore layers and tensors. Where a tensor cannot be in BF16
        alone its layer is. Another mode reports everything again, and what did not fit the memory
        is tried again: this start may have more.
        """
        state = state or {}
        self.fallen, self.refused = Fallen(), set()
        if self.mode != "warn":
            keys = split_keys(state.get("tensors", ()))
            kept = {key for key in keys if self.mode == "operand" and self.alone(name_of(key))}
            layers = set(state.get("in_bf16", ())) | {layer_of(key) for key in keys - kept}
            self.fallen = Fallen().with_layers(layers).with_tensors(kept)
        self.suspected = _measured(state.get("suspected", ()))
        same_mode = state.get("mode") == self.mode
        self.reported = _measured(state.get("reported", ())) if same_mode else set()
        self.change(*self.fallen)


def make_guard(
    config: Config,
    vocab: int,
    data_parallel: int,
    *,
    memory: int,
    change: Callable[[Collection[int], Collection[str]], None],
) -> PrecisionGuard | None:
    """The guard of `precision.guard`; None if it is off. See PrecisionGuard for `change`.

    `memory`: the smallest of the ranks' GPUs in bytes, 0 on CPUs.
    """
    if config.precision.guard == "off":
        return None
    fits = partial(fits_memory, config, vocab, data_parallel, memory)
    limits = limits_of(config.precision)
    return PrecisionGuard(
        config.precision.guard, limits, fits=fits, change=change, alone=partial(alone, config)
    )


def restore_guard(
    guard: PrecisionGuard | None, saved: Mapping[str, Any] | None, config: Config
) -> None:
    """Restore the guard of a checkpoint. Warns of what is in FP8 again, or in BF16 as a whole."""
    precision, parallel, saved = config.precision, config.parallel, saved or {}
    head, tail = precision.bf16_layers
    ours = range(head + 1, config.model.layers - tail + 1) if precision.flow else ()
    layers = set(saved.get("in_bf16", ())).intersection(ours)
    tensors = {key for key in split_keys(saved.get("tensors", ())) if layer_of(key) in ours}
    now = Fallen()
    if guard is not None:
        guard.restore(saved)
        now = guard.fallen
    if gone := layers - now.layers:
        whole_run.warning(
            "layers that had fallen back to BF16 compute in FP8 again with precision.guard=%s: %s",
            *(precision.guard, number_list(gone)),
        )
    others = {key for key in tensors if layer_of(key) not in now.layers} - now.tensors
    if others:
        names = ", ".join(sorted(others))
        whole_run.warning(
            "tensors that had fallen back to BF16 are in FP8 again with precision.guard=%s: %s",
            precision.guard,
            names,
        )
    if whole := {layer_of(key) for key in tensors}.intersection(now.layers):
        whole_run.warning(
            "layers of which single tensors had fallen back to BF16 compute in BF16 as a whole "
            "with precision.guard=%s, precision.recipe=%s, parallel.tp=%d and "
            "parallel.cp_comm_kv=%s: %s",
            *(precision.guard, precision.recipe, parallel.tp, parallel.cp_comm_kv),
            number_list(whole),
        )


def _measured(keys: Iterable[str]) -> set[str]:
    """Keys that a checkpoint has of measurements; JOINT was measured in the attention output."""
    return {key_of(layer_of(key), "o_saved") if name_of(key) == JOINT else key for key in keys}


def fits_memory(
    config: Config,
    vocab: int,
    data_parallel: int,
    memory: int,
    fallen: Collection[int],
    tensors: Collection[str] = (),
) -> bool:
    """Whether the estimated peak with the layers `fallen` and `tensors` in BF16 fits a GPU.

    Its `memory` is in bytes. True for 0, a CPU, for which the peak is no estimate.
    """
    return not memory or peak_with(config, vocab, data_parallel, fallen, tensors) <= memory
