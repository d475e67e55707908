"""Sites of a recorded step that a policy wants in FP8 and that FP8 kernels do not take."""

from autoprec.graph.opgraph import OpGraph
from autoprec.ops import float8_fault
from autoprec.policy import FLOAT8, ResolvedPolicy


def float8_faults(resolved: ResolvedPolicy, op_graph: OpGraph) -> tuple[str, ...]:
    """Return a line for each site whose format is FP8 and whose shapes are not for it, in the order they ran."""
    lines: dict[str, None] = {}
    for node in op_graph.calls():
        assert node.site is not None
        if node.left_alone or resolved.format(node.site) != FLOAT8:
            continue
        shapes = [tensor.shape for tensor in node.inputs]
        fault = "it writes its result to a given tensor" if node.writes else float8_fault(node.op, shapes)
        if fault:
            rule = resolved.winners[node.site] + 1
            lines[f'rule {rule} "{resolved.rule(node.site).sites}": {node.site} cannot run in {FLOAT8}: {fault}'] = None
    return tuple(lines)
