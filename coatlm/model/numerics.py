"""Numerics of one step: errors of FP8 tensors, kurtosis of the residual stream, size of logits.

For a tensor x with codes c, which dequantize to d(c) = code * scale:

    amax             max|x|
    saturated        share of the codes at the largest value of the format
    underflow        share of the non-zero x (INT8: of the rotated x) whose code is zero
    relative_error   |d(c) - x| / |x|, Euclidean norms over the whole tensor

    *_saved          saved for backward: the residual stream before each norm, gate | up, and with
                     coat-lean q and k after RoPE, v, and the attention output o
    qkv_input, attention_output, fc1_input, fc2_input, *_weight      operands of forward's GEMMs
    *_grad           gradient of a linear's output, as the operand of dgrad

    residual         the input of a layer, FP8 or BF16, x [tokens, H]: its amax and

    kurtosis         mean over the tokens of H sum(x^4) / sum(x^2)^2, sums over the H channels:
                     3 for Gaussian channels, H if one channel has everything

    lse              of the output layer, which has the number after the last layer's, x [tokens]:
                     log(sum(exp(logits))) of the tokens with a loss; its amax and its

    mean             over the tokens

x is the tensor before quantization. Fused kernels never write the outputs of norms and SwiGLU or
the gradients of gate | up and q | k | v to memory, so the references recompute those in fp32, some
rows at a time, from the operands that the kernel read.

Each number follows from a maximum or from sums over elements, which are reduced over ranks: tensor-
and context-parallel ranks hold shards of a tensor (replicas change no ratio; a shard has the scale
that it has in training), and pipeline stages hold other layers. Only the first microbatch of
data-parallel rank 0 is measured; with `sampled`, only SAMPLE rows of each tensor there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coatlm.fp8.formats import RotatedInt8
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.rotation import rotate
from coatlm.kernels.activation import swiglu_backward_ref, swiglu_ref
from coatlm.kernels.rope import join_qkv_rope_ref
from coatlm.parallel.groups import Groups

whole_run = logging.getLogger("coatlm.run")  # of rank 0 alone

TENSORS = (
    *("norm1_saved", "qkv_input", "qkv_weight"),
    *("q_saved", "k_saved", "v_saved"),
    *("attention_output", "o_saved", "proj_weight"),
    *("norm2_saved", "fc1_input", "fc1_weight", "gate_up_saved", "fc2_input", "fc2_weight"),
    *("fc2_grad", "fc1_grad", "proj_grad", "qkv_grad"),
)
RESIDUAL, LSE = "residual", "lse"
REPORTED = (RESIDUAL, *TENSORS, LSE)  # of a layer, in the order of the report
SUMS = ("elements", "saturated", "nonzero", "zeroed", "error", "size")
MOMENTS = ("tokens", "kurtosis")  # of RESIDUAL: tokens that are not all zero, sum of their kurtosis
COARSE = 32.0  # from here on numbers of BF16, which logits are, are a quarter of a nat apart
PIECE = 1 << 22  # elements at a time; temporaries take about 60 bytes per element, 0.25 GB
SAMPLE, RUNS = 1024, 2  # rows of a tensor that are sampled, in this many runs of adjacent rows

RowSource = Callable[[int, int], Tensor]  # (start, stop) -> these rows of x in fp32
NumericsRecord = dict[str, int | float | str]


class Probe:
    """The measurements of one layer's tensors in one step.

    Only the first tensor of a name is measured. It belongs to the first microbatch, because
    microbatches enter forward and backward in order, and not to a forward pass that is recomputed.
    """

    def __init__(self, *, sampled: bool = False, weights: bool = True) -> None:
        self.sampled, self.weights = sampled, weights
        self.amax: dict[str, Tensor] = {}  # fp32 []
        self.sums: dict[str, Tensor] = {}  # fp64 [SUMS]; of RESIDUAL [MOMENTS], of LSE [2]

    @torch.no_grad()
    def record(self, name: str, source: Tensor | RowSource, quantized: QTensor) -> None:
        """Measure the codes of x[M, K] = `source`, if `name` is new. Does not sync the device."""
        if name not in self.sums and (self.weights or not name.endswith("_weight")):
            self.amax[name], self.sums[name] = _measure(source, quantized, self.sampled)

    @torch.no_grad()
    def record_residual(self, x: Tensor) -> None:
        """Measure the layer's input x[..., H], if it is the first. Does not sync the device."""
        if RESIDUAL not in self.sums:
            self.amax[RESIDUAL], self.sums[RESIDUAL] = _moments(x.flatten(0, -2))

    @torch.no_grad()
    def record_logits(self, lse_T: Tensor, counts_T: Tensor) -> None:
        """Measure log(sum(exp(logits))), fp32, of tokens that count, if it is the first call."""
        if LSE not in self.sums:
            lse_T = lse_T.where(counts_T, 0.0)
            self.amax[LSE] = lse_T.abs().amax()
            self.sums[LSE] = torch.stack((counts_T.sum().double(), lse_T.double().sum()))


