"""A leaf's forward in short gives what the mode gives: the same bits, gradients and buffers, the same errors."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

from autoprec.policy import Policy, Rule
from autoprec.runtime import apply

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of each call alike

MAP, IMAGE, ROWS = (2, 4, 6), (2, 4, 6, 6), (3, 8)
VOLUME = (2, 2, 3, 3, 3)

LEAVES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (partial(nn.Linear, 8, 8), ROWS),
    "linear without bias": (partial(nn.Linear, 8, 8, bias=False), ROWS),
    "large linear": (partial(nn.Linear, 96, 96), (3, 96)),
    "conv1d": (partial(nn.Conv1d, 4, 4, 4, padding="same"), MAP),
    "conv2d": (partial(nn.Conv2d, 4, 4, 3, padding=1), IMAGE),
    "conv3d": (partial(nn.Conv3d, 2, 2, 3, padding=1), VOLUME),
    "reflecting": (partial(nn.Conv2d, 4, 4, 3, padding=1, padding_mode="reflect"), IMAGE),
    "circular": (partial(nn.Conv1d, 4, 4, 3, padding=2, padding_mode="circular"), MAP),
    "identity": (nn.Identity, ROWS),
    "relu": (nn.ReLU, ROWS),
    "relu in place": (partial(nn.ReLU, inplace=True), ROWS),
    "relu6": (partial(nn.ReLU6, inplace=True), ROWS),
    "leaky relu": (nn.LeakyReLU, ROWS),
    "elu in place": (partial(nn.ELU, inplace=True), ROWS),
    "gelu": (partial(nn.GELU, "tanh"), ROWS),
    "silu": (nn.SiLU, ROWS),
    "silu in place": (partial(nn.SiLU, inplace=True), ROWS),
    "mish": (nn.Mish, ROWS),
    "tanh": (nn.Tanh, ROWS),
    "sigmoid": (nn.Sigmoid, ROWS),
    "hardswish": (nn.Hardswish, ROWS),
    "softplus": (nn.Softplus, ROWS),
    "softmax": (partial(nn.Softmax, dim=-1), ROWS),
    "softmax of a guessed dim": (nn.Softmax, ROWS),
    "log softmax": (partial(nn.LogSoftmax, dim=-1), ROWS),
    "dropout": (nn.Dropout, ROWS),
    "dropout in place": (partial(nn.Dropout, inplace=True), ROWS),
    "layer norm": (partial(nn.LayerNorm, 8), ROWS),
    "plain layer norm": (partial(nn.LayerNorm, 8, elementwise_affine=False), ROWS),
    "rms norm": (partial(nn.RMSNorm, 8), ROWS),
    "group norm": (partial(nn.GroupNorm, 2, 4), MAP),
    "batch norm 1d": (partial(nn.BatchNorm1d, 4), MAP),
    "batch norm 2d": (partial(nn.BatchNorm2d, 4, momentum=None), IMAGE),
    "batch norm 3d": (partial(nn.BatchNorm3d, 2, affine=False), VOLUME),
    "batch norm of batches": (partial(nn.BatchNorm2d, 4, track_running_stats=False), IMAGE),
    "max pool": (partial(nn.MaxPool2d, 2, return_indices=True), IMAGE),
    "avg pool": (partial(nn.AvgPool2d, 2), IMAGE),
}
FORMATS = ("fp32", "bf16", "fp16", "as_given", "promote")


class Nothing(TorchFunctionMode):
    """Another mode on the stack: all take the general way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.leaf = leaf

    def forward(self, x: torch.Tensor, how: str) -> Any:
        if how == "leaf":
            x = x.detach().clone().requires_grad_()
            return self.leaf(x), x
        if how == "twice":
            return self.leaf(x), self.leaf(x)
        return self.leaf(input=x) if how == "keyword" else self.leaf(x)


def flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [part for each in value for part in flat(each)]


def policy_of(site: str, site_format: str) -> Policy:
    other = "fp16" if site_format == "bf16" else "bf16"
    rules = (Rule(sites=site, format=site_format), Rule(sites="*", format=other))
    return Policy(name="test", rules=rules, outputs="computed")


