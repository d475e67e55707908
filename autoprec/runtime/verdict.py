"""Whether a call of a site ran as the policy asked: honored, exempt by the stated semantics, or dishonored."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from autoprec.policy import AS_GIVEN, PROMOTE
from autoprec.runtime.arguments import widest
from autoprec.runtime.kernels import Kernel, format_name
from autoprec.runtime.site_call import SiteCall

Verdict: TypeAlias = Literal["honored", "exempt", "dishonored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A verdict and, unless the site was honored, one sentence why."""

    verdict: Verdict
    reason: str = ""


_HONOURED = Judgement(verdict="honored")


def judge(call: SiteCall, asked: str, float32_matmul: str) -> Judgement:
    """Return whether `call` ran in the format `asked`, and FP32 matmuls in it with `float32_matmul` inside."""
    if call.is_left_alone and not _may_agree(call) and call.entered not in (None, call.given):
        ran = _formats(format_name(dtype) for dtype in call.entered or ())
        return Judgement(verdict="dishonored", reason=f"was to be {call.exemption}, but was cast to {ran}")
    if not call.forward:
        return Judgement(verdict="exempt", reason="no kernel computed: the call only moved or returned what it got")
    inside = _wrong_inside(call, asked, float32_matmul)
    if inside:
        return Judgement(verdict="dishonored", reason=inside)
    if asked == AS_GIVEN:
        return _HONOURED
    wanted = _wanted(call, asked)
    forward = [kernel for kernel in call.forward if _computes_otherwise(call, kernel, wanted)]
    backward = [kernel for kernel in call.backward if _computes_otherwise(call, kernel, wanted)]
    if not forward and not backward:
        return _HONOURED
    if call.is_emulated and asked.startswith("fp8"):
        return _HONOURED
    return _explained(call, wanted, forward, backward)


def _explained(call: SiteCall, wanted: str, forward: list[Kernel], backward: list[Kernel]) -> Judgement:
    ran = _formats(name for kernel in forward or backward for name in kernel.takes if name != wanted)
    if call.exemption:
        return Judgement(verdict="exempt", reason=call.exemption)
    if call.is_autocast:
        reason = f"torch.autocast is on around it and casts after the policy did: it ran in {ran}; leave that block out"
        return Judgement(verdict="dishonored", reason=reason)
    if call.entered is None:
        return Judgement(verdict="dishonored", reason=f"something else ran in place of its function, in {ran}")
    entered = _formats(format_name(dtype) for dtype in _entered(call))
    if entered != wanted:
        return Judgement(verdict="dishonored", reason=f"its arguments were not cast: they came in as {entered}")
    if call.names_dtype:
        return Judgement(verdict="exempt", reason=f"the call names its own dtype and ran in {ran}")
    if call.casts_inside:
        return Judgement(verdict="exempt", reason=f"torch's own kernel casts to {ran} inside the call")
    if not forward:
        return Judgement(verdict="dishonored", reason=f"its forward ran in {wanted}, but its backward in {ran}")
    return Judgement(verdict="dishonored", reason=f"it was entered in {wanted}, but its kernel took {ran}")


def _wanted(call: SiteCall, asked: str) -> str:
    if asked == PROMOTE:
        return format_name(widest(set(call.given)) if set(call.given) <= _WIDENED else call.given[0])
    return "fp32" if asked == "tf32" else asked


_WIDENED = frozenset({torch.float16, torch.bfloat16, torch.float32})


def _computes_otherwise(call: SiteCall, kernel: Kernel, wanted: str) -> bool:
    """Return whether a kernel took something other than `wanted`; of a norm the activation alone counts."""
    takes = kernel.takes[:1] if call.op.cast == "first" else kernel.takes
    return any(name != wanted for name in takes)


def _entered(call: SiteCall) -> tuple[torch.dtype, ...]:
    entered = call.entered or ()
    return entered[:1] if call.op.cast == "first" else entered


def _wrong_inside(call: SiteCall, asked: str, float32_matmul: str) -> str:
    """Return what is wrong with the precision inside FP32 matmuls, or an empty text."""
    wanted = "tf32" if asked == "tf32" else float32_matmul
    for kernel in (*call.forward, *call.backward):
        if kernel.inside and kernel.takes and set(kernel.takes) == {"fp32"} and kernel.inside != wanted:
            return (
                f"{kernel.name} ran with {kernel.inside} inside FP32, and the policy says {wanted}; "
                "something set torch.backends.*.fp32_precision after apply()"
            )
    return ""


def _may_agree(call: SiteCall) -> bool:
    """Return whether the runtime may give this call agreeing dtypes although it leaves it alone."""
    return call.agrees and (len(set(call.given)) > 1 or set(call.entered or ()) == {torch.float32})


def _formats(names: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(names)) or "nothing"
