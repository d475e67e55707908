"""The step in a low format is the step that explicit casts make."""

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import (
    Damage,
    LowReplay,
    Reference,
    damage,
    gradients_of,
    reference_of,
    relative_error,
)
from autoprec.capture import Recording, record
from autoprec.graph.site import Site
from autoprec.runtime.dtypes import torch_dtype
from autoprec.workload import Workload
from tests.unit.analysis.recorded import device_format, format_of, recorded, referred, site

FORMATS = ("bf16", "fp16")
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
SCALE = torch.randn(4, generator=torch.Generator().manual_seed(3))


def chain(net: Any, x: torch.Tensor) -> torch.Tensor:
    return (F.linear(x, net.weight).exp() * net.scale).sum()


def by_hand(step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """Return the loss of `step(weight, scale)` and the gradients."""
    parameters = [WEIGHT.clone().requires_grad_(), SCALE.clone().requires_grad_()]
    loss = step(*parameters).float()
    return loss.item(), list(torch.autograd.grad(loss, parameters))


def replayed(
    recording: Recording, fmt: LowFormat, low: Iterable[Site], forced: Iterable[Site] = ()
) -> tuple[float, tuple[torch.Tensor | None, ...]]:
    loss = LowReplay(recording, fmt, frozenset(low), forced=frozenset(forced)).loss()
    assert loss.dtype == torch.float32
    return loss.item(), gradients_of(loss, recording)


def assert_same(found: tuple[float, Any], right: tuple[float, Any]) -> None:
    assert found[0] == right[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], right[1], strict=True))


def values_of(recording: Recording, fmt: LowFormat, low: Iterable[Site], forced: Iterable[Site] = ()) -> dict[str, Any]:
    """Return what every site gives, by site."""
    found: dict[str, Any] = {}

    def note(node: Any, value: Any) -> None:
        if node.site is not None:
            found[str(node.site)] = value

    LowReplay(recording, fmt, frozenset(low), forced=frozenset(forced), visit=note).loss()
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_device_kernels_give_what_explicit_casts_give_bit_for_bit(name: str) -> None:
    dtype, recording = torch_dtype(name), recorded(chain, X, weight=WEIGHT, scale=SCALE)
    right = by_hand(lambda w, s: (F.linear(X.to(dtype), w.to(dtype)).exp() * s.to(dtype)).sum())
    assert_same(replayed(recording, device_format(name), recording.op_graph.sites()), right)


@pytest.mark.parametrize("name", FORMATS)
def test_ideal_kernels_round_operands_results_and_gradients_and_compute_in_fp32(name: str) -> None:
    dtype, recording = torch_dtype(name), recorded(chain, X, weight=WEIGHT, scale=SCALE)

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).float()

    def step(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = rounded(F.linear(rounded(X), rounded(weight)))
        return rounded((rounded(rounded(h.exp()) * rounded(scale))).sum())

    assert_same(replayed(recording, format_of(name), recording.op_graph.sites()), by_hand(step))


def test_sites_that_are_not_low_are_fp32() -> None:
    recording = recorded(chain, X, weight=WEIGHT, scale=SCALE)
    right = by_hand(lambda w, s: (F.linear(X, w).bfloat16().exp().float() * s).sum())
    assert_same(replayed(recording, device_format("bf16"), [site("exp#0")]), right)


def test_with_nothing_low_the_step_is_the_recorded_one() -> None:
    recording = recorded(chain, X, weight=WEIGHT, scale=SCALE)
    assert_same(replayed(recording, device_format("fp16"), []), by_hand(lambda w, s: chain(Of(w, s), X)))


class Of:
    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self.weight, self.scale = weight, scale


def test_of_a_norm_only_the_activation_is_rounded() -> None:
    gain = torch.full((8,), 1 + 2.0**-10)  # 1 in bf16
    recording = recorded(lambda net, x: F.layer_norm(x, (8,), net.gain).square().mean(), X, gain=gain)
    low = values_of(recording, format_of("bf16"), [site("layer_norm#0")])[":layer_norm#0"]
    assert torch.equal(low, F.layer_norm(X.bfloat16().float(), (8,), gain).bfloat16())
    by_name = recorded(
        lambda net, x: F.layer_norm(input=x, normalized_shape=(8,), weight=net.gain).square().mean(), X, gain=gain
    )
    assert torch.equal(values_of(by_name, format_of("bf16"), [site("layer_norm#0")])[":layer_norm#0"], low)


def joined(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.linear(x, net.weight).tanh(), x.sin()], 1).square().mean()


