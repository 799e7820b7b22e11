"""What layers exchange, against `traffic`, and what of context parallelism is exposed."""

from __future__ import annotations

import pytest

from coatlm.config import Config, load_config
from coatlm.model.layer_comm import GroupLink, exposed, tensor_collectives
from coatlm.model.layer_time import linear_gemms
from coatlm.model.memory import replaced
from coatlm.model.rates import Link, load_rates
from coatlm.model.step_time import NO_SUMS, Cluster, StepTime, forecast
from coatlm.model.traffic import step_traffic

H200 = load_rates("h200")
TP = ["parallel.tp=4", "parallel.pp=4"]
SP = [*TP, "parallel.sequence_parallel=true"]


@pytest.mark.parametrize(
    "words",
    [
        TP,
        [*SP, "parallel.tp_chunks=4"],
        [*SP, "train.recompute=full", "precision.scaling=current", "parallel.tp_chunks=2"],
        [*SP, "precision.recipe=rowwise"],
        [*SP, "precision.recipe=coat-paper", "train.recompute=selective"],
        [*SP, "parallel.tp_comm_reduce=fp8", "parallel.tp_chunks=2"],
        [*SP, "preset=bf16"],
    ],
    ids=" ".join,
)
def test_collectives_of_layers_send_the_bytes_of_traffic(words: list[str]) -> None:
    config = load_config("llama2-7b", [*words, "train.micro_batch=1"])
    found = tensor_collectives(config, linear_gemms(config, H200))
    sent = step_traffic(config, stage=1, microbatches=1, once=NO_SUMS).summary()
    ours = 8 * sum(one.times * one.sent for one in found)  # layers of a stage in the middle
    assert ours == pytest.approx(sent["comm_bytes_tp"], rel=1e-6)


def test_rows_of_four_ranks_arrive_in_three_steps_each_beside_the_gemm_of_a_rank() -> None:
    words = [*SP, "parallel.tp_chunks=2", "train.micro_batch=4", "precision.scaling=delayed"]
    config = load_config("llama2-7b", words)
    gemms = linear_gemms(config, H200)
    inputs, *_ = tensor_collectives(config, gemms)
    rows = 4 * 4096 / 4  # of a rank: codes, and a scale per row
    assert inputs.sent == rows * (4096 + 4) and (inputs.times, inputs.calls) == (3, 2)
    assert inputs.beside == gemms["qkv"].forward / 4


def test_gradients_in_bf16_are_gathered_before_dgrad() -> None:
    words = [*SP, "parallel.tp_chunks=2", "precision.recipe=rowwise", "train.micro_batch=1"]
    config = load_config("llama2-7b", words)
    found = list(tensor_collectives(config, linear_gemms(config, H200)))
    bf16 = 4096 * 4096 * 2 * 3 / 4
    gathers = [one for one in found if one.sent == bf16 and one.times == 1]
    assert [one.beside > 0 for one in gathers] == 2 * [False, True, True]  # dy, x, sum of dgrad


def test_nothing_is_saved_where_nothing_runs_beside_a_collective() -> None:
    config = load_config("llama2-7b", [*SP, "train.micro_batch=1"])
    found = list(tensor_collectives(config, linear_gemms(config, H200)))
    wire = GroupLink(Link(gb_per_s=100, latency_us=10), contention=0.25)
    alone = exposed((one._replace(beside=0.0) for one in found), wire)
    covered = exposed((one._replace(beside=1.0) for one in found), wire, layers=2)
    assert alone.saved == 0 and covered.saved == pytest.approx(2 * 0.75 * alone.seconds)
    assert covered.seconds == pytest.approx(2 * 0.25 * alone.seconds)


def long(*more: str) -> Config:
    sizes = ["data.seq_len=16384", "train.micro_batch=1", "train.global_batch=1"]
    return load_config("llama2-7b", [*sizes, "parallel.cp=2", *more])


def times(config: Config, cluster: Cluster | None = None) -> StepTime:
    return forecast(config, 32000, cluster or Cluster(H200, 2)).time


def test_heads_are_exchanged_beside_attention_of_whole_samples_except_one_part_each_way() -> None:
    found = times(long())
    attention = 32 * 6 * 16_384 * 4096 * 8192 / 460.4e12
    assert found.attention == pytest.approx(attention, rel=1e-9)
    # q, k, v and o of 8192 tokens and 32 heads of 128, in two parts of the heads; half is sent
    part = 2 * 8192 * 4096 / 2 / 2 / 165e9
    late, passes = 25e-6, 2
    forward = attention / 32 / 3
    assert 3 * part + 3 * late < forward / 2  # shorter than attention of a part
    each = (3 * part + 3 * late) + (part + late)
    context = 32 * passes * (each + 0.35 * each)
    assert found.context_parallel == pytest.approx(context, rel=1e-9)
    plain = times(replaced(long(), parallel={"cp_comm": "all_gather"}))
    copies = 32 * passes * 4 * 8192 * 4096 * 2 * 2 / 4.26e12
    assert found.elementwise - plain.elementwise == pytest.approx(copies, rel=1e-6)


