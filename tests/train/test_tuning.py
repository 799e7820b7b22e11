"""All ranks of a run use the same algorithms and backends, and rank 0 writes them down."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coatlm.config import make_config
from coatlm.model.attention_backends import Measured, Shape
from coatlm.train.tuning import tunes_attention
from tests.distributed import run_ranks


def tuned(rank: int, size: int, directory: str) -> list[dict[str, str]]:
    """The choices of a rank of a first start, of a second one, in which rank 1 has another GPU, and
    of a third one, during which another run writes its own.
    """
    import torch
    import torch.distributed as dist

    from coatlm.train import tuning
    from coatlm.train.setup import Launch, start_processes

    config = make_config({"data": {"text": ["-"], "cache_dir": directory}})
    used: list[dict[str, str]] = []
    other_run: list[str] = []  # the kinds that it still has to write down

    def tune_layers(layers: Any, tokens: int, dtype: Any, choices: dict[str, str]) -> None:
        assert (layers, tokens) == ([], config.train.micro_batch * config.data.seq_len)
        for kind in ("shared", f"of {rank}"):
            choices.setdefault(kind, f"timed by {rank}")
        used.append(dict(choices))
        if rank == 0 and other_run:
            written = {"B200": {other_run.pop(): "timed by another run"}}
            tuning.add_choices(config.data.cache_dir / tuning.GEMMS, written, "GEMM algorithms")

    tuning.tune_layers = tune_layers
    torch.cuda.current_device = lambda: 0
    tuning.cublaslt.version = lambda: 130000
    start_processes(Launch.from_environment())
    group = dist.group.WORLD
    assert group is not None
    found = []
    for gpus in (("H100", "H100", "H200"), ("H100", "H200", "H200"), ("B200",) * 3):
        other_run += ["shared"] * (gpus[0] == "B200")
        tuning.machine = lambda _, library, gpus=gpus: gpus[rank]  # type: ignore[misc]
        tuning.tune_gemms(config, [], torch.float32, group)
        found.append(used[-1])
        dist.barrier()
    dist.destroy_process_group()
    return found


def test_ranks_with_one_kind_of_gpu_agree_and_a_later_start_finds_their_choices(
    tmp_path: Path,
) -> None:
    by_rank = run_ranks(3, f"{__name__}:tuned", str(tmp_path))
    h100 = {"shared": "timed by 0", "of 0": "timed by 0", "of 1": "timed by 1"}
    h200 = {"shared": "timed by 2", "of 2": "timed by 2"}
    assert [first for first, *_ in by_rank] == [h100, h100, h200]
    later = h200 | {"of 1": "timed by 1"}
    assert [second for _, second, _ in by_rank] == [h100, later, later]
    raced = {f"of {rank}": f"timed by {rank}" for rank in range(3)}
    assert [third for *_, third in by_rank] == [raced | {"shared": "timed by another run"}] * 3


KINDS = ("even", "faster", "slower")  # of ranks, by how fast flash is on their GPUs
FLASH = dict(zip(KINDS, (1.0, 0.9, 1.1), strict=True))


def layer(scale: float) -> Any:
    """A layer whose attention has one shape, which its scale tells from others."""

    def core_shapes(samples: int, tokens: int) -> list[Shape]:
        return [Shape(samples, tokens, 4, 4, 64, scale)]

    core = SimpleNamespace(backends={})
    return SimpleNamespace(
        self_attention=SimpleNamespace(core_attention=core, core_shapes=core_shapes)
    )


def started(rank: int, size: int, directory: str) -> list[Any]:
    """What a rank's layers use and what it timed, in three starts; ranks 0 and 2 share a GPU."""
    import torch
    import torch.distributed as dist

    from coatlm.model import attention_backends
    from coatlm.train import tuning
    from coatlm.train.setup import Launch, start_processes

    config = make_config(
        {
            "data": {"text": ["-"], "cache_dir": directory, "seq_len": 1024},
            "train": {"micro_batch": 8, "global_batch": 24},
        }
    )
    timed: list[Shape] = []
    starts = [
        ("H100", "H200", "H100"),
        ("H100", "H200", "H100"),
        ("H200", "H200", "H200"),
    ]
    speeds = [("faster", "even", "slower"), ("slower", "slower", "slower"), ("even",) * 3]

    def measure(shape: Shape, device: torch.device, *, kind: str) -> dict[str, Measured]:
        timed.append(shape)
        flash = Measured(FLASH[kind], True, 0)
        return {"cudnn": Measured(1.0, True, 0), "flash": flash}

    torch.cuda.current_device = lambda: 0
    start_processes(Launch.from_environment())
    group = dist.group.WORLD
    assert group is not None
    found = []
    choose_backends = attention_backends.choose_backends
    for gpus, kinds in zip(starts, speeds, strict=True):
        # the last stage has a shape of its own
        layers = [layer(0.1)] + [layer(0.2)] * (rank == 2)

        def choose(*args: Any, kind: str = kinds[rank]) -> dict[Shape, str]:
            return choose_backends(*args, measure=lambda *at: measure(*at, kind=kind))

        tuning.choose_backends = choose  # type: ignore[assignment]
        tuning.machine = lambda _, library, gpus=gpus: f"{gpus[rank]}, {library}"  # type: ignore
        timed.clear()
        tuning.tune_attention(config, layers, group)
        used = [part.self_attention.core_attention.backends for part in layers]
        assert all(part is used[0] for part in used)
        found.append([sorted(used[0].items()), sorted(timed)])
        dist.barrier()
    dist.destroy_process_group()
    return json.loads(json.dumps(found))


