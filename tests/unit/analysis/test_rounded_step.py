import torch
from torch import nn

from autoprec.analysis.rounded_step import RoundingProbe, rounding_faults
from autoprec.capture import Recording, record
from autoprec.workload import Workload


class Wave(nn.Module):
    """A frequency times positions, then sin; beside it a table whose rounding is as good as nothing."""

    def __init__(self, position: float) -> None:
        super().__init__()
        self.position, self.weight = position, nn.Parameter(torch.tensor([0.7, 1.3]))
        self.register_buffer("frequency", torch.tensor([0.3, 0.7]))
        self.register_buffer("offset", torch.tensor([0.31, 0.77]))
        self.register_buffer("unused", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * ((self.frequency * self.position).sin() + 2) * x + self.offset).square()


def recording(position: float) -> Recording:
    return record(
        Workload(model=lambda: Wave(position), batches=lambda: [torch.ones(2)], loss=lambda model, x: model(x).sum())
    )


def harmful(position: float, format_name: str) -> set[str]:
    faults = rounding_faults(RoundingProbe(recording(position)), (format_name,))
    return {each.name for each in faults if each.verdict != "fine"}


def test_a_buffer_is_named_if_its_rounding_changes_the_step() -> None:
    # The phase is off by up to 2**-9 * 0.7 * 2000 = 2.7 rad in bf16; in fp16 by an eighth of that
    assert harmful(2000.0, "bf16") == {"frequency"}
    assert harmful(1.0, "bf16") == set()


def test_what_is_beyond_the_range_is_named() -> None:
    made = recording(1.0)
    made.model.offset.fill_(1e6)
    faults = rounding_faults(RoundingProbe(made), ("fp16",))
    assert {each.name for each in faults if each.verdict != "fine"} == {"offset"}


def test_all_that_the_step_reads_is_judged_and_nothing_else() -> None:
    faults = list(rounding_faults(RoundingProbe(recording(1.0)), ("bf16",)))
    assert [(each.part, each.name) for each in faults] == [
        ("parameters", "weight"), ("buffers", "frequency"), ("buffers", "offset"),
    ]  # fmt: skip
    assert all(0 < each.numbers["gradient_error"] < 0.02 for each in faults)


def test_the_model_is_left_as_it_was() -> None:
    made = recording(2000.0)
    list(rounding_faults(RoundingProbe(made), ("bf16",)))
    assert made.model.frequency.tolist() == torch.tensor([0.3, 0.7]).tolist()
    assert made.model.weight.grad is None
    assert made.replay_matches