class Probed(Protocol):
    """An object that passes its tensors to `probe` unless that is None."""

    probe: Probe | None


@contextmanager
def watched(
    flows: Mapping[int, Probed],
    layers: Mapping[int, nn.Module] | None = None,
    *,
    sampled: bool = False,
    weights: bool = True,
) -> Iterator[dict[int, Probe]]:
    """Attach a probe to each layer inside the context. Keys are layer numbers, from 1.

    `flows`: FP8 layers, whose tensors are measured, but weights only with `weights`, and the output
    layer. `layers`: those whose inputs are measured.
    """
    layers = layers or {}
    numbers = sorted({*flows, *layers})
    probes = {number: Probe(sampled=sampled, weights=weights) for number in numbers}
    with ExitStack() as stack:
        for number, layer in layers.items():
            hook = layer.register_forward_pre_hook(_to(probes[number]), with_kwargs=True)
            stack.callback(hook.remove)
        for number, flow in flows.items():
            flow.probe = probes[number]
            stack.callback(setattr, flow, "probe", None)
        yield probes


def _to(probe: Probe) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Any]], None]:
    """A hook that gives the input of a layer to `probe`."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        probe.record_residual(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    return hook


def collect(
    probes: Mapping[int, Probe], groups: Groups, *, layers: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """amax fp32 [layers, REPORTED] and sums fp64 [layers, REPORTED, SUMS], reduced over the ranks.

    All ranks of a model replica must call this; `layers` counts those of the model and the output
    layer.
    """
    bits = torch.zeros(layers, len(REPORTED), dtype=torch.int32, device=device)
    sums = torch.zeros(layers, len(REPORTED), len(SUMS), dtype=torch.float64, device=device)
    for number, probe in probes.items():
        for name, values in probe.sums.items():
            at = number - 1, REPORTED.index(name)
            bits[at] = probe.amax[name].view(torch.int32)
            sums[at][: len(values)] = values
    for group in (groups.model, groups.cp):
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)  # NaN > Inf > numbers, as integers
        dist.all_reduce(sums, group=group)
    return bits.view(torch.float32), sums


def report(amax: Tensor, sums: Tensor) -> list[NumericsRecord]:
    """One record per layer and tensor that was measured, in order. Syncs with the device."""
    records: list[NumericsRecord] = []
    tables = zip(amax.tolist(), sums.tolist(), strict=True)
    for number, (amax_of_layer, sums_of_layer) in enumerate(tables, start=1):
        for name, largest, values in zip(REPORTED, amax_of_layer, sums_of_layer, strict=True):
            if values[0]:  # elements or tokens
                measures = MEASURES.get(name, _errors)(values)
                records.append({"layer": number, "tensor": name, "amax": largest, **measures})
    return records


def _errors(values: list[float]) -> NumericsRecord:
    total = dict(zip(SUMS, values, strict=True))
    return {
        "saturated": total["saturated"] / total["elements"],
        "underflow": _ratio(total["zeroed"], total["nonzero"]),
        "relative_error": _ratio(total["error"], total["size"]) ** 0.5,
    }


def _kurtosis(values: list[float]) -> NumericsRecord:
    total = dict(zip(MOMENTS, values, strict=False))
    return {"kurtosis": total["kurtosis"] / total["tokens"]}


def _mean(values: list[float]) -> NumericsRecord:
    return {"mean": values[1] / values[0]}


MEASURES = {RESIDUAL: _kurtosis, LSE: _mean}  # of what has no codes


class LogitsWatch:
    """Warns when the logits become too large for the digits of BF16: at each power of two once."""

    def __init__(self) -> None:
        self.limit = COARSE

    def observe(self, records: list[NumericsRecord]) -> list[NumericsRecord]:
        """Look at a report, and return it."""
        for record in records:
            if record["tensor"] == LSE and abs(mean := float(record["mean"])) >= self.limit:
                exponent = math.frexp(mean)[1]
                self.limit = 2.0**exponent
                whole_run.warning(
                    "log(sum(exp(logits))) is %.1f on average, and numbers of BF16 of that size "
                    "are %g apart: logits lose digits (docs/guides/troubleshooting.md)",
                    mean,
                    2.0 ** (exponent - 8),
                )
        return records


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> RowSource:
    """Rows of the output of RMSNorm, from its input [M, H]."""

    def rows(start: int, stop: int) -> Tensor:
        part = x[start:stop].float()
        rstd = torch.rsqrt(part.square().mean(-1, keepdim=True) + eps)
        return part * rstd * weight.float()

    return rows


def swiglu_rows(gate_up: Tensor) -> RowSource:
    """Rows of silu(gate) * up, from gate | up [M, 2F]."""
    return lambda start, stop: swiglu_ref(gate_up[start:stop].float())


def swiglu_gradient_rows(da: Tensor, gate_up: Tensor | QTensor) -> RowSource:
    """Rows of the gradient of the saved gate | up, from that of SwiGLU's output [M, F]."""

    def rows(start: int, stop: int) -> Tensor:
        if isinstance(gate_up, QTensor):
            saved = _cut(gate_up, start, stop).dequantize()
        else:
            saved = gate_up[start:stop].float()
        return swiglu_backward_ref(da[start:stop].float(), saved)

    return rows


