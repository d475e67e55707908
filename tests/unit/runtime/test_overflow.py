"""`find_overflow` names the origin, not where the NaN surfaces, and is quiet about infinities that do no harm."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoprec.graph.site import Site
from autoprec.policy import LossScale, Policy, Rule
from autoprec.runtime import apply
from autoprec.runtime.overflow import Overflow


def policy(*rules: tuple[str, str], **settings: Any) -> Policy:
    return Policy(name="test", rules=tuple(Rule(sites=s, format=f) for s, f in rules), **settings)


class Net(nn.Module):
    """A mask that holds -inf, as attention does, and a gain that a test sets."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.one, self.two, self.gain = nn.Linear(4, 4), nn.Linear(4, 4), gain
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (self.one(x) * self.gain).square()
        mask = torch.zeros(4).masked_fill(torch.tensor([True, False, False, False]), float("-inf"))
        return self.two(F.softmax(h * 1e-6 + mask, dim=-1)) + self.offset


FP16 = policy(("*:softmax", "fp32"), (":add", "fp32"), ("*", "fp16"))
X = torch.linspace(1, 3, 12).reshape(3, 4)


def found(model: nn.Module, rules: Policy, batch: Any = X, loss: Any = None) -> Overflow | None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.1, 0.5)
    with apply(model, rules) as precision:
        return precision.find_overflow(batch, loss)


def test_a_healthy_step_is_quiet_whatever_its_masks_hold() -> None:
    assert found(Net(), FP16) is None
    assert found(Net(), policy(("*", "fp32"))) is None
    finfo = torch.finfo(torch.float32).min  # as HF masks; in fp16 it is -inf

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(self.one(x) + torch.tensor([0.0, 0.0, 0.0, finfo]), dim=-1)

    assert found(Masked(), policy(("*", "fp16"))) is None


@pytest.mark.parametrize("scaled", [False, True])
def test_an_overflow_of_the_forward(*, scaled: bool) -> None:
    scale = LossScale(kind="static", initial=1024.0) if scaled else LossScale()
    rules = Policy(name="test", rules=FP16.rules, loss_scale=scale)
    overflow = found(Net(gain=300.0), rules)
    assert overflow is not None
    assert (overflow.where, overflow.site, overflow.kernel) == ("forward", Site("", "square", 0), "pow")
    assert overflow.format == "fp16"
    assert 256 < overflow.largest < 65504
    assert overflow.loss_scale == (1024.0 if scaled else 1.0)
    assert (
        'a loss scale cannot mend an overflow of the forward; run it in bf16 or fp32, say by the rule {sites: ":'
        in str(overflow)
    )


def test_an_overflow_in_the_cast_of_an_argument() -> None:
    overflow = found(Net(), policy(("two:*", "fp16"), ("*", "fp32")), X, lambda m, x: m.two(m.one(x) * 1e5).sum())
    assert overflow is not None
    assert (overflow.site, overflow.kernel, overflow.format) == (Site("two", "linear", 0), "_to_copy", "fp32 to fp16")
    assert overflow.largest > 65504


def test_an_overflow_of_the_backward_at_this_scale_alone() -> None:
    def rules(scale: float) -> Policy:
        return Policy(name="test", rules=FP16.rules, loss_scale=LossScale(kind="static", initial=scale))

    assert found(Net(), rules(8.0)) is None
    overflow = found(Net(), rules(2.0**20))
    assert overflow is not None
    assert (overflow.where, overflow.site, overflow.loss_scale) == ("backward", Site("", "add", 1), 2.0**20)
    assert (overflow.kernel, overflow.format) == ("_to_copy", "fp32 to fp16")
    assert "lower the loss scale (now 1.04858e+06)" in str(overflow)


def test_a_backward_kernel_that_overflows_is_found_with_its_site() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x).sqrt()

    model = Steep()
    torch.manual_seed(0)
    with apply(model, policy(("*", "fp32"))) as precision:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        overflow = precision.find_overflow(X)  # the slope of a root at 0
    assert overflow is not None
    assert (overflow.where, overflow.site) == ("backward", Site("", "sqrt", 0))
    assert overflow.kernel == "div"
    assert "without any loss scale" in str(overflow)


def test_without_scaling_a_backward_overflow_asks_for_a_wider_format() -> None:
    overflow = found(nn.Linear(4, 4), policy(("@loss", "fp32"), ("*", "fp16")), X, lambda m, x: m(x).sum() * 1e6)
    assert overflow is not None
    assert overflow.place == "the gradient on its way back into site :linear#0"
    assert "the gradient leaves the range of fp16 without any loss scale: run it in bf16 or fp32" in str(overflow)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_the_batch(value: float) -> None:
    batch = X.clone()
    batch[0, 0] = value
    overflow = found(Net(), FP16, {"x": batch})
    assert overflow is not None
    assert (overflow.where, overflow.place, overflow.site) == ("batch", "the batch", None)
    assert str(overflow).startswith("the batch holds non-finite values before the step begins; mend the data")


def test_an_infinity_in_the_batch_that_reaches_nothing_is_no_matter() -> None:
    batch = (X, torch.full((4,), float("-inf")))
    assert found(Net(), FP16, batch, lambda m, b: m(b[0]).sum() + b[1].exp().sum()) is None


def test_parameters_and_buffers_by_name() -> None:
    for where, name in (("parameter", "two.bias"), ("buffer", "offset")):
        model = Net()
        with apply(model, FP16) as precision:
            tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
            with torch.no_grad():
                tensor[1] = float("nan")
            overflow = precision.find_overflow(X)
        assert overflow is not None
        assert (overflow.where, overflow.place) == (where, f"{where} {name}")
        assert "go back to a checkpoint before it" in str(overflow)


def test_an_infinity_that_the_code_writes_is_told_apart() -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(self.one(x).masked_fill(torch.ones(4, dtype=torch.bool), float("-inf")), dim=-1)

    overflow = found(Blind(), policy(("*", "fp32")))
    assert overflow is not None
    assert overflow.kernel == "masked_fill"
    assert "the code itself writes this infinity" in str(overflow)


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_checkpointed_code(*, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(super().forward, self.one(x), use_reentrant=reentrant)
            return y

    overflow = found(Checkpointed(gain=300.0), FP16)
    assert overflow is not None
    assert (overflow.where, overflow.site) == ("forward", Site("", "square", 0))


def test_the_first_of_several_in_the_order_of_execution() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.one(x)
            return (h * 1e4 * h * 1e4).exp() + (h * 1e5)

    overflow = found(Two(), policy(("*", "fp16")))
    assert overflow is not None
    assert overflow.site == Site("", "mul", 1)


def test_an_infinite_scaled_loss_does_no_harm_but_its_gradient_does() -> None:
    rules = policy(("*", "fp32"), loss_scale=LossScale(kind="static", initial=2.0**24))
    overflow = found(nn.Linear(4, 4), rules, X, lambda m, x: m(x).sum() * 1e33)
    assert overflow is not None
    assert (overflow.where, overflow.site) == ("backward", Site("@loss", "mul", 0))
    assert "lower the loss scale" in overflow.advice


def test_the_scaler_is_left_as_it_is() -> None:
    rules = Policy(name="test", rules=FP16.rules, loss_scale=LossScale(kind="dynamic", initial=2.0**20))
    with apply(Net(), rules) as precision:
        before = precision.scaler.state_dict()
        assert precision.find_overflow(X) is not None
        assert precision.scaler.state_dict() == before
        assert precision.scaler._scale is None
