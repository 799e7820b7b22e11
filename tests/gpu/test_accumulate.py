"""One-byte gradients on a GPU: the bits of the reference, replays, and training steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from coatlm.fp8.accumulate import BlockFp8, square_sums
from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.optim.adamw import AdamW
from coatlm.optim.recipes import RECIPES
from coatlm.optim.shards import FlatShard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
N = 70 * 128  # two programs, the second one partly empty


def sums(device: str, fmt: Fp8Format = E4M3) -> BlockFp8:
    return BlockFp8.zeros(N, torch.tensor([-5, 7, 3, 0], dtype=torch.int32, device=device), fmt)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [N, N - 50])
def test_sums_have_the_bits_of_the_reference(fmt: Fp8Format, dtype: torch.dtype, n: int) -> None:
    torch.manual_seed(0)
    made, expected = sums("cuda", fmt), sums("cpu", fmt)
    for step in range(4):
        x = torch.randn(n) * torch.randn(n).exp()
        x[2000:2300] = 0.0
        if step == 3:
            x[300], x[1000] = torch.nan, torch.inf
        x = x.to(dtype)
        (made.add_ if step else made.copy_)(x.cuda())
        (expected.add_ if step else expected.copy_)(x)
        exact = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(made.codes.float().cpu(), expected.codes.float(), **exact)
        torch.testing.assert_close(made.scale.cpu(), expected.scale, **exact)
        torch.testing.assert_close(made.float().cpu(), expected.float(), **exact)
        # sums of 128 squares in another order
        torch.testing.assert_close(
            square_sums(made).cpu(), square_sums(expected), rtol=1e-5, atol=0, equal_nan=True
        )
    assert made.noise.tolist() == expected.noise.tolist() == [-5, 7, 3, 3]


def test_each_replay_of_a_graph_rounds_with_new_bits() -> None:
    made = sums("cuda")
    x = torch.randn(N, device="cuda")
    made.copy_(x)
    made.add_(x)  # compiles
    made.noise[3] = 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.add_(x)
    expected = sums("cpu")
    made.copy_(x)
    expected.copy_(x.cpu())
    for _ in range(3):
        graph.replay()
        expected.add_(x.cpu())
    assert torch.equal(made.float().cpu(), expected.float()) and int(made.noise[3]) == 3


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_fused_step_takes_one_byte_gradients_as_their_values(recipe: str) -> None:
    """Recipes with expansion have approximate logarithms: a code may be the next one."""
    gradient = sums("cuda")
    gradient.copy_(1e-3 * torch.randn(N, device="cuda"))
    found = []
    for grad in (gradient, gradient.float()):
        weight = torch.full((N,), 0.5, dtype=torch.bfloat16, device="cuda")
        half = N // 256 * 128
        shard = FlatShard(weight, grad, ((0, half),), ((0, half), (half, N - 27)))
        opt = AdamW([shard], recipe=recipe, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for _ in range(3):
            opt.step(lr=1e-3, clip_coefficient=torch.tensor(0.7, device="cuda"))
        found.append(weight.float())
    assert torch.equal(*found)


@pytest.fixture
def processes() -> Iterator[None]:
    """A world of one process, which the next test in this process does not find."""
    from coatlm.train.setup import Launch, start_processes

    start_processes(Launch())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("graphs", [False, True])
def test_a_run_with_one_byte_gradients_learns(graphs: bool) -> None:
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.step import Trainer

    model = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 256}
    config = make_config(
        {
            "model": model,
            "data": {"text": ["unused"], "seq_len": 64},
            "parallel": {"main_grads": "fp8"},
            "precision": {"recipe": "coat"},
            "optim": {"recipe": "fp8lm", "lr": 1e-3},
            "train": {"micro_batch": 2, "global_batch": 8, "cuda_graphs": graphs},
        }
    )
    groups = make_groups(config.parallel)
    trainer = Trainer(config, groups, vocab=256)
    tokens = torch.randint(256, (2, 65), device="cuda")
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(2, 64, device="cuda"),
        "document_bounds": None,
    }
    losses = [float(trainer.train_step([batch] * 4, lr=1e-3)[0]) for _ in range(8)]
    codes = trainer.chunks[0].buckets[0].grads
    trainer.close()
    release_groups()
    assert losses[-1] < losses[0] - 0.3
    assert codes.dtype == torch.float8_e4m3fn and codes.nbytes * 128 == codes.numel() * 132