def test_one_head_per_rank_is_exchanged_before_and_after_attention() -> None:
    both = times(long()).context_parallel
    one = times(long("model.kv_heads=2")).context_parallel  # one key head per rank: one part
    part = (2 * 8192 * 4096 + 2 * 8192 * 256) * 2 / 2 / 165e9
    assert one == pytest.approx(32 * 2 * (part + 4 * 25e-6), rel=1e-9) and one < both * 1.5


def test_attention_is_computed_again_with_its_exchange_in_recomputation() -> None:
    plain, again = times(long()), times(long("train.recompute=selective"))
    assert again.attention / plain.attention == pytest.approx(4 / 3)
    assert again.context_parallel / plain.context_parallel == pytest.approx(3 / 2)


def test_gathered_keys_have_twice_the_attention_and_overlap_with_nothing() -> None:
    plain, gathered = times(long()), times(long("parallel.cp_comm=all_gather"))
    assert gathered.attention == 2 * plain.attention
    # keys and values of the other rank, or their gradients
    sent = 2 * 8192 * 4096 * 2 / 165e9
    assert gathered.context_parallel == pytest.approx(32 * 2 * (sent + 2 * 25e-6), rel=1e-9)


KEYS = ("precision.recipe=coat-lean", "parallel.cp_comm_kv=fp8")


def test_keys_in_fp8_shorten_the_all_gathers_of_forward_alone() -> None:
    found = times(long("parallel.cp_comm=all_gather", *KEYS)).context_parallel
    sent = 2 * 8192 * 4096 * 2 / 165e9  # of gradients of keys and values, in BF16
    assert found == pytest.approx(32 * (sent * (1 + 17 / 32) + 4 * 25e-6), rel=1e-9)


def test_keys_in_fp8_travel_with_queries_in_bf16() -> None:
    part = 2 * 8192 * 4096 / 2 / 2 / 165e9  # of q, k, v or o, as above
    forward, backward = (
        ((1 + 2 * keys) * part + 3 * 25e-6) + (part + 25e-6) for keys in (17 / 32, 1)
    )
    context = 32 * 1.35 * (forward + backward)
    assert times(long(*KEYS)).context_parallel == pytest.approx(context, rel=1e-9)


def test_layers_in_bf16_send_keys_in_bf16() -> None:
    gathered = ("parallel.cp_comm=all_gather", *KEYS)
    found = times(long(*gathered, "precision.bf16_layers=[4,4]")).context_parallel
    fp8, bf16 = (times(long(*words)).context_parallel for words in (gathered, gathered[:1]))
    assert found == pytest.approx(0.75 * fp8 + 0.25 * bf16, rel=1e-9)


def test_exchanges_over_the_network_do_not_delay_attention() -> None:
    config = long("parallel.cp=16", "model.heads=64", "model.head_dim=64", "data.seq_len=65536")
    inside, across = (times(config, Cluster(H200, 16, nodes)) for nodes in (16, 8))
    assert inside.attention == across.attention
    # forward or backward: q, k, v and o of 4096 tokens, in two parts, of which one is covered
    exchange = 4 * 4096 * 4096 * 2 * 15 / 16 / 45e9 + 8 * 40e-6
    assert across.context_parallel == pytest.approx(32 * 2 * exchange / 2, rel=1e-9)


PEERS = ("parallel.cp_comm=p2p", "data.reset_attention_mask=false")


def test_keys_of_peers_arrive_beside_attention_and_the_last_gradients_return_alone() -> None:
    sent = long(*PEERS)
    plain, found = times(long()), times(sent)
    assert found.attention == pytest.approx(1.25 * plain.attention, rel=1e-9)
    assert found.elementwise == plain.elementwise
    late = 25e-6
    total = step_traffic(sent, stage=0, microbatches=1, once=NO_SUMS).summary()["comm_bytes_cp"]
    # forward's keys, backward's keys and their gradients; `total` is that of rank 1, which returns
    # gradients of half of the keys that rank 0 returns
    piece = total / 32 / 2.5 / 165e9
    assert piece == pytest.approx(2 * 8192 * 4096 * 2 / 165e9, rel=1e-6)
    assert piece < found.attention / 32 / 3 / 2
    context = 32 * (2 * 0.35 * (piece + late) + (piece + late))
    assert found.context_parallel == pytest.approx(context, rel=1e-9)


def test_of_four_peers_only_the_last_gradients_are_exposed() -> None:
    config = long(*PEERS, "parallel.cp=4")
    found = times(config, Cluster(H200, 4))
    total = step_traffic(config, stage=0, microbatches=1, once=NO_SUMS).summary()["comm_bytes_cp"]
    link = Cluster(H200, 4).wire(1, 4).link
    sent = total / 32 / 2.5 / 3
    one, both = link.seconds(sent), link.seconds(2 * sent, 2)
    # keys beside each piece of forward; in backward twice keys alone, keys and gradients, gradients
    # alone, and the last gradients after all pieces
    assert both < found.attention / 32 * 2 / 3 / 4
    covered = 3 * one + 2 * one + both + one
    assert found.context_parallel == pytest.approx(32 * (0.35 * covered + one), rel=1e-9)