def ran(make: Callable[[], nn.Module], policy: Policy, x: torch.Tensor, how: str, *, train: bool, short: bool) -> Any:
    """Return all that a step leaves behind, or the type of what it raises."""
    torch.manual_seed(0)
    net = Net(make()).train(train)
    apply(net, policy)
    source = x.clone().requires_grad_(x.is_floating_point())
    given = source.clone()
    try:
        if short:
            outputs = flat(net(given, how))
        else:
            with Nothing():
                outputs = flat(net(given, how))
        graded = [each for each in outputs if each.requires_grad]
        slopes = [torch.linspace(-1, 1, each.numel()).reshape(each.shape).to(each.dtype) for each in graded]
        torch.autograd.backward(graded, slopes)
    except Exception as error:  # both ways must raise alike
        return type(error)
    gradients = [each.grad for each in (*net.parameters(), source)]
    leaf_gradients = [each.grad for each in outputs if each.is_leaf]
    return [each for each in (*outputs, *gradients, *leaf_gradients, *net.buffers(), given) if each is not None]


def assert_same(make: Callable[[], nn.Module], policy: Policy, x: torch.Tensor, how: str = "", **mode: bool) -> None:
    short = ran(make, policy, x, how, **{"train": True, **mode}, short=True)
    general = ran(make, policy, x, how, **{"train": True, **mode}, short=False)
    if isinstance(short, type) or isinstance(general, type):
        assert short is general
        return
    assert len(short) == len(general)
    for one, other in zip(short, general, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("site_format", FORMATS)
@pytest.mark.parametrize("name", LEAVES)
def test_the_short_way_is_the_general_way(name: str, site_format: str) -> None:
    make, shape = LEAVES[name]
    policy, x = policy_of("leaf", site_format), torch.randn(shape) * 3
    assert_same(make, policy, x)
    assert_same(make, policy, x, train=False)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64):
        assert_same(make, policy, x.to(dtype))
    for how in ("leaf", "keyword", "twice"):
        assert_same(make, policy, x, how)
    if len(shape) == 4:
        assert_same(make, policy, x.to(memory_format=torch.channels_last))
    for dtype in (torch.bfloat16, torch.float16):
        assert_same(lambda low=dtype: make().to(low), policy, x)


@pytest.mark.parametrize("name", ["reflect", "circular", "replicate"])
@pytest.mark.parametrize("site_format", FORMATS)
def test_the_padding_of_a_convolution_is_a_site_of_its_own(name: str, site_format: str) -> None:
    make = partial(nn.Conv2d, 4, 4, 3, padding=2, padding_mode=name)
    assert_same(make, policy_of("leaf:pad", site_format), torch.randn(IMAGE))
    assert_same(make, policy_of("leaf:conv2d", site_format), torch.randn(IMAGE))


@pytest.mark.parametrize("site", ["leaf:linear", "leaf:linear#0", "leaf:linear#1"])
@pytest.mark.parametrize("site_format", FORMATS)
def test_a_rule_with_an_index_counts_in_each_forward(site: str, site_format: str) -> None:
    assert_same(partial(nn.Linear, 8, 8), policy_of(site, site_format), torch.randn(ROWS), "twice")


def low_bias() -> nn.Module:
    norm = nn.LayerNorm(8)
    norm.bias = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    return norm


def weight_that_is_no_parameter() -> nn.Module:
    norm = nn.LayerNorm(8)
    del norm.weight
    norm.weight = torch.ones(8, dtype=torch.bfloat16)  # type: ignore[assignment]
    return norm


def low_statistics() -> nn.Module:
    norm = nn.BatchNorm1d(8)
    norm.running_mean, norm.running_var = torch.zeros(8).bfloat16(), torch.ones(8).bfloat16()
    return norm


