"""What running a site low does to the loss, to first order: one backward pass for all sites of a format.

The error d that rounding makes in a site's result y changes the loss by the sum over elements of g * d, g being the
gradient of the loss at y. Errors of different elements are taken for independent, so their effects add up as squares:
error = sum of (g * d) ** 2, which is additive over sites too.

Source: the variance of a sum of independent rounding errors (Higham and Mary 2019, A New Approach to Probabilistic
Rounding Error Analysis, section 2), with first-order sensitivities as in automatic error analysis (Iri 1984).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import LowReplay, Reference, gradients_of
from autoprec.graph.site import Site
from autoprec.ops import lookup


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """The first-order effect of one site on the loss, in its format.

    `error`: the expected square of the change of the loss; infinite where a low result is not finite or does not run.
    `relative_error`: that of the result itself (norms).
    """

    site: Site
    error: float
    relative_error: float


def sensitivities(reference: Reference, fmt: LowFormat, sites: Collection[Site]) -> Mapping[Site, Sensitivity]:
    """Return the sensitivity of each of `sites` that ran. Costs one step, in which each site runs twice.

    Holds one more tensor for each result that needs a gradient, in the format, up to the end of the backward pass.
    """
    replay = _Probing(reference.recording, fmt, sites)
    loss = replay.loss()
    gradients_of(loss, reference.recording)
    return {site: replay.sensitivity(site) for site in replay.noted}


class _Probing(LowReplay):
    """Runs a step in FP32, and each site once more in the format, to see what rounding does to its result."""

    def __init__(self, recording: Any, fmt: LowFormat, sites: Collection[Site]) -> None:
        super().__init__(recording, fmt, frozenset())
        self._sites = frozenset(sites)
        self.noted: dict[Site, float] = {}
        self._norms: dict[Site, tuple[float, float]] = {}

    def sensitivity(self, site: Site) -> Sensitivity:
        """Return what was seen of a site, after the backward pass."""
        difference, norm = self._norms.get(site, (0.0, 0.0))
        relative = math.sqrt(difference / norm) if norm else 0.0
        return Sensitivity(site=site, error=self.noted[site], relative_error=relative)

    def run_node(self, n: fx.Node) -> Any:
        """Return what the node computes in FP32, watched on its way back."""
        value = super().run_node(n)
        node = self._graph[n.name]
        if node.site not in self._sites or not self._format.can_run(node) or lookup(node.op).family == "random":
            return value
        assert node.site is not None
        self.noted.setdefault(node.site, 0.0)
        low = self._in_format(n, node.site)
        if low is None:
            self.noted[node.site] = math.inf
            return value
        site = node.site
        pytree.tree_map(lambda wide, narrow: self._watch(wide, narrow, site), value, low)
        return value

    def _in_format(self, n: fx.Node, site: Site) -> Any:
        self._low = self._forced = frozenset({site})
        try:
            with torch.no_grad():
                return super().run_node(n)
        except (RuntimeError, TypeError, ValueError):
            return None
        finally:
            self._low = self._forced = frozenset()

    def _watch(self, wide: Any, low: Any, site: Site) -> None:
        if not isinstance(wide, torch.Tensor) or not wide.is_floating_point() or not wide.requires_grad:
            return
        error = low.detach().float() - wide.detach()
        error = torch.where(wide.detach().isfinite(), error, 0)  # a mask of -inf stays one
        difference, norm = self._norms.get(site, (0.0, 0.0))
        there = torch.where(wide.detach().isfinite(), wide.detach(), 0)
        self._norms[site] = (
            difference + float(error.double().square().sum()),
            norm + float(there.double().square().sum()),
        )

        noted, kept = (
            self.noted,
            error.to(torch.bfloat16),
        )  # not the replay itself: autograd would hold the model with it

        def note(gradient: torch.Tensor) -> None:
            effect = float((gradient.double() * kept.double()).square().sum())
            noted[site] += effect if math.isfinite(effect) else math.inf

        wide.register_hook(note)  # called with the gradient of what was here, whatever is written over it later
