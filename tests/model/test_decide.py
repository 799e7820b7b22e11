"""What auto becomes: the planner's first layout on GPUs, the simplest on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from coatlm.config import LAYOUT, Config, ConfigError, load_config, make_config
from coatlm.config.yaml_text import parse_yaml
from coatlm.model.decide import Gpu, cluster_of, decide, expectation
from coatlm.model.layouts import describe, predicted, ranked
from coatlm.model.memory import GIB, replaced
from coatlm.model.rates import load_rates, rates_of

H100 = Gpu("NVIDIA H100 80GB HBM3", round(79.2 * GIB))
VOCAB = 128256
LAYOUT_AUTO, SIZE_AUTO = "parallel.layout=auto", "train.micro_batch=auto"


def decided(
    config: Config, ranks: int = 8, gpu: Gpu | None = H100, earlier: Any = None
) -> tuple[Config, str]:
    return decide(config, VOCAB, ranks=ranks, per_node=min(8, ranks), gpu=gpu, earlier=earlier)


def layout(config: Config) -> dict[str, Any]:
    keys = [*LAYOUT, ("train", "micro_batch")]
    return {f"{section}.{key}": getattr(getattr(config, section), key) for section, key in keys}


def test_nothing_auto_stays_as_it_is() -> None:
    config = load_config("llama3-8b")
    assert decided(config) == (config, "")


def test_layout_and_microbatch_are_the_first_of_the_planner_and_the_sentence_names_two() -> None:
    found, why = decided(load_config("llama3-8b", [LAYOUT_AUTO, SIZE_AUTO]))
    cluster = cluster_of(H100, 8, 8)
    assert cluster is not None
    first, second, *_ = ranked(load_config("llama3-8b"), VOCAB, cluster)
    assert layout(found) == layout(first.config) and not found.undecided
    assert why.startswith(f"Chosen for {LAYOUT_AUTO} and {SIZE_AUTO} on 8 x {H100.name}: ")
    assert describe(first.config, 8) in why
    assert f"; the next is {describe(second.config, 8)} (" in why
    assert f"{second.forecast.tokens_per_s:,.0f} tokens/s per GPU" in why


def test_a_microbatch_alone_leaves_the_layout() -> None:
    given = load_config("llama3-8b")
    found, _ = decided(load_config("llama3-8b", [SIZE_AUTO]))
    assert replaced(found, train={"micro_batch": given.train.micro_batch}) == given
    larger, _ = decided(load_config("llama3-8b", [SIZE_AUTO]), gpu=Gpu(H100.name, 200 * GIB))
    assert larger.train.micro_batch > found.train.micro_batch


def test_the_override_replaces_the_files_layout_and_other_overrides_win() -> None:
    free = load_config("llama3.1-70b", [LAYOUT_AUTO])
    assert "tp" not in free.parallel.model_fields_set
    set_by_hand = load_config("llama3.1-70b", [LAYOUT_AUTO, "parallel.tp=4", "parallel.zero=2"])
    found, _ = decided(set_by_hand, ranks=32)
    assert (found.parallel.tp, found.parallel.zero) == (4, 2)
    assert found.parallel.sequence_parallel and found.train.micro_batch == free.train.micro_batch


def test_keys_beside_auto_in_a_file_stay_also_in_the_file_that_a_job_is_submitted_with() -> None:
    data = {
        "model": {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 2048, "vocab": VOCAB},
        "data": {"text": "x", "seq_len": 2048},
        "parallel": {"layout": "auto", "pp": 2},
        "train": {"micro_batch": "auto", "global_batch": 64},
    }
    config = make_config(data)
    again = make_config(parse_yaml(config.to_yaml()))
    assert again == config and again.parallel.model_fields_set == {
        *config.parallel.__class__.model_fields
    } - {"tp", "sequence_parallel", "cp", "cp_comm", "vpp", "zero"}
    assert decided(config) == decided(again)
    assert decided(config)[0].parallel.pp == 2


def test_given_keys_without_a_valid_layout_are_named() -> None:
    config = load_config("llama3-8b", [LAYOUT_AUTO, "parallel.pp=16"])
    with pytest.raises(ConfigError, match=r"layout=auto with parallel.pp=16.*: no layout of 8 "):
        decided(config)
    with pytest.raises(ConfigError, match=r"fits 20.0 GiB; allowed are more GPUs"):
        decided(load_config("llama3.1-70b", [LAYOUT_AUTO]), gpu=Gpu(H100.name, 20 * GIB))


def test_a_gpu_without_rates_needs_given_keys() -> None:
    with pytest.raises(ConfigError, match=r"micro_batch=auto: must be given on NVIDIA A100.*H200"):
        decided(load_config("llama3-8b", [SIZE_AUTO]), gpu=Gpu("NVIDIA A100", 80 * GIB))
    assert rates_of("NVIDIA H100 80GB HBM3 MIG 3g.40gb") is None
    assert rates_of("NVIDIA H200") == load_rates("h200")


def test_on_a_cpu_ranks_are_data_parallel_with_the_smallest_microbatch() -> None:
    config = load_config("llama3.1-70b", [LAYOUT_AUTO, SIZE_AUTO])
    found, why = decided(config, ranks=4, gpu=None)
    assert found.data_parallel_size(4) == 4 and found.train.micro_batch == 1
    assert why == (
        f"Chosen for {LAYOUT_AUTO} and {SIZE_AUTO} on a CPU: "
        "dp 4, zero 1, recompute none, micro_batch 1."
    )
    words = ["parallel.pp=2", "parallel.vpp=2", "train.global_batch=8", SIZE_AUTO]
    found, _ = decided(load_config("quickstart", words), ranks=2, gpu=None)
    assert found.train.micro_batch == 1


@pytest.mark.parametrize("gpu", [H100, None])
def test_an_option_of_larger_cp_or_tp_leaves_layouts_without_them_in_the_choice(
    gpu: Gpu | None,
) -> None:
    words = [LAYOUT_AUTO, "precision.recipe=coat-lean"]
    plain, _ = decided(load_config("llama3-8b", words), gpu=gpu)
    assert plain.parallel.cp == plain.parallel.tp == 1
    options = ["parallel.cp_comm_kv=fp8", "parallel.tp_chunks=2", "parallel.tp_comm_reduce=fp8"]
    found, why = decided(load_config("llama3-8b", [*words, *options]), gpu=gpu)
    assert found == plain
    assert why.endswith(
        " parallel.tp_chunks=2 and parallel.tp_comm_reduce=fp8 apply only to layouts with tp above "
        "1. parallel.cp_comm_kv=fp8 applies only to layouts with cp above 1."
    )
    given = [*words, *options, "parallel.cp=2", "parallel.tp=2", "parallel.sequence_parallel=true"]
    found, why = decided(load_config("llama3-8b", given), gpu=gpu)
    p = found.parallel
    assert (p.cp_comm_kv, p.tp_comm_reduce, p.tp_chunks) == ("fp8", "fp8", 2)
    assert "tp_comm_reduce fp8" in why and "cp_comm_kv fp8" in why and "apply only" not in why


def test_an_option_that_a_given_size_excludes_is_refused_beside_auto() -> None:
    words = [LAYOUT_AUTO, "precision.recipe=coat-lean"]
    for given, said in (
        (["parallel.cp=1", "parallel.cp_comm_kv=fp8"], "cp_comm_kv=fp8 needs cp > 1"),
        (["parallel.tp=1", "parallel.tp_chunks=2"], "tp_chunks=2 needs parallel.tp > 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config("llama3-8b", [*words, *given])
    half = [*words, "parallel.tp=2", "parallel.tp_comm_reduce=fp8"]
    with pytest.raises(ConfigError, match="fp8 needs sequence_parallel=true"):
        decided(load_config("llama3-8b", half), gpu=None)


@pytest.mark.parametrize("gpu", [H100, None])
def test_updates_in_backward_get_one_microbatch_and_no_pipeline(gpu: Gpu | None) -> None:
    words = [LAYOUT_AUTO, SIZE_AUTO, "train.update=backward", "train.global_batch=8"]
    found, why = decided(load_config("llama3-8b", words), gpu=gpu)
    assert found.train.update == "backward" and found.parallel.pp == 1
    dp = found.data_parallel_size(8)
    assert found.train.micro_batch * dp == 8 and why


def test_a_resumed_run_keeps_what_it_can() -> None:
    auto = load_config("llama3-8b", [LAYOUT_AUTO, SIZE_AUTO])
    first, _ = decided(auto)
    before = replaced(first, parallel={"zero": 3}, train={"micro_batch": 2, "recompute": "full"})
    saved = before.model_dump(mode="json")
    found, why = decided(auto, earlier=saved)
    assert found == before and why.endswith("to continue as before.")
    saved["parallel"]["pp"] = 16  # more than the GPUs that are left
    found, why = decided(auto, earlier=saved)
    assert found.train.micro_batch == 2 and found.parallel.pp < 16 and "as before" in why
    saved["train"]["micro_batch"] = 3  # does not divide the global batch
    assert decided(auto, earlier=saved)[0] == first


@pytest.mark.parametrize("words", [[LAYOUT_AUTO], [SIZE_AUTO]])
def test_what_plans_a_given_layout_refuses_auto(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{words[0]}: must be given here"):
        load_config("llama3-8b", words).data_parallel_size(8)


def test_a_wrong_microbatch_is_refused_as_before() -> None:
    with pytest.raises(ConfigError, match=r"train.micro_batch='many': .*integer"):
        load_config("llama3-8b", ["train.micro_batch=many"])
    with pytest.raises(ConfigError, match=r"train.micro_batch=0: "):
        load_config("llama3-8b", ["train.micro_batch=0"])


def expected(config: Config, gpu: Gpu | None = H100, done: int = 0) -> str:
    return expectation(config, VOCAB, ranks=8, per_node=8, gpu=gpu, done=done)


def test_what_is_expected_is_the_forecast_with_saved_logits() -> None:
    config = load_config("llama3-8b", ["train.steps=1000"])
    text = expected(config)
    assert text == expected(replaced(config, train={"logits": "save"}))
    assert text != expected(replaced(config, train={"logits": "recompute"}))
    cluster = cluster_of(H100, 8, 8)
    assert cluster is not None
    speed = predicted(config, VOCAB, cluster).forecast.tokens_per_s
    start = f"Expected on 8 x {H100.name}: {speed:,.0f} tokens/s per GPU, {8 * speed:,.0f} in all, "
    assert text.startswith(start) and " GiB; 1,000 steps of " in text


def test_after_some_steps_the_time_of_the_others_is_expected() -> None:
    config = load_config("llama3-8b", ["train.steps=1000"])
    before, after = expected(config), expected(config, done=250)
    assert before.partition(";")[0] == after.partition(";")[0]
    cluster = cluster_of(H100, 8, 8)
    assert cluster is not None
    seconds = 750 * predicted(config, VOCAB, cluster).forecast.time.total
    hours, minutes = divmod(round(seconds / 60), 60)
    assert "; 750 remaining steps of " in after and f" s take {hours} h {minutes} min, " in after


def test_of_a_gpu_without_rates_one_sentence_says_how_to_measure_them() -> None:
    gpu = Gpu("NVIDIA A100-SXM4-80GB", 80 * GIB)
    config = load_config("llama3-8b")
    note = (
        "Speed and time on NVIDIA A100-SXM4-80GB are not predicted, as coatlm/rates/ has no rates "
        "of it; `python tools/bench.py rates --out coatlm/rates/NAME.yaml` in a checkout measures "
        "them."
    )
    assert expected(config, gpu) == expected(config, gpu, done=250) == note


def test_nothing_is_expected_of_a_cpu() -> None:
    assert expected(load_config("llama3-8b"), None) == ""
