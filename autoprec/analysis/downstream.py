"""Where a step first goes wrong beyond the site that is low: in calls that no policy casts.

Code under `no_grad`, and calls that write to an argument, compute in the format of what they are given. So a site may
have to stay FP32 for what such a call does with its result.
"""

from typing import Any

import torch

from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import LowReplay, Reference
from autoprec.capture.facts import tensors_in_tree
from autoprec.graph.opgraph import OpNode
from autoprec.graph.site import Site


def first_not_finite(reference: Reference, fmt: LowFormat, site: Site) -> OpNode | None:
    """Return the first call whose result is finite in FP32 and not with only `site` low; None if there is none.

    Costs two forward passes.
    """
    healthy: set[str] = set()

    def note(node: OpNode, value: Any) -> None:
        if _is_finite(value):
            healthy.add(node.name)

    found: list[OpNode] = []

    def look(node: OpNode, value: Any) -> None:
        if not found and node.name in healthy and not _is_finite(value):
            found.append(node)

    only = frozenset({site})
    with torch.no_grad():
        LowReplay(reference.recording, fmt, frozenset(), visit=note).loss()
        try:
            LowReplay(reference.recording, fmt, only, forced=only, visit=look).loss()
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
    return found[0] if found else None


def _is_finite(value: Any) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors_in_tree(value) if t.is_floating_point())
