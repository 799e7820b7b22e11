"""Every mistake in a configuration is reported with its path, its value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatlm.config import Config, ConfigError, load_config, make_config

PEERS = {"cp": 2, "cp_comm": "p2p"}  # ranks that send each other keys


def message(data: Any) -> str:
    """What the user is told about `data`."""
    with pytest.raises(ConfigError) as error:
        make_config(data)
    return str(error.value)


def write(directory: Path, text: str) -> Path:
    path = directory / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("data", "key", "meant"),
    [
        ({"modle": {}}, "modle", "model"),
        ({"run": {"nmae": "a"}}, "run.nmae", "name"),
        ({"model": {"hiden": 256}}, "model.hiden", "hidden"),
        ({"model": {"rope_scaling": {"facto": 8.0}}}, "model.rope_scaling.facto", "factor"),
        ({"data": {"text": "a", "tokeniser": "byte"}}, "data.tokeniser", "tokenizer"),
        ({"data": {"paths": [{"path": "a", "wieght": 2}]}}, "data.paths.0.wieght", "weight"),
        ({"parallel": {"tpp": 2}}, "parallel.tpp", "tp"),
        ({"precision": {"recipy": "bf16"}}, "precision.recipy", "recipe"),
        ({"optim": {"warmup": 20}}, "optim.warmup", "warmup_steps"),
        ({"train": {"microbatch": 4}}, "train.microbatch", "micro_batch"),
        ({"checkpoint": {"evry": 4}}, "checkpoint.evry", "every"),
        ({"log": {"wandb": "a"}}, "log.wandb", "wandb_project"),
    ],
)
def test_an_unknown_key_is_named_with_a_similar_one_of_its_section(
    data: dict[str, Any], key: str, meant: str
) -> None:
    section = key.rpartition(".")[0]
    assert (
        message(data) == f"{key}: unknown key; do you mean {section}{'.' * bool(section)}{meant}?"
    )


@pytest.mark.parametrize(
    ("model", "parallel", "documents", "found"),
    [
        ({"kv_heads": 2}, {"cp": 2}, True, "a2a"),
        ({"kv_heads": 2}, {"cp": 2, "tp": 2}, False, "p2p"),
        ({"kv_heads": 2}, {"cp": 2, "tp": 2}, True, "all_gather"),
        ({"kv_heads": 1}, {"cp": 2}, True, "all_gather"),
        ({"kv_heads": 1, "window": {"size": 8}}, {"cp": 2}, False, "all_gather"),
        ({"kv_heads": 2, "head_dim": 20}, {"cp": 2, "tp": 2}, False, "all_gather"),
        ({"kv_heads": 2, "head_dim": 264}, {"cp": 2, "tp": 2}, False, "all_gather"),
        ({"kv_heads": 2}, PEERS, False, "p2p"),
        ({"kv_heads": 2}, {"cp": 2, "cp_comm": "all_gather"}, False, "all_gather"),
    ],
)
def test_context_parallel_ranks_exchange_heads_or_keys_where_they_can(
    model: dict[str, Any], parallel: dict[str, Any], documents: bool, found: str
) -> None:
    data = {"text": ["a"], "reset_attention_mask": documents}
    sections = {"model": {"heads": 4, **model}, "parallel": parallel, "data": data}
    assert make_config(sections).context_comm == found


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("run", "seed", "many"),
        ("run", "name", 3),
        ("run", "dir", 3),
        ("model", "layers", 1.5),
        ("model", "layers", "4"),
        ("model", "heads", "8"),
        ("model", "tie_embeddings", "yes"),
        ("model", "rope_scaling", 8),
        ("data", "tokenizer", 3),
        ("data", "split", 3),
        ("parallel", "tp", True),
        ("precision", "recipe", 16),
        ("optim", "lr", "fast"),
        ("train", "steps", "150"),
        ("train", "steps", 10.0),
        ("checkpoint", "resume", None),
        ("log", "tensorboard", 1),
    ],
)
def test_a_value_of_another_type_is_refused_and_not_converted(
    section: str, key: str, value: Any
) -> None:
    fill = {"text": "a"} if section == "data" else {}
    shown = "null" if value is None else repr(value)
    assert message({section: fill | {key: value}}).startswith(f"{section}.{key}={shown}: ")


@pytest.mark.parametrize(
    ("section", "key", "value", "allowed"),
    [
        ("run", "seed", -1, "greater than or equal to 0"),
        ("run", "name", "", "at least 1 character"),
        ("model", "spec", "torch", "'local' or 'te'"),
        ("model", "layers", 0, "greater than or equal to 1"),
        ("model", "heads", 0, "greater than or equal to 1"),
        ("model", "hidden", -8, "greater than or equal to 1"),
        ("model", "kv_heads", 0, "greater than or equal to 1"),
        ("model", "norm_eps", 0.0, "greater than 0"),
        ("data", "seq_len", 1, "greater than or equal to 2"),
        ("data", "workers", -1, "greater than or equal to 0"),
        ("parallel", "pp", 0, "greater than or equal to 1"),
        ("parallel", "zero", 4, "0, 1, 2 or 3"),
        ("parallel", "grad_comm", "fp16", "'fp8-nccl' or 'fp8-a2a'"),
        ("parallel", "grad_comm_nodes", 0, "greater than or equal to 1"),
        ("parallel", "main_grads", "fp16", "'fp32', 'bf16' or 'fp8'"),
        ("precision", "recipe", "fp4", "'fp32'"),
        ("optim", "recipe", "adam", "'adamw-fp32'"),
        ("optim", "schedule", "step", "'cosine'"),
        ("optim", "lr", 0.0, "greater than 0"),
        ("optim", "lr", float("nan"), ""),
        ("optim", "lr", float("inf"), "finite"),
        ("optim", "clip_grad", -1.0, "greater than or equal to 0"),
        ("train", "micro_batch", 0, "greater than or equal to 1"),
        ("train", "recompute", "some", "'none'"),
        ("train", "max_skipped", 0, "greater than or equal to 1"),
        ("train", "rollbacks", -1, "greater than or equal to 0"),
        ("train", "spike_sigma", -6.0, "greater than or equal to 0"),
        ("train", "spike_window", 1, "greater than or equal to 2"),
        ("checkpoint", "keep", 0, "greater than or equal to 1"),
        ("log", "every", 0, "greater than or equal to 1"),
        ("log", "hang_timeout", -1.0, "greater than or equal to 0"),
        ("log", "straggler_factor", -1.0, "greater than or equal to 0"),
    ],
)
def test_a_value_out_of_range_is_reported_with_what_is_allowed(
    section: str, key: str, value: Any, allowed: str
) -> None:
    fill = {"text": "a"} if section == "data" else {}
    told = message({section: fill | {key: value}})
    assert told.startswith(f"{section}.{key}={value!r}: ")
    assert allowed in told


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"model": {"hidden": 100, "heads": 8}}, "hidden=100 is not a multiple of heads=8"),
        ({"model": {"heads": 8, "kv_heads": 3}}, "heads=8 is not a multiple of kv_heads=3"),
        ({"model": {"head_dim": 33}}, "head_dim=33 is odd"),
        ({"optim": {"eps": 1e-60}}, "eps=1e-60: must be at least 1.18e-38"),
        ({"data": {"tokenizer": "byte"}}, "give either text"),
        ({"data": {"text": ["a"], "paths": ["b"]}}, "give either text"),
        ({"data": {"text": ["a"], "split": [0, 1, 1]}}, "split=[0.0, 1.0, 1.0]"),
        ({"data": {"text": ["a"], "split": [9, -1, 1]}}, "split=[9.0, -1.0, 1.0]"),
        ({"optim": {"betas": [0.9, 1.0]}}, "betas=[0.9, 1.0]"),
        ({"optim": {"lr": 1e-5, "min_lr": 1e-4}}, "min_lr=0.0001 is above lr=1e-05"),
        ({"log": {"profile": [5, 4]}}, "profile=[5, 4]"),
        (
            {"parallel": {"zero": 2, "overlap_grad_reduce": False}},
            "zero=2 needs overlap_grad_reduce=true: it frees gradients during backward",
        ),
        (
            {"parallel": {"zero": 3, "overlap_grad_reduce": False}},
            "zero=3 needs overlap_grad_reduce=true: it frees gradients during backward",
        ),
        (
            {"parallel": {"zero": 0, "partition": "whole-tensor"}},
            "partition=whole-tensor needs zero=1, 2 or 3",
        ),
        (
            {"parallel": {"zero": 0, "weight_gather": "fp8"}},
            "weight_gather=fp8 needs zero=1, 2 or 3",
        ),
        (
            {"parallel": {"grad_comm": "bf16", "grad_comm_scale": "tensor"}},
            "grad_comm_scale=tensor needs grad_comm=fp8-a2a",
        ),
        (
            {"parallel": {"grad_comm_scale": "bucket", "grad_comm_format": "e3m4"}},
            "grad_comm_format=e3m4 needs grad_comm=fp8-a2a and grad_comm_scale=block",
        ),
        (
            {"parallel": {"grad_comm": "fp32", "grad_comm_format": "e3m4"}},
            "grad_comm_format=e3m4 needs grad_comm=fp8-a2a and grad_comm_scale=block",
        ),
        (
            {"parallel": {"grad_comm_scaling": "delayed"}},
            "grad_comm_scaling=delayed needs grad_comm=fp8-nccl, or grad_comm=fp8-a2a with",
        ),
        (
            {"parallel": {"grad_comm": "fp32", "grad_comm_scaling": "delayed"}},
            "grad_comm_scaling=delayed needs grad_comm=fp8-nccl, or grad_comm=fp8-a2a with",
        ),
        (
            {"parallel": {"grad_comm": "fp8-nccl", "grad_comm_nodes": 2}},
            "grad_comm_nodes=2 needs grad_comm=fp8-a2a",
        ),
        (
            {
                "parallel": {
                    "partition": "whole-tensor",
                    "grad_comm": "fp8-a2a",
                    "grad_comm_nodes": 2,
                }
            },
            "grad_comm_nodes=2 needs partition=flat",
        ),
    ],
)
def test_sizes_that_contradict_each_other_in_a_section_are_refused(
    data: dict[str, Any], told: str
) -> None:
    (section,) = data
    assert message(data).startswith(f"{section}: ")
    assert told in message(data)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (
            {"model": {"hidden": 192, "heads": 6}, "parallel": {"tp": 4}},
            "model.heads=6 is not a multiple of parallel.tp=4",
        ),
        (
            {"model": {"kv_heads": 2}, "parallel": {"tp": 4}},
            "model.kv_heads=2 is not a multiple of parallel.tp=4",
        ),
        (
            {
                "optim": {"schedule": "wsd", "decay_steps": 91, "warmup_steps": 10},
                "train": {"steps": 100},
            },
            "optim.decay_steps=91: must be at most train.steps - optim.warmup_steps = 100-10",
        ),
        (
            {"precision": {"recipe": "fp8-linear", "group_size": 32}},
            "precision.group_size=32: fp8-linear saves no blocks",
        ),
        (
            {
                "precision": {
                    "recipe": "coat",
                    "group_size": 32,
                    "bf16_operands": ["saved.norm_input", "saved.gate_up"],
                }
            },
            "precision.group_size=32: coat saves no blocks",
        ),
        (
            {"model": {"head_dim": 12}, "data": {"text": "x", "reset_attention_mask": True}},
            "data.reset_attention_mask=true with model.head_dim=12: must be a multiple of 8",
        ),
        (
            {"data": {"text": "x", "reset_position_ids": True}},
            "data.reset_position_ids=true needs data.reset_attention_mask=true: tokens",
        ),
        (
            {"data": {"paths": ["x"], "reset_attention_mask": False, "reset_position_ids": True}},
            "data.reset_position_ids=true needs data.reset_attention_mask=true: tokens",
        ),
        (
            {"model": {"ffn": 706}, "parallel": {"tp": 4}},
            "model.ffn=706 is not a multiple of parallel.tp=4",
        ),
        (
            {"model": {"vocab": 258}, "parallel": {"tp": 4}},
            "model.vocab=258 is not a multiple of parallel.tp=4",
        ),
        (
            {"model": {"layers": 6}, "parallel": {"pp": 2, "vpp": 2}},
            "model.layers=6 is not a multiple of parallel.pp*vpp=4",
        ),
        ({"parallel": {"vpp": 2}}, "parallel.vpp=2 needs parallel.pp > 1"),
        (
            {"train": {"micro_batch": 3, "global_batch": 16}},
            "train.global_batch=16 is not a multiple of train.micro_batch=3",
        ),
        (
            {"data": {"text": ["a"], "seq_len": 258}, "parallel": {"cp": 2}},
            "data.seq_len=258 is not a multiple of 2*parallel.cp=4",
        ),
        ({"parallel": {"cp_comm": "a2a"}}, "parallel: cp_comm=a2a needs cp > 1"),
        ({"parallel": {"cp_comm_kv": "fp8"}}, "parallel: cp_comm_kv=fp8 needs cp > 1"),
        *(
            (
                {
                    "parallel": {"cp": 2, "cp_comm_kv": "fp8"},
                    "precision": {"recipe": recipe},
                },
                f"parallel.cp_comm_kv=fp8 with precision.recipe={recipe}: must be coat-lean",
            )
            for recipe in ("bf16", "coat")
        ),
        (
            {
                "parallel": {"cp": 2, "cp_comm_kv": "fp8"},
                "precision": {"recipe": "coat-lean", "bf16_operands": ["saved.v"]},
            },
            "precision.bf16_operands=['saved.v']: must not name saved.k or saved.v",
        ),
        (
            {"data": {"text": ["a"], "reset_attention_mask": True}, "parallel": PEERS},
            "parallel.cp_comm=p2p with data.reset_attention_mask=true: must be false",
        ),
        (
            {"model": {"window": {"size": 8}}, "parallel": PEERS},
            "parallel.cp_comm=p2p with model.window: must be null",
        ),
        (
            {"model": {"attention_softcap": 2.0}, "parallel": PEERS},
            "parallel.cp_comm=p2p with model.attention_softcap=2.0: must be null",
        ),
        (
            {"model": {"heads": 4, "kv_heads": 1}, "parallel": {"cp": 2, "cp_comm": "a2a"}},
            "model.kv_heads=1 is not a multiple of parallel.tp*cp=2",
        ),
        (
            {
                "data": {"text": ["a"], "seq_len": 257},
                "parallel": {"tp": 2, "sequence_parallel": True},
            },
            "data.seq_len=257 is not a multiple of parallel.tp*cp=2",
        ),
        ({"parallel": {"sequence_parallel": True}}, "needs parallel.tp > 1"),
        ({"parallel": {"tp_chunks": 2}}, "parallel.tp_chunks=2 needs parallel.tp > 1 and FP8"),
        (
            {"parallel": {"tp": 2, "tp_chunks": 2}, "precision": {"recipe": "bf16"}},
            "parallel.tp_chunks=2 needs parallel.tp > 1 and FP8 layers: precision.recipe=",
        ),
        (
            {"parallel": {"tp": 2, "tp_chunks": 3}, "precision": {"recipe": "coat"}},
            "is not a multiple of 16*parallel.tp_chunks=48",
        ),
        (
            {"parallel": {"tp": 2, "tp_comm_reduce": "fp8"}, "precision": {"recipe": "coat"}},
            "parallel: tp_comm_reduce=fp8 needs sequence_parallel=true",
        ),
        *(
            (
                {
                    "parallel": {"tp": 2, "sequence_parallel": True, "tp_comm_reduce": "fp8"},
                    "model": {"spec": spec},
                    "precision": {"recipe": recipe},
                },
                "parallel.tp_comm_reduce=fp8 needs parallel.tp > 1 and FP8 layers: precision.recip",
            )
            for spec, recipe in (("local", "bf16"), ("te", "te-delayed"))
        ),
        (
            {
                "parallel": {"tp": 2, "sequence_parallel": True, "tp_comm_reduce": "fp8"},
                "model": {"hidden": 192, "heads": 4},
                "precision": {"recipe": "coat"},
            },
            "model.hidden=192 is not a multiple of 128*parallel.tp_chunks=128",
        ),
        (
            {"train": {"rollbacks": 1}, "checkpoint": {"every": 0}},
            "train.rollbacks=1 needs checkpoint.every > 0",
        ),
        (
            {"precision": {"recipe": "te-delayed"}},
            "precision.recipe=te-delayed needs model.spec=te",
        ),
        (
            {"parallel": {"zero": 3}, "model": {"spec": "te"}},
            "parallel.zero=3 with model.spec=te: must be local",
        ),
        (
            {"parallel": {"zero": 3}, "precision": {"recipe": "coat", "keep_weights": True}},
            "parallel.zero=3 with precision.keep_weights=True: must be False",
        ),
        *(
            (
                {
                    "train": {"cuda_graphs": True, **train},
                    "parallel": {"tp": 2, **parallel},
                    **more,
                },
                f"train.cuda_graphs=true with {told}",
            )
            for train, parallel, more, told in (
                ({}, {"zero": 2}, {}, "parallel.zero=2: must be 0 or 1"),
                ({}, {"zero": 3}, {}, "parallel.zero=3: must be 0 or 1"),
                ({}, {"pp": 2}, {}, "parallel.pp=2: must be 1"),
                ({"recompute": "full"}, {}, {}, "train.recompute=full: must be none"),
                ({}, {}, {"model": {"spec": "te"}}, "model.spec=te: must be local"),
                (
                    {},
                    {},
                    {"precision": {"recipe": "coat", "keep_weights": True}},
                    "precision.keep_weights=True: must be False",
                ),
            )
        ),
        *(
            (
                {"train": {"update": "backward", **more.pop("train", {})}, **more},
                f"train.update=backward with {told}",
            )
            for more, told in (
                ({"parallel": {"pp": 2}}, "parallel.pp=2: must be 1"),
                ({"model": {"spec": "te"}}, "model.spec=te: must be local"),
                ({"train": {"spike_sigma": 6.0}}, "train.spike_sigma=6.0: must be 0.0"),
                ({"log": {"states_every": 5}}, "log.states_every=5: must be 0"),
                ({"parallel": {"main_grads": "fp8"}}, "parallel.main_grads=fp8: must be fp32 or"),
                (
                    {"parallel": {"overlap_grad_reduce": False}},
                    "parallel.overlap_grad_reduce=false: must be true",
                ),
            )
        ),
        (
            {"train": {"update": "backward", "cuda_graphs": True}},
            "train.cuda_graphs=true with train.update=backward: must be step",
        ),
        (
            {
                "parallel": {"weight_gather": "fp8"},
                "model": {"spec": "te"},
                "precision": {"recipe": "te-delayed"},
            },
            "precision.recipe=te-delayed; it needs one of te-current, fp8-",
        ),
        (
            {
                "parallel": {"weight_gather": "fp8"},
                "precision": {"recipe": "coat"} | {"guard": "fallback"},
            },
            "precision.guard=fallback with parallel.weight_gather=fp8",
        ),
        (
            {"precision": {"recipe": "coat"} | {"guard_every": 50}},
            "precision.guard_every=50 needs precision.guard=warn, fallback or operand",
        ),
        (
            {
                "parallel": {"weight_gather": "fp8"},
                "precision": {"recipe": "coat"} | {"guard": "operand"},
            },
            "precision.guard=operand with parallel.weight_gather=fp8",
        ),
        ({"precision": {"guard": "warn"}}, "precision.guard is for fp8-linear | coat"),
        (
            {"parallel": {"weight_gather": "fp8"}},
            "parallel.weight_gather=fp8 would change the weights of precision.recipe=bf16",
        ),
        (
            {"precision": {"recipe": "fp32"}, "optim": {"recipe": "adamw-bf16"}},
            "optim.recipe=adamw-bf16 needs BF16 weights",
        ),
    ],
)
def test_sections_that_contradict_each_other_are_refused(data: dict[str, Any], told: str) -> None:
    assert told in message(data)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("gather", ["bf16", "fp8"])
def test_microbatches_are_recorded_under_data_and_tensor_parallelism(
    zero: int, gather: str
) -> None:
    config = make_config(
        {
            "parallel": {
                **{"tp": 2, "cp": 2, "sequence_parallel": True, "zero": zero},
                **({"weight_gather": gather} if zero else {}),
            },
            "precision": {"recipe": "coat"},
            "train": {"cuda_graphs": True, "recompute": "none"},
        }
    )
    assert config.data_parallel_size(16) == 4


@pytest.mark.parametrize("value", [None, 3, "a", [1, 2]])
@pytest.mark.parametrize("section", sorted(Config.model_fields))
def test_a_section_that_is_no_mapping_is_refused(section: str, value: Any) -> None:
    shown = "null" if value is None else repr(value)
    assert message({section: value}) == f"{section}={shown}: must be a mapping"


def test_every_mistake_is_reported_on_its_own_line() -> None:
    told = message({"train": {"steps": 0}, "optim": {"lr": -1.0, "wd": 0.1}})
    assert [line.split("=")[0].split(":")[0] for line in told.splitlines()] == [
        "optim.lr",
        "optim.wd",
        "train.steps",
    ]


def test_the_data_parallel_size_is_what_the_model_parallel_ranks_leave() -> None:
    config = make_config(
        {
            "parallel": {"tp": 2, "pp": 2, "cp": 2},
            "train": {"micro_batch": 2, "global_batch": 8},
        }
    )
    assert config.data_parallel_size(8) == 1
    assert config.data_parallel_size(32) == 4


@pytest.mark.parametrize(
    ("parallel", "world_size", "told"),
    [
        ({"tp": 2, "cp": 2}, 6, "parallel.tp*pp*cp=2*1*2: start a multiple of 4"),
        ({}, 3, "train.micro_batch * data-parallel size = 2*3"),
        (
            {"grad_comm": "fp8-a2a", "grad_comm_nodes": 3},
            4,
            "parallel.grad_comm_nodes=3 does not divide the 4 ranks",
        ),
        ({"pp": 2, "vpp": 2}, 16, "1 microbatches per step are not a multiple of parallel.pp=2"),
    ],
)
def test_a_number_of_processes_that_does_not_fit_is_refused(
    parallel: dict[str, Any], world_size: int, told: str
) -> None:
    config = make_config({"parallel": parallel, "train": {"micro_batch": 2, "global_batch": 16}})
    with pytest.raises(ConfigError) as error:
        config.data_parallel_size(world_size)
    assert told in str(error.value)


def test_updates_in_backward_need_one_microbatch_per_step_and_exclude_graphs() -> None:
    sizes = {"micro_batch": 2, "global_batch": 16, "update": "backward", "cuda_graphs": "auto"}
    config = make_config({"model": {"hidden": 256}, "train": sizes})
    assert config.data_parallel_size(8) == 8 and not config.cuda_graphs
    assert make_config({"model": {"hidden": 256}, "train": sizes | {"update": "step"}}).cuda_graphs
    with pytest.raises(ConfigError) as error:
        config.data_parallel_size(4)
    assert str(error.value) == (
        "train.update=backward with train.global_batch=16: must be train.micro_batch * "
        "data-parallel size = 2*4, one microbatch per step"
    )


@pytest.mark.parametrize(
    ("tp", "hidden", "graphs"),
    [
        (1, 2048, True),
        (1, 2080, False),
        (2, 4096, True),
        (2, 4128, False),
        (4, 5760, True),
        (4, 5824, False),
    ],
)
def test_graphs_are_automatic_up_to_a_size_of_the_layers(
    tp: int, hidden: int, graphs: bool
) -> None:
    """At most 2048 on one rank; with more, where hidden^2 / tp is at most 2 * 2048^2."""
    sections = {"model": {"hidden": hidden, "heads": 16}, "parallel": {"tp": tp}}
    config = make_config(sections | {"train": {"cuda_graphs": "auto"}})
    assert config.cuda_graphs == graphs
    assert not make_config(sections).cuda_graphs


def test_kv_heads_and_head_dim_follow_from_heads_and_hidden() -> None:
    model = make_config({"model": {"hidden": 96, "heads": 6}}).model
    assert (model.key_value_heads, model.size_per_head) == (6, 16)
    model = make_config({"model": {"hidden": 100, "heads": 6, "head_dim": 16}}).model
    assert (model.key_value_heads, model.size_per_head) == (6, 16)


def test_nothing_can_be_changed_after_loading() -> None:
    config = make_config({})
    with pytest.raises(pydantic.ValidationError):
        config.train.steps = 1
    with pytest.raises(pydantic.ValidationError):
        config.train = config.train


def test_an_override_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {steps: 7, micro_batch: 2}\noptim: {lr: 3e-4}\n")
    config = load_config(path, ["train.steps=9", "optim.lr=5e-4", "optim.betas=[0.8, 0.9]"])
    assert config.train.steps == 9
    assert config.train.micro_batch == 2
    assert config.train.global_batch == Config().train.global_batch
    assert config.optim.lr == 5e-4
    assert config.optim.betas == (0.8, 0.9)


def test_the_last_of_two_overrides_wins(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "{}"), ["train.steps=9", "train.steps=8"])
    assert config.train.steps == 8


def test_exponents_without_a_point_are_numbers(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "optim: {lr: 3e-4}\n")).optim.lr == 3e-4


def test_an_empty_mapping_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "{}")) == Config()


@pytest.mark.parametrize(
    ("text", "overrides", "told"),
    [
        ("train: {steps: 1\n", [], "not valid YAML"),
        ("train: {steps: 1}\ntrain: {steps: 2}\n", [], "duplicate key train"),
        ("", [], "run.yaml: the file is empty"),
        ("# nothing\n", [], "run.yaml: the file is empty"),
        ("- train\n- model\n", [], "a mapping of sections, not ['train', 'model']"),
        ("3\n", [], "a mapping of sections, not 3"),
        ("{}\n---\n{}\n", [], "line 2"),
        ("train: {1: 2}\n", [], "train.1: a key must be text"),
        ("run: {name: !!python/name:os.system ''}\n", [], "could not determine a constructor"),
        ("{}", ["train.steps"], "'train.steps': an override is key=value"),
        ("{}", ["=3"], "'=3': an override is key=value"),
        ("{}", ["train..steps=3"], "'train..steps=3': an override is key=value"),
        ("{}", ["train.stesp=3"], "train.stesp: unknown key; do you mean train.steps?"),
        ("{}", ["optim.betas=[0.8"], "optim.betas=[0.8: not valid YAML"),
        ("{}", ["train.steps=5 # five"], "train.steps=5 # five: ` #` starts a comment"),
        ("{}", ["model=3"], "model=3: "),
        ("model: 3\n", ["model.layers=2"], "model=3 in the file is not a mapping"),
    ],
)
def test_a_file_or_override_that_cannot_be_read_is_an_error_of_the_user(
    tmp_path: Path, text: str, overrides: list[str], told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, text), overrides)
    assert told in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such configuration file"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_directory_or_a_binary_file_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "run.bin").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "run.bin"):
        with pytest.raises(ConfigError):
            load_config(path)


def test_a_dataset_may_be_a_path_or_a_path_with_a_weight() -> None:
    data = make_config({"data": {"paths": ["a", {"path": "b", "weight": 3}]}}).data
    assert [(str(s.path), s.weight) for s in data.paths] == [("a", 1.0), ("b", 3.0)]


def test_attention_stays_within_documents_of_prepared_data_unless_told_otherwise() -> None:
    prepared, text = {"text": [], "paths": ["a"]}, {"text": ["a"]}
    for data, more, expected in (
        (prepared, {}, True),
        (text, {}, False),
        (prepared, {"reset_attention_mask": False}, False),
        (text, {"reset_attention_mask": True}, True),
    ):
        config = make_config({"data": {**data, **more}})
        assert config.data.reset_attention_mask is expected
        assert make_config(config.model_dump(mode="json")) == config
    with pytest.raises(ConfigError, match=r"^data\.paths=3: [^\n]*$"):
        make_config({"data": {"paths": 3}})
    with pytest.raises(ConfigError, match=r"or data\.reset_attention_mask=false be given"):
        make_config({"model": {"head_dim": 12}, "data": prepared})


@given(
    name=st.text(
        st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1
    ),
    lr=st.floats(1e-9, 1e3),
    weight=st.floats(1e-6, 1e6),
    profile=st.none() | st.integers(1, 9).map(lambda n: (n, n + 1)),
)
@settings(max_examples=30)
def test_to_yaml_loads_as_the_same_config(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    lr: float,
    weight: float,
    profile: tuple[int, int] | None,
) -> None:
    config = make_config(
        {
            "run": {"name": name, "dir": f"runs/{lr}"},
            "model": {"rope_scaling": {"factor": 1.0 + lr}},
            "data": {"paths": ["a", {"path": "b", "weight": weight}]},
            "optim": {"lr": lr, "min_lr": lr / 3},
            "log": {"profile": profile},
        }
    )
    path = write(tmp_path_factory.mktemp("round_trip"), config.to_yaml())
    assert load_config(path) == config


def test_steps_that_the_run_does_not_reach_cannot_be_profiled() -> None:
    told = message({"log": {"profile": [5, 9]}, "train": {"steps": 8}})
    assert told == "log.profile=[5, 9] with train.steps=8: must be at least 9"
    assert make_config({"log": {"profile": [5, 9]}, "train": {"steps": 9}}).log.profile == (5, 9)


UNSUITED = [
    ({"norm_after": True}, {}, {}, "precision.recipe=coat with model.norm_after=True"),
    ({"residual_multiplier": 0.5}, {}, {}, "precision.recipe=coat with model.residual_multiplier"),
    ({"qk_norm": True, "qk_norm_width": "all"}, {"tp": 2}, {}, "model.qk_norm_width=all with"),
    ({"qk_norm_width": "all"}, {}, {"recipe": "bf16"}, "qk_norm_width=all needs qk_norm=true"),
    ({"norm_after": True, "spec": "te"}, {}, {"recipe": "bf16"}, "needs model.spec=local"),
    *(
        ({name: value}, {}, {}, f"precision.recipe=coat with model.{name}=")
        for name, value in (
            ("sandwich_norm", True),
            ("zero_centered_norm", True),
            ("activation", "gelu_tanh"),
            ("attention_softcap", 50.0),
        )
    ),
    ({"sandwich_norm": True, "norm_after": True}, {}, {}, "sandwich_norm=true: at most one"),
    ({"zero_centered_norm": True, "spec": "te"}, {}, {"recipe": "bf16"}, "needs model.spec=local"),
    ({"scale_embeddings": True, "embedding_multiplier": 2.0}, {}, {}, "must be 1"),
    ({"partial_rotary_factor": 0.6}, {}, {}, "are 19 elements: must be an even number"),
    ({"window": {"period": 2, "full_layers": 1}}, {}, {}, "period=2 needs full_layers=0, not 1"),
    ({"window": {}, "head_dim": 20}, {}, {}, "model.window with model.head_dim=20: must be a mult"),
    ({"window": {"period": 5}}, {}, {}, "window.period=5 has no effect with layers=4"),
    ({"window": {"full_layers": 4}}, {}, {}, "window.full_layers=4 has no effect with layers=4"),
    ({"rope_scaling": {"type": "longrope"}}, {}, {}, "needs short_factor and long_factor"),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {},
        {},
        "rope_scaling.short_factor has 1 numbers: must have one for each of the 16 frequencies",
    ),
    ({"rope_scaling": {"type": "yarn", "low_freq_factor": 1.0}}, {}, {}, "does not apply to type"),
    ({"rope_scaling": {"type": "linear", "beta_fast": 3.0}}, {}, {}, "beta_fast=3.0 does not"),
    ({"rope_scaling": {"type": "yarn", "beta_slow": 40.0}}, {}, {}, "beta_slow=40.0 must be below"),
]


@pytest.mark.parametrize(("model", "parallel", "precision", "told"), UNSUITED)
def test_a_model_that_layers_or_layouts_cannot_compute_is_refused_by_name(
    model: dict[str, Any], parallel: dict[str, Any], precision: dict[str, Any], told: str
) -> None:
    precision = {"recipe": "coat"} | precision
    assert told in message({"model": model, "parallel": parallel, "precision": precision})


@pytest.mark.parametrize(
    ("sections", "data_parallel", "captured"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"train": {"micro_batch": 1}}, 1, False),  # 64 microbatches
        ({"optim": {"offload": "states"}}, 1, False),
        ({"precision": {"recipe": "fp32"}}, 1, False),
        ({"parallel": {"tp": 2, "sequence_parallel": True}}, 1, False),
        ({"parallel": {"cp": 2}}, 1, False),
        ({"train": {"cuda_graphs": False}}, 1, False),
    ],
)
def test_a_graph_holds_a_step_of_at_most_32_microbatches_in_one_process(
    sections: dict[str, Any], data_parallel: int, captured: bool
) -> None:
    train = {"micro_batch": 2, "global_batch": 64, "cuda_graphs": True}
    config = make_config({**sections, "train": train | sections.get("train", {})})
    assert config.captures_steps(data_parallel) == captured
