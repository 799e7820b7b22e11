"""A model on packed documents: each of them has the losses and gradients that it has alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.config import Config, make_config
from coatlm.data.context_parallel import zigzag_positions
from coatlm.kernels.document_attention import document_attention, document_positions
from coatlm.model import attention
from coatlm.model.rotary import RotaryTables, rotary_tables
from coatlm.parallel.groups import make_groups, release_groups
from tools.studies.recipe_models import RecipeModel

LENGTHS = ([20, 1, 43], [64])  # of the documents of two samples
BOUNDS = torch.tensor([[0, 20, 21, 64, 64], [0, 64, 64, 64, 64]], dtype=torch.int32)
SEQ, VOCAB = 64, 128
MODEL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96}
# a document alone differs from a packed one by RoPE: it turns by the position in the sample, of
# which attention reads differences only, up to rounding
BOUND = {  # of losses and of gradients, relative to their norm
    "fp32": (1e-7, 1e-6),
    "bf16": (3e-4, 1e-2),  # 2^-9 per rounding; errors of 128 tokens average out in the losses
    "coat": (5e-4, 3e-2),  # a rotation moves elements across codes 2^-3 apart
    "coat-lean": (5e-4, 3e-2),
}
# With positions that restart the rotations are the same, and fp32 sums in another order remain:
# attention's over keys at other places, and those of weight gradients over documents. A loss is
# then off by its own rounding, 2^-24. BF16 numbers and FP8 codes differ only where a sum, off by
# 2^-24, lies on a boundary between two of them: one BF16 number in 2^15. So the limit of the losses
# can be a fifth of their error above, which is at least 5e-5. Weight gradients are rounded to BF16
# for each document alone, 2^-9, and FP8 gradients have the scale of other tokens.
RESTARTED = {
    "fp32": (2**-24, 5e-7),
    "bf16": (1e-5, 2**-8),
    "coat": (1e-5, 2e-2),
    "coat-lean": (1e-5, 2e-2),
}


def configuration(*, restarted: bool, model: dict[str, Any] | None = None, **more: Any) -> Config:
    data = {"reset_attention_mask": True, "reset_position_ids": restarted}
    return make_config(
        {
            "model": {**MODEL, **(model or {})},
            "data": {"text": "unused", "seq_len": SEQ, **data},
            **more,
        }
    )


def model(recipe: str, *, restarted: bool = False, **train: Any) -> RecipeModel:
    config = configuration(restarted=restarted, precision={"recipe": recipe}, train=train)
    return RecipeModel(config, make_groups(config.parallel), VOCAB)


def losses_and_gradients(
    of: RecipeModel, tokens: Tensor, labels: Tensor, bounds: Tensor | None, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses [B, S] where `counted`, else 0, and the gradient of their sum, accumulated."""
    of.flat.set_is_first_microbatch()
    with of.flat.no_sync():
        losses = of.flat(tokens, labels, bounds) * counted
        losses.sum().backward()
    return losses.detach(), torch.cat([p.main_grad.flatten() for p in of.parameters.values()])


def restart(of: RecipeModel) -> None:
    of.flat.train()
    of.flat.zero_grad_buffer()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("recipe", BOUND)
def test_packed_documents_have_the_losses_and_gradients_of_each_alone(
    recipe: str, restarted: bool, megatron: None
) -> None:
    of = model(recipe, restarted=restarted)
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ))
    restart(of)
    packed, gradient = losses_and_gradients(of, tokens, labels, BOUNDS, torch.ones(2, SEQ))
    restart(of)
    alone, expected = torch.zeros(2, SEQ), gradient
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for length in lengths:
            end = begin + length
            first, second = (x[row : row + 1, begin:end] for x in (tokens, labels))
            found, expected = losses_and_gradients(of, first, second, None, torch.ones(1, length))
            alone[row, begin:end] = found
            begin = end
    release_groups()
    of_losses, of_gradients = (RESTARTED if restarted else BOUND)[recipe]
    assert (packed - alone).norm() <= of_losses * alone.norm()
    assert (gradient - expected).norm() <= of_gradients * expected.norm()