class Subclass(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 as in torch
        return super().forward(input) * 2


def own_forward() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.forward = lambda x: F.linear(x, linear.weight) * 2  # type: ignore[method-assign]
    return linear


def hooked() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    linear.register_forward_hook(lambda _, __, output: output * 2)
    linear.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 2,))
    return linear


def wrong_size() -> nn.Module:
    return nn.Linear(7, 8)


SPECIAL = [
    low_bias,
    low_statistics,
    weight_that_is_no_parameter,
    partial(Subclass, 8, 8),
    own_forward,
    hooked,
    wrong_size,
    lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
]


@pytest.mark.parametrize("site_format", FORMATS)
@pytest.mark.parametrize("number", range(len(SPECIAL)))
def test_a_leaf_that_is_not_plain_is_served_alike(number: int, site_format: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_same(SPECIAL[number], policy_of("leaf", site_format), torch.randn(ROWS).to(dtype))


def test_leaves_that_do_the_same_share_one_forward_and_remove_leaves_nothing() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(96, 96), nn.ReLU())
    before = [dict(each.__dict__) for each in net]
    rules = (Rule(sites="2", format="fp16"), Rule(sites="*", format="bf16"))
    precision = apply(net, Policy(name="test", rules=rules))
    low, same, other, large, relu = (each.forward.__func__ for each in net)  # type: ignore[union-attr]
    assert low is same
    assert len({low, other, large, relu}) == 4, "another format, a weight whose cast is kept, another op"
    precision.remove()
    assert [each.__dict__ for each in net] == before


@pytest.mark.parametrize("later", ["fp32", "fp16", "as_given"])
def test_the_leaves_of_a_deep_copy_follow_an_exchange_either_way(later: str) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8))
    precision = apply(net, policy_of("2", "fp32"))
    twin, x = copy.deepcopy(net), torch.randn(ROWS)
    policy = policy_of("2", later)
    precision.exchange(policy)
    expected = copy.deepcopy(net)(x)
    assert torch.equal(twin(x), expected)
    with Nothing():
        assert torch.equal(twin(x), expected)
    assert torch.equal(twin[0](x), net[0](x))


def test_the_short_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(nn.Linear(8, 8))
    precision = apply(net, policy_of("leaf", "bf16"))
    entered: list[str] = []
    plans_of = precision.plans_of

    def noting(path: str) -> Any:
        entered.append(path)
        return plans_of(path)

    monkeypatch.setattr(precision, "plans_of", noting)
    net(torch.randn(ROWS), "")
    assert "leaf" not in entered
    with Nothing():
        net(torch.randn(ROWS), "")
    assert "leaf" in entered


def test_a_wrong_call_of_a_leaf_raises_what_torch_raises() -> None:
    net = Net(nn.Linear(8, 8))
    apply(net, policy_of("leaf", "bf16"))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input'"):
        net.leaf()
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        net.leaf(x=torch.ones(8))
    with pytest.raises(TypeError, match="must be Tensor, not int"):
        net(3, "")


@pytest.mark.parametrize("norm", [partial(nn.LayerNorm, 4), partial(nn.GroupNorm, 2, 4), partial(nn.RMSNorm, 4)])
def test_transforms_differentiate_norm_modules(norm: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(norm(), nn.Linear(4, 4))
    apply(model, Policy(name="test", rules=(Rule(sites="*", format="bf16"),)))
    rows = torch.linspace(-1, 1, 12).reshape(3, 4)
    output, tangent = torch.func.jvp(model, (rows,), (torch.ones(3, 4),))
    assert tangent.shape == (3, 4)
    assert torch.isfinite(tangent).all()
    torch.testing.assert_close(output, model(rows), rtol=2**-7, atol=2**-8)
    each = torch.func.vmap(lambda row: model(row[None])[0])(rows)
    torch.testing.assert_close(each, model(rows), rtol=2**-7, atol=2**-8)
    near = 1 + rows / 64  # rounded to a few numbers of bf16, which a norm then spreads
    spread = torch.func.vmap(lambda row: model[0](row[None])[0])(near)
    torch.testing.assert_close(spread, model[0](near), rtol=2**-7, atol=2**-8)
