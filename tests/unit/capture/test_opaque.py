"""Transforms and compiled code replay with their gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.capture import record
from tests.unit.capture.steps import Run, check_faithful, step


def with_vjp(m: Any, x: torch.Tensor) -> Any:
    out, pull = torch.func.vjp(m.one, x)
    return pull(out)[0] * m.two(x)


def with_vjp_over_a_closure(m: Any, x: torch.Tensor) -> Any:
    y = m.two(x)
    out, pull = torch.func.vjp(lambda a: m.one(a) * y, x)
    return torch.func.vmap(lambda row: pull(row)[0])(torch.stack([out, y])).sum(0)


def with_jvp(m: Any, x: torch.Tensor) -> Any:
    return sum(torch.func.jvp(lambda a: m.one(a).sin(), (m.two(x),), (x,)))


def with_vmap_over_a_closure(m: Any, x: torch.Tensor) -> Any:
    y = m.two(x)
    return torch.func.vmap(lambda row: row * y.sum())(m.one(x))


def with_vmap_over_a_nested_closure(m: Any, x: torch.Tensor) -> Any:
    y = m.two(x)

    def scaled(row: torch.Tensor) -> torch.Tensor:
        return row * y.sum()  # type: ignore[no-any-return]

    return torch.func.vmap(lambda row: scaled(row) + 1)(m.one(x))


def jacobian_of(transform: Any) -> Run:
    return lambda m, x: transform(lambda a: m.one(a).sin())(m.two(x)).sum((0, 1))


def hessian(m: Any, x: torch.Tensor) -> Any:
    return torch.func.hessian(lambda a: m.one(a).sin().sum())(m.two(x)).sum((0, 1))


TRANSFORMS: dict[str, Run] = {
    "vjp": with_vjp,
    "vjp over a closure": with_vjp_over_a_closure,
    "jvp": with_jvp,
    "jacrev": jacobian_of(torch.func.jacrev),
    "jacfwd": jacobian_of(torch.func.jacfwd),
    "hessian": hessian,
    "vmap over a closure": with_vmap_over_a_closure,
    "vmap over a nested closure": with_vmap_over_a_nested_closure,
}


# jacfwd and jvp use torch.jit for their decompositions, which warns of its age.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    check_faithful(step(TRANSFORMS[name]))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # from dynamo itself, in the plain run
def test_compiled_parts_are_recorded_as_they_are_written() -> None:
    def run(m: Any, x: torch.Tensor) -> Any:
        return m.inner(m.one(torch.compile(lambda a: a.sin() * 2, backend="eager")(x)))

    recording = check_faithful(step(run, lambda: {"inner": torch.compile(nn.Linear(4, 4), backend="eager")}))
    assert [node.op for node in recording.op_graph.calls()].count("linear") == 2
    assert "sin" in [node.op for node in recording.op_graph.calls()]


def test_everything_is_put_back_after_an_exception() -> None:
    from torch._functorch import apis, eager_transforms

    def functions() -> list[Any]:
        return [apis.vmap_impl, eager_transforms._vjp_with_argnums, torch.autograd.Function.__dict__["apply"]]

    before = functions()

    def run(m: Any, x: torch.Tensor) -> Any:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        record(step(run))
    assert functions() == before