def test_an_op_without_numerics_follows_what_it_reads_unless_it_is_forced() -> None:
    recording = recorded(joined, X, weight=WEIGHT)
    everything = frozenset(recording.op_graph.sites())
    readers = {site("tanh#0"), site("sin#0")}
    fmt = device_format("bf16")
    assert values_of(recording, fmt, everything)[":cat#0"].dtype == torch.bfloat16
    assert values_of(recording, fmt, everything - {site("sin#0")})[":cat#0"].dtype == torch.bfloat16  # one is low
    assert values_of(recording, fmt, everything - readers)[":cat#0"].dtype == torch.float32
    forced = values_of(recording, fmt, everything - readers, forced=[site("cat#0")])
    assert forced[":cat#0"].dtype == torch.bfloat16


def test_what_is_kept_reaches_an_op_without_numerics_through_views() -> None:
    recording = recorded(
        lambda net, x: torch.cat([(x * net.gain).tanh().t().reshape(4, 12)] * 2).square().mean(), X, gain=X[0]
    )
    low = frozenset(recording.op_graph.sites()) - {site("tanh#0")}
    assert values_of(recording, device_format("bf16"), low)[":cat#0"].dtype == torch.float32


def masked(net: Any, x: torch.Tensor) -> torch.Tensor:
    scores = x * net.gain
    return scores.masked_fill(x > 0, torch.finfo(scores.dtype).min).softmax(-1).square().sum()


def test_the_limits_of_fp32_become_those_of_the_format_where_the_call_is_low() -> None:
    recording = recorded(masked, X, gain=X[1])
    everything = frozenset(recording.op_graph.sites())
    low = values_of(recording, device_format("fp16"), everything)[":masked_fill#0"]
    assert low[X > 0].unique().tolist() == [-65504.0]
    kept = values_of(recording, device_format("fp16"), everything - {site("mul#0")})[":masked_fill#0"]
    assert kept[X > 0].unique().tolist() == [torch.finfo(torch.float32).min]


