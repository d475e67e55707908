"""When a step counts as broken."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.analysis.faults import FormatCheck, check_format, floor_of
from autoprec.analysis.low_step import Damage, reference_of
from autoprec.capture import record, record_batches
from autoprec.workload import Workload
from tests.unit.analysis.recorded import device_format, format_of, referred, site, workload

BF16_ROOT, FP16_ROOT = 2.0**-4, 2.0**-5.5  # of the unit roundoffs 2^-8 and 2^-11


def check(name: str, error: float, floor: float = 0.0) -> FormatCheck:
    damage = Damage(loss_error=0.0, gradient_error=error)
    return FormatCheck(format=name, damage=damage, batch=0, floor=floor)


@pytest.mark.parametrize(
    ("name", "floor", "limit"),
    [
        ("bf16", 0.0, 2.2 * BF16_ROOT),
        ("fp16", 0.0, 2.2 * FP16_ROOT),
        ("bf16", 0.1, 0.4),
        ("fp16", 0.01, 2.2 * FP16_ROOT),
    ],
)
def test_the_limit_is_in_roots_of_the_unit_roundoff_or_in_floors(name: str, floor: float, limit: float) -> None:
    assert check(name, 0.0, floor).limit == pytest.approx(limit, rel=1e-12)
    assert not check(name, limit * 0.999, floor).is_broken
    assert check(name, limit * 1.001, floor).is_broken
    assert check(name, math.inf, floor).is_broken


@pytest.mark.parametrize(
    ("error", "floor", "repaired"),
    [(math.inf, 0.0, 2.75 * BF16_ROOT), (math.inf, 0.1, 0.4), (0.3, 0.0, 0.15), (0.9, 0.1, 0.4)],
)
def test_a_repair_has_to_be_healthy_and_to_halve_the_error(error: float, floor: float, repaired: float) -> None:
    assert check("bf16", error, floor).repaired == pytest.approx(repaired, rel=1e-12)


def cubes(net: Any, x: torch.Tensor) -> torch.Tensor:
    return (net.gain**3 * x).sum()


def test_the_floor_is_the_gradient_error_of_rounded_weights() -> None:
    gain, x = torch.tensor([1 / 3, 1.1, -7.7, 0.003]), torch.tensor([1.0, 2.0, 3.0, 400.0])
    reference = referred(cubes, x, gain=gain)
    found = floor_of(reference, format_of("bf16"))
    right, rounded = gain.double(), gain.bfloat16().double()
    gradient, off = 3 * right**2 * x, 3 * (rounded**2 - right**2) * x
    assert found == pytest.approx(float(off.norm() / gradient.norm()), rel=1e-4)  # FP32 against FP64
    assert 2.0**-10 < found < 2.0**-7  # twice the relative rounding of bf16, 2^-8 at most
    assert torch.equal(reference.recording.model.gain, gain)


def test_a_weight_that_is_read_under_no_grad_first_has_its_gradient() -> None:
    def followed(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            net.gain.square().sum()
        return cubes(net, x)

    gain, x = torch.tensor([1 / 3, 1.1]), torch.tensor([1.0, 2.0])
    found = floor_of(referred(followed, x, gain=gain), format_of("bf16"))
    assert found == floor_of(referred(cubes, x, gain=gain), format_of("bf16")) > 0


def test_weights_that_the_format_holds_have_no_floor() -> None:
    assert floor_of(referred(cubes, torch.ones(2), gain=torch.tensor([1.5, -0.25])), format_of("bf16")) == 0.0


def test_a_step_that_rounded_weights_break_has_no_floor() -> None:
    def loss(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (x / (net.gain - 1)).sum()

    reference = referred(loss, torch.ones(1), gain=torch.tensor([1 + 2.0**-12]))
    assert reference.is_finite
    assert floor_of(reference, format_of("bf16")) == 0.0

    def steep(net: Any, x: torch.Tensor) -> torch.Tensor:
        return ((net.gain - 1) * x).sqrt().sum()  # finite at 0, its gradient is not

    assert floor_of(referred(steep, torch.ones(1), gain=torch.tensor([1 + 2.0**-12])), format_of("bf16")) == 0.0


def test_parameters_that_are_not_fp32_stay_as_they_are() -> None:
    def loss(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (net.gain.square() * net.wide.square() * x).sum()

    wide = torch.tensor([1 / 3], dtype=torch.float64)
    assert floor_of(referred(loss, torch.ones(1), gain=torch.ones(1), wide=wide), format_of("bf16")) == 0.0


def chaotic(seed: int) -> Workload:
    """Return a deep net with batch norm over 4 samples, whose gradient no nudge leaves alone."""

    def model() -> nn.Module:
        torch.manual_seed(seed)
        layers = [[nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()] for _ in range(12)]
        return nn.Sequential(*(each for layer in layers for each in layer), nn.Linear(16, 2))

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), torch.tensor([0, 1, 0, 1]))

    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
    return Workload(model=model, batches=lambda: [batch], loss=loss)


@pytest.mark.parametrize("seed", [0, 1])
def test_chaos_is_no_fault(seed: int) -> None:
    reference = reference_of(record(chaotic(seed)))
    fmt = format_of("bf16", "device")
    found = check_format([reference], fmt, reference.recording.op_graph.sites(), 1.0, 1.0)
    assert replace(found, floor=0.0).is_broken  # by the error alone it would be
    assert not found.is_broken


def test_the_worst_batch_counts() -> None:
    def loss(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * net.gain).square().mean().sqrt()

    batches = torch.ones(4), torch.full((4,), 300.0), torch.full((4,), 2.0)
    references = [reference_of(each) for each in record_batches(workload(loss, *batches, gain=torch.ones(4)), 3)]
    sites = references[0].recording.op_graph.sites()
    found = check_format(references, device_format("fp16"), sites, 1.0, 1.0)
    assert (found.batch, found.is_broken, found.damage.gradient_error) == (1, True, math.inf)
    healthy = check_format(references[::2], device_format("fp16"), sites, 8.0, 8.0)
    assert not healthy.is_broken
    assert healthy.damage.loss_scale == 8.0
    only = check_format(references, device_format("fp16"), [site("mul#0")], 1.0, 1.0)
    assert not only.is_broken
