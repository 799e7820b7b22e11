"""Bytes of attention under context parallelism, against autograd on two ranks.

Kernels of GPUs have the causal mask of a prefix built in; a CPU would make it and save it, so that
here the prefixes have none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coatlm.config import make_config
from coatlm.data.context_parallel import zigzag_positions
from coatlm.kernels import cpu_gemms
from coatlm.model import layer_memory as layer
from coatlm.parallel.ring_attention import Received, attend_to_peers, gradients_of_peers
from tests.distributed import run_ranks
from tests.model.shapes import DATA, TINY
from tests.parallel.test_ring_attention import whole

GQA, MHA = {"kv_heads": 2}, {"kv_heads": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name -> model, sections
    "bf16": (GQA, {}),
    "bf16 qk_norm": ({**GQA, "qk_norm": True}, {}),
    "bf16 selective": (MHA, {"train": {"recompute": "selective"}}),
    "bf16 masked": (GQA, {"data": {**DATA, "reset_attention_mask": True}}),
    "fp32": (MHA, {"precision": {"recipe": "fp32"}}),
    "coat": (GQA, {"precision": {"recipe": "coat"}}),
    "coat, a key per query": (MHA, {"precision": {"recipe": "coat"}}),
    "coat, a key per query, qk_norm": (
        {**MHA, "qk_norm": True},
        {"precision": {"recipe": "coat"}},
    ),
    "coat, a key per query, selective": (
        MHA,
        {"precision": {"recipe": "coat"}, "train": {"recompute": "selective"}},
    ),
    "fp8-linear, a key per query": (MHA, {"precision": {"recipe": "fp8-linear"}}),
    "coat-lean": (GQA, {"precision": {"recipe": "coat-lean"}}),
    "coat-lean, k in BF16": (
        GQA,
        {"precision": {"recipe": "coat-lean", "bf16_operands": ["saved.k"]}},
    ),
    "coat-lean, a key per query, v and o in BF16": (
        MHA,
        {"precision": {"recipe": "coat-lean", "bf16_operands": ["saved.v", "saved.o"]}},
    ),
    "coat-lean, a key per query, o in FP8 alone": (
        MHA,
        {"precision": {"recipe": "coat-lean", "bf16_operands": ["saved.q", "saved.k", "saved.v"]}},
    ),
    "coat-lean, a key per query": (MHA, {"precision": {"recipe": "coat-lean"}}),
    "coat-lean, fp8 keys": (
        GQA,
        {"precision": {"recipe": "coat-lean"}, "parallel": {"cp_comm_kv": "fp8"}},
    ),
    "coat-lean, fp8 keys, selective": (
        MHA,
        {
            "precision": {"recipe": "coat-lean"},
            "parallel": {"cp_comm_kv": "fp8"},
            "train": {"recompute": "selective"},
        },
    ),
}


COMMS = ("a2a", "p2p", "all_gather")
PAIRS = [  # documents have no p2p
    (name, comm) for comm in COMMS for name in CASES if (name, comm) != ("bf16 masked", "p2p")
]
GRADIENTS = ("coat, a key per query", "coat")  # two parts of heads are exchanged, and one


def make(name: str, comm: str) -> Any:
    model, sections = CASES[name]
    sizes = {**TINY, "layers": 2, "head_dim": 32, "ffn": 64, **model}
    parallel = {"cp": 2, "cp_comm": comm, **sections.get("parallel", {})}
    return make_config({"model": sizes, "data": DATA, **sections, "parallel": parallel})


REPEATS = 3  # a thread of gloo may free what it has sent only after the wait has returned


def measure(rank: int, size: int, pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Bytes that autograd saves per token of this rank and layer, by "NAME/cp_comm"."""
    from coatlm.parallel.groups import release_groups
    from coatlm.train.setup import Launch, start_processes
    from tests.model.test_memory import saved_bytes_per_token_and_layer

    cpu_gemms.multiplies_bf16 = lambda: True  # as on a GPU: no copies in fp32
    start_processes(Launch.from_environment())
    found = {}
    for name, comm in pairs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bias, "causal_lower_right", lambda queries, keys: None)
            saved = saved_bytes_per_token_and_layer(make(name, comm), patch)
            found[f"{name}/{comm}"] = saved
        release_groups()
    for comm in COMMS:
        found |= attend_in_fp8(make("coat-lean, fp8 keys", comm))
        release_groups()
    for comm in COMMS:
        with pytest.MonkeyPatch.context() as patch:
            for name in GRADIENTS:
                peaks = []
                for _ in range(REPEATS):
                    peaks.append(peak_of_gradients(make(name, comm), patch))
                    release_groups()
                found[f"gradients, {name}/{comm}"] = min(peaks)
    return found


