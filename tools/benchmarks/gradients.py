"""Gradients of FP8 recipes against those of BF16, with the same weights and the same tokens.

    length = <g, r> / <r, r> - 1      g: the gradient of a recipe, r: that of BF16
    error  = |g - r| / |r|            both over all elements of the weights of one kind

Rounding to FP8 leaves the length nearly as it is. A GEMM that accumulates too many terms with too
few bits shortens gradients, the more so the more the terms of all tokens agree in sign. They agree
most at the start of training.
Rows are "RECIPE mbsN", and "RECIPE mbsN slow GEMM ..." with GEMMs that accumulate in fp32, all in
one process. They are measured at initialization and again after `steps` steps of BF16, on the same
batch, which was not trained on; tokens are the bytes of the Python sources of torch.
Options: batch=128 seq=1024 hidden=1280 layers=18 steps=40, and --smoke (tiny, also on a CPU).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coatlm.config import Config, make_config
from coatlm.config.load import override
from coatlm.config.recipes import GEMMS, TE_RECIPES
from coatlm.data.batches import Microbatch
from tools.benchmarks.clock import DEVICE, release

OPTIONS = ("batch", "seq", "hidden", "layers", "steps", "smoke")
TOGETHER = "; "  # between the names of rows, which one process measures
DEFAULTS = {"batch": 128, "seq": 1024, "hidden": 1280, "layers": 18, "steps": 40}
SMOKE = {"batch": 4, "seq": 128, "hidden": 256, "layers": 2, "steps": 4}
HEAD_DIM, RATE, VOCAB = 128, 3e-4, 257
KINDS = ("embedding", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer")
TE_NAMES = {  # of norms that are fused into the linear behind them
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
NamedGradients = dict[str, Tensor]


def rows(options: dict[str, str]) -> list[str]:
    """`coat` with sums over more and fewer tokens, and the other recipes at one microbatch size."""
    batch = sizes(options)["batch"]
    most, few = f"mbs{batch}", f"mbs{max(batch // 4, 1)}"
    slow = "slow " + " ".join(GEMMS)
    found = [f"coat {most} fast", f"coat {most}", f"coat {most} {slow}"]
    found += [f"coat mbs{max(batch // part, 1)} fast" for part in (4, 8, 16)]
    found += [f"{name} {few}" for name in ("coat", "coat-lean", "rowwise", "fp8-block")]
    if DEVICE == "cuda" and find_spec("transformer_engine") is not None:
        found += [f"{name} {few}" for name in TE_RECIPES]
    return list(dict.fromkeys(found))  # small batches have fewer different ones


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return 0 if options.get("smoke") else 1


def sizes(options: dict[str, str]) -> dict[str, int]:
    """The sizes of the model and of the batch."""
    defaults = SMOKE if options.get("smoke") else DEFAULTS
    return {name: int(options.get(name, size)) for name, size in defaults.items()}


def configuration(row: str, size: dict[str, int]) -> Config:
    """The configuration of a row. Raises ValueError for a row of another form."""
    recipe, microbatch, *words = row.split()
    hidden = size["hidden"]
    heads = hidden // HEAD_DIM
    sections: dict[str, Any] = {
        "model": {"hidden": hidden, "layers": size["layers"], "heads": heads},
        "data": {"text": ["-"], "tokenizer": "byte", "seq_len": size["seq"]},
        "parallel": {"zero": 0, "grad_comm": "fp32"},
        "precision": {"recipe": recipe},
        "train": {"global_batch": size["batch"], "cuda_graphs": False},
        "run": {"seed": 1},
    }
    if recipe in TE_RECIPES:
        sections["model"]["spec"] = "te"
    changes = [f"train.micro_batch={microbatch.removeprefix('mbs')}"]
    if words:
        slow = set(words) - {"fast", "slow"}
        fast = ",".join(name for name in GEMMS if name not in slow)
        changes.append(f"precision.fast_accumulation=[{fast}]")
    return make_config(override(sections, changes))


def measure(names: str, options: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yields one record per row and state of the weights; lengths and errors are in %."""
    from coatlm.parallel.groups import make_groups
    from coatlm.train.setup import Launch, quiet_megatron, start_processes

    quiet_megatron()
    start_processes(Launch.from_environment())
    size = sizes(options)
    reference = configuration(f"bf16 mbs{max(size['batch'] // 4, 1)}", size)
    groups = make_groups(reference.parallel)
    source = Source(size["batch"], size["seq"])
    for steps in (0, size["steps"]):
        run = GradientModel(reference, groups, source)
        for step in range(steps):
            run.step(step, min(RATE, RATE * (step + 1) / 30))
        weights = {name: p.detach().clone() for name, p in run.params.items()}
        loss, expected = run.gradients(size["steps"])
        yield {"steps": steps, "row": "bf16", "loss": round(loss, 5)}
        for name in names.split(TOGETHER):
            del run
            release()
            run = GradientModel(configuration(name, size), groups, source)
            run.load(weights)
            loss, found = run.gradients(size["steps"])
            yield {
                "steps": steps,
                "row": name,
                "loss": round(loss, 5),
                **differences(found, expected),
            }


