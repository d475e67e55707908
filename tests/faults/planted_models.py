"""Small training runs with one thing wrong with each of them; the one without is healthy."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoprec.workload import Workload

WIDTH, LENGTH, ROWS, CLASSES = 16, 6, 8, 4


class Net(nn.Module):
    """Two layers over the features of each position, a mean over positions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


class Loud(Net):
    """Layers of ordinary size whose results are amplified before the head takes them, and made small again after."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1) * self.gain) / self.gain


class Scaled(Net):
    """A learned factor that is as large as no number of fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((WIDTH,), 1e5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.body(x) * 1e-5 * self.factor).mean(1))


class Masked(Net):
    """Attention of a learned query over positions, hidden ones at -1e9."""

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        hidden = self.body(x)
        scores = torch.where(visible, hidden.sum(-1), -1e9)
        return self.head((torch.softmax(scores, dim=1).unsqueeze(-1) * hidden).sum(1))


class NormalizedOverLength(Net):
    """Normalizes over positions, with an eps that fp16 rounds to zero."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        centered = hidden - hidden.mean(1, keepdim=True)
        spread = (centered * centered).mean(1, keepdim=True) + 1e-9
        return self.head((centered / torch.sqrt(spread)).square().mean(1) + hidden.mean(1))


class Energy(Net):
    """Reads the energy of its inputs, which grows with their square."""

    def forward(self, x: Tensor) -> Tensor:
        energy = (x * 30.0).square().sum((1, 2), keepdim=False)
        return self.head(self.body(x).mean(1)) + torch.log1p(energy).unsqueeze(-1) * 0.01


class Counting(Net):
    """Anneals by a counter that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 1 / self.calls)


class Averaging(Net):
    """Subtracts a running mean, kept in a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        with torch.no_grad():
            self.mean.lerp_(hidden.float().mean((0, 1)), 0.1)
        return self.head((hidden - self.mean).mean(1))


GENERATOR = torch.Generator()


class OwnDropout(Net):
    """Drops units by a generator of its own, which goes on from run to run."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(WIDTH, generator=GENERATOR) > 0.2
        return self.head((self.body(x) * kept).mean(1))


class OwnStart(Net):
    """Begins each run with other weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.inner.weight.add_(torch.randn(2 * WIDTH, WIDTH, generator=GENERATOR) * 1e-3)


class ForgetfulSGD(torch.optim.SGD):
    """Keeps its momentum where no state dict finds it."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.05)
        self.momenta: dict[nn.Parameter, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.momenta.setdefault(parameter, torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.grad = momentum.clone()
        super().step(closure)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(48):
        x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
        yield x, x.mean(1)[:, :CLASSES].argmax(1)


def masked_batches() -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    for x, label in batches():
        yield (x, torch.arange(LENGTH).expand(ROWS, -1) < 4), label


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def masked_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(*batch[0]), batch[1])


def times(factor: float) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss times a factor."""
    return lambda model, batch: loss(model, batch) * factor


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def workload(model: Callable[[], nn.Module] = Net, **fields: Any) -> Workload:
    """Return a run of `model`, the healthy one unless another is given."""
    return Workload(**{"model": model, "batches": batches, "loss": loss, "optimizer": sgd, **fields})
