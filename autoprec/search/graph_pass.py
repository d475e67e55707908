"""The presets that are made for a graph: TensorFlow's pass, painted on the recorded step and written as rules."""

import os
from pathlib import Path

from autoprec.analysis import static_marks
from autoprec.analysis.classes import numerics_classes
from autoprec.graph.layers import layers_of
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.propagate import paint
from autoprec.graph.site import Site
from autoprec.policy import LossScale, Policy, graph_preset_names, policy_or_preset
from autoprec.search.layout import Layout, layout_of, lowerable_sites
from autoprec.search.rules import rules_of
from autoprec.search.space import Space

_NAME = "tf-graph-pass-"
_UNREACHED = "between no two matmuls or convolutions by way of low ops, so TensorFlow leaves it in FP32"

# tf.keras.mixed_precision.LossScaleOptimizer: halves down to 1, and grows as long as the scale is finite.
_LOSS_SCALE = LossScale(kind="dynamic", initial=2.0**15, growth_interval=2000, minimum=1.0, maximum=2.0**127)


def graph_pass(op_graph: OpGraph, low: str, device_kind: str) -> Policy:
    """Return the policy of TensorFlow's auto_mixed_precision pass on a graph, in few rules that all win somewhere.

    A site runs in `low` if every call of it is painted low; see `autoprec.graph.propagate.paint` for the passes and
    `autoprec.ops.catalog` for the lists.

    Source: TensorFlow, tensorflow/core/grappler/optimizers/auto_mixed_precision.cc and auto_mixed_precision_lists.h;
    the loss scale is that of tf.keras.mixed_precision.LossScaleOptimizer.
    """
    marks = static_marks(op_graph, (low,), device_kind)
    layout = layout_of(marks, layers_of(op_graph), Space(low=(low,)), lowerable_sites(op_graph))
    targets = _painted(op_graph, layout, low)
    why = {site: _why(site, layout, low) for site, target in targets.items() if target != low}
    return Policy(
        name=f"{_NAME}{low}",
        device={"kind": device_kind},
        loss_scale=_LOSS_SCALE if low == "fp16" else LossScale(),
        rules=rules_of(targets, layout, low, why),
    )


def policy_for(given: str | os.PathLike[str], device_kind: str, op_graph: OpGraph) -> Policy:
    """Return the policy in a file, or the preset of that name, made for the graph where it needs one; a file wins.

    Raises: whatever `policy_or_preset` raises.
    """
    name = os.fspath(given)
    if name in graph_preset_names() and not Path(given).exists():
        return graph_pass(op_graph, low_of(name), device_kind)
    return policy_or_preset(given, device_kind)


def low_of(name: str) -> str:
    """Return the low format of a preset that is made for a graph."""
    return name.removeprefix(_NAME)


def _painted(op_graph: OpGraph, layout: Layout, low: str) -> dict[Site, str]:
    """Return the format of every site of `layout`: FP32 where one of its calls is painted so."""
    targets = dict.fromkeys(layout.sites, low)
    for name, each in paint(op_graph.digraph, numerics_classes(op_graph)).items():
        site = op_graph[name].site
        if site in targets and each.color == "fp32":
            targets[site] = "fp32"
    return targets


def _why(site: Site, layout: Layout, low: str) -> str:
    return _UNREACHED if layout.verdict(site, low) == "free" else layout.detail(site, low)
