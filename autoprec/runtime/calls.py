"""What a torch function is to autoprec: its catalog row, whether it writes to an argument, whether it is entered.

Recording and casting both intercept torch functions; both read a call through `describe`, so that what was
analyzed is what is cast.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional as F

from autoprec.ops import CATALOG, ENTERED, Op, canonical_name, lookup

# Changes something although it returns no tensor and writes to none of its arguments' memory.
EFFECTS = frozenset({"backward", "set", "requires_grad", "register_hook", "retain_grad", "_set_grad_enabled"})

# So many functions are remembered before all are forgotten: one that is made anew at each call must not pile up.
MOST_FUNCTIONS = 2**11

# Where functions live that move tensors between processes, and FSDP's copies into and out of its buffers. Only their
# bytes count, also those of names that compute elsewhere: `torch.distributed.scatter` is no `Tensor.scatter`.
_COMMUNICATION = (
    "torch.distributed.",
    *(f"torch._ops.{name}" for name in ("c10d", "_c10d", "fsdp", "symm_mem")),  # or what begins so
)


@dataclass(frozen=True, slots=True)
class Call:
    """Facts of one torch function, the same at every call of it.

    `writes_first` says that the first argument is written to; `is_entered` that the function is written in Python on
    top of other torch functions, which are intercepted one by one where `BODIES[function]` is called in its place.
    `property_name` is set for a tensor property such as `T`; `is_site` repeats the op's, whose property torch.compile
    cannot read. `writes` holds place and name of the arguments that a custom op is declared to write to.
    """

    op: Op
    writes_first: bool = False
    is_entered: bool = False
    property_name: str = ""
    writes: tuple[tuple[int, str], ...] = ()
    is_site: bool = field(init=False)

    def __post_init__(self) -> None:
        """Repeat what the op says."""
        object.__setattr__(self, "is_site", self.op.is_site)


def _never(*_: Any) -> bool:
    return False


def _entered(function: types.FunctionType) -> Callable[..., Any]:
    """Return `function` with its own override check answered no, so that its body runs and inner calls are seen."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    namespace = {**function.__globals__, **dict.fromkeys(checks, _never)}
    del namespace["__name__"]  # by which torch.compile would find the globals of the module, not these
    facts = (function.__name__, function.__defaults__, function.__closure__)
    body = types.FunctionType(function.__code__, namespace, *facts)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


BODIES: Mapping[Any, Callable[..., Any]] = {getattr(F, name): _entered(getattr(F, name)) for name in sorted(ENTERED)}


def _describe(function: Any) -> Call:
    if _communicates(function):
        return Call(CATALOG["collective"])
    name = getattr(function, "__name__", type(function).__name__).partition(".")[0]  # add_.Tensor is an overload
    if isinstance(function, types.MethodWrapperType):  # Tensor.T.__get__ and its kind
        return Call(lookup(canonical_name(name)), property_name=getattr(function.__self__, "__name__", ""))
    op = lookup(canonical_name(name))
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    writes = () if in_place else _declared_writes(function)
    return Call(op, writes_first=in_place, is_entered=function in BODIES, writes=writes)


def _declared_writes(function: Any) -> tuple[tuple[int, str], ...]:
    """Return place and name of each argument that an op of a library writes to by its schema; `out=` is told apart."""
    overloads: list[OpOverload] = []
    if isinstance(function, OpOverload):
        overloads = [function]
    elif isinstance(function, OpOverloadPacket):
        overloads = [getattr(function, name) for name in function.overloads()]
    return tuple(
        dict.fromkeys(
            (place, argument.name)
            for overload in overloads
            for place, argument in enumerate(overload._schema.arguments)
            if argument.is_write and not argument.is_out
        )
    )


def _communicates(function: Any) -> bool:
    home = getattr(function, "__module__", None)
    return isinstance(home, str) and home.startswith(_COMMUNICATION)


_CALLS: dict[Any, Call] = {}


def describe(function: Any) -> Call:
    """Return the facts of a torch function; the answer is cached."""
    call = _CALLS.get(function)
    if call is None:
        if len(_CALLS) >= MOST_FUNCTIONS:
            _CALLS.clear()
        call = _CALLS[function] = _describe(function)
    return call


# torch.compile asks once a call site, while it traces, and does not trace the asking: the answer never changes.
# What `torch.compiler.assume_constant_result` sets, without importing the compiler.
describe._dynamo_marked_constant = True  # type: ignore[attr-defined]
