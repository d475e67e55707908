"""Graphs that torch.compile makes of code under a cast mode: the casts are in them, so nothing casts while they run."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from autoprec.runtime.graph_guards import exchange_guards
from autoprec.runtime.plans import Action
from autoprec.runtime.running import RUNNING

_F = TypeVar("_F", bound=Callable[..., Any])

_NAMED: WeakValueDictionary[str, Any] = WeakValueDictionary()
_NUMBERS = itertools.count()

# Before torch 2.13 Dynamo calls the counterpart of a method without its object: then a function has to ask by itself.
ASKS = torch.__version__ < "2.13"

_DONE = "_autoprec_runs_aside"
_DEPTH = "_autoprec_effects"


def run_graph_aside() -> None:
    """Have the graph that is being traced run with the mode of its thread aside.

    torch.compile traces the mode into the graph and leaves it on the stack when the graph runs: it would see the
    graph's own aten ops, as calls of whatever frame is open. Must be called while torch.compile traces.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    if not hasattr(output.compiler_fn, _DONE):
        output.compiler_fn = _aside(output.compiler_fn, output)


# torch.compile calls it while it traces and does not trace it: what `assume_constant_result` would set.
run_graph_aside._dynamo_marked_constant = True  # type: ignore[attr-defined]


def name_in_graphs(owner: Any) -> str:
    """Return a name by which code that torch.compile traces finds `owner` for as long as it lives.

    What is asked once, while a graph is traced, may be asked with constants only: torch before 2.13 takes no object.
    """
    name = f"policy {next(_NUMBERS)}"
    _NAMED[name] = owner
    return name


def traced_action(name: str, module: str, op: str, index: int) -> Action:
    """Return what the policy of that name does at a site: a constant of the graph that is being traced."""
    action: Action = _NAMED[name].action_of(module, op, index)
    return action


traced_action._dynamo_marked_constant = True  # type: ignore[attr-defined]


def allow_effects() -> None:
    """Let the mode keep its own account while torch.compile traces a checkpointed function, until `end_effects()`.

    Frames and the counts of calls in them lie outside that function, and Dynamo refuses to change what does. They are
    as they should be when the forward is through; the backward runs the graph again, whose casts are in it, and needs
    none of them. Only those are let through: what the function itself changes is still refused. May be nested.
    """
    _change_effects(1)


def end_effects() -> None:
    """End what `allow_effects()` began."""
    _change_effects(-1)


def _change_effects(step: int) -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer = InstructionTranslator.current_tx().output.current_tracer
    if "checkpoint" not in str(tracer.source_target):
        return
    depth, before = getattr(tracer, _DEPTH, (0, tracer.unsafe_allow_externally_visible_side_effects))
    setattr(tracer, _DEPTH, (depth + step, before))
    tracer.unsafe_allow_externally_visible_side_effects = before or depth + step > 0


allow_effects._dynamo_marked_constant = True  # type: ignore[attr-defined]
end_effects._dynamo_marked_constant = True  # type: ignore[attr-defined]


def not_compiled_alone(function: _F, *, but_within: bool = False) -> _F:
    """Return `function`, which torch.compile traces inside of models, and leaves alone where it runs between graphs.

    A mode is asked there about each call. To compile its frames costs compilations and shows Dynamo calls that it takes
    for others: `grad_fn` of a tensor comes out as a bool, which breaks modules with backward hooks. With `but_within`
    the functions that it calls may be compiled.
    """
    frames = torch._C._dynamo.eval_frame
    skip, within = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT if but_within else frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, within))
    return function


def traced_as(counterpart: Callable[..., Any], *, but_within: bool = False) -> Callable[[_F], _F]:
    """Have torch.compile trace `counterpart` where the decorated function is called; that is not compiled alone.

    So the function need not ask at each call whether it is traced, but where `ASKS` says so. `counterpart` must have no
    closure: Dynamo would look for its cells in those of the function. It is told as torch's own wrappers tell it.
    """
    assert counterpart.__closure__ is None

    def decorate(function: _F) -> _F:
        if not ASKS:
            setattr(function, "_torchdynamo_inline", counterpart)  # noqa: B010
        return not_compiled_alone(function, but_within=but_within)

    return decorate


def _aside(compiler: Any, output: Any) -> Any:
    """Return the backend `compiler`, whose graphs run aside."""

    @functools.wraps(compiler)
    def compile_aside(*arguments: Any, **options: Any) -> Callable[..., Any]:
        exchange_guards(output)
        graph = compiler(*arguments, **options)

        @functools.wraps(graph)
        def run(*inputs: Any) -> Any:
            mode = RUNNING.mode
            if mode is None or mode.aside:
                return graph(*inputs)
            if torch._C._len_torch_function_stack() == 1:  # the mode alone: then it need not even be asked
                with torch._C.DisableTorchFunction():
                    return graph(*inputs)
            mode.aside = True
            try:
                return graph(*inputs)
            finally:
                mode.aside = False

        return run

    setattr(compile_aside, _DONE, True)
    return compile_aside
