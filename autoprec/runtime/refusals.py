"""What a model that runs a policy refuses to be used for."""

import functools
import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import Tracer

from autoprec.errors import ApplyError
from autoprec.runtime.forwards import is_replaced

_DONE = "_autoprec_refuses_policies"

if TYPE_CHECKING:
    from autoprec.runtime.precision import Precision


class Seal:
    """Keeps a module that runs a policy from being pickled: what is loaded would run without it."""

    def __init__(self, policy: str) -> None:
        self.policy = policy

    def __deepcopy__(self, _: object) -> "Seal":
        return self

    def __reduce__(self) -> Any:
        raise ApplyError(
            f'pickling a model that runs policy "{self.policy}": a policy is installed, not saved; '
            "save model.state_dict(), or call remove() on the Precision first, and apply() after loading"
        )


def check_runs(precision: "Precision") -> None:
    """Refuse a forward whose backward could not work.

    Raises: `ApplyError`, which says what to do instead.
    """
    if precision.storage.is_flattened:
        raise ApplyError(
            f'policy "{precision.policy.name}" stores parameters in {precision.policy.parameters.storage}, and '
            "FullyShardedDataParallel has flattened them since, without their masters; keep storage: fp32 under it, "
            "and let its MixedPrecision(param_dtype=...) make the working copies"
        )
    if precision.storage.has_wide_gradients:
        _check_data_parallel(precision)


def refuse_symbolic_tracing() -> None:
    """Have `torch.fx` refuse to trace models that run a policy. Idempotent.

    It calls the forward of the model's class and no function mode: what it traced would lack the casts of functions.
    `make_fx` and `torch.export` go another way, and their graphs hold the casts.
    """
    trace = Tracer.trace
    if hasattr(trace, _DONE):
        return

    @functools.wraps(trace)
    def checked(self: Tracer, root: Any, *args: Any, **kwargs: Any) -> Any:
        for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
            if is_replaced(module):
                raise ApplyError(
                    f"torch.fx.symbolic_trace: {f'module {path}' if path else 'the model'} runs a policy, and the "
                    "traced code would lack the casts of its functions; call remove() on the Precision first, or "
                    "trace with torch.export.export or make_fx, whose graphs hold the casts"
                )
        return trace(self, root, *args, **kwargs)

    setattr(checked, _DONE, True)
    Tracer.trace = checked  # type: ignore[method-assign]


def _check_data_parallel(precision: "Precision") -> None:
    """Refuse FP32 gradients of low parameters in DistributedDataParallel, which reduces them in the stored dtype."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is not None and module.DistributedDataParallel._active_ddp_module is not None:
        raise ApplyError(
            f'policy "{precision.policy.name}" stores parameters in {precision.policy.parameters.storage} and '
            "accumulates their gradients in fp32, and DistributedDataParallel reduces gradients in the dtype of the "
            "parameter; add gradients: storage to the policy's parameters"
        )
