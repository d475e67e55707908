"""Every range rule owes one thing: no value of the op lies outside the interval, whatever its arguments."""

import contextlib

import pytest
import torch
from torch.nn import functional as F

from autoprec.analysis.extremes import extremes_of
from autoprec.analysis.ranges import RULES, ranges_of
from autoprec.ops import CATALOG
from tests.contracts.op_examples import EXAMPLES
from tests.recorded import recorded
from tests.soundness import violations

KINDS = {
    "ordinary": lambda *shape: torch.randn(shape),
    "positive": lambda *shape: torch.rand(shape) + 0.1,
    "fractions": lambda *shape: torch.rand(shape),
    "large": lambda *shape: 3e4 * torch.randn(shape),
    "small": lambda *shape: 1e-4 * torch.randn(shape),
    "integers": lambda *shape: torch.randint(-3, 4, shape).float(),
    "zeros": lambda *shape: torch.zeros(shape).copysign(torch.randn(shape)),
    "broken": lambda *shape: torch.randn(shape).masked_fill(torch.rand(shape) > 0.7, torch.inf),
    "negative": lambda *shape: -torch.rand(shape) - 0.1,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def integers(*shape: int, high: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % high


def run_with_all_kinds(name: str) -> None:
    cases = [(kind, torch.float32) for kind in KINDS.values()]
    cases += [(KINDS[kind], dtype) for kind in ("ordinary", "fractions") for dtype in DTYPES[1:]]
    for kind, dtype in cases:
        with contextlib.suppress(RuntimeError, NotImplementedError, IndexError, ValueError):  # not of such numbers
            EXAMPLES[name](lambda *shape, kind=kind, dtype=dtype: kind(*shape).to(dtype), integers)


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() & RULES.keys()))
def test_what_an_op_returns_lies_in_its_interval(name: str) -> None:
    recording = recorded(lambda: run_with_all_kinds(name))
    for known in (extremes_of(recording), {}):
        assert violations(recording, ranges_of(recording.op_graph, known)) == []


def test_rules_are_about_ops_of_the_catalog() -> None:
    assert RULES.keys() <= CATALOG.keys()


