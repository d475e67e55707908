"""Property: in any program of torch ops, every value lies in the interval of its node."""

from collections.abc import Callable, Mapping

import hypothesis
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from autoprec.analysis.extremes import extremes_of
from autoprec.analysis.ranges import ranges_of
from tests.recorded import recorded
from tests.soundness import violations

SIZE = 3
Operation = tuple[int, Callable[..., torch.Tensor]]
OPS: Mapping[str, Operation] = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "reflected": (1, lambda a: 0.1 - a),
    "mul": (2, lambda a, b: a * b),
    "square": (1, lambda a: a * a),
    "div": (2, lambda a, b: a / (b.abs() + 0.5)),
    "scale": (1, lambda a: a * 0.3),
    "matmul": (2, lambda a, b: a @ b),
    "exp": (1, lambda a: a.clamp(-5, 5).exp()),
    "log": (1, lambda a: (a.relu() + 1e-3).log()),
    "sqrt": (1, lambda a: a.abs().sqrt()),
    "rsqrt": (1, lambda a: (a.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * a),
    "softmax": (1, lambda a: a.softmax(-1)),
    "sigmoid": (1, torch.sigmoid),
    "tanh": (1, torch.tanh),
    "cumsum": (1, lambda a: a.cumsum(-1)),
    "sum": (1, lambda a: a.sum(-1, keepdim=True).expand(SIZE, SIZE)),
    "max": (1, lambda a: a - a.amax(-1, keepdim=True)),
    "round": (1, lambda a: a.round()),
    "index": (2, lambda a, b: a[(b.clamp(0, 2)).long()[:, 0]]),
    "where": (2, lambda a, b: torch.where(a > b, a, -1e4)),
    "cat": (2, lambda a, b: torch.cat([a, b])[:SIZE]),
    "transpose": (1, lambda a: a.t()),
    "half": (1, lambda a: a.half().float()),
    "norm": (1, lambda a: F.layer_norm(a, (SIZE,))),
    "in place": (2, lambda a, b: a.clone().mul_(2).add_(b)),
    "write a row": (2, lambda a, b: _written(a, b)),
    "write to a view": (2, lambda a, b: _written_view(a, b)),
}


def _written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = a.clone()
    result[0] = b[1]
    return result


def _written_view(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = a * 1
    result.t()[1].sub_(b[0])
    return result


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...]]]:
    """Return steps, whose arguments are the input (0) or results of steps before."""
    steps = []
    for place in range(draw(st.integers(1, 8))):
        op = draw(st.sampled_from(sorted(OPS)))
        steps.append((op, tuple(draw(st.integers(0, place)) for _ in range(OPS[op][0]))))
    return steps


@hypothesis.settings(max_examples=60)
@hypothesis.given(programs(), st.sampled_from([1.0, 1e-4, 300.0]), st.integers(0, 3))
def test_every_value_of_a_program_lies_in_its_interval(steps, scale: float, seed: int) -> None:
    def lines(x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for op, places in steps:
            values.append(OPS[op][1](*(values[place] for place in places)))
        return values[-1]

    x = scale * torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    recording = recorded(lines, x)
    for known in (extremes_of(recording), {}):
        assert violations(recording, ranges_of(recording.op_graph, known)) == []
