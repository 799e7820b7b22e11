"""q, k, v and the attention output o in BF16 one by one, with coat-lean, which saves all in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.config.recipes import ATTENTION
from coatlm.fp8.attention import SavedInFp8, _unpack, memory_order
from coatlm.fp8.attention import attend_saving_fp8 as attend
from coatlm.model import coat_layer
from coatlm.model.coat_layer import flows_of
from coatlm.model.numerics import watched
from tests.model.test_bf16_tensors import changed
from tests.model.test_flow import build, equal, run, run_config

QKV = "self_attention.linear_qkv.weight"
BEFORE = {QKV, "input_layernorm.weight", "dx"}  # gradients that those of q, k and v enter


def lean(*names: str, **options: Any) -> Any:
    precision = {"bf16_operands": [f"saved.{name}" for name in names]}
    return run_config("coat-lean", precision=precision, **options)


def saved_by_attention(
    monkeypatch: pytest.MonkeyPatch, *names: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The results of a layer; q, k, v and o; what backward reads of them, in the same shapes."""
    exact: dict[str, Tensor] = {}
    packed: list[tuple[Tensor, Any]] = []
    pack = SavedInFp8._pack

    def note(core: Any, size: int, *qkv: Tensor, **options: Any) -> Any:
        made = attend(core, size, *qkv, **options)
        exact.update(zip(ATTENTION, (x.detach() for x in (*qkv, made[0])), strict=True))
        return made

    def noted(self: SavedInFp8, x: Tensor) -> Any:
        packed.append((x.detach(), pack(self, x)))
        return packed[-1][1]

    with monkeypatch.context() as patch:
        patch.setattr(coat_layer, "attend_saving_fp8", note)
        patch.setattr(SavedInFp8, "_pack", noted)
        results = run(lean(*names))
    read = {}
    for name, x in exact.items():
        (held,) = {id(h): h for t, h in packed if t.data_ptr() == x.data_ptr()}.values()
        saved = _unpack(held)  # [B, N, S, D] or [B, S, N, D], in the memory of x
        read[name] = saved.permute(memory_order(saved)).reshape(x.shape)
    return results, exact, read


def test_each_name_alone_saves_its_tensor_exactly_and_the_others_as_before(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, exact, before = saved_by_attention(monkeypatch)
    assert not any(torch.equal(before[name], exact[name]) for name in ATTENTION)
    for name in ATTENTION:
        results, same, read = saved_by_attention(monkeypatch, name)
        assert torch.equal(results["y"], plain["y"])
        for x in ATTENTION:
            assert torch.equal(same[x], exact[x])
            assert torch.equal(read[x], (exact if x == name else before)[x]), (name, x)


def test_each_name_changes_the_gradients_that_depend_on_its_tensor_and_no_other(
    megatron: None,
) -> None:
    """dq and dk depend on all four, dv on the probabilities, that is on q and k.

    The weight gradient of the projection takes codes of o, whose scale is a power of two as well:
    o and the codes that are saved of it round to the same ones.
    """
    plain = run(lean())
    for name in ATTENTION:
        found = run(lean(name))
        moved = {key for key in plain if not torch.equal(plain[key], found[key])}
        assert moved == BEFORE
        # rows of two key and value heads: two query heads, a key and a value, of 16 rows each
        rows = [x[QKV].unflatten(0, (2, 4, 16)) for x in (plain, found)]
        q, k, v = (
            not torch.equal(rows[0][:, part], rows[1][:, part])
            for part in (slice(0, 2), slice(2, 3), slice(3, 4))
        )
        assert (q, k, v) == (True, True, name in ("q", "k")), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": {"kv_heads": 4}},
        {"model": {"qk_norm": True}},
        {"train": {"micro_batch": 2, "global_batch": 2, "recompute": "selective"}},
    ],
    ids=["", "a key per query", "qk_norm", "selective"],
)
def test_all_four_in_bf16_are_coat_bit_by_bit(options: dict[str, Any], megatron: None) -> None:
    """coat differs from coat-lean in nothing but these four."""
    found = run(lean(*ATTENTION, **options))
    assert equal(found, run(run_config("coat", **options)))
    assert not equal(found, run(lean(**options)))


def test_tensors_of_a_layer_are_the_names_of_the_recipe_bit_by_bit(megatron: None) -> None:
    for name in ATTENTION:
        assert equal(run(*changed("coat-lean", [f"{name}_saved"])), run(lean(name)))


def test_numerics_are_of_the_codes_that_backward_reads(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, exact, read = saved_by_attention(monkeypatch)
    c = lean("k")
    model = build(c)
    with watched(flows_of(model.decoder.layers)) as probes:
        run(c, model)
    sums = probes[1].sums
    assert [f"{name}_saved" in sums for name in ATTENTION] == [True, False, True, True]
    for name in ("q", "v", "o"):
        error = (read[name].double() - exact[name].double()).square().sum()
        elements, *_, found, size = sums[f"{name}_saved"]
        assert elements == exact[name].numel()
        torch.testing.assert_close(found, error, rtol=1e-12, atol=0)
        torch.testing.assert_close(size, exact[name].double().square().sum(), rtol=1e-12, atol=0)
