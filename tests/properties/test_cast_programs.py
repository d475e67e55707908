"""Property: under any per-site policy, a program of torch ops is that program with its casts written out."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeAlias

import hypothesis
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import autoprec
from autoprec.policy import Policy, Rule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZE = 4

# op -> its number of arguments, the function, and what it demands: `agree` for equal dtypes, `norm` for a first
# argument that alone is cast.
Operation: TypeAlias = tuple[int, Callable[..., torch.Tensor], str]
OPS: Mapping[str, Operation] = {
    "matmul": (2, lambda a, b: a @ b, "agree"),
    "linear": (3, lambda a, b, c: F.linear(a, b, c[0]), "agree"),
    "addmm": (3, lambda a, b, c: torch.addmm(a, b, c), "agree"),
    "scaled_dot_product_attention": (
        3,
        lambda a, b, c: F.scaled_dot_product_attention(a[None], b[None], c[None])[0],
        "agree",
    ),
    "add": (2, lambda a, b: a + b, ""),
    "mul": (2, torch.mul, ""),
    "tanh": (1, torch.tanh, ""),
    "softmax": (1, lambda a: a.softmax(-1), ""),
    "cat": (2, lambda a, b: torch.cat([a, b])[:SIZE], ""),
    "where": (2, lambda a, b: torch.where(a > 0, a, b), ""),
    "layer_norm": (3, lambda a, b, c: F.layer_norm(a, (SIZE,), b[0], c[0]), "norm"),
}
Step: TypeAlias = tuple[str, tuple[int, ...]]


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Step], dict[tuple[str, int], str]]:
    """Return steps, whose arguments are the input (0), a weight (1) or results of steps before, and a format a site."""
    steps: list[Step] = []
    formats = {}
    counts: Counter[str] = Counter()
    for place in range(draw(st.integers(1, 7))):
        op = draw(st.sampled_from(sorted(OPS)))
        steps.append((op, tuple(draw(st.integers(0, place + 1)) for _ in range(OPS[op][0]))))
        formats[op, counts[op]] = draw(st.sampled_from([*DTYPES, "as_given", "promote"]))
        counts[op] += 1
    return steps, formats


class Program(nn.Module):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps, self.weight = steps, nn.Parameter(torch.linspace(-1, 1, SIZE * SIZE).reshape(SIZE, SIZE).cos())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x, self.weight]
        for op, places in self.steps:
            values.append(OPS[op][1](*(values[place] for place in places)))
        return values[-1]


def widest(values: list[torch.Tensor]) -> torch.dtype:
    dtypes = {value.dtype for value in values}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def by_hand(program: Program, formats: dict[tuple[str, int], str], x: torch.Tensor) -> torch.Tensor:
    values = [x, program.weight]
    counts: Counter[str] = Counter()
    for op, places in program.steps:
        _, function, demand = OPS[op]
        name, arguments = formats[op, counts[op]], [values[place] for place in places]
        counts[op] += 1
        if name == "as_given":
            dtype = widest(arguments) if demand == "agree" else None
        else:
            dtype = widest(arguments) if name == "promote" else DTYPES[name]
        if demand == "norm":
            first = arguments[0].to(arguments[0].dtype if dtype is None else dtype)
            common = widest([first, *arguments[1:]])  # parameters are not narrower than the activation
            arguments = [first, *(value.to(common) for value in arguments[1:])]
        elif dtype is not None:
            arguments = [value.to(dtype) for value in arguments]
        if op == "where":  # the comparison is never cast
            values.append(torch.where(values[places[0]] > 0, arguments[0], arguments[1]))
        else:
            values.append(function(*arguments))
    return values[-1].float()


def policy_of(formats: dict[tuple[str, int], str]) -> Policy:
    rules = [Rule(sites=f":{op}#{index}", format=name) for (op, index), name in formats.items()]
    return Policy(name="random", rules=(*rules, Rule(sites="*", format="as_given")))


@hypothesis.given(programs())
def test_a_program_under_a_policy_is_the_program_with_casts(
    case: tuple[list[Step], dict[tuple[str, int], str]],
) -> None:
    steps, formats = case
    program = Program(steps)
    x = torch.linspace(-2, 2, SIZE * SIZE).reshape(SIZE, SIZE).requires_grad_()
    with autoprec.apply(program, policy_of(formats)):
        ours = program(x)
    theirs = by_hand(program, formats, x)
    assert torch.equal(ours, theirs) or (ours.isnan() == theirs.isnan()).all()
    assert ours.dtype == torch.float32
    gradients = [
        torch.autograd.grad(each.sum(), (x, program.weight), allow_unused=True, materialize_grads=True)
        for each in (ours, theirs)
    ]
    for mine, hand in zip(*gradients, strict=True):
        # A weight that is cast once has its gradients added in the low format, one that is cast at each use in FP32.
        bound = 2**-5 * hand.abs().max() + 2**-5
        assert mine.isnan().any() or (mine - hand).abs().max() <= bound or hand.isnan().any()