def differences(found: NamedGradients, expected: NamedGradients) -> dict[str, float]:
    """Length and error of the gradients of each kind of weight and of all of them, in %."""
    sums: dict[str, Tensor] = {}
    for name, reference in expected.items():
        gradient = found[name]
        parts = [gradient @ reference, reference @ reference, (gradient - reference).square().sum()]
        for kind in ("all", *(kind for kind in KINDS if kind in name and "norm" not in name)):
            sums[kind] = sums.get(kind, torch.zeros(3, device=gradient.device)) + torch.stack(parts)
    result = {}
    for kind in ("all", *KINDS):
        along, norm, apart = sums[kind].tolist()
        result[f"{kind} length"] = round(100 * (along / norm - 1), 2)
        result[f"{kind} error"] = round(100 * (apart / norm) ** 0.5, 2)
    return result


class Source:
    """Batches of bytes, [batch, seq + 1] on the device."""

    def __init__(self, batch: int, seq: int) -> None:
        self.shape = batch, seq + 1
        files = sorted(Path(torch.__path__[0]).rglob("*.py"))
        text = bytearray()
        for file in files:
            text += file.read_bytes()
            if len(text) > 200 * batch * (seq + 1):
                break
        self.ids = torch.from_numpy(np.frombuffer(bytes(text), dtype=np.uint8).astype(np.int64))

    def batch(self, number: int) -> Tensor:
        """Batch `number` of the text, which begins again at its end."""
        batch, length = self.shape
        count = batch * length
        start = number * count % (len(self.ids) - count)
        return self.ids[start : start + count].view(batch, length).to(DEVICE)


class GradientModel:
    """A model whose gradients can be read."""

    def __init__(self, config: Config, groups: Any, source: Source) -> None:
        from coatlm.train.step import Trainer

        self.config, self.source = config, source
        self.trainer = Trainer(config, groups, VOCAB)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters, by the names that they have in coatlm's layers."""
        found = {}
        for chunk in self.trainer.chunks:
            for name, param in chunk.module.named_parameters():
                for theirs, ours in TE_NAMES.items():
                    name = name.replace(theirs, ours)
                found[name] = param
        return found

    def load(self, weights: dict[str, Tensor]) -> None:
        """Set the weights, and with them those that the optimizer stores in fp32: after a step they
        replace the model's, even if its learning rate is zero.
        """
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(weights[name])
        self.trainer.optimizer.optimizer.reload_from_weights()

    def step(self, number: int, rate: float) -> Tensor:
        """A step on batch `number`; returns its loss."""
        tokens = self.source.batch(number)
        batches = [
            Microbatch(
                tokens=part[:, :-1].contiguous(),
                labels=part[:, 1:].contiguous(),
                loss_mask=torch.ones(part.shape[0], part.shape[1] - 1, device=DEVICE),
                document_bounds=None,
            )
            for part in tokens.split(self.config.train.micro_batch)
        ]
        return self.trainer.train_step(self.trainer.place(batches), rate)[0]

    def gradients(self, number: int) -> tuple[float, NamedGradients]:
        """Loss and gradients on batch `number`, whose step has a learning rate of zero."""
        if self.config.precision.recipe == "te-delayed":
            self.step(number, 0.0)  # its amax histories begin empty
        loss = self.step(number, 0.0)
        gradients = {name: p.main_grad.float().flatten() for name, p in self.params.items()}
        return loss.item(), {name: g.clone() for name, g in gradients.items()}
