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


def test_a_parameter_that_does_harm_alone_is_named() -> None:
    class Learned(Wave):
        def __init__(self, position: float) -> None:
            super().__init__(position)
            self.frequency = nn.Parameter(self._buffers.pop("frequency"))

    made = record(
        Workload(model=lambda: Learned(2000.0), batches=lambda: [torch.ones(2)], loss=lambda model, x: model(x).sum())
    )
    faults = list(rounding_faults(RoundingProbe(made), ("bf16",)))
    assert {each.name for each in faults if each.verdict != "fine"} == {"frequency"}


def test_harm_that_nobody_does_alone_is_laid_on_nobody() -> None:
    # Each of many factors that are all rounded up by a 300th is innocent; their product is off by e**(64 / 300).
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.ParameterList(nn.Parameter(torch.tensor([1 + 0.75 * 2.0**-7])) for _ in range(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for factor in self.factors:
                x = x * factor
            return x

    made = record(Workload(model=Product, batches=lambda: [torch.ones(2)], loss=lambda model, x: model(x).sum()))
    faults = list(rounding_faults(RoundingProbe(made), ("bf16",)))
    assert {each.verdict for each in faults} == {"fine"}
    assert max(each.numbers["gradient_error"] for each in faults) > 0.1
    assert sum("with 63 others" in each.reason for each in faults) == 62  # two were tried alone


def test_tied_parameters_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    made = record(
        Workload(model=Tied, batches=lambda: [torch.tensor([1, 2])], loss=lambda model, x: model(x).square().sum())
    )
    (fault,) = rounding_faults(RoundingProbe(made), ("bf16",))
    assert (fault.name, fault.verdict) == ("embed.weight", "fine")


def test_where_any_rounding_changes_the_gradient_nobody_is_named() -> None:
    # Both factors are multiplied by 2000 before the sine: each alone is harmful, and so is what is left without it,
    # but for the two that are tried.
    class Chaotic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waves = nn.ParameterList(nn.Parameter(torch.tensor([0.3 + 0.1 * index])) for index in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((wave * 2000 * x).sin() for wave in self.waves)

    made = record(Workload(model=Chaotic, batches=lambda: [torch.ones(1)], loss=lambda model, x: model(x).sum()))
    assert {each.verdict for each in rounding_faults(RoundingProbe(made), ("bf16",))} == {"fine"}
