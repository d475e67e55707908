import math

import pytest
import torch
from torch import nn

from autoprec.analysis.constants import lost_constants
from autoprec.analysis.single_site import broken_calls
from autoprec.capture import record
from autoprec.workload import Workload
from tests.unit.analysis.workloads import HIDDEN, ORDINARY, TIED, masked, ratio, squared


def broken(workload: Workload, *formats: str) -> list[str]:
    """Return `site format` of every constant that breaks the step."""
    recording = record(workload)
    lost = lost_constants(recording.op_graph, formats or ("fp16", "bf16"))
    return sorted(f"{each.node.site} {each.format}" for each in broken_calls(recording, lost))


def test_a_guard_that_vanishes_breaks_the_step_where_it_is_needed() -> None:
    assert broken(ratio(1e-8, ORDINARY, TIED)) == [":add#0 fp16"]


def test_and_nowhere_else() -> None:
    assert broken(ratio(1e-8, ORDINARY)) == []
    assert broken(ratio(1e-4, ORDINARY, TIED)) == []


def test_a_mask_that_becomes_infinite_breaks_a_row_that_has_nothing_else() -> None:
    assert broken(masked(lambda _: -1e9, ORDINARY, HIDDEN)) == [":where#0 fp16"]


def test_and_no_other_row() -> None:
    assert broken(masked(lambda _: -1e9, ORDINARY)) == []


def test_the_dtypes_own_limit_is_taken_as_the_low_run_would_write_it() -> None:
    assert broken(masked(lambda scores: torch.finfo(scores.dtype).min, ORDINARY, HIDDEN)) == []


def test_a_bound_that_becomes_one_breaks_the_logarithm_after_it() -> None:
    class Miss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log1p(-(self.linear(x) + 20).sigmoid().clamp(max=1 - 1e-6))

    workload = Workload(
        model=Miss, batches=lambda: [torch.ones(2, 4)], loss=lambda model, x: model(x).sum()
    )  # fmt: skip
    assert broken(workload) == [":clamp#0 bf16", ":clamp#0 fp16"]


def test_a_fault_that_only_the_backward_has_counts() -> None:
    """sqrt(0) is finite, and its slope is not."""

    class Distance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return ((y - y.detach()).square().sum(-1) + 1e-8).sqrt()

    workload = Workload(
        model=Distance, batches=lambda: [torch.ones(2, 4)], loss=lambda model, x: model(x).sum()
    )  # fmt: skip
    assert broken(workload) == [":add#0 fp16"]


class Unit(nn.Module):
    """A unit vector times a fixed one, by either of two functions."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.linear, self.op = nn.Linear(4, 4, bias=False), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.op == "normalize":
            return nn.functional.normalize(self.linear(x), dim=-1)
        return nn.functional.cosine_similarity(self.linear(x), torch.ones(1, 4), dim=-1)


@pytest.mark.parametrize("op", ["normalize", "cosine_similarity"])
def test_the_eps_of_an_op_counts_whether_the_call_names_it_or_not(op: str) -> None:
    def with_rows(*rows: float) -> Workload:
        return Workload(
            model=lambda: Unit(op), batches=lambda: [torch.tensor(rows)[:, None].expand(-1, 4)], loss=squared
        )  # fmt: skip

    assert broken(with_rows(1.0, 0.0)) == [f":{op}#0 fp16"]
    assert broken(with_rows(1.0, 2.0)) == []


def test_a_fault_that_is_not_the_constants_is_not_blamed_on_it() -> None:
    """1e5 does not fit into fp16 whatever the eps is: the replaced constant does not help."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1e5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight + 1e-8).log()

    workload = Workload(
        model=Large, batches=lambda: [torch.ones(2)], loss=lambda model, x: model(x).sum()
    )  # fmt: skip
    assert broken(workload) == []


def test_a_step_that_is_not_finite_in_fp32_blames_no_format() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(math.inf))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + 1e-8

    workload = Workload(
        model=Broken, batches=lambda: [torch.ones(2)], loss=lambda model, x: model(x).sum()
    )  # fmt: skip
    assert broken(workload) == []


def test_a_call_that_cannot_run_low_tells_nothing() -> None:
    recording = record(ratio(1e-8, TIED))
    (lost,) = lost_constants(recording.op_graph, ("fp8_e5m2",))
    assert broken_calls(recording, [lost]) == frozenset()


def test_the_model_is_left_as_it_was() -> None:
    class WithState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x)) + 1e-8

    recording = record(Workload(model=WithState, batches=lambda: [torch.arange(32.0).reshape(8, 4)], loss=squared))
    before = {name: value.clone() for name, value in recording.model.named_parameters()}
    broken_calls(recording, lost_constants(recording.op_graph, ("fp16",)))
    after = dict(recording.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in recording.model.parameters())
    assert recording.replay_matches


def test_no_constant_costs_no_step() -> None:
    assert broken_calls(None, ()) == frozenset()
