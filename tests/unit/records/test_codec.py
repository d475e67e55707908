"""Dataclasses to JSON values and back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from autoprec.errors import RecordError
from autoprec.records.codec import decode, encode


@dataclass(frozen=True, kw_only=True)
class Inner:
    number: int
    maybe: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    word: Literal["a", "b"]
    flag: bool
    losses: tuple[float, ...] = ()
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    anything: Mapping[str, Any] = field(default_factory=dict)


FULL = Outer(
    word="b",
    flag=True,
    losses=(1.5, -0.0),
    inner=Inner(number=3, maybe=0.25),
    inners=(Inner(number=1), Inner(number=2, maybe=-1.0)),
    anything={"x": [1, {"y": None}]},
)


def test_every_field_comes_back() -> None:
    assert decode(Outer, encode(FULL)) == FULL


def test_fields_keep_their_order() -> None:
    assert list(encode(FULL)) == ["word", "flag", "losses", "inner", "inners", "anything"]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_comes_back(value: float) -> None:
    (back,) = decode(Outer, encode(Outer(word="a", flag=False, losses=(value,)))).losses
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_an_int_where_a_float_belongs_becomes_one() -> None:
    (back,) = decode(Outer, {"word": "a", "flag": False, "losses": [2]}).losses
    assert isinstance(back, float)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"word": "c", "flag": True}, "record.word"),
        ({"word": "a", "flag": 1}, "record.flag"),
        ({"word": "a"}, "flag"),
        ({"word": "a", "flag": True, "extra": 1}, "extra"),
        ({"word": "a", "flag": True, "losses": [1.0, "two"]}, r"record.losses\[1\]"),
        ({"word": "a", "flag": True, "losses": 1.0}, "record.losses"),
        ({"word": "a", "flag": True, "inners": [{"number": True}]}, r"record.inners\[0\].number"),
        ({"word": "a", "flag": True, "anything": []}, "record.anything"),
        ([], "record: expected Outer"),
    ],
)
def test_damage_is_reported_where_it_is(data: Any, place: str) -> None:
    with pytest.raises(RecordError, match=place):
        decode(Outer, data)
