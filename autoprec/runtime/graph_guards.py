"""What torch.compile guards of a policy: what can change, and that in one look.

Dynamo guards on all that it read while it traced a graph, before each run of it, and each look fetches memory that the
run before has driven from the caches of the processor. Two kinds of guards say nothing and are taken out again:

A leaf module runs the very forward that was traced. By itself Dynamo would look at the method, its function and code,
at the object it is bound to, and at three attributes that could stand in for calling it, where a leaf without a policy
costs one look. The method is made when the policy is installed and holds all of that for good: one look at the method.

The code of the cast mode, and its tables, are autoprec's own, and stay as they were imported. What they know of the
running thread (`RUNNING`) stays guarded, and what they reach in a module of torch: code of the model may do so too.
"""

import functools
from collections.abc import Callable, Mapping, Set
from types import ModuleType
from typing import Any

from autoprec.runtime.forwards import LEAF
from autoprec.runtime.running import RUNNING

_LEAVES = "_autoprec_leaves"
_CALLS = frozenset({"__call__", "_call_impl", "_compiled_call_impl"})


def guard_by_method() -> None:
    """Guard the leaf that is traced by its method alone; to be called in a function that has it as `module`."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    source: Any = output.current_tx.symbolic_locals["module"].source
    if isinstance(source, AttrSource) and source.member == "__self__":  # of the method, by which Dynamo came here
        method: Any = source.base
        source = method.base
    if source is not None:  # None for a module that is made in the graph
        output.__dict__.setdefault(_LEAVES, set()).add(source)


# torch.compile calls it while it traces and does not trace it: what `assume_constant_result` would set.
guard_by_method._dynamo_marked_constant = True  # type: ignore[attr-defined]


def exchange_guards(output: Any) -> None:
    """Take out the guards that say nothing; to be called when the graph is complete and not yet guarded."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    leaves = output.__dict__.pop(_LEAVES, frozenset())
    methods = [AttrSource(leaf, "forward") for leaf in leaves]
    is_known_by_methods, scope = _known_by(leaves, methods), output.global_scope

    def says_nothing(guard: Any) -> bool:
        return is_known_by_methods(guard) or _is_constant(guard, scope)

    guards = TracingContext.get().guards_context.dynamo_guards
    guards.inner = type(guards.inner)(guard for guard in guards.inner if not says_nothing(guard))
    for method in methods:
        guards.add(method.make_guard(GuardBuilder.ID_MATCH))


def _known_by(leaves: Set[Any], methods: list[Any]) -> Callable[[Any], bool]:
    """Return whether a guard follows from the methods of these leaves, given by their sources."""
    from torch._dynamo.source import AttrSource, CodeSource

    known = {*methods, *(AttrSource(each, part) for each in methods for part in ("__func__", "__self__"))}
    known.update(AttrSource(AttrSource(each, "__func__"), "_torchdynamo_inline") for each in methods)
    for each in (AttrSource(leaf, LEAF) for leaf in leaves):
        known.update((each, *(AttrSource(each, part) for part in ("owner", "path", "original"))))

    def is_known(guard: Any) -> bool:
        source = guard.originating_source
        if isinstance(source, CodeSource):
            source = source.base
        return source in known or (source in leaves and _options(guard).get("attr") in _CALLS)

    return is_known


def _is_constant(guard: Any, scope: Mapping[str, Any]) -> bool:
    """Return whether a guard is one on what is autoprec's own and stays what it is."""
    from torch._dynamo.source import TorchFunctionModeStackSource

    ends = (guard.originating_source, _options(guard).get("source_b"))  # with a second one they must be one object
    if any(_stays(end, scope) for end in ends):
        return True
    # The mode that runs is the topmost one of autoprec's, and which modes are on the stack is guarded apart.
    is_of_stack = any(isinstance(end, TorchFunctionModeStackSource) for end in ends)
    return is_of_stack and any(_own_global(end, scope)[0] is RUNNING for end in ends)


def _stays(source: Any, scope: Mapping[str, Any]) -> bool:
    """Return whether what stands at `source` is autoprec's code, or a table of it."""
    from torch._dynamo.source import TypeSource

    found, links = _own_global(source, scope)
    if found is RUNNING:
        return not links or any(isinstance(each, TypeSource) or _member(each) == "__func__" for each in links)
    return found is not None and (not isinstance(found, ModuleType) or _is_own_name(found.__name__))


def _own_global(source: Any, scope: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Return what `source` comes from in a module of autoprec, or that module, and the links from there; None if not.

    `scope` holds the globals of the function that is traced.
    """
    from torch._dynamo.source import GlobalSource
    from torch._guards import ChainedSource

    links: list[Any] = []
    while isinstance(source, ChainedSource):
        links.insert(0, source)
        source = source.base
    if not isinstance(source, GlobalSource):
        return None, []
    found = scope.get(source.global_name)
    if isinstance(found, ModuleType) and _is_own_name(found.__name__):
        return (getattr(found, _member(links[0]), None), links[1:]) if links else (found, [])
    is_own = _is_own_name(scope.get("__name__", "")) and not source.global_name.startswith("__")  # as Dynamo's own are
    return (found, links) if is_own else (None, [])


def _member(link: Any) -> str:
    return getattr(link, "member", "")


def _options(guard: Any) -> Mapping[str, Any]:
    return guard.create_fn.keywords if isinstance(guard.create_fn, functools.partial) else {}


def _is_own_name(module: str) -> bool:
    return module.partition(".")[0] == "autoprec"
