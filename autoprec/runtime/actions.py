"""What a policy does at a site: nothing, a cast, or running the call by itself."""

from collections.abc import Mapping

import torch

from autoprec.errors import DeviceError
from autoprec.graph.site import Site
from autoprec.ops import lookup
from autoprec.policy import AS_GIVEN, FLOAT8, INSIDE_FP32, Policy
from autoprec.runtime.device import emulated_formats
from autoprec.runtime.dtypes import torch_dtype
from autoprec.runtime.float8 import Float8Matmul, float8_product
from autoprec.runtime.inside_fp32 import InsideFp32, has_inside, put_back_after_failures
from autoprec.runtime.matmul_precision import supported
from autoprec.runtime.plans import PROMOTE, Action, Executor


class Actions:
    """What `policy` does at each site on a device of kind `device`; whatever takes long is done at the start.

    `executors` run the calls of sites with a format that takes more than a cast, by the name of the format.
    Raises: `DeviceError` for a precision inside FP32 matmuls that changes nothing there; `ApplyError` without torchao.
    """

    def __init__(self, policy: Policy, device: str) -> None:
        self._policy = policy
        self.executors: Mapping[str, Executor] = {
            name: _executor(name, policy, device)
            for name in dict.fromkeys(rule.format for rule in policy.rules)
            if name == FLOAT8 or name in INSIDE_FP32
        }

    def at(self, site: Site) -> Action:
        """Return a dtype or `PROMOTE`, which tensor arguments are cast to, the name of an executor, or None."""
        name = self._policy.format_of(site)[0]
        if name == AS_GIVEN:
            return None
        if name in INSIDE_FP32 and not has_inside(lookup(site.op)):
            return torch.float32
        return name if name in self.executors or name == PROMOTE else torch_dtype(name)


def _executor(name: str, policy: Policy, device: str) -> Executor:
    if name == FLOAT8:
        return Float8Matmul(product=float8_product(policy.float8.scaling, emulated=name in emulated_formats(device)))
    precision, allowed = INSIDE_FP32[name], supported(device)
    if precision not in allowed:
        words = [word for word, inside in INSIDE_FP32.items() if inside in allowed]
        raise DeviceError(
            f'policy "{policy.name}" has a rule with format {name}, and "{precision}" inside FP32 matmuls changes '
            f"nothing on this {device} device; formats with an effect there: fp32, {', '.join(words)}"
        )
    put_back_after_failures()
    return InsideFp32(kind=device, precision=precision)
