"""A run that cannot fit is refused from its configuration; one that might fit never is."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from coatlm.config import Config, ConfigError
from coatlm.model.capacity import MARGIN, check_host_memory, check_memory, remedies, requirements
from coatlm.model.plan import plan
from tests.model.shapes import LLAMA2_7B, config

VOCAB = 32000


def refusal(c: Config, memory: int, data_parallel: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        check_memory(c, VOCAB, data_parallel=data_parallel, memory=memory, device="GPU 0")
    assert len(str(error.value)) <= 400 and len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_weights_and_states_beyond_the_memory_are_refused_with_both_sizes() -> None:
    c = config({**LLAMA2_7B}, seq_len=2048, train={"micro_batch": 1})
    # 2 bytes of a weight, 4 of its gradient, 12 of states
    needed = 18 * 6_738_415_616 / 2**30
    told = refusal(c, 80 * 2**30)
    assert f"need {needed:,.1f} GiB per rank, and GPU 0 has 80.0 GiB" in told
    assert told.startswith("model.layers=32, model.hidden=4096: ")


def test_the_keys_that_suffice_are_named_the_cheapest_first() -> None:
    c = config({**LLAMA2_7B}, seq_len=2048, train={"micro_batch": 1})
    told = refusal(c, 110 * 2**30)
    named = re.findall(r"([\w.]+=[\w-]+) \(([\d.]+) GiB\)", told.partition("; try ")[2])
    assert [key for key, _ in named] == [
        "parallel.main_grads=bf16",
        "optim.recipe=coat-lean",
        "optim.recipe=coat",
    ]
    assert all(float(size) <= 110 for _, size in named)
    assert told.endswith("or more ranks with a larger parallel.tp or parallel.pp")


def test_a_remedy_is_a_configuration_that_needs_less_or_the_same() -> None:
    c = config({**LLAMA2_7B}, seq_len=2048, parallel={"zero": 0}, train={"micro_batch": 4})
    found = dict(remedies(c, 2))
    assert {"parallel.zero=1", "train.micro_batch=1", "optim.recipe=coat-lean"} <= found.keys()
    assert requirements(found["parallel.zero=1"], VOCAB, 2)[0] < requirements(c, VOCAB, 2)[0]


@pytest.mark.parametrize(
    ("recipe", "leaner"), [("coat", "coat-lean"), ("coat-int8", "coat-lean-int8")]
)
def test_the_leaner_recipe_has_the_same_operands_in_forward(recipe: str, leaner: str) -> None:
    found = dict(remedies(config({**LLAMA2_7B}, precision={"recipe": recipe}), 1))
    named = {key for key in found if key.startswith("precision.recipe=")}
    assert named == {f"precision.recipe={leaner}", "precision.recipe=bf16"}


def test_offload_is_named_where_smaller_states_do_not_suffice() -> None:
    c = config({**LLAMA2_7B}, seq_len=2048, train={"micro_batch": 1}, optim={"recipe": "coat-lean"})
    assert "try optim.offload=states (" in refusal(c, 40 * 2**30)


def test_updates_in_backward_are_named_where_a_step_has_one_microbatch() -> None:
    sizes = {"micro_batch": 1, "global_batch": 1}
    options: dict[str, Any] = {"parallel": {"main_grads": "bf16"}, "optim": {"recipe": "coat-lean"}}
    c = config({**LLAMA2_7B}, seq_len=2048, train=sizes, **options)
    assert "; try train.update=backward (" in refusal(c, 45 * 2**30)
    several = config({**LLAMA2_7B}, seq_len=2048, train={"micro_batch": 1}, **options)
    assert "train.update" not in refusal(several, 45 * 2**30)


def test_what_is_needed_just_fits() -> None:
    c = config({**LLAMA2_7B}, seq_len=2048, train={"micro_batch": 1})
    needed, peak = requirements(c, VOCAB, 1)
    assert needed < peak < MARGIN * needed
    check_memory(c, VOCAB, data_parallel=1, memory=needed, device="GPU 0")
    refusal(c, needed - 1)


def test_an_estimated_peak_must_be_twice_the_memory() -> None:
    c = config(
        {**LLAMA2_7B, "layers": 1}, seq_len=2048, train={"micro_batch": 64, "global_batch": 64}
    )
    needed, peak = requirements(c, VOCAB, 1)
    assert needed < peak // MARGIN
    check_memory(c, VOCAB, data_parallel=1, memory=peak // MARGIN, device="GPU 0")
    told = refusal(c, peak // MARGIN - 1)
    assert "a step needs an estimated" in told and "train.micro_batch=1" in told


def test_sharding_counts() -> None:
    c = config({**LLAMA2_7B}, seq_len=2048, train={"micro_batch": 1})
    refusal(c, 60 * 2**30)
    check_memory(c, VOCAB, data_parallel=8, memory=60 * 2**30, device="GPU 0")


@pytest.mark.parametrize(("ranks", "data_parallel"), [(1, 1), (8, 8), (8, 16)])
def test_offloaded_states_beyond_the_memory_of_the_host_are_refused(
    ranks: int, data_parallel: int
) -> None:
    optim = {"recipe": "adamw-fp32", "offload": "states"}
    c = config({**LLAMA2_7B}, seq_len=2048, train={"micro_batch": 1}, optim=optim)
    needed = 12 * 6_738_415_616 * ranks // data_parallel  # zero=1 shards the states of all ranks
    sizes: dict[str, Any] = {"data_parallel": data_parallel, "ranks": ranks}
    check_host_memory(c, VOCAB, **sizes, memory=needed + ranks)
    with pytest.raises(ConfigError, match=f"of {ranks} ranks need {needed / 2**30:,.1f} GiB of "):
        check_host_memory(c, VOCAB, **sizes, memory=needed - ranks)
    resident = config({**LLAMA2_7B}, seq_len=2048, train={"micro_batch": 1})
    check_host_memory(resident, VOCAB, **sizes, memory=0)


def test_the_requirements_model_that_a_configuration_allows_is_planned_at_once() -> None:
    c = config(
        {
            "layers": 10_000,
            "hidden": 2**20,
            "heads": 2**16,
            "kv_heads": 2**16,
            "ffn": 2**22,
            "vocab": 2**24,
        },
        seq_len=2**27,
        train={"micro_batch": 2**24, "global_batch": 2**30, "steps": 2**40},
    )
    start = time.process_time()
    assert "10000 layers" in plan(c, 1)
    refusal(c, 80 * 2**30)
    assert time.process_time() - start < 10