def attend_in_fp8(c: Any) -> dict[str, float]:
    """What attention with keys in FP8 computes, against one softmax over all tokens."""
    from coatlm.fp8 import kv_bytes
    from coatlm.fp8.attention import SavedInFp8, attend_saving_fp8
    from coatlm.model.attention import CoreAttention
    from coatlm.parallel import context, ring_attention
    from coatlm.parallel.groups import make_groups

    groups = make_groups(c.parallel).collection
    core = CoreAttention(None, 1, pg_collection=groups, comm=c.context_comm, comm_kv="fp8")
    generator, rank = torch.Generator().manual_seed(7), groups.cp.rank()
    q, k, v, do = (torch.randn(64, 2, n, 32, generator=generator).bfloat16() for n in (4, 2, 2, 4))
    whole_chunk = torch.arange(32 * rank, 32 * rank + 32)
    at = whole_chunk if c.context_comm == "a2a" else zigzag_positions(64, rank, 2)
    leaves = [x[at].requires_grad_() for x in (q, k, v)]
    sent: list[Tensor] = []
    saved: list[Any] = []

    def encode(x: Tensor, size: int) -> Tensor:
        sent.append(kv_bytes.encode(x, size))
        return sent[-1]

    def record(x: Any) -> Any:
        saved.append(x)
        return x

    with pytest.MonkeyPatch.context() as patch:
        for module in (context, ring_attention):
            patch.setattr(module, "encode", encode)
        pack = SavedInFp8._pack
        patch.setattr(SavedInFp8, "_pack", lambda self, x: record(pack(self, x)))
        out, _ = attend_saving_fp8(lambda: core(*leaves, block_size=16), 16, *leaves)
        casts = len(sent)
        grads = torch.autograd.grad(out, leaves, do[at].flatten(2))
    out = out.unflatten(2, (4, 32))
    decoded = [kv_bytes.decode(kv_bytes.encode(x, 16), 32, torch.bfloat16) for x in (k, v)]
    wanted = whole_gradients(q, *decoded, do)
    pairs = zip(("output", "dq", "dk", "dv"), (out, *grads), wanted, strict=True)
    found = {name: error(x, y[at]) for name, x, y in pairs}
    found["output of exact keys"] = error(out, whole_gradients(q, k, v, do)[0][at])
    found["casts in backward"] = len(sent) - casts
    heads = slice(rank, rank + 1) if c.context_comm == "a2a" else slice(None)
    found["saved is sent"] = float(all(held_as(x[:, :, heads], saved, sent) for x in decoded))
    return {f"fp8 keys, {name}/{c.context_comm}": value for name, value in found.items()}


def held_as(x_TBGD: Tensor, saved: list[Any], sent: list[Tensor]) -> bool:
    """Whether what was sent is saved as bytes, or else decoded keys or values x or a prefix."""
    from coatlm.fp8.attention import Packed

    if any(x is sent[0] for x in saved):
        return True
    held = [getattr(x, "held", None) for x in saved]
    parts = [x.unpack().permute(2, 0, 1, 3) for x in held if isinstance(x, Packed)]
    return any(len(x) <= 64 and torch.equal(x, x_TBGD[: len(x)]) for x in parts)


def whole_gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    """The output of causal attention by one softmax in fp64, and the gradients of q, k and v."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = whole(*leaves, None)
    return [out.detach(), *torch.autograd.grad(out, leaves, do.double())]


def error(x: Tensor, y: Tensor) -> float:
    """The norm of the difference, relative to that of y."""
    return float((x.double() - y).norm() / y.norm())


class Live(TorchDispatchMode):
    """While on, follows the memory of saved and of new tensors; `peak` is beyond the saved ones."""

    def __init__(self, saved: list[Tensor]) -> None:
        super().__init__()
        self.known: set[StorageWeakRef] = set()
        self.live = {
            StorageWeakRef(x.untyped_storage()): x.untyped_storage().nbytes() for x in saved
        }
        self.before, self.peak = sum(self.live.values()), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for x in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            if (storage := StorageWeakRef(x.untyped_storage())) not in self.live:
                self.known.add(storage)
        out = func(*args, **(kwargs or {}))
        for x in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            if (storage := StorageWeakRef(x.untyped_storage())) not in self.known:
                self.live[storage] = x.untyped_storage().nbytes()
        self.live = {at: size for at, size in self.live.items() if not at.expired()}
        self.peak = max(self.peak, sum(self.live.values()) - self.before)
        return out


def peak_of_gradients(c: Any, patch: pytest.MonkeyPatch) -> float:
    """Bytes per token by which attention's backward exceeds, at its peak, what forward saved."""
    from coatlm.model import attention
    from coatlm.parallel.groups import make_groups

    patch.setattr(bias, "causal_lower_right", lambda queries, keys: None)
    groups = make_groups(c.parallel).collection
    core = attention.CoreAttention(None, 1, pg_collection=groups, comm=c.context_comm)
    tokens = 64 // 2 * c.train.micro_batch
    q, k, v = (
        torch.randn(32, c.train.micro_batch, n, 32, dtype=torch.bfloat16, requires_grad=True)
        for n in (c.model.heads, c.model.key_value_heads, c.model.key_value_heads)
    )
    saved: list[Tensor] = []

    def record(x: Tensor) -> Tensor:
        saved.append(x.detach())
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        out = core(q, k, v)
    gradient = torch.randn_like(out)
    with Live(saved) as live:
        saved.clear()
        torch.autograd.backward(out, gradient)
    return live.peak / tokens