def qkv_gradient_rows(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> RowSource:
    """Rows of d(q | k | v) before RoPE [S * B, W], from those of attention [S, B, heads, D]."""
    batch = dq.shape[1]

    def rows(start: int, stop: int) -> Tensor:
        first, last = start // batch, -(-stop // batch)
        q, k, v = (d[first:last].float() for d in (dq, dk, dv))
        joined = join_qkv_rope_ref(q, k, v, cos[first:last], sin[first:last])
        return joined.flatten(2).flatten(0, 1)[start - first * batch : stop - first * batch]

    return rows


def _measure(
    source: Tensor | RowSource, quantized: QTensor, sampled: bool
) -> tuple[Tensor, Tensor]:
    """The amax and the sums of one tensor on this rank."""
    amax: list[Tensor] = []
    sums: list[Tensor] = []
    m, k = quantized.shape
    for start, stop in _pieces(m, k, quantized.granularity.rows or 1, sampled):
        x = source[start:stop].float() if isinstance(source, Tensor) else source(start, stop)
        part = _cut(quantized, start, stop)
        code, exact = part.codes.float(), x.double()
        encoded = rotate(x) if isinstance(part.fmt, RotatedInt8) else x
        counts = (
            torch.full((), x.numel(), device=x.device),
            (code.abs() == part.fmt.max).sum(),
            (encoded != 0).sum(),
            ((encoded != 0) & (code == 0)).sum(),
            (part.dequantize().double() - exact).square().sum(),
            exact.square().sum(),
        )
        sums.append(torch.stack([count.double() for count in counts]))
        amax.append(x.abs().amax())
    return torch.stack(amax).amax(), torch.stack(sums).sum(0)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The amax and the MOMENTS of x[T, H]; each token is divided by its amax, so none overflows."""
    amax: list[Tensor] = []
    sums: list[Tensor] = []
    for start, stop in _pieces(len(x), x.shape[1], 1, False):
        part = x[start:stop].float()
        largest = part.abs().amax(-1, keepdim=True)
        square = (part / largest).square()
        kurtosis = x.shape[1] * square.square().sum(-1) / square.sum(-1).square()
        found = largest[:, 0] != 0
        counts = found.sum(), torch.where(found, kurtosis, 0).double().sum()
        sums.append(torch.stack([count.double() for count in counts]))
        amax.append(largest.amax())
    return torch.stack(amax).amax(), torch.stack(sums).sum(0)


def _pieces(m: int, k: int, height: int, sampled: bool) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of a tensor [m, k]: all, or the sample. `height` rows share a scale."""
    step = max(height, PIECE // k // height * height)
    if not sampled or m <= SAMPLE:
        yield from ((start, min(start + step, m)) for start in range(0, m, step))
        return
    for run in range(RUNS):
        first = run * (m // RUNS) // height * height
        last = first + SAMPLE // RUNS
        yield from ((start, min(start + step, last)) for start in range(first, last, step))


def _cut(x: QTensor, start: int, stop: int) -> QTensor:
    """Rows `start` to `stop`; `start` is a multiple of the number of rows that share a scale."""
    scale, height = x.scale, x.granularity.rows
    if height is not None:
        scale = scale[start // height : -(-stop // height)]
    return QTensor(x.codes[start:stop], scale, x.granularity, x.fmt)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