X = torch.tensor([[0.5, -1.5, 2.0], [1.0, 0.0, -0.0]])
INDEX = torch.tensor([0, 1, 1])
SPELLINGS = {
    "where as a method": lambda x: x.where(x > 0, -5.0),
    "max of two": lambda x: torch.max(x, x + 5),
    "max along a dimension": lambda x: x.max(-1),
    "the indices of max": lambda x: x.max(-1)[1] * 2,
    "reflected subtraction": lambda x: 1 - x,
    "reflected division": lambda x: 1 / (x.abs() + 1),
    "rsub": lambda x: torch.rsub(x, 3.0),
    "reflected power": lambda x: 2**x,
    "below the maximum": lambda x: x - x.amax(-1, keepdim=True),
    "below the maximum of another": lambda x: x - (x - 1).amax(-1, keepdim=True),
    "spread": lambda x: x.amax(-1) - x.amin(-1),
    "spread along two dimensions": lambda x: x.amax(0)[:2] - x.amin(1),
    "maximum along another dimension": lambda x: x[:, :2].amax(0) - x[:, :2].amin(1),
    "alpha": lambda x: torch.add(x, x, alpha=-3),
    "floor division": lambda x: x // 0.3,
    "rounding mode": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "negative power": lambda x: x**-1,
    "odd power": lambda x: x**3,
    "fractional power": lambda x: x.abs() ** 0.3,
    "round to decimals": lambda x: x.round(decimals=1),
    "bits as integers": lambda x: x.view(torch.int32),
    "infinity to an integer": lambda x: (1 / x).long(),
    "a NaN to an integer": lambda x: (x - x / x).long(),
    "wrapped integer": lambda x: (x * 100).to(torch.int8) * 3,
    "constant fill": lambda x: torch.full_like(x, 0.1),
    "arange by steps": lambda x: torch.arange(0.1, 1.0, 0.1),
    "arange downward": lambda x: torch.arange(5, 0, -2),
    "linspace": lambda x: torch.linspace(-1, 1, 7),
    "one hot": lambda x: F.one_hot(INDEX, 4),
    "running sum": lambda x: x.cumsum(-1),
    "running sum of ones": lambda x: torch.ones(300).cumsum(0),
    "mean": lambda x: x.mean(),
    "embedding of torch": lambda x: torch.embedding(x, INDEX % 2),
    "batch norm of torch": lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
    "layer norm": lambda x: F.layer_norm(x, (3,), torch.full((3,), 2.0), torch.full((3,), 9.0)),
    "rms norm": lambda x: F.rms_norm(x, (3,)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "outer einsum": lambda x: torch.einsum("i,j->ij", x[0], x[1]),
    "inner einsum": lambda x: torch.einsum("ij,ij->", x, x),
    "batched einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "outer product": lambda x: x[0][:, None] @ x[1][None],
    "addmm with factors": lambda x: torch.addmm(x @ x.T, x, x.T, beta=-2.0, alpha=5.0),
    "reflecting pad": lambda x: F.pad(x[None], (1, 1), mode="reflect"),
    "constant pad": lambda x: F.pad(x, (1, 1), value=7.0),
    "circular convolution": lambda x: F.conv1d(x[None], torch.ones(1, 2, 2)),
    "transposed convolution": lambda x: F.conv_transpose1d(x[None], torch.ones(2, 1, 3)),
    "bicubic": lambda x: F.interpolate(x[None, None], size=(5, 7), mode="bicubic"),
    "average pool with padding": lambda x: F.avg_pool1d(x[None] - 5, 2, padding=1),
    "accumulating put": lambda x: x.index_put((INDEX % 2,), x[0], accumulate=True),
    "index add": lambda x: x.index_add(0, INDEX % 2, torch.ones(3, 3), alpha=4.0),
    "scatter of a number": lambda x: x.scatter(1, torch.zeros(2, 1, dtype=torch.long), 9.0),
    "uniform of nn.init": lambda x: torch.nn.init.uniform_(torch.empty(3), a=2.0, b=3.0),
    "randint of two": lambda x: torch.randint(5, 9, (4,)),
    "dropout": lambda x: F.dropout(x, 0.9),
    "clamp by tensors": lambda x: torch.clamp(x, x - 1, x * 0),
    "nan to num": lambda x: (x / 0).nan_to_num(),
    "sum of squared errors": lambda x: F.mse_loss(x, x * 0 + 3, reduction="sum"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_all_spellings_of_an_op_are_told_apart(name: str) -> None:
    recording = recorded(SPELLINGS[name], X.clone())
    for known in (extremes_of(recording), {}):
        assert violations(recording, ranges_of(recording.op_graph, known)) == []


def _writes_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4)
    y[1] = 100.0
    part = y[:2]
    part.clamp_(0, 1)
    part[0].fill_(7)
    y[3] = -50.0
    return y + 0


def _writes_twice(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    view = y.view(-1)
    y.mul_(10)
    y.add_(3)
    return view.relu().view(2, 3) + y


def _writes_below_a_maximum(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    top = y.amax(-1, keepdim=True)
    y.add_(100)
    return y - top


def _replaces_data(x: torch.Tensor) -> torch.Tensor:
    y = x.sigmoid()
    y.data = x * 50
    return y + 0


def _writes_out(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2, 3)
    z = y.detach()
    torch.mul(x, 100, out=y)
    return z + 0


def _writes_to_what_dropout_returned(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    same = F.dropout(y, 0.0, training=False)
    same.add_(1000)
    return y + 0


@pytest.mark.parametrize(
    "lines",
    [
        _writes_through_a_view,
        _writes_twice,
        _writes_below_a_maximum,
        _replaces_data,
        _writes_out,
        _writes_to_what_dropout_returned,
    ],
)
def test_memory_that_is_written_to_is_known_to_have_changed(lines) -> None:
    recording = recorded(lines, X.clone())
    for known in (extremes_of(recording), {}):
        assert violations(recording, ranges_of(recording.op_graph, known)) == []


class Doubled(torch.autograd.Function):
    """A function whose name is that of an op with another range."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x + 5

    @staticmethod
    def backward(ctx, gradient):
        return gradient


Doubled.__name__ = "sigmoid"


def test_a_function_of_the_user_with_the_name_of_an_op_may_return_anything() -> None:
    recording = recorded(lambda x: Doubled.apply(x), X.clone())
    assert violations(recording, ranges_of(recording.op_graph)) == []