class Watched(torch.autograd.Function):
    """Remembers the dtypes of what it is given, and of a product that it computes itself."""

    seen: ClassVar[list[torch.dtype]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Watched.seen += [x.dtype, (x.float() * 3).dtype]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_an_opaque_function_computes_in_what_it_is_given() -> None:
    recording = recorded(lambda net, x: (Watched.apply((x * net.gain).exp()) * net.gain).sum(), X, gain=X[0])
    everything = frozenset(recording.op_graph.sites())
    Watched.seen.clear()
    LowReplay(recording, device_format("bf16"), everything).loss()
    LowReplay(recording, device_format("bf16"), everything - {site("exp#0")}).loss()
    assert Watched.seen == [torch.bfloat16, torch.float32, torch.float32, torch.float32]


class Mixed(torch.autograd.Function):
    """Multiplies what it is given by an FP32 matrix, which torch does for FP32 only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, torch.eye(8))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_what_an_opaque_function_does_inside_is_not_mended() -> None:
    reference = referred(lambda net, x: (Mixed.apply((x * net.gain).exp())).sum(), X, gain=X[0])
    assert "dtype" in damage(reference, device_format("bf16"), [site("exp#0"), site("mul#0")]).raised
    assert damage(reference, device_format("bf16"), [site("mul#0")]).raised == ""


def left_alone(net: Any, x: torch.Tensor) -> torch.Tensor:
    h = (x * net.gain).exp()
    with torch.no_grad():
        target = h.cos() * x
    return (h * target).sum()


def test_calls_under_no_grad_are_never_cast() -> None:
    recording = recorded(left_alone, X, gain=X[0])
    everything = frozenset(recording.op_graph.sites())
    values = values_of(recording, device_format("bf16"), everything)
    assert values[":cos#0"].dtype == torch.bfloat16
    assert values[":mul#1"].dtype == torch.float32  # bf16 by FP32, as torch promotes
    values = values_of(recording, device_format("bf16"), everything - {site("exp#0")})
    assert values[":cos#0"].dtype == torch.float32


def test_replaying_leaves_the_model_and_its_flags_alone() -> None:
    recording = recorded(chain, X, weight=WEIGHT, scale=SCALE)
    damage(reference_of(recording), device_format("bf16"), recording.op_graph.sites())
    parameters = dict(recording.model.named_parameters())
    assert torch.equal(parameters["weight"], WEIGHT)
    assert all(each.grad is None and each.requires_grad for each in parameters.values())


def test_damage_is_the_relative_error_of_loss_and_gradients() -> None:
    reference = referred(chain, X, weight=WEIGHT, scale=SCALE)
    found = damage(reference, device_format("bf16"), reference.recording.op_graph.sites())
    loss, (weight, scale) = by_hand(lambda w, s: (F.linear(X.bfloat16(), w.bfloat16()).exp() * s.bfloat16()).sum())
    right, (right_weight, right_scale) = by_hand(lambda w, s: chain(Of(w, s), X))
    off = torch.cat([(weight - right_weight).flatten(), scale - right_scale]).double().norm()
    norm = torch.cat([right_weight.flatten(), right_scale]).double().norm()
    assert found.loss_error == pytest.approx(abs(loss - right) / abs(right), rel=1e-12)
    assert found.gradient_error == pytest.approx(float(off / norm), rel=1e-6)  # FP32 differences against FP64 ones
    assert (found.loss_scale, found.raised) == (1.0, "")


def scaled(factor: float) -> Reference:
    """Return a step whose gradient is `factor` in every element."""
    return referred(lambda net, x: (net.gain * factor).sum(), X, gain=torch.ones(4))


@pytest.mark.parametrize(
    ("factor", "given", "least", "used", "error"),
    [
        (4.0, 1024.0, 1.0, 1024.0, 0.0),
        (4.0, 2.0**16, 1.0, 2.0**10, 0.0),  # 4 * 2^16 is beyond 65504, and 2^6 smaller is not
        (4.0, 2.0**16, 2.0**12, 2.0**12, 0.0),
        (4.0, 2.0**16, 2.0**15, 2.0**16, math.inf),  # the least is too large: nothing helps
        (4.0, 2.0**16, None, 2.0**16, math.inf),
        (3.0e4, 2.0**16, 1.0, 1.0, 0.0),  # 2^10 and 2^4 are too large as well
        (3.0e4, 2.0**16, 2.0, 2.0, 0.0),
        (3.0e4, 2.0**20, 1.0, 2.0**20, math.inf),  # three times at most, which is 2^2
        (3.0e4, 2.0**19, 1.0, 2.0, 0.0),
        (1.0e5, 1.0, 1.0, 1.0, math.inf),
    ],
)
def test_the_loss_scale_backs_off_where_gradients_are_not_finite(
    factor: float, given: float, least: float | None, used: float, error: float
) -> None:
    found = damage(scaled(factor), format_of("fp16"), [site("mul#0")], loss_scale=given, least_scale=least)
    assert (found.loss_scale, found.gradient_error) == (used, error)


def test_no_loss_scale_mends_a_loss_that_is_not_finite() -> None:
    reference = referred(lambda net, x: (net.gain * 300).square().sum(), X, gain=torch.ones(4))
    found = damage(reference, device_format("fp16"), [site("square#0")], loss_scale=2.0**16)
    assert found == Damage(loss_error=math.inf, gradient_error=math.inf, loss_scale=2.0**16)


def test_a_kernel_that_is_missing_is_told_in_torchs_words() -> None:
    if _runs_in_bf16():
        pytest.skip("this torch inverts matrices in bf16")
    reference = referred(lambda net, x: torch.linalg.inv(net.matrix).sum(), X, matrix=torch.eye(3) * 2)
    (inverse,) = [each for each in reference.recording.op_graph.sites() if "inv" in each.op]
    found = damage(reference, device_format("bf16"), [inverse])
    assert (found.loss_error, found.gradient_error) == (math.inf, math.inf)
    assert "BFloat16" in found.raised
    assert "\n" not in found.raised
    assert damage(reference, format_of("bf16"), [inverse]).raised == ""  # ideal kernels compute in FP32


def _runs_in_bf16() -> bool:
    try:
        torch.linalg.inv(torch.eye(2, dtype=torch.bfloat16))
    except RuntimeError:
        return False
    return True


def tensors(*values: float | None) -> list[torch.Tensor | None]:
    return [None if value is None else torch.tensor([value]) for value in values]


@pytest.mark.parametrize(
    ("one", "right", "error"),
    [
        (tensors(3.0, 4.0), tensors(3.0, 4.0), 0.0),
        (tensors(3.0, 3.5), tensors(3.0, 4.0), 0.1),
        (tensors(None, 4.0), tensors(3.0, 4.0), 0.6),  # a gradient that is missing is 0
        (tensors(3.0, None), tensors(3.0, None), 0.0),
        (tensors(0.0), tensors(0.0), 0.0),
        (tensors(1.0), tensors(0.0), math.inf),
        (tensors(3.0, math.nan), tensors(3.0, 4.0), math.inf),
        (tensors(3.0, math.inf), tensors(3.0, None), math.inf),
        ([], [], 0.0),
    ],
)
def test_relative_errors_by_hand(one: Any, right: Any, error: float) -> None:
    assert relative_error(one, right) == pytest.approx(error, abs=1e-12)


def test_relative_errors_do_not_overflow() -> None:
    assert relative_error([torch.tensor([3e38])], [torch.tensor([1.5e38])]) == pytest.approx(1.0)


def test_gradients_are_dense_unscaled_and_none_where_the_loss_does_not_reach() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)
            self.idle, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.table(ids) * self.frozen).sum()

    recording = record(
        Workload(model=Table, batches=lambda: [torch.tensor([1, 1, 3])], loss=lambda net, ids: net(ids))
    )  # fmt: skip
    names = [name for name, each in recording.model.named_parameters() if each.requires_grad]
    found = dict(zip(names, gradients_of(recording.replay(), recording, 1024.0), strict=True))
    assert found["idle"] is None
    assert torch.equal(found["table.weight"], torch.tensor([[0.0, 0], [2, 2], [0, 0], [1, 1]]))


@pytest.mark.parametrize(
    ("loss", "gradient", "is_finite"), [(1.0, 1.0, True), (math.nan, 1.0, False), (1.0, math.inf, False)]
)
def test_a_reference_is_healthy_if_all_of_it_is_finite(loss: float, gradient: float, is_finite: bool) -> None:
    recording = recorded(chain, X, weight=WEIGHT, scale=SCALE)
    reference = Reference(recording=recording, loss=loss, gradients=(torch.ones(2), torch.tensor([gradient]), None))
    assert reference.is_finite is is_finite


def test_a_norm_that_is_not_fused_for_its_fp32_weights_warns_nobody() -> None:
    def loss(net: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x * net.gain, (8,), net.gain).square().sum()

    reference = referred(loss, torch.linspace(1, 2, 8), gain=torch.ones(8))
    torch.set_warn_always(True)  # not only once a process
    try:
        found = damage(reference, device_format("fp16"), reference.recording.op_graph.sites())
    finally:
        torch.set_warn_always(False)
    assert (found.raised, math.isfinite(found.gradient_error)) == ("", True)
