"""What static analysis costs: python benchmarks/static_analysis.py [--json reports/static_analysis.json].

Op graphs of 10,000 and 100,000 ops are built by hand, without torch: transformer blocks with attention and norms
written out, a recurrence, and ops that all read one node and are all read by one. Everything that
`autoprec inspect --static` computes from a graph is timed: classes and their spread, constants, ranges, patterns and
notes. Seconds are those of the clock; those of the processor tell what other work on the machine added to them.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx

sys.path.insert(0, str(Path(__file__).parents[1]))

from autoprec.analysis.static import static_analysis
from autoprec.graph.opgraph import NodeKind, OpGraph, OpNode, Ref, TensorMeta
from autoprec.graph.site import Site
from autoprec.ops import lookup

SIZES = (10_000, 100_000)
FORMATS = ("fp16", "bf16")
WIDTH, LENGTH, HEADS = 256, 128, 4
ACTIVATION, SCORES = (8, LENGTH, WIDTH), (8, HEADS, LENGTH, LENGTH)


class Builder:
    """An op graph in the making; each method returns the reference to what it added."""

    def __init__(self) -> None:
        self.digraph: nx.DiGraph[str] = nx.DiGraph()
        self.num_ops = 0
        self._counts: Counter[tuple[str, str]] = Counter()

    def source(self, kind: NodeKind, name: str, *shape: int) -> Ref:
        """Add an input or a parameter."""
        target = "" if kind == "input" else name
        outputs = (TensorMeta(shape=shape, dtype="float32"),)
        node = OpNode(name=name.replace(".", "_"), kind=kind, target=target, outputs=outputs)
        self.digraph.add_node(node.name, call=node)
        return Ref(node.name)

    def op(self, module: str, op: str, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Ref:
        """Add a call of `op`."""
        index = self._counts[module, op]
        self._counts[module, op] += 1
        refs = [value for value in args if isinstance(value, Ref)]
        refs += [value for value in kwargs.values() if isinstance(value, Ref)]
        node = OpNode(
            name=f"op_{self.num_ops}",
            kind="op",
            op=op,
            site=Site(module, op, index) if lookup(op).is_site else None,
            inputs=tuple(self.digraph.nodes[ref.name]["call"].outputs[0] for ref in refs),
            outputs=(TensorMeta(shape=shape, dtype="float32", requires_grad=True),),
            constants=tuple(value for value in args if isinstance(value, int | float)),
            source="model.py:1",
            args=args,
            kwargs=kwargs,
        )
        self.num_ops += 1
        self.digraph.add_node(node.name, call=node)
        self.digraph.add_edges_from((ref.name, node.name) for ref in refs)
        return Ref(node.name)

    def graph(self) -> OpGraph:
        """Return the finished graph."""
        return OpGraph(self.digraph)


def transformer(num_ops: int) -> OpGraph:
    """Return blocks of attention and feed-forward layers, with what scripts write out themselves."""
    build = Builder()
    x = build.source("input", "batch_0", *ACTIVATION)
    block = 0
    while build.num_ops < num_ops:
        x = _block(build, f"blocks.{block}", x)
        block += 1
    build.op("@loss", "mean", (), x)
    return build.graph()


def _block(build: Builder, name: str, x: Ref) -> Ref:
    normed = _rms_norm(build, f"{name}.norm", x)
    heads = (8, HEADS, LENGTH, WIDTH // HEADS)
    query, key, value = (
        build.op(
            name, "transpose", heads, build.op(name, "view", heads, _linear(build, f"{name}.{part}", normed)), 1, 2
        )
        for part in ("query", "key", "value")
    )
    turned = build.op(name, "transpose", heads, key, -2, -1)
    scores = build.op(name, "div", SCORES, build.op(name, "matmul", SCORES, query, turned), 8.0)
    position = build.op(name, "arange", (LENGTH,), LENGTH, dtype="float32")
    scores = build.op(name, "add", SCORES, scores, build.op(name, "mul", (LENGTH,), position, 0.5))
    mixed = build.op(name, "matmul", heads, build.op(name, "softmax", SCORES, scores, -1), value)
    flat = build.op(name, "reshape", ACTIVATION, build.op(name, "transpose", heads, mixed, 1, 2), *ACTIVATION)
    x = build.op(name, "add", ACTIVATION, x, _linear(build, f"{name}.out", flat))
    hidden = build.op(name, "gelu", ACTIVATION, _linear(build, f"{name}.up", _rms_norm(build, f"{name}.norm2", x)))
    return build.op(name, "add", ACTIVATION, x, _linear(build, f"{name}.down", hidden))


def _linear(build: Builder, name: str, x: Ref) -> Ref:
    weight, bias = (
        build.source("parameter", f"{name}.weight", WIDTH, WIDTH),
        build.source("parameter", f"{name}.bias", WIDTH),
    )
    return build.op(name, "linear", ACTIVATION, x, weight, bias)


def _rms_norm(build: Builder, name: str, x: Ref) -> Ref:
    square = build.op(name, "pow", ACTIVATION, x, 2)
    mean = build.op(name, "mean", (*ACTIVATION[:-1], 1), square, -1, keepdim=True)
    root = build.op(name, "rsqrt", (*ACTIVATION[:-1], 1), build.op(name, "add", (*ACTIVATION[:-1], 1), mean, 1e-8))
    gain = build.source("parameter", f"{name}.gain", WIDTH)
    return build.op(name, "mul", ACTIVATION, build.op(name, "mul", ACTIVATION, x, root), gain)


def chain(num_ops: int) -> OpGraph:
    """Return one long recurrence, seen through movement: state = decay * state + input."""
    build = Builder()
    x, decay = build.source("input", "batch_0", *ACTIVATION), build.source("parameter", "decay", WIDTH)
    state = x
    while build.num_ops < num_ops:
        moved = build.op("scan", "view", ACTIVATION, state)
        state = build.op("scan", "add", ACTIVATION, build.op("scan", "mul", ACTIVATION, decay, moved), x)
    return build.graph()


def fan(num_ops: int) -> OpGraph:
    """Return ops that all read one node, and that one call concatenates."""
    build = Builder()
    x = build.op("fan", "exp", ACTIVATION, build.source("input", "batch_0", *ACTIVATION))
    parts = [build.op("fan", "log", ACTIVATION, x) for _ in range(num_ops - 2)]
    build.op("fan", "cat", ACTIVATION, tuple(parts), -1)
    build.digraph.add_edges_from((part.name, f"op_{build.num_ops - 1}") for part in parts)
    return build.graph()


GRAPHS: dict[str, Callable[[int], OpGraph]] = {"transformer": transformer, "chain": chain, "fan": fan}


def measure(build: Callable[[int], OpGraph], num_ops: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of an analysis, and microseconds an op."""
    seconds, processor = [], []
    for _ in range(rounds):
        graph = build(num_ops)  # afresh: nothing is cached
        num = sum(1 for node in graph if node.kind == "op")
        started, used = time.perf_counter(), time.process_time()
        static_analysis(graph, FORMATS, "cpu")
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    used = statistics.median(processor)
    return {
        "num_ops": num,
        "seconds": round(statistics.median(seconds), 3),
        "processor_seconds": round(used, 3),
        "processor_microseconds_an_op": round(1e6 * used / num, 1),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/static_analysis.py",
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "networkx": nx.__version__,
        "formats": list(FORMATS),
        "rounds": options.rounds,
        "graphs": {name: [measure(build, size, options.rounds) for size in SIZES] for name, build in GRAPHS.items()},
    }
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
