"""What a policy does at a site: nothing, a cast, or running the call by itself."""

from typing import TypeAlias

import torch

from autoprec.errors import DeviceError
from autoprec.graph.site import Site
from autoprec.ops import lookup
from autoprec.policy import AS_GIVEN, FLOAT8, INSIDE_FP32, Policy
from autoprec.policy import PROMOTE as PROMOTE_FORMAT
from autoprec.runtime.device import emulated_formats
from autoprec.runtime.dtypes import torch_dtype
from autoprec.runtime.float8 import Float8Matmul, Float8Product, float8_product
from autoprec.runtime.inside_fp32 import InsideFp32, has_inside, put_back_after_failures
from autoprec.runtime.matmul_precision import supported
from autoprec.runtime.plans import PROMOTE, Action

_Prepared: TypeAlias = torch.dtype | str | InsideFp32 | Float8Product | None


class Actions:
    """What `policy` does at each site on a device of kind `device`; whatever takes long is done at the start.

    Raises: `DeviceError` for a precision inside FP32 matmuls that changes nothing there; `ApplyError` without torchao.
    """

    def __init__(self, policy: Policy, device: str) -> None:
        self._policy = policy
        self._prepared = {rule.format: _prepare(rule.format, policy, device) for rule in policy.rules}

    def at(self, site: Site) -> Action:
        """Return a dtype or `PROMOTE`, which tensor arguments are cast to, a callable that runs the call, or None."""
        prepared = self._prepared[self._policy.format_of(site)[0]]
        if isinstance(prepared, Float8Product):
            return Float8Matmul(site=site, product=prepared)
        if isinstance(prepared, InsideFp32) and not has_inside(lookup(site.op)):
            return torch.float32
        return prepared


def _prepare(name: str, policy: Policy, device: str) -> _Prepared:
    if name == AS_GIVEN:
        return None
    if name == PROMOTE_FORMAT:
        return PROMOTE
    if name == FLOAT8:
        return float8_product(policy.float8.scaling, emulated=name in emulated_formats(device))
    if name not in INSIDE_FP32:
        return torch_dtype(name)
    precision, allowed = INSIDE_FP32[name], supported(device)
    if precision not in allowed:
        raise DeviceError(
            f'policy "{policy.name}" has a rule with format {name}, and "{precision}" inside FP32 matmuls changes '
            f"nothing on this {device} device; it supports: {', '.join(allowed)}"
        )
    put_back_after_failures()
    return InsideFp32(kind=device, precision=precision)
