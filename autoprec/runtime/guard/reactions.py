"""What a guard can do about a finding: which site is at fault, and the policy or state to go on with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from autoprec.errors import TraceError
from autoprec.graph.site import Site
from autoprec.policy import Policy
from autoprec.runtime.guard.changed import fallback_of, with_fp32_at, with_fp32_parameter
from autoprec.runtime.guard.looks import ops_of
from autoprec.runtime.guard.sample import Finding
from autoprec.runtime.guard.snapshot import restore, state_of, widen_state
from autoprec.runtime.one_step import Loss
from autoprec.runtime.overflow import Overflow
from autoprec.runtime.precision import Precision

Kind: TypeAlias = Literal["data", "state", "site", "layer", "parameter", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a fault is: a site pattern, a layer, a stored parameter, the batch, or what the run holds already."""

    kind: Kind
    name: str = ""
    detail: str = ""


def surest(places: Sequence[Place]) -> Place:
    """Return the place that settles most: a broken batch or state explains what layers show, a site more than a layer.

    Of equal kinds the first, so that ranks that ask in one order get one answer.
    """
    return min(places, key=lambda place: get_args(Kind).index(place.kind))


class Run:
    """The parts of a run, and what can be done with them. `scheduler` is the last one that a step was given."""

    def __init__(
        self,
        precision: Precision,
        optimizers: Sequence[torch.optim.Optimizer],
        model: nn.Module,
        loss: Loss | None,
    ) -> None:
        self.precision = precision
        self.optimizers = tuple(optimizers)
        self.model = model
        self.scheduler: Any = None
        self._loss = loss

    def find(self, finding: Finding, batch: Any, broken_layer: str) -> Place:
        """Return where the fault is. A batch that is given is run again, kernel by kernel, unless a site is known."""
        if finding.detector == "frozen_weights":
            return Place(kind="parameter", name=finding.site)
        if finding.detector == "non_finite_update":  # what is stored low has a wider format to go to; else it is state
            is_low = finding.site in self.precision.storage.names
            return Place(kind="parameter" if is_low else "state", name=finding.site)
        if finding.detector in ("flush", "overflow"):
            return Place(kind="layer", name=finding.site)
        if finding.detector not in ("non_finite_loss", "non_finite_gradient", "loss_scale_collapse", "skipped_steps"):
            return Place(kind="unknown")
        if batch is not None and (found := self._overflow(batch)) is not None:
            place = _place(found)
            if place.kind != "site" or self._computes_low(place) or not broken_layer:
                return place  # an FP32 site whose gradient overflows on its way into a low layer is not at fault
            return Place(kind="layer", name=broken_layer, detail=place.detail)
        return Place(kind="layer", name=broken_layer) if broken_layer else Place(kind="unknown")

    def promoted(self, place: Place, why: str) -> Policy | None:
        """Return the policy with FP32 at `place`; None if there is nothing there to promote."""
        policy, parameters = self.precision.policy, self.precision.policy.parameters
        if place.kind == "parameter":
            is_low = parameters.storage != "fp32" and place.name in self.precision.storage.names
            return with_fp32_parameter(policy, place.name) if is_low else None
        if place.kind not in ("site", "layer") or not place.name or not self._computes_low(place):
            return None
        return with_fp32_at(policy, place.name, why)

    def exchange(self, policy: Policy) -> None:
        """Go on under another policy."""
        self.precision.exchange(policy)
        widen_state(self.optimizers)

    def fall_back(self) -> None:
        """Go on under the fallback."""
        self.exchange(fallback_of(self.precision.policy))

    def state(self) -> Mapping[str, Any]:
        """Return the state of the run, by reference."""
        return state_of(self.precision, self.optimizers, self.scheduler)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a state back."""
        restore(state, self.precision, self.optimizers, self.scheduler)

    def _computes_low(self, place: Place) -> bool:
        """Return whether the policy runs anything at `place` below FP32."""
        module, _, op = place.name.partition(":")
        ops = (op,) if op else ops_of(self.precision, module)
        formats = {self.precision.policy.format_of(Site(module, each, 0))[0] for each in ops}
        return not formats.issubset({"fp32", "as_given", "promote"})

    def _overflow(self, batch: Any) -> Overflow | None:
        try:
            return self.precision.find_overflow(batch, self._loss)
        except TraceError:  # compiled code hides its kernels, a batch needs a loss: gradients have to do
            return None


def _place(found: Overflow) -> Place:
    if found.where == "batch":
        return Place(kind="data", detail=str(found))
    if found.where in ("parameter", "buffer"):
        return Place(kind="state", name=found.place, detail=str(found))
    if found.site is None:
        return Place(kind="unknown", detail=str(found))
    return Place(kind="site", name=f"{found.site.module}:{found.site.op}", detail=str(found))