@pytest.mark.parametrize("restarted", [False, True])
def test_recomputation_changes_nothing(restarted: bool, megatron: None) -> None:
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ))
    found = []
    for recompute in ("none", "selective", "full"):
        of = model("coat", restarted=restarted, recompute=recompute)
        restart(of)
        found.append(losses_and_gradients(of, tokens, labels, BOUNDS, torch.ones(2, SEQ)))
        release_groups()
    for losses, gradient in found[1:]:
        assert torch.equal(losses, found[0][0])
        assert torch.equal(gradient, found[0][1])


ROPE_OF_WINDOWS = {"window": {"size": 9, "period": 2, "rope_theta": 1e4}}
RANKS = [(1, "auto"), (2, "auto"), (2, "all_gather"), (4, "all_gather")]


@pytest.mark.parametrize("own_theta", [False, True])
@pytest.mark.parametrize(("cp", "cp_comm"), RANKS)
def test_the_angles_of_a_token_are_those_of_its_position_in_its_document(
    cp: int, cp_comm: str, own_theta: bool
) -> None:
    own = ROPE_OF_WINDOWS if own_theta else None
    parallel = {"cp": cp, "cp_comm": cp_comm}
    config = configuration(restarted=True, model=own, parallel=parallel)
    positions = torch.cat([torch.arange(n) for lengths in LENGTHS for n in lengths])
    expected = rotary_tables(config, positions).unflatten(1, (2, SEQ))
    found = torch.zeros_like(expected)
    for rank in range(cp):
        tables = RotaryTables(config, cp_rank=rank, cp_size=cp)
        of_rank = tables.of_documents(BOUNDS, SEQ).unflatten(1, (2, SEQ // cp))
        found[:, :, tables.token_positions(SEQ)] = of_rank
    # cos and sin of the same number, of which another place in a vector may round otherwise
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-23)


def test_positions_of_documents_need_no_more_than_their_bounds() -> None:
    """Bounds that are padded further, as those of a CUDA graph, have the same positions."""
    wider = torch.cat((BOUNDS, torch.full((2, 4), SEQ, dtype=torch.int32)), 1)
    at = torch.arange(SEQ, dtype=torch.int32)
    expected = torch.cat([torch.arange(n) for lengths in LENGTHS for n in lengths])
    for bounds in (BOUNDS, wider):
        found = document_positions(bounds, at)
        assert found.dtype == torch.int32  # the index of a table, without a copy in int64
        assert torch.equal(found.flatten().long(), expected)


def test_a_shorter_sample_has_positions_of_its_own_length() -> None:
    config = configuration(restarted=True)
    tables = RotaryTables(config, cp_rank=0, cp_size=1)
    bounds = torch.tensor([[0, 5, 16]], dtype=torch.int32)
    whole = tables.of_sample(SEQ)
    expected = torch.cat((whole[:, :5], whole[:, :11]), 1)
    assert torch.equal(tables.of_documents(bounds, 16), expected)


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["one document", "documents"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 2.0), (9, 2.0)])
def test_context_parallel_ranks_attend_like_one(
    bounds: Tensor | None,
    window: int | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    q, k, v = (2 * torch.randn(2, SEQ, heads, 8) for heads in (4, 2, 2))
    expected = document_attention(q, k, v, bounds, window=window, softcap=softcap)

    def laid_out(x: Tensor) -> Tensor:
        return x.transpose(0, 1) if bounds is None else x.flatten(0, 1)[:, None]

    for rank in range(2):
        whole = iter((k, v))
        monkeypatch.setattr(
            attention, "gather_zigzag", lambda _, __, whole=whole: next(whole).transpose(0, 1)
        )
        cp = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        core = attention.CoreAttention(
            None, 1, pg_collection=SimpleNamespace(cp=cp), window=window, softcap=softcap
        )
        at = zigzag_positions(SEQ, rank, 2)
        out = core(*(laid_out(x[:, at]) for x in (q, k, v)), bounds)
        torch.testing.assert_close(out, laid_out(expected[:, at]).flatten(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 0}, "window=0 keys: must be at least 1"), ({"softcap": 0.0}, "softcap=0.0: must")],
)
def test_impossible_windows_and_caps_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention.CoreAttention(None, 1, pg_collection=SimpleNamespace(cp=None), **options)
