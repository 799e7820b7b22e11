"""What may differ between a checkpoint and the run that continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coatlm.config import Config, ConfigError, Model, make_config
from coatlm.data.identity import SourceIdentity
from coatlm.train.changes import TENSORS, changed_keys, check_changes, check_same_model
from coatlm.train.checkpoint import CheckpointError

PATH = Path("runs/a/checkpoints/step_00000010")
DATA = [SourceIdentity(documents=3, tokens=1000, weight=1.0, sha256="ab" * 32)]


def config(**sections: Any) -> Config:
    return make_config({"data": {"text": ["a.txt"]}} | sections)


def state(saved: Config, **changes: Any) -> dict[str, Any]:
    return {
        "config": saved.model_dump(mode="json"),
        "tokenizer": "f" * 64,
        "data": DATA,
        "step": 10,
    } | changes


def check(now: Config, saved: dict[str, Any], **changes: Any) -> list[str]:
    given: dict[str, Any] = {"tokenizer": "f" * 64, "data": DATA} | changes
    return check_changes(PATH, saved, now, **given)


def test_nothing_is_listed_where_nothing_changed_but_names_and_places() -> None:
    now = config(run={"dir": "elsewhere", "name": "b"}, log={"every": 3}, checkpoint={"keep": 9})
    assert check(now, state(config())) == []


def test_what_may_change_is_listed_as_old_and_new() -> None:
    now = config(optim={"lr": 2e-3}, train={"global_batch": 32}, precision={"recipe": "coat"})
    assert check(now, state(config())) == [
        "precision.recipe: bf16 -> coat",
        "optim.lr: 0.001 -> 0.002",
        "train.global_batch: 16 -> 32",
    ]


OTHER = [SourceIdentity(documents=3, tokens=1000, weight=1.0, sha256="cd" * 32)]
REFUSED: dict[str, tuple[Config, dict[str, Any], str]] = {
    "data.split": (
        config(data={"text": ["a.txt"], "split": [90, 5, 5]}),
        {},
        "data.split: [96.0, 2.0, 2.0] -> [90.0, 5.0, 5.0]",
    ),
    "data.packing": (
        config(data={"text": ["a.txt"], "packing": "best-fit"}),
        {},
        "data.packing: concat -> best-fit",
    ),
    "run.seed": (config(run={"seed": 1}), {}, "run.seed: 1234 -> 1"),
    "optim.recipe": (
        config(optim={"recipe": "coat"}),
        {},
        "optim.recipe: adamw-fp32 -> coat",
    ),
    "data.tokenizer": (
        config(data={"text": ["a.txt"], "tokenizer": "hf:b.json"}),
        {"tokenizer": "e" * 64},
        "data.tokenizer: byte (fingerprint ffffffff) -> hf:b.json (fingerprint eeeeeeee)",
    ),
    "data.text": (
        config(),
        {"data": OTHER},
        "data.text: 1,000 tokens (abababab) -> 1,000 tokens (cdcdcdcd)",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_another_run_is_refused_until_the_change_is_named(key: str) -> None:
    now, changes, line = REFUSED[key]
    with pytest.raises(ConfigError) as refused:
        check(now, state(config()), **changes)
    assert str(refused.value).splitlines()[0] == line
    assert f"checkpoint.allow_changes=[{key}]" in str(refused.value)
    allowed = make_config(now.model_dump() | {"checkpoint": {"allow_changes": [key]}})
    assert check(allowed, state(config()), **changes) == [line]


def test_a_change_that_was_not_named_is_still_refused() -> None:
    now = config(
        data={"text": ["a.txt"], "split": [90, 5, 5]},
        run={"seed": 1},
        checkpoint={"allow_changes": ["data.split"]},
    )
    with pytest.raises(ConfigError, match=r"run.seed: 1234 -> 1\n.*allow_changes=\[run.seed\]"):
        check(now, state(config()))


def test_a_copy_of_the_data_in_another_place_is_listed_and_not_refused() -> None:
    moved = config(data={"text": ["/copy/a.txt"]})
    assert check(moved, state(config())) == ['data.text: ["a.txt"] -> ["/copy/a.txt"]']


def blend(*weights: float) -> list[SourceIdentity]:
    return [SourceIdentity(**DATA[0] | {"weight": w}) for w in weights]  # type: ignore[typeddict-item]


def test_a_change_of_the_weights_of_a_blend_is_another_run() -> None:
    with pytest.raises(ConfigError) as refused:
        check(config(), state(config(), data=blend(3.0, 1.0)), data=blend(3.0, 2.0))
    assert str(refused.value).splitlines()[0] == (
        "data.text: source 2 of 2: 1,000 tokens (abababab), weight 1 -> "
        "1,000 tokens (abababab), weight 2"
    )


@pytest.mark.parametrize("now", [(6.0, 2.0), (0.3, 0.1), (0.75, 0.25)])
def test_proportional_weights_of_a_blend_are_no_change(now: tuple[float, float]) -> None:
    assert check(config(), state(config(), data=blend(3.0, 1.0)), data=blend(*now)) == []
    assert check(config(), state(config()), data=blend(now[0])) == []


def test_a_checkpoint_of_a_version_without_data_and_new_keys_is_continued() -> None:
    saved = state(config())
    del saved["data"], saved["config"]["checkpoint"]["allow_changes"]
    del saved["config"]["optim"]["eps"]  # as if it were new: its default was used
    assert check(config(), saved) == []


def test_another_model_or_dtype_of_weights_does_not_fit() -> None:
    for now, said in (
        (
            config(model={"ffn": 768}),
            "model.ffn is 704 in the checkpoint and 768 in this configuration",
        ),
        (
            config(precision={"recipe": "fp32"}),
            "precision.recipe is 'bf16' in the checkpoint and 'fp32'",
        ),
    ):
        with pytest.raises(CheckpointError, match=said):
            check(now, state(config()))


@pytest.mark.parametrize(
    ("key", "value"), [("rope_theta", 500000.0), ("norm_eps", 1e-6), ("logits_scaling", 2.0)]
)
def test_another_function_of_the_same_tensors_is_refused_unless_only_weights_are_loaded(
    key: str, value: float
) -> None:
    now = config(model={key: value})
    with pytest.raises(ConfigError, match=f"model.{key} is .* changes the function that the"):
        check(now, state(config()))
    with pytest.raises(CheckpointError, match="its tensors do not fit"):  # no option allows that
        check(config(model={key: value, "qkv_bias": True}), state(config()))
    keys = changed_keys(config().model_dump(mode="json"), now)
    assert check_same_model(PATH, keys, weights_only=True) == keys
    assert list(keys) == [f"model.{key}"]


def test_every_key_of_the_model_by_which_tensors_differ_exists() -> None:
    assert set(TENSORS) <= set(Model.model_fields)


def test_the_standard_deviation_of_initial_weights_has_no_effect_on_a_resumed_run() -> None:
    assert check(config(model={"init_std": 0.01}), state(config())) == []


def test_a_vocabulary_that_one_side_takes_from_the_tokenizer_is_compared_with_the_tensors() -> None:
    given = config(model={"vocab": 384})
    assert check(given, state(config())) == check(config(), state(given)) == []
    with pytest.raises(CheckpointError, match=r"model\.vocab is 384 in the checkpoint and 512"):
        check(config(model={"vocab": 512}), state(given))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"window": {"size": 64}}, r"window\.\w+ is"),
        ({"rope_scaling": {}}, r"rope_scaling\.\w+ is"),
    ],
)
def test_an_optional_section_of_the_model_cannot_be_added_or_dropped(
    section: dict[str, Any], said: str
) -> None:
    with_it, without = config(model=section), config()
    assert check(with_it, state(with_it)) == []
    for now, before in ((with_it, without), (without, with_it)):
        with pytest.raises(ConfigError, match=f"model.{said}"):
            check(now, state(before))


def test_any_recipe_of_layers_with_bf16_weights_and_any_spec_fits() -> None:
    saved = config().model_dump(mode="json")
    te = config(precision={"recipe": "te-delayed"}, model={"spec": "te"})
    check_same_model(PATH, changed_keys(saved, te))
    assert check(te, state(config())) == [
        "model.spec: local -> te",
        "precision.recipe: bf16 -> te-delayed",
    ]


def test_names_of_bf16_operands_in_older_checkpoints_and_their_order_are_no_change() -> None:
    four = [f"saved.{name}" for name in "qkvo"]
    now = config(precision={"recipe": "coat-lean", "bf16_operands": [*four, "dgrad.weight"]})
    saved = state(now)
    saved["config"]["precision"]["bf16_operands"] = ["saved.attention", "dgrad.weight"]
    assert check(now, saved) == []
    fewer = config(precision={"recipe": "coat-lean", "bf16_operands": [*four[1:], "dgrad.weight"]})
    assert check(fewer, saved) == [
        'precision.bf16_operands: ["dgrad.weight", "saved.q", "saved.k", "saved.v", "saved.o"] -> '
        '["saved.k", "saved.v", "saved.o", "dgrad.weight"]'
    ]
