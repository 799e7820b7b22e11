"""Who owns what: FP8-LM's balance of whole tensors, and nodes of ranks."""

import pytest

from coatlm.parallel.groups import split_into_nodes
from coatlm.parallel.partition import largest_first


def matrices(hidden: int, layers: int) -> list[int]:
    """Elements of qkv, projection and the two of the MLP in the GPT layers of FP8-LM's models."""
    return [3 * hidden**2, hidden**2, 4 * hidden**2, 4 * hidden**2] * layers


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "waste"),
    [("7B", 4096, 32, 0.0), ("13B", 5120, 40, 0.0), ("125M", 768, 12, 1 / 3)],
)
def test_waste_over_32_ranks(name: str, hidden: int, layers: int, waste: float) -> None:
    assert largest_first(matrices(hidden, layers), 32).waste == pytest.approx(waste, abs=1e-12)


def test_the_plan_is_printed_with_its_balance() -> None:
    assert str(largest_first(matrices(768, 12), 32)) == (
        "48 whole tensors over 32 ranks: 2,359,296 to 3,538,944 elements each, "
        "the largest 33% above the mean"
    )


def test_each_tensor_goes_to_the_emptiest_rank() -> None:
    plan = largest_first([1, 8, 7, 2, 3], 2)
    assert plan.owner == (0, 0, 1, 0, 1) and plan.loads == (11, 10)


def test_pinned_tensors_are_on_the_first_rank() -> None:
    plan = largest_first([5, 5, 1], 2, pinned=[2])
    assert plan.owner == (1, 0, 0) and plan.loads == (6, 5)


def test_more_ranks_than_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tensors cannot be spread over 3"):
        largest_first([1, 1], 3)


@pytest.mark.parametrize(
    ("first", "nodes", "expected"),
    [
        ([0, 0, 0, 0], None, [[0, 1, 2, 3]]),  # one node
        ([0, 0, 2, 2], None, [[0, 1], [2, 3]]),
        ([0, 1, 2, 3], None, [[0, 1, 2, 3]]),  # one rank on each: levels gain nothing
        ([0, 0, 0, 3], None, [[0, 1, 2, 3]]),  # different numbers
        ([0, 1, 0, 1], None, [[0, 1, 2, 3]]),  # not side by side
        ([0, 0, 0, 0], 2, [[0, 1], [2, 3]]),  # as told
        ([0, 0, 2, 2], 1, [[0, 1, 2, 3]]),
    ],
)
def test_ranks_are_split_into_nodes_where_that_helps(
    first: list[int], nodes: int | None, expected: list[list[int]]
) -> None:
    members = [0, 1, 2, 3]
    assert split_into_nodes(members, dict(enumerate(first)), nodes) == expected