class Sending:
    """Ranks of which only the memory matters: what is sent is alive until something arrived."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def swap(self, x_X: Tensor, *, to: int, source: int, rows: int) -> Received:
        """Zeros; the sizes of x say what they are."""
        received, sent = x_X.new_zeros(rows, *x_X.shape[1:]), [x_X]

        def finish() -> Tensor:
            sent.clear()
            return received

        del x_X
        return finish


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_more_ranks_that_send_each_other_keys_hold_no_more_than_is_estimated(
    ranks: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_gemms, "multiplies_bf16", lambda: True)  # as on a GPU
    torch.manual_seed(0)
    tokens, peaks = 8, []
    q, do = (torch.randn(tokens, 2, 4, 32, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(tokens, 2, kv_heads, 32, dtype=torch.bfloat16) for _ in range(2))
    how = {"scale": 1.0, "backend": "cpu"}
    for rank in range(ranks):
        peers = Sending(rank, ranks)
        merged = attend_to_peers(q, k, v, peers, **how)
        with Live([q, k, v, do, *merged[:2]]) as live:
            gradients_of_peers(do, q, k, v, merged, peers, **how)
        peaks.append(live.peak / (2 * tokens))
    sizes = {**TINY, "layers": 2, "head_dim": 32, "ffn": 64, "kv_heads": kv_heads}
    data = {**DATA, "seq_len": ranks * tokens}
    c = make_config({"model": sizes, "data": data, "parallel": {"cp": ranks, "cp_comm": "p2p"}})
    estimate = layer.attention_gradients(c) - 2 * c.model.heads * 32
    assert estimate * (1.0 if ranks == 2 else 0.85) <= max(peaks) <= estimate


@pytest.fixture(scope="module")
def measured() -> list[dict[str, float]]:
    return run_ranks(2, f"{__name__}:measure", PAIRS)


@pytest.mark.parametrize(("name", "comm"), PAIRS)
def test_layers_save_the_bytes_autograd_saves_on_both_ranks(
    measured: list[dict[str, float]], name: str, comm: str
) -> None:
    c = make(name, comm)
    m, tokens = c.model, c.train.micro_batch * c.data.seq_len // 2
    q, k = m.heads * 32, m.key_value_heads * 32
    weight_rows = (q + 2 * k) + m.hidden + 2 * m.ffn + m.hidden if c.precision.flow else 0
    for rank in measured:
        assert rank[f"{name}/{comm}"] - 4 * weight_rows / tokens == layer.layer_activation_bytes(c)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradients_within_attention_are_the_bytes_that_its_backward_adds(
    measured: list[dict[str, float]], name: str, comm: str
) -> None:
    """The rank with the longest second prefix has the most. The gradient of the output is older."""
    c = make(name, comm)
    output = 2 * c.model.heads * 32
    highest = max(rank[f"gradients, {name}/{comm}"] for rank in measured)
    assert highest == layer.attention_gradients(c) - output


@pytest.mark.parametrize("comm", COMMS)
def test_all_ways_attend_to_decoded_keys_and_save_what_they_send(
    measured: list[dict[str, float]], comm: str
) -> None:
    """Outputs are rounded to BF16 twice at most, each by 2^-9. Backward reads q and the output in
    FP8, each off by 2^-4 / sqrt(3) of its norm, and attention's logits are of order one.
    """
    for rank in measured:
        of = {name: rank[f"fp8 keys, {name}/{comm}"] for name in ("output", "dq", "dk", "dv")}
        assert of["output"] <= 2.0**-8
        assert rank[f"fp8 keys, output of exact keys/{comm}"] >= 4 * 2.0**-8
        assert max(of.values()) <= (2 / 3) ** 0.5 * 2.0**-4
        assert rank[f"fp8 keys, casts in backward/{comm}"] == 0
        assert rank[f"fp8 keys, saved is sent/{comm}"] == 1
