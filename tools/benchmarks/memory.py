"""Peak device memory of real training steps against the estimate of coatlm/model/memory.py.

Three steps of coatlm's trainer on random tokens; the peak is torch's `max_memory_allocated` over
all of them, of the rank with the highest. `ratio` is estimate / measured. Rows are "PRECISION zeroN
RECOMPUTE" on one GPU, and "LAYOUT PRECISION zeroN RECOMPUTE" on two; RECIPES gives the model.spec
and the optim.recipe of each precision recipe. Options: model=1b mbs=4 seq=2048 vocab=32000,
layers=N for fewer, main_grads=fp32 (or bf16), gpus=1 to leave out the rows of two GPUs. On a CPU
nothing is measured.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from coatlm.config import Config, make_config
from coatlm.config.recipes import RECIPES as FLOW_RECIPES
from coatlm.model.fits import with_fitting
from coatlm.model.memory import GIB, peak_bytes
from coatlm.platform import device, gpu_memory
from tools.benchmarks.ranks import run_ranks, send_record

OPTIONS = ("model", "mbs", "seq", "vocab", "layers", "main_grads", "gpus")
SHAPES = {  # hidden, layers, heads, ffn
    "tiny": (64, 2, 4, 96),
    "1b": (2048, 16, 16, 5504),
    "3b": (3072, 28, 24, 8192),
}
STEPS = 3
RECIPES = {  # precision.recipe -> model.spec, optim.recipe
    "bf16": ("local", "adamw-fp32"),
    "te-delayed": ("te", "adamw-fp32"),
    # without block-wise GEMMs: not every size above, sharded, is a multiple of 128
    **{
        name: ("local", "coat-lean" if recipe.saved.attention else "coat")
        for name, recipe in FLOW_RECIPES.items()
        if recipe.summed_multiple == 16
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {  # of two GPUs
    "dp2": {},
    "tp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
}


def rows(options: dict[str, str]) -> list[str]:
    """The rows: every recipe and recompute mode on one GPU; ZeRO stages and layouts on two.

    By default those of two are left out where there is only one; gpus=2 includes them.
    """
    one = [f"{recipe} zero1 {mode}" for recipe in RECIPES for mode in ("none", "selective", "full")]
    if options.get("gpus", "1" if torch.cuda.device_count() == 1 else "2") == "1":
        return one
    zero = [f"dp2 {recipe} zero{stage} none" for recipe in RECIPES for stage in (0, 1)]
    cut = [f"{layout} {recipe} zero1 none" for layout in ("tp2", "pp2") for recipe in RECIPES]
    return [*one, *zero, *cut]


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return 1


def measure(row: str, options: dict[str, str]) -> dict[str, Any]:
    """Estimate, peak and their ratio. Raises ValueError for a row that the options do not allow."""
    config, ranks = configuration(row, options)
    if ranks == 1:
        return record(row, options, train(config))
    return run_ranks(__name__, [row, *(f"{key}={value}" for key, value in options.items())], ranks)


def configuration(row: str, options: dict[str, str]) -> tuple[Config, int]:
    """The configuration of a row, and its number of GPUs."""
    *layout, recipe, zero, recompute = row.split()
    spec, optim = RECIPES[recipe]
    hidden, layers, heads, ffn = SHAPES[options.get("model", "1b")]
    mbs, ranks = int(options.get("mbs", 4)), 2 if layout else 1
    parallel = LAYOUTS[layout[0]] if layout else {}
    replicas = ranks // (parallel.get("tp", 1) * parallel.get("pp", 1))
    config = make_config(
        {
            "model": {
                "spec": spec,
                "hidden": hidden,
                "layers": int(options.get("layers", layers)),
                "heads": heads,
                "ffn": ffn,
                "vocab": int(options.get("vocab", 32000)),
            },
            "data": {"text": ["-"], "seq_len": int(options.get("seq", 2048))},
            "parallel": {
                "zero": int(zero.removeprefix("zero")),
                "main_grads": options.get("main_grads", "fp32"),
                **parallel,
            },
            "precision": {"recipe": recipe},
            "optim": {"recipe": optim, "lr": 1e-4},
            # a pipeline is full with as many microbatches as it has stages
            "train": {
                "micro_batch": mbs,
                "global_batch": mbs * replicas * parallel.get("pp", 1),
                "recompute": recompute,
            },
        }
    )
    return config, ranks


def train(config: Config) -> int:
    """Train STEPS steps; returns the peak in bytes of the rank with the highest, 0 on a CPU."""
    from coatlm.parallel.groups import make_groups
    from coatlm.train.setup import Launch, quiet_megatron, start_processes
    from coatlm.train.step import Trainer

    quiet_megatron()
    start_processes(Launch.from_environment())
    groups = make_groups(config.parallel)
    assert config.model.vocab is not None
    config = with_fitting(config, config.model.vocab, groups.dp.size(), gpu_memory())
    trainer = Trainer(config, groups, config.model.vocab)
    t = config.train
    shape = (t.micro_batch, config.data.seq_len)
    count = t.microbatches(groups.dp.size())
    for _ in range(STEPS):
        batches = []
        for _ in range(count):
            tokens = torch.randint(0, config.model.vocab, (2, *shape), device=device())
            mask = torch.ones(shape, device=device())
            batches.append(
                {
                    "tokens": tokens[0],
                    "labels": tokens[1],
                    "loss_mask": mask,
                    "document_bounds": None,
                }
            )
        loss, _ = trainer.train_step(batches, 1e-4)
    if not torch.isfinite(loss):
        raise RuntimeError(f"loss={float(loss)} after {STEPS} steps: the measurement is invalid")
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    largest = torch.tensor(peak, device=device())
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=groups.world)
    return int(largest)


def record(row: str, options: dict[str, str], measured: int) -> dict[str, Any]:
    """A line of the table."""
    config, ranks = configuration(row, options)
    assert config.model.vocab is not None
    dp = config.data_parallel_size(ranks)
    estimate = peak_bytes(config, config.model.vocab, dp)
    return {
        "optim": config.optim.recipe,
        "estimate_gib": round(estimate / GIB, 2),
        "measured_gib": round(measured / GIB, 2),
        "ratio": round(estimate / measured, 4) if measured else None,
    }


def main() -> None:
    """Run one rank of a row with two GPUs, under torchrun."""
    row, *words = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words)
    found = record(row, options, train(configuration(row, options)[0]))
    if dist.get_rank() == 0:
        send_record(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
