import pytest
import torch
from torch import nn

from autoprec.analysis.optimizer_twin import Twin, template_of

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


def flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).clone()


def pair(make: object, *, groups: bool) -> tuple[torch.optim.Optimizer, list[nn.Parameter], Twin]:
    parameters = {name: nn.Parameter(torch.randn(3, 2)) for name in "abc"}
    given = list(parameters.values())
    optimizer = make([{"params": given[1:]}, {"params": given[:1], "lr": 0.01}] if groups else given)
    template = template_of(optimizer, parameters, flat)
    return optimizer, given, Twin(template, [flat("", each) for each in given])


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_twin_does_to_flat_values_what_the_optimizer_does(name: str, groups: bool) -> None:
    optimizer, parameters, twin = pair(OPTIMIZERS[name], groups=groups)
    for _ in range(3):
        gradients = [torch.randn(3, 2) for _ in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        twin.step([gradient.reshape(-1) for gradient in gradients])
    for parameter, value in zip(parameters, twin.values(), strict=True):
        # the same operations on the same numbers, up to how the compiler orders them
        torch.testing.assert_close(value, parameter.detach().reshape(-1))
    for key in twin.moment_names():
        for index, state in twin.state(key).items():
            torch.testing.assert_close(state, optimizer.state[parameters[index]][key].reshape(-1))


def test_the_optimizer_is_left_alone() -> None:
    optimizer, parameters, twin = pair(OPTIMIZERS["adam"], groups=False)
    before = [each.detach().clone() for each in parameters]
    twin.step([torch.ones(6)] * 3)
    assert all(torch.equal(each, old) for each, old in zip(parameters, before, strict=True))
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"][0] is parameters[0]


def test_a_parameter_that_is_not_asked_for_costs_nothing() -> None:
    wanted, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1000))
    template = template_of(torch.optim.Adam([other, wanted]), {"wanted": wanted}, flat)
    held = [each for group in template.optimizer.param_groups for each in group["params"]]
    assert sum(each.numel() for each in held) == 0
    twin = Twin(template, [torch.ones(2)])
    twin.step([torch.ones(2)])
    assert twin.values()[0].tolist() == pytest.approx([0.999, 0.999])


def test_a_scheduler_in_the_way_does_not_make_the_optimizer_step() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps optimizer.step in the instance
    parameter.grad = torch.ones(2)
    twin = Twin(template_of(optimizer, {"w": parameter}, flat), [torch.ones(2)])
    twin.step([torch.full((2,), 0.5)])
    assert parameter.tolist() == [1, 1]
    assert twin.values()[0].tolist() == [0.5, 0.5]


def test_state_is_rounded_in_place() -> None:
    twin = Twin(template_of(torch.optim.SGD([p := nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9), {"w": p}, flat),
                [torch.ones(1)])  # fmt: skip
    twin.step([torch.tensor([1 + 2.0**-10])])
    twin.round_state("momentum_buffer", "bf16")
    assert twin.state("momentum_buffer")[0].item() == 1
