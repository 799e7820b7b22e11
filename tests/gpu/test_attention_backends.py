"""Backends of causal attention on a GPU: against the definition, and as runs use them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.fp8.attention import Packed, SavedInFp8, attend_saving_fp8
from coatlm.kernels.flash_attention import flash_attention
from coatlm.model.attention import CoreAttention
from coatlm.model.attention_backends import (
    BACKENDS,
    Shape,
    choose_backends,
    forward_and_backward,
    measure_backends,
    random_inputs,
)
from tests.distributed import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = torch.device("cuda", 0)
# both round to BF16 (2^-9), in other places: probabilities, outputs, and their gradients
RELATIVE = 2.0**-6
SHAPES = {
    "small": Shape(2, 200, 4, 4, 64, None),
    "grouped": Shape(2, 320, 8, 2, 64, 0.1),
    "96": Shape(1, 256, 4, 4, 96, None),
    "128": Shape(2, 256, 8, 4, 128, None),
}
# several blocks of keys: with fewer and with more samples times heads than multiprocessors
LONG = {"few": Shape(1, 2048, 8, 8, 64, None), "many": Shape(8, 1024, 32, 8, 64, None)}
backend = pytest.mark.parametrize("name", BACKENDS)


def accepted(name: str, shape: Shape) -> list[Tensor]:
    """The output and the gradients of a backend; skips what it does not accept."""
    inputs = random_inputs(shape, GPU)
    try:
        return forward_and_backward(BACKENDS[name], inputs, shape.scale)
    except RuntimeError as error:
        if name == "efficient" and shape.heads != shape.kv_heads:
            pytest.skip(f"{name}: {error}")  # newer versions of torch accept fewer key heads
        raise


def definition(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output [S, B, N, D] and the statistics [B, N, S], with a mask of S x S elements."""
    scale = q_SBND.shape[-1] ** -0.5 if scale is None else scale
    fold = q_SBND.shape[2] // k_SBGD.shape[2]
    k, v = (x.repeat_interleave(fold, dim=2) for x in (k_SBGD, v_SBGD))
    logits = scale * torch.einsum("sbnd,tbnd->bnst", q_SBND, k)
    above = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    logits = logits.masked_fill(above, -torch.inf)
    return torch.einsum("bnst,tbnd->sbnd", logits.softmax(-1), v), logits.logsumexp(-1)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found.float() - expected).norm() <= RELATIVE * expected.norm()


@backend
@pytest.mark.parametrize("shape", SHAPES)
def test_a_backend_computes_the_definition_and_its_gradients(name: str, shape: str) -> None:
    found = accepted(name, SHAPES[shape])
    inputs = [x.detach().float() for x in random_inputs(SHAPES[shape], GPU)]
    exact = [*(x.requires_grad_() for x in inputs[:3]), inputs[3]]
    expected = forward_and_backward(lambda *args: definition(*args)[0], exact, SHAPES[shape].scale)
    for actual, wanted in zip(found, expected, strict=True):
        assert_near(actual, wanted)


@backend
@pytest.mark.parametrize("shape", SHAPES)
def test_the_statistics_that_a_backend_saves_are_those_of_softmax(name: str, shape: str) -> None:
    accepted(name, SHAPES[shape])
    saved: list[Tensor] = []
    q, k, v, _ = random_inputs(SHAPES[shape], GPU)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        BACKENDS[name](q, k, v, SHAPES[shape].scale)
    (lse,) = (x for x in saved if x.dtype == torch.float32 and x.numel() >= q[..., 0].numel())
    _, expected_BNS = definition(*(x.detach().float() for x in (q, k, v)), SHAPES[shape].scale)
    samples, heads, tokens = expected_BNS.shape  # some backends pad the last dimension
    found = lse.reshape(samples, heads, -1)[..., :tokens]
    # logits of BF16 inputs are summed in fp32, in another order and with another exp
    assert (found - expected_BNS).abs().max() <= 2.0**-12 * expected_BNS.abs().max()


@pytest.mark.parametrize("shape", LONG)
def test_gradients_of_flash_have_the_same_bits_every_time(shape: str) -> None:
    first = accepted("flash", LONG[shape])
    for _ in range(8):
        assert all(map(torch.equal, accepted("flash", LONG[shape]), first))
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.parametrize("shape", LONG)
def test_torch_s_flash_is_as_exact_and_the_outputs_are_equal(shape: str) -> None:
    """The deterministic mode changes the order of sums in backward, and nothing else."""
    from torch.nn.attention import SDPBackend

    from coatlm.model.attention_backends import torch_attention

    inputs = random_inputs(LONG[shape], GPU)
    atomics = partial(torch_attention, order=[SDPBackend.FLASH_ATTENTION])
    out, *gradients = forward_and_backward(BACKENDS["flash"], inputs, None)
    expected, *others = forward_and_backward(atomics, inputs, None)
    assert torch.equal(out, expected)
    for actual, wanted in zip(gradients, others, strict=True):
        assert (actual.float() - wanted.float()).norm() <= 2.0**-8 * wanted.float().norm()


