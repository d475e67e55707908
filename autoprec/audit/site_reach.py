"""How far the numbers at each site are from the ends of its format: the largest from overflow, the small from zero."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from autoprec.analysis import ExponentHistogram, MeasuredNumerics, TensorNumerics, measured_numerics
from autoprec.analysis.loss_scale import flush_exponent
from autoprec.capture import Recording
from autoprec.graph.opgraph import OpNode
from autoprec.graph.site import Site
from autoprec.numerics import Format, format_named

if TYPE_CHECKING:
    from autoprec.audit.audited import Audited

Kind: TypeAlias = Literal["activation", "gradient", "parameter"]

# Ops whose results hold what code writes rather than computes: a mask of -1e9, or the lowest number there is.
_MASKED = frozenset(
    {"add", "sub", "where", "masked_fill", "softmax", "log_softmax", "scaled_dot_product_attention", "amax", "max"}
)
_MASK_GAP = 6  # empty powers of two between a mask and the numbers it hides


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteReach:
    """The numbers of one kind at one place: `where` is a site or a parameter, `what` says which of its numbers.

    `headroom` is how many powers of two lie between the largest (of gradients: times the loss scale) and the largest
    number of `format`; infinite where all are zero. `flushed_frac` is the fraction of the nonzero elements that rounds
    to zero, `flushed_norm` the fraction of the norm that these make up. `scale` is the loss scale in all of these.
    """

    where: str
    what: str
    kind: Kind
    format: str
    largest: float
    headroom: float
    flushed_frac: float
    flushed_norm: float
    scale: float = 1.0


def reach_of(
    recordings: Sequence[Recording], audited: "Audited", ran_as: Mapping[Site, str], scale: float
) -> tuple[SiteReach, ...]:
    """Return the reach of all that the sites in `ran_as` read, return and get as gradients, least headroom first.

    Numbers are those of FP32 steps, each with an optimizer step, so that what breaks in a format is seen as it is
    before it breaks. Gradients are multiplied by `scale`, but not by the number of micro-batches.
    """
    numerics = measured_numerics(recordings, audited.loaded.workload.optimizer, ())
    nodes = {node.name: node for recording in recordings for node in recording.op_graph}
    found: list[SiteReach] = []
    for site, name in ran_as.items():
        low = format_named(name)
        for tensor in numerics.sites.get(site, ()):
            histogram = _computed(tensor.numerics, low) if site.op in _MASKED else tensor.numerics.histogram
            if tensor.role == "gradient":
                found.append(_reach(str(site), "gradient", "gradient", low, histogram, scale))
                continue
            named = [nodes[source].target for source in tensor.sources if nodes[source].kind == "parameter"]
            found += [_reach(each, f"parameter, read at {site}", "parameter", low, histogram) for each in named]
            if not named:
                found.append(_reach(str(site), tensor.role, "activation", low, histogram))
            sources = (nodes[source] for source in tensor.sources)
            found += _handed_back(site, sources, numerics, ran_as, low, scale)
    storage = audited.policy.parameters.storage
    if storage in ("bf16", "fp16"):
        low = format_named(storage)
        for parameter, each in numerics.parameters.items():
            found.append(_reach(parameter, "parameter, as stored", "parameter", low, each.value.histogram))
    return tuple(sorted(found, key=lambda reach: reach.headroom))


def _handed_back(
    site: Site,
    sources: Iterable[OpNode],
    numerics: MeasuredNumerics,
    ran_as: Mapping[Site, str],
    low: Format,
    scale: float,
) -> Iterator[SiteReach]:
    """Yield the gradients that a site computes in its format for what it reads: parameters, and results of wide sites.

    Those of sites below FP32 count where they arrive. A tensor with several readers counts with the sum of all.
    """
    for node in sources:
        if node.kind == "parameter" and node.target in numerics.parameters:
            gradient = numerics.parameters[node.target].gradient
            if gradient is not None:
                what = f"gradient, computed at {site}"
                yield _reach(node.target, what, "gradient", low, gradient.histogram, scale)
        elif node.site is not None and node.site not in ran_as:
            what = f"gradient for {node.site}, computed here"
            for tensor in numerics.sites.get(node.site, ()):
                if tensor.role == "gradient":
                    yield _reach(str(site), what, "gradient", low, tensor.numerics.histogram, scale)


def _reach(
    where: str, what: str, kind: Kind, low: Format, histogram: ExponentHistogram, scale: float = 1.0
) -> SiteReach:
    room = histogram.headroom(low)
    return SiteReach(
        where=where,
        what=what,
        kind=kind,
        format=low.name,
        largest=histogram.max_abs * scale,
        headroom=math.inf if room is None else room - math.log2(scale),
        flushed_frac=histogram.flush_frac(low, scale),
        flushed_norm=histogram.norm_frac_below(flush_exponent(low) - round(math.log2(scale))),
        scale=scale,
    )


def _computed(numerics: TensorNumerics, low: Format) -> ExponentHistogram:
    """Return the exponents without those of a mask: one negative level beyond the format, far from all else.

    As -inf it hides what it hides; whether a row has nothing else is the question of the stress gate.
    """
    histogram = numerics.histogram
    if numerics.minimum >= -low.max or numerics.maximum > low.max:
        return histogram
    *rest, top = histogram.counts
    next_below = rest[-1][0] if rest else 0  # a mask by itself holds zeros where it hides nothing
    if top[0] - next_below <= _MASK_GAP or not (rest or histogram.num_zero):
        return histogram
    return ExponentHistogram(
        counts=tuple(rest),
        num_zero=histogram.num_zero,
        num_nonfinite=histogram.num_nonfinite + top[1],
        max_abs=math.ldexp(1.0, next_below + 1) if rest else 0.0,
    )
