"""Optimizer state in bf16 and 8 bit: torchao's optimizers, for the same groups."""

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import ApplyError
from autoprec.policy import Parameters, Policy, Rule
from autoprec.runtime import Precision, apply

torchao_optim = pytest.importorskip("torchao.optim")


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Run torchao's compiled steps as they stand: compiling them takes a minute and changes no line of ours."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def applied(model: nn.Module, **parameters: Any) -> Precision:
    return apply(model, Policy(name="s", rules=(Rule(sites="*", format="fp32"),), parameters=Parameters(**parameters)))


def big() -> nn.Linear:
    """Return a layer with one parameter of 4096 elements, which torchao quantizes, and a small one."""
    torch.manual_seed(0)
    return nn.Linear(64, 64)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()


def test_fp32_state_leaves_the_optimizer_as_it_is() -> None:
    model = big()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert applied(model).optimizer(optimizer) is optimizer


@pytest.mark.parametrize("storage", [{}, {"storage": "bf16"}, {"storage": "bf16", "master": "fp32"}])
@pytest.mark.parametrize(("kind", "name"), [(torch.optim.Adam, "Adam"), (torch.optim.AdamW, "AdamW")])
def test_counterparts_and_the_dtype_of_their_state(kind: Any, name: str, storage: dict[str, str]) -> None:
    for state, suffix in (("8bit", "8bit"), ("bf16", "Bf16State")):
        model = big()
        precision = applied(model, optimizer_state=state, **storage)
        optimizer = precision.optimizer(kind(model.parameters()))
        assert type(optimizer).__name__ == name + suffix
        step(model, optimizer)
        step(model, optimizer, 1)
        weight, bias = (optimizer.state[p]["exp_avg"] for p in (model.weight, model.bias))
        if state == "8bit":
            assert type(weight).__name__ == "OptimState8bit"
            wide = torch.bfloat16 if storage == {"storage": "bf16"} else torch.float32
            assert (type(bias), bias.dtype) == (torch.Tensor, wide)
        else:
            assert {weight.dtype, bias.dtype} == {torch.bfloat16}
        assert model.weight.dtype == (torch.bfloat16 if storage else torch.float32)


def test_groups_and_hyperparameters_are_taken_over() -> None:
    model = big()
    groups = [{"params": [model.weight], "lr": 0.5, "label": "matrix"}, {"params": [model.bias]}]
    made = applied(model, optimizer_state="8bit").optimizer(
        torch.optim.AdamW(groups, lr=0.25, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.125, amsgrad=True, foreach=True)
    )
    first, second = made.param_groups
    assert (first["params"], second["params"]) == ([model.weight], [model.bias])
    assert (float(first["lr"]), float(second["lr"]), first["label"]) == (0.5, 0.25, "matrix")
    for group in (first, second):
        assert [group[key] for key in ("betas", "eps", "weight_decay", "amsgrad")] == [(0.5, 0.75), 1e-3, 0.125, True]
        assert "foreach" not in group


def test_bf16_state_computes_what_adamw_does_and_rounds_the_moments() -> None:
    model, reference = big(), big()
    optimizer = applied(model, optimizer_state="bf16").optimizer(torch.optim.AdamW(model.parameters()))
    theirs = torch.optim.AdamW(reference.parameters(), foreach=False)
    step(model, optimizer)
    step(reference, theirs)
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        # Both round a few times in FP32, at numbers below 0.125; the moments are rounded after their first use.
        assert torch.allclose(ours, other, rtol=0, atol=4 * 2.0**-27)
        expected = theirs.state[other]["exp_avg_sq"].bfloat16()
        assert torch.allclose(optimizer.state[ours]["exp_avg_sq"].float(), expected.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("state", ["8bit", "bf16"])
@pytest.mark.parametrize("storage", [{}, {"storage": "bf16", "master": "fp32"}])
def test_a_resumed_run_equals_the_whole(state: str, storage: dict[str, str]) -> None:
    def run() -> tuple[nn.Linear, Precision, torch.optim.Optimizer]:
        model = big()
        precision = applied(model, optimizer_state=state, **storage)
        return model, precision, precision.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    whole, resumed = run(), run()
    step(whole[0], whole[2])
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in whole], buffer)
    buffer.seek(0)
    for ours, saved in zip(resumed, torch.load(buffer, weights_only=True), strict=True):
        ours.load_state_dict(saved)
    for each in (whole, resumed):
        step(each[0], each[2], 1)
        step(each[0], each[2], 2)
    assert all(torch.equal(a, b) for a, b in zip(whole[0].parameters(), resumed[0].parameters(), strict=True))
    if state == "bf16":
        assert {s["exp_avg"].dtype for s in resumed[2].state.values()} == {torch.bfloat16}


class Own(torch.optim.AdamW):
    """A user's own optimizer."""


REFUSED: dict[str, tuple[Any, str]] = {
    "kind": (lambda p: torch.optim.SGD(p, lr=0.1), "SGD has no counterpart with 8bit.*possible: torch.optim.Adam and"),
    "subclass": (lambda p: Own(p), "Own has no counterpart"),
    "maximize": (
        lambda p: torch.optim.AdamW(p, maximize=True),
        "maximize=True is not possible with 8bit state.*lr, bet",
    ),
    "capturable": (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True is not possible"),
    "double": (lambda p: torch.optim.AdamW([nn.Parameter(torch.ones(2).double())]), "a parameter of torch.float64"),
    "no optimizer": (lambda p: list(p), "got a list; give it a torch.optim.Optimizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torchao_cannot_continue_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    model = big()
    precision = applied(model, optimizer_state="8bit")
    with pytest.raises(ApplyError, match=message):
        precision.optimizer(make(model.parameters()))


def test_an_optimizer_in_use_is_refused() -> None:
    model = big()
    precision = applied(model, optimizer_state="bf16")
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ApplyError, match="a learning rate scheduler holds this optimizer already"):
        precision.optimizer(optimizer)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    with pytest.raises(ApplyError, match="has taken steps, and its state would be lost"):
        precision.optimizer(optimizer)


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    model = big()
    with pytest.raises(ApplyError, match=r"state in 8bit needs torchao.optim, .*pip install torchao"):
        applied(model, optimizer_state="8bit").optimizer(torch.optim.AdamW(model.parameters()))
