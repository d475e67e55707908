"""What torch.compile guards of a leaf module: that it runs the very forward that was traced, in one look.

By itself Dynamo would look at the method, its function and code, at the object it is bound to, and at three attributes
that could stand in for calling it: at each leaf, in each step, where a leaf without a policy costs one look. Each look
fetches memory that the step before has driven from the caches of the processor. The method is made when the policy is
installed and holds all of that for good: who knows the method knows it all.
"""

import functools
from collections.abc import Set
from typing import Any

from autoprec.runtime.compiled import at_end_of_trace
from autoprec.runtime.forwards import PATH

_LEAVES = "_autoprec_leaves"
_CALLS = frozenset({"__call__", "_call_impl", "_compiled_call_impl"})


def guard_by_method() -> None:
    """Guard the leaf that is traced by its method alone; to be called in a function that has it as `module`."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    leaves = output.__dict__.get(_LEAVES)
    if leaves is None:
        leaves = output.__dict__[_LEAVES] = set()
        at_end_of_trace(output, functools.partial(_exchange_guards, leaves))
    source = output.current_tx.symbolic_locals["module"].source
    if source is not None:  # None for a module that is made in the graph
        leaves.add(source)


# torch.compile calls it while it traces and does not trace it: what `assume_constant_result` would set.
guard_by_method._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _exchange_guards(leaves: Set[Any]) -> None:
    """Put one guard on the method of each leaf, given by its source, for those that say no more than it."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    methods = [AttrSource(leaf, "forward") for leaf in leaves]
    known = {AttrSource(leaf, PATH) for leaf in leaves}
    known.update(methods, *((AttrSource(each, "__func__"), AttrSource(each, "__self__")) for each in methods))

    def says_no_more(guard: Any) -> bool:
        options = guard.create_fn.keywords if isinstance(guard.create_fn, functools.partial) else {}
        source = guard.originating_source
        return source in known or (source in leaves and options.get("attr") in _CALLS)

    guards = TracingContext.get().guards_context.dynamo_guards
    guards.inner = type(guards.inner)(guard for guard in guards.inner if not says_no_more(guard))
    for method in methods:
        guards.add(method.make_guard(GuardBuilder.ID_MATCH))
