"""The presets of systems people know train as these systems do, bit for bit, held against casts written by hand.

Each oracle trains a small model in plain torch with the casts of the original where the original puts them. Two
steps of SGD: the second loss sees the gradients, the loss scale, the masters and what is stored.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec import runtime
from autoprec.policy import preset

Cast = Callable[[torch.Tensor], torch.Tensor]
STEPS = 3


class Images(nn.Module):
    """Convolution, batch norm, pooling, a residual, a linear head. The casts are those of an oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.one = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.deep, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.one(self.enter(x)).relu(), 2)
        x = (x + self.two(self.deep(x))).relu()
        y: torch.Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return y


class Text(nn.Module):
    """Embedding, attention with a softmax, layer norms, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Embedding(11, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1) @ v)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        y: torch.Tensor = self.head(x)
        return y


class Speech(nn.Module):
    """An LSTM and a GRU cell; both are one call each."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return y


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(kind: type[nn.Module], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    if kind is Text:
        ids = torch.randint(0, 11, (2, 6), generator=generator)
        return ids, ids.roll(-1, 1)
    shape = (4, 2, 8, 8) if kind is Images else (4, 5, 6)
    return torch.randn(shape, generator=generator), torch.arange(4) % 3


def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss; the weight 1.5 makes a mul and a mean of it, which code outside the model may have."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten()) * 1.5


def under_policy(kind: type[nn.Module], name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses under a preset, and the parameters after them, masters where there are some.

    Layouts are left as given: other kernels add up in another order, and the oracle is about casts.
    """
    model = built(kind)
    with runtime.apply(model, replace(preset(name, "cpu"), memory_format="as_given")) as precision:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            x, target = batch(kind, step)
            with precision.loss():
                loss = criterion(model(x), target)
            precision.backward(loss)
            precision.step(optimizer)
            losses.append(loss.item())
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def by_hand(
    kind: type[nn.Module],
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    *,
    scale: float,
    stored: Callable[[nn.Module], None] = lambda model: None,
    has_masters: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the same for a loop with the casts in `forward` and a model whose parameters `stored` casts."""
    model = built(kind)
    masters = [nn.Parameter(each.detach().clone()) for each in model.parameters()]
    stored(model)
    stepped: Iterable[nn.Parameter] = masters if has_masters else model.parameters()
    optimizer = torch.optim.SGD(stepped, lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        x, target = batch(kind, step)
        loss = criterion(forward(model, x), target)
        (loss * scale).backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
            if has_masters:
                master.grad = parameter.grad.float() / scale
            else:
                parameter.grad /= scale
        optimizer.step()
        if has_masters:
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    parameter.copy_(master)
        losses.append(loss.item())
    named = zip(model.named_parameters(), masters, strict=True)
    return losses, {n: (m if has_masters else p).detach().float() for (n, p), m in named}


def assert_same(
    ours: tuple[list[float], dict[str, torch.Tensor]], theirs: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    assert ours[0] == theirs[0]
    assert len(set(ours[0])) == STEPS
    assert [name for name, value in theirs[1].items() if not torch.equal(ours[1][name].float(), value)] == []


def half_but_batch_norm(model: nn.Module) -> None:
    """Cast as `convert_network` of Apex does; buffers of other modules there are none here."""
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.half()


def whole(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return FP32 outputs for inputs that are cast to fp16 at the entrance, as Apex patches `forward`."""
    return model(x.half() if x.is_floating_point() else x).float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Images, Text])
def test_apex_o2(kind: type[nn.Module]) -> None:
    theirs = by_hand(kind, whole, scale=2.0**16, stored=half_but_batch_norm, has_masters=True)
    assert_same(under_policy(kind, "apex-o2"), theirs)


def test_apex_o2_sums_the_gradient_of_a_recurrent_weight_in_fp32_where_apex_does_in_fp16() -> None:
    losses, ours = under_policy(Speech, "apex-o2")
    their_losses, theirs = by_hand(Speech, whole, scale=2.0**16, stored=half_but_batch_norm, has_masters=True)
    assert losses[0] == their_losses[0]
    # Five parts are added, each sum rounded by 2^-11 of a gradient below 1: 5 * 2^-11 * lr * (sum of momenta) a weight.
    bound = 5 * 2.0**-11 * 0.1 * (1 + 1.9 + 2.71)
    assert all((ours[name] - value).abs().max() < bound for name, value in theirs.items())
    assert torch.equal(ours["head.weight"], theirs["head.weight"])


@pytest.mark.parametrize("kind", [Text, Speech])  # a batch norm differs by the rounding of its running statistics
def test_apex_o3(kind: type[nn.Module]) -> None:
    assert_same(under_policy(kind, "apex-o3"), by_hand(kind, whole, scale=1.0, stored=lambda model: model.half()))


def images_in_fp16(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run convolutions and the head on fp16 copies; what is on no list gets what reaches it: fp16."""
    assert isinstance(m, Images)
    x = F.max_pool2d(m.one(conv(m.enter, x)).relu(), 2)
    x = (x + m.two(conv(m.deep, x))).relu()
    return linear(m.head, F.adaptive_avg_pool2d(x, 1).flatten(1), half)


def half(x: torch.Tensor) -> torch.Tensor:
    return x.half()


def conv(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    assert layer.bias is not None
    return F.conv2d(x.half(), layer.weight.half(), layer.bias.half(), padding=layer.padding)


def linear(layer: nn.Linear, x: torch.Tensor, low: Cast) -> torch.Tensor:
    return F.linear(low(x), low(layer.weight), low(layer.bias))


def text_o1(m: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Run linear and matmul in fp16, layer norm and softmax in FP32; sums take the wider of their arguments."""
    assert isinstance(m, Text)
    low = half
    x = m.embed(ids)
    q, k, v = linear(m.qkv, m.norm1(x), low).chunk(3, -1)
    weights = F.softmax((low(q) @ low(k).transpose(-1, -2) * 8**-0.5).float(), -1)
    x = x + linear(m.out, low(weights) @ low(v), low)
    x = x + linear(m.down, F.gelu(linear(m.up, m.norm2(x), low)), low)
    return linear(m.head, x, low)


def test_apex_o1_on_images() -> None:
    theirs = by_hand(Images, lambda m, x: images_in_fp16(m, x).float(), scale=2.0**16)
    assert_same(under_policy(Images, "apex-o1"), theirs)


def test_apex_o1_on_text() -> None:
    assert_same(under_policy(Text, "apex-o1"), by_hand(Text, lambda m, x: text_o1(m, x).float(), scale=2.0**16))


def test_fp16_resnet() -> None:
    theirs = by_hand(Images, lambda m, x: images_in_fp16(m, x).float(), scale=2.0**16)
    assert_same(under_policy(Images, "fp16-resnet"), theirs)


def text_as_flax(m: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Run every module in bf16 on FP32 parameters; norms compute in FP32 and hand on bf16, the softmax in FP32."""
    assert isinstance(m, Text)

    def low(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()

    x = F.embedding(ids, low(m.embed.weight))
    q, k, v = linear(m.qkv, low(m.norm1(x.float())), low).chunk(3, -1)
    x = x + linear(m.out, low(F.softmax((q @ k.transpose(-1, -2) * 8**-0.5).float(), -1)) @ v, low)
    x = x + linear(m.down, F.gelu(linear(m.up, low(m.norm2(x.float())), low)), low)
    return linear(m.head, x, low).float()


def test_tpu_bf16_is_flax_with_bf16_modules_and_fp32_parameters() -> None:
    assert_same(under_policy(Text, "tpu-bf16"), by_hand(Text, text_as_flax, scale=1.0))
