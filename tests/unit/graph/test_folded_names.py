"""Names folded over their numbers, and back."""

from hypothesis import given
from hypothesis import strategies as st

from autoprec.graph.folded_names import folded, numbers_in, ranges, unfolded

PARTS = st.sampled_from(["", "a", "blocks", "0", "1", "2", "10", "007", "@loss"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)


def test_layers_that_are_alike_are_one_name() -> None:
    values = {f"blocks.{block}.mlp.{place}": "linear" for block in range(4) for place in (0, 2)}
    assert folded(values) == {"blocks.{0-3}.mlp.{0,2}": "linear"}


def test_layers_that_differ_stay_apart() -> None:
    values = {"blocks.0": "a", "blocks.1": "b", "blocks.2": "a", "head": "a"}
    assert folded(values) == {"blocks.{0,2}": "a", "blocks.1": "b", "head": "a"}


def test_experts_of_some_layers_alone() -> None:
    values = {f"{layer}.{expert}": "x" for layer, expert in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1))}
    assert unfolded(folded(values)) == values


@given(st.dictionaries(NAMES, st.sampled_from(["x", "y"]), max_size=12))
def test_every_name_comes_back(values: dict[str, str]) -> None:
    assert unfolded(folded(values)) == values


@given(st.sets(st.integers(0, 50), min_size=1))
def test_numbers_come_back(numbers: set[int]) -> None:
    assert list(numbers_in(ranges(numbers))) == sorted(numbers)
