"""Rescaled weights: the same function in fp32, gradients that map back, and outliers that grow."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.tools.stressed import Opened, open_stressed, relative
from tools.studies import outliers
from tools.studies.outliers import (
    EMBEDDING,
    STRESSES,
    Activations,
    Rescaling,
    Stress,
    layers_of,
    outlier_ratio,
    principal,
    readers,
    rounded,
    tracked_norms,
    writers,
)

EXACT = ("swiglu", "aligned", "norm")
# Rescaling by a power of two changes no rounding; sums may add in another order: sqrt(96) fp32 eps
SAME = 2e-6
FACTOR = 1024
LAYERS = {
    f"decoder.layers.{number}.{name}.weight": torch.zeros(5, 3)
    for number in (0, 10, 2)
    for name in ("self_attention.linear_proj", "mlp.linear_fc2")
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with open_stressed(tmp_path_factory.mktemp("outliers")) as found:
        yield found


def test_the_tokens_of_calibration_are_not_those_of_the_errors(opened: Opened) -> None:
    assert len(opened.calibration) == 8
    tokens = opened.batch["tokens"]
    assert not any(torch.equal(tokens, batch["tokens"]) for batch in opened.calibration)


@pytest.mark.parametrize("name", EXACT)
def test_exact_stresses_leave_every_loss_and_gradient_as_it_is(opened: Opened, name: str) -> None:
    stress = STRESSES[name](opened.weights, opened.seen)
    assert stress.exact
    results = {}
    for factor in (1, FACTOR):
        opened.model.load(stress.weights(factor))
        results[factor] = opened.model.run(opened.batch)
        stress.pull_back_(results[factor].gradients, factor)
    assert relative(results[FACTOR].losses, results[1].losses) < SAME
    # aligned is linear in its channels' gate for no token: only what is around the pair stays
    free = ("linear_fc1.weight", "linear_fc2.weight") if name == "aligned" else ()
    for key, wanted in results[1].gradients.items():
        if not key.endswith(free):
            assert relative(results[FACTOR].gradients[key], wanted) < 20 * SAME, key


def test_folding_gains_and_reflecting_the_stream_keep_the_losses(opened: Opened) -> None:
    direction = torch.randn(64, generator=torch.Generator().manual_seed(1))
    moved = outliers.reflected(outliers.folded(opened.weights), direction / direction.norm())
    assert relative(moved[EMBEDDING], opened.weights[EMBEDDING]) > 0.1
    assert all((moved[gain] == 1).all() for gain, _ in readers(moved))
    wanted = opened.losses(opened.weights)
    # dense rotations round every weight and sum once more: 1e-7 * sqrt(64) per layer
    assert relative(opened.losses(moved), wanted) < 2e-5


def test_a_reflection_turns_the_direction_into_channel_0(opened: Opened) -> None:
    direction = outliers.direction_of(opened.seen, largest=True).float()
    moved = outliers.reflected(opened.weights, direction)[EMBEDDING]
    torch.testing.assert_close(moved[:, 0], opened.weights[EMBEDDING] @ direction)
    torch.testing.assert_close(moved.norm(dim=1), opened.weights[EMBEDDING].norm(dim=1))
    already = torch.zeros(64)
    already[0] = 1.0
    same = outliers.reflected(opened.weights, already)[EMBEDDING]
    assert torch.equal(same, opened.weights[EMBEDDING])


def test_swiglu_multiplies_the_strongest_channels_and_no_other(opened: Opened) -> None:
    stress = STRESSES["swiglu"](opened.weights, opened.seen)
    key = "decoder.layers.2.mlp.linear_fc2.weight"
    before, after = (opened.inputs(stress, factor).linear[key] for factor in (1, FACTOR))
    strongest = opened.seen.linear[key].square().mean(0).argmax()
    factors = torch.ones(96)
    factors[strongest] = FACTOR  # one channel of 96
    torch.testing.assert_close(after, before * factors, rtol=1e-4, atol=1e-5)


def test_aligned_channels_are_parallel_cancel_and_grow_by_the_factor(opened: Opened) -> None:
    stress = STRESSES["aligned"](opened.weights, opened.seen)
    for layer in range(3):
        fc1 = stress.base[f"decoder.layers.{layer}.mlp.linear_fc1.weight"]
        fc2 = stress.base[f"decoder.layers.{layer}.mlp.linear_fc2.weight"]
        pair = [j for j in range(96) if torch.equal(fc1[j], fc1[96 + j])]
        assert len(pair) == 2 and torch.equal(fc1[pair[0]], fc1[pair[1]])
        assert torch.equal(fc2[:, pair[0]], -fc2[:, pair[1]]) and fc2[:, pair[0]].any()
        down = opened.weights[f"decoder.layers.{layer}.mlp.linear_fc2.weight"]
        a = opened.seen.linear[f"decoder.layers.{layer}.mlp.linear_fc2.weight"]
        contributed = torch.stack([(a[:, [j]] * down[:, j]).norm() for j in range(96)])
        assert set(pair) == set(contributed.argsort()[:2].tolist())
    key = "decoder.layers.2.mlp.linear_fc2.weight"
    before, after = (opened.inputs(stress, factor).linear[key] for factor in (1, FACTOR))
    others = [j for j in range(96) if j not in pair]
    torch.testing.assert_close(after[:, others], before[:, others], rtol=1e-3, atol=1e-4)
    # silu(z) lies between z / 2 and z where z > 0, and the largest a_j is where z is largest
    growth = float(after[:, pair].abs().amax() / before[:, pair].abs().amax())
    assert growth * (1 + 1e-4) >= FACTOR and growth < 2 * FACTOR
    largest = float(before[:, others].abs().amax())
    assert largest / 4 < float(before[:, pair].abs().amax()) < 4 * largest
    assert torch.equal(after[:, pair[0]], after[:, pair[1]])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_aligned_rows_point_to_where_the_norm_output_reaches_furthest(sign: float) -> None:
    direction = torch.tensor([0.6, 0.8, 0.0])
    fc1, fc2 = (f"decoder.layers.0.mlp.linear_fc{i}.weight" for i in (1, 2))
    weights = {fc1: torch.zeros(8, 3), fc2: torch.rand(3, 4) + 0.1}
    y = sign * torch.tensor([[1.0], [2.0], [5.0], [-0.5]]) * direction
    a = torch.full((4, 4), -9.0)
    stress = STRESSES["aligned"](weights, Activations({}, {fc1: y, fc2: a}, eps=1e-5))
    row = max(stress.base[fc1], key=lambda row: float(row.norm()))
    # gate * up = 9, the largest |a|, at the furthest token; the weights are BF16
    torch.testing.assert_close(y @ row, torch.tensor([0.6, 1.2, 3.0, -0.3]), rtol=2**-7, atol=0)


def test_norm_multiplies_channel_0_of_every_norm(opened: Opened) -> None:
    stress = STRESSES["norm"](opened.weights, opened.seen)
    for layer in range(3):
        key = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        before, after = (opened.inputs(stress, factor).linear[key] for factor in (1, FACTOR))
        torch.testing.assert_close(after[:, 0], before[:, 0] * FACTOR, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(after[:, 1:], before[:, 1:], rtol=1e-4, atol=1e-5)
        # the principal direction has more power than any channel had before
        power = before.square().mean(0)
        assert power.argmax() == 0


def test_stream_keeps_the_function_where_its_channel_follows_the_norm(opened: Opened) -> None:
    weights = dict(opened.weights)
    for key in writers(weights):  # the stream is the embedding: its norms are known by token
        weights[key] = torch.zeros_like(weights[key])
    opened.model.load(weights)
    stress = STRESSES["stream"](weights, opened.model.activations(opened.calibration))
    assert not stress.exact
    for gain, linear in readers(stress.base):
        assert stress.base[gain][0] == 1 and not stress.base[linear][:, 0].any()
    losses = {factor: opened.losses(stress.weights(factor)) for factor in (1, FACTOR)}
    # the epsilon is 4 % of the power of x, which varies by a fifth over tokens; gains are BF16. The
    # least of 64 directions is dropped from the start
    assert relative(losses[FACTOR], losses[1]) < 0.008
    assert relative(losses[1], opened.losses(rounded(weights))) < 0.02
    for x in opened.inputs(stress, FACTOR).stream.values():
        others = (x[:, 1:].square().sum(1) / 64).sqrt()
        torch.testing.assert_close(x[:, 0], FACTOR * others, rtol=2**-7, atol=0.0)
        assert outlier_ratio(x) == pytest.approx(FACTOR, rel=0.2)


def test_stream_multiplies_the_rows_that_write_its_channel(opened: Opened) -> None:
    stress = STRESSES["stream"](opened.weights, opened.seen)
    rescaled = stress.weights(8)
    for key in writers(stress.base):
        assert stress.base[key][0].any()
        assert torch.equal(rescaled[key][0], 8 * stress.base[key][0])
        assert torch.equal(rescaled[key][1:], stress.base[key][1:])


def test_layers_are_in_the_order_of_the_model() -> None:
    assert [name[-2:] for name in layers_of(LAYERS)] == [".0", ".2", "10"]


def test_rows_that_track_norms_are_found_where_norms_grow_linearly() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = list(writers(LAYERS))
    rows = {key: torch.rand(3, generator=generator) for key in keys}
    inputs = {key: torch.rand(200, 3, generator=generator) for key in keys}
    size, stream = torch.rand(200, generator=generator) + 1, {}
    for number, key in enumerate([None, *keys]):
        if key is not None:
            size = size + inputs[key] @ rows[key]
        stream[str(number)] = size[:, None].expand(-1, 5)  # rms(x) = size
    found = tracked_norms(LAYERS, Activations(stream, inputs, eps=1e-5))
    for key, row in rows.items():
        torch.testing.assert_close(found[key], row, rtol=2e-3, atol=2e-3)  # RIDGE = 1e-4


def test_weights_of_a_factor_are_bf16_and_the_base_stays(opened: Opened) -> None:
    for name, make in STRESSES.items():
        stress = make(opened.weights, opened.seen)
        before = {key: weight.clone() for key, weight in stress.base.items()}
        assert all(torch.equal(before[key], w) for key, w in stress.weights(1).items()), name
        for key, weight in stress.weights(FACTOR).items():
            assert torch.equal(weight, weight.bfloat16().float()), (name, key)
        assert all(torch.equal(before[key], weight) for key, weight in stress.base.items()), name
        assert stress.name == name


def test_gradients_of_base_weights_are_those_of_a_derivative() -> None:
    rescalings = [
        Rescaling("w", 0, torch.tensor([1]), 8.0),
        Rescaling("w", 1, torch.tensor([0]), 0.5),
    ]
    base = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    stress = Stress("w", {"w": base}, lambda factor: rescalings, "w")
    rescaled = stress.weights(8)["w"].requires_grad_()
    rescaled.sin().sum().backward()
    gradients = {"w": rescaled.grad.clone()}  # type: ignore[union-attr]
    stress.pull_back_(gradients, 8)
    leaf = base.clone().requires_grad_()
    (leaf * torch.tensor([[0.5, 1.0], [4.0, 8.0], [0.5, 1.0]])).sin().sum().backward()
    torch.testing.assert_close(gradients["w"], leaf.grad)


def test_principal_is_the_direction_with_the_most_and_the_least_power() -> None:
    x = torch.tensor([[3.0, 4.0, 0.0], [-3.0, -4.0, 0.0], [0.4, -0.3, 0.0], [0.0, 0.0, 2.0]])
    most, least = principal(x), principal(x, largest=False)
    torch.testing.assert_close(most.abs(), torch.tensor([0.6, 0.8, 0.0]).double())
    torch.testing.assert_close(least.abs(), torch.tensor([0.8, 0.6, 0.0]).double())


def test_outlier_ratio_is_the_largest_to_the_median_channel() -> None:
    x = torch.tensor([[1.0, 2.0, 30.0], [1.0, -2.0, -30.0]])
    assert outlier_ratio(x) == pytest.approx(15.0)
    assert math.isnan(outlier_ratio(x * math.nan))
