"""Default random generators that a step sets itself are set alike in a replay."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autoprec.capture.random_state import is_default
from tests.unit.capture.steps import Run, check_faithful, step


def seeding(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return F.dropout(m.one(x))


def forking(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.rand(4)
    return F.dropout(m.one(x)) * noise


def repeating(m: Any, x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = F.dropout(m.one(x))
    torch.set_rng_state(state)
    return first * F.dropout(m.two(x))


def by_its_object(m: Any, x: torch.Tensor) -> torch.Tensor:
    drawn = torch.rand(4, generator=torch.default_generator)
    first = F.dropout(m.one(x) * drawn)
    torch.default_generator.manual_seed(5)
    return F.dropout(first)


@pytest.mark.parametrize("run", [seeding, forking, repeating, by_its_object])
def test_a_generator_that_is_set_in_the_step(run: Run) -> None:
    check_faithful(step(run))


def test_setting_is_recorded_only_where_it_happens() -> None:
    ops = [node.op for node in check_faithful(step(seeding)).op_graph]
    assert ops.count("set_rng_state") == 1
    assert "set_rng_state" not in [n.op for n in check_faithful(step(lambda m, x: F.dropout(m.one(x)))).op_graph]


def test_is_default() -> None:
    assert is_default(torch.default_generator)
    assert not is_default(torch.Generator())