def test_ranks_attend_with_the_backends_of_the_lowest_rank_and_later_starts_with_the_same(
    tmp_path: Path,
) -> None:
    by_rank = run_ranks(3, f"{__name__}:started", str(tmp_path))
    one, two = ([8, 1024, 4, 4, 64, scale] for scale in (0.1, 0.2))
    flash, cudnn, own = [one, "flash"], [one, "cudnn"], [two, "cudnn"]
    first, second, third = zip(*by_rank, strict=True)
    assert first == ([[flash], [one]], [[cudnn], [one]], [[flash, own], [one, two]])
    assert second == ([[flash], []], [[cudnn], []], [[flash, own], []])
    # on other GPUs the second shape is timed, and the first as rank 1 found it on its own
    assert third == ([[cudnn], []], [[cudnn], []], [[cudnn, own], [two]])
    machines = json.loads((tmp_path / "attention.json").read_text())["machines"]
    assert sorted(name.split(", ")[0] for name in machines) == ["H100", "H200"]
    assert all(name.split(", ")[1].startswith("cuDNN ") for name in machines)


def renamed(rank: int, size: int, directory: str) -> list[Any]:
    """What a rank uses, and how often it timed, in two starts: first, the file names a backend that
    there is not, and every rank finds another one the fastest.
    """
    import torch
    import torch.distributed as dist

    from coatlm.model import attention_backends
    from coatlm.train import tuning
    from coatlm.train.setup import Launch, start_processes

    config = make_config({"data": {"text": ["-"], "cache_dir": directory}})
    layers, timed = [layer(0.1)], []

    def measure(shape: Shape, device: torch.device) -> dict[str, Measured]:
        timed.append(shape)
        flash = Measured(FLASH["slower" if rank else "faster"], True, 0)
        return {"cudnn": Measured(1.0, True, 0), "flash": flash}

    original = attention_backends.choose_backends
    tuning.choose_backends = lambda *at: original(*at, measure=measure)  # type: ignore
    tuning.machine = lambda *_: "H100"
    torch.cuda.current_device = lambda: 0
    start_processes(Launch.from_environment())
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:
        tokens = config.data.seq_len
        (shape,) = layers[0].self_attention.core_shapes(config.train.micro_batch, tokens)
        written = {"H100": {shape.name: "removed"}}
        tuning.add_choices(config.data.cache_dir / tuning.ATTENTION, written, "backends")
    dist.barrier()
    found = []
    for _ in range(2):
        tuning.tune_attention(config, layers, group)
        found.append([*layers[0].self_attention.core_attention.backends.values(), len(timed)])
        dist.barrier()
    dist.destroy_process_group()
    return found


def test_ranks_agree_where_the_file_names_a_backend_that_there_is_not(tmp_path: Path) -> None:
    by_rank = run_ranks(2, f"{__name__}:renamed", str(tmp_path))
    assert by_rank == [[["flash", 1], ["flash", 1]]] * 2


@pytest.mark.parametrize(
    ("sections", "tunes"),
    [
        ({}, True),
        ({"precision": {"recipe": "bf16"}}, True),
        ({"precision": {"recipe": "coat-lean"}}, True),
        ({"precision": {"recipe": "coat-lean", "tune_attention": False}}, False),
        ({"precision": {"recipe": "fp32"}}, False),
        ({"precision": {"tune_attention": False}}, False),
        ({"data": {"reset_attention_mask": True}}, False),
    ],
)
def test_attention_is_tuned_where_there_is_a_choice(sections: dict[str, Any], tunes: bool) -> None:
    data = {"text": ["-"]} | sections.get("data", {})
    assert tunes_attention(make_config({**sections, "data": data})) is tunes