def test_a_graph_replays_the_bits_of_flash() -> None:
    inputs = random_inputs(LONG["few"], GPU)
    expected = forward_and_backward(BACKENDS["flash"], inputs, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward_and_backward(BACKENDS["flash"], inputs, None)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward_and_backward(BACKENDS["flash"], inputs, None)
    for _ in range(2):
        for x in found:
            x.zero_()
        graph.replay()
        assert all(map(torch.equal, found, expected))


@backend
def test_the_chosen_backend_attends_and_its_tensors_are_saved_in_fp8(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What layers do that save BF16 and what layers do that save FP8, by one backend."""
    shape = LONG["few"]
    calls, attend = [], BACKENDS[name]
    monkeypatch.setitem(BACKENDS, name, lambda *args: calls.append(name) or attend(*args))
    alone = SimpleNamespace(cp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    core = CoreAttention(None, 1, pg_collection=alone)
    core.backends = {shape: name}
    *qkv, dout = random_inputs(shape, GPU)
    out = core(*qkv)
    exact = torch.autograd.grad(out, qkv, dout.flatten(2))
    assert calls == [name]
    saved: list[Any] = []
    pack = SavedInFp8._pack
    monkeypatch.setattr(
        SavedInFp8, "_pack", lambda self, x: saved.append(pack(self, x)) or saved[-1]
    )
    fp8, codes = attend_saving_fp8(lambda: core(*qkv), 16, *qkv)
    assert calls == [name, name] and torch.equal(fp8, out)
    held = [x if isinstance(x, Tensor) else x.held for x in saved]
    addresses = {x.codes.codes.data_ptr() for x in held if isinstance(x, Packed)}
    assert len(addresses) == 4 and codes.codes.data_ptr() in addresses
    assert not any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in held)
    for actual, wanted in zip(torch.autograd.grad(fp8, qkv, dout.flatten(2)), exact, strict=True):
        # q, k, v and the output are each off by 2^-4 / sqrt(3); errors add in squares
        error = (actual.float() - wanted.float()).norm() / wanted.float().norm()
        assert 0 < error <= (4 / 3) ** 0.5 * 2.0**-4 + RELATIVE


@pytest.mark.parametrize("shape", [*SHAPES, *LONG])
def test_cudnn_and_flash_are_timed_and_one_of_them_is_chosen(shape: str) -> None:
    at = (SHAPES | LONG)[shape]
    before = torch.cuda.get_rng_state()
    measured = measure_backends(at, GPU)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert [*measured][:2] == ["cudnn", "flash"] and measured["flash"].repeats
    # the output, and gradients of q, k and v
    outputs = 2 * at.tokens * at.samples * at.head_dim * (2 * at.heads + 2 * at.kv_heads)
    assert all(found.ms > 0 and found.peak >= outputs for found in measured.values())
    choices: dict[str, str] = {}
    chosen = choose_backends((at,), choices, GPU, measure=lambda *_: measured)
    assert chosen[at] == choices[at.name] in ("cudnn", "flash", "efficient")


def test_flash_refuses_what_its_kernels_do_not_have() -> None:
    q, k, v, _ = (x.detach() for x in random_inputs(Shape(1, 64, 2, 2, 264, None), GPU))
    with pytest.raises(RuntimeError):
        flash_attention(*(x.transpose(0, 1) for x in (q, k, v)))
    assert "flash" not in measure_backends(Shape(1, 64, 2, 2, 264, None), GPU)


def trained(rank: int, size: int, asked: tuple[str, str]) -> list[Any]:
    """Two runs of a recipe with flash in the cache: each run's losses, and bits at its end."""
    from coatlm.config import make_config
    from coatlm.model import attention_backends
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from tests.graphs import checksum, train_steps

    recipe, directory = asked
    start_processes(Launch.from_environment())
    config = make_config(
        {
            "model": {"layers": 2, "hidden": 256, "heads": 4, "ffn": 704},
            "data": {"text": ["unused"], "seq_len": 1024, "cache_dir": directory},
            "train": {"micro_batch": 2, "global_batch": 4, "cuda_graphs": False},
            "precision": {"recipe": recipe} | ({} if recipe == "bf16" else {"tune_gemms": False}),
        }
    )
    attend, calls = attention_backends.BACKENDS["flash"], []
    attention_backends.BACKENDS["flash"] = lambda *args: calls.append(1) or attend(*args)
    found = []
    for _ in range(2):
        groups = make_groups(config.parallel)
        trainer = Trainer(config, groups, vocab=128)
        calls.clear()
        curve = [step.curve for step in train_steps(trainer, config, groups, 3)]
        found.append([curve, checksum(trainer), len(calls)])
        trainer.close()
        release_groups()
    return found


@pytest.mark.parametrize("recipe", ["bf16", "coat", "coat-lean"])
def test_a_run_attends_with_the_backend_of_the_cache_and_repeats_its_bits(
    recipe: str, tmp_path: Path
) -> None:
    """Attention to several blocks of keys: with cuDNN's default kernels bits may differ."""
    from coatlm.fp8.timed_choices import machine
    from coatlm.model.attention_backends import cudnn_version
    from coatlm.train.tuning import ATTENTION

    here = machine(0, f"cuDNN {cudnn_version()}")
    shape = Shape(2, 1024, 4, 4, 64, None)
    content = {"format": 1, "machines": {here: {shape.name: "flash"}}}
    (tmp_path / ATTENTION).write_text(json.dumps(content))
    ((first, second),) = run_ranks(1, f"{__name__}:trained", [recipe, str(tmp_path)])
    assert first == second
    assert first[2] == 3 * 2 * 2  # steps, microbatches, layers
    assert json.loads((tmp_path / ATTENTION).read_text()) == content  # nothing was timed
