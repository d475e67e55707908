"""Find, prove and install the fastest precision assignment that trains a PyTorch model as faithfully as FP32 does.

Public names are loaded when they are first touched: `import autoprec` imports nothing heavy, `autoprec.apply` imports
torch and PyYAML and nothing of the tuner.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoprec.errors import AutoprecError, GuardError
    from autoprec.graph.site import Site
    from autoprec.policy import (
        Float8,
        LossScale,
        Parameters,
        Policy,
        Rule,
        dump_policy,
        load_policy,
        preset,
        resolve,
        save_policy,
    )
    from autoprec.runtime import Precision, apply
    from autoprec.runtime.guard import Guard, GuardEvent, GuardLimits, GuardOutcome, guard
    from autoprec.workload.workload import Workload

__version__ = "0.1.0"

__all__ = [
    "AutoprecError",
    "Float8",
    "Guard",
    "GuardError",
    "GuardEvent",
    "GuardLimits",
    "GuardOutcome",
    "LossScale",
    "Parameters",
    "Policy",
    "Precision",
    "Rule",
    "Site",
    "Workload",
    "__version__",
    "apply",
    "dump_policy",
    "guard",
    "load_policy",
    "preset",
    "resolve",
    "save_policy",
]

_HOMES = {
    "AutoprecError": "autoprec.errors",
    "Float8": "autoprec.policy",
    "Guard": "autoprec.runtime.guard",
    "GuardError": "autoprec.errors",
    "GuardEvent": "autoprec.runtime.guard",
    "GuardLimits": "autoprec.runtime.guard",
    "GuardOutcome": "autoprec.runtime.guard",
    "LossScale": "autoprec.policy",
    "Parameters": "autoprec.policy",
    "Policy": "autoprec.policy",
    "Precision": "autoprec.runtime",
    "Rule": "autoprec.policy",
    "Site": "autoprec.graph.site",
    "Workload": "autoprec.workload.workload",
    "apply": "autoprec.runtime",
    "dump_policy": "autoprec.policy",
    "guard": "autoprec.runtime.guard",
    "load_policy": "autoprec.policy",
    "preset": "autoprec.policy",
    "resolve": "autoprec.policy",
    "save_policy": "autoprec.policy",
}


def __getattr__(name: str) -> Any:
    """Return the public name, importing its home the first time (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not, beside what the module holds."""
    return sorted({*globals(), *__all__})
