"""How long planning takes: python benchmarks/planner.py [--json reports/planner.json].

On op graphs of transformers with made-up costs, of some 300, 3 000 and 30 000 nodes: the time to set the problem up, of
one minimum cut at a middle price of error, of a sweep that ends with 20 plans, and of one over all prices where the
graph is not too large for it. For comparison, one cut of the whole network, in which nothing was settled before, by
each of three algorithms of networkx; one that took too long is not tried any further. Medians of interleaved rounds.
"""

import argparse
import contextlib
import json
import math
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import networkx as nx
from networkx.algorithms import flow

from autoprec.graph import cut
from autoprec.graph.cut import CastCost, CutProblem, OpCost, cheapest, cut_problem
from autoprec.graph.front import sweep
from autoprec.graph.opgraph import NodeKind, OpGraph, OpNode, TensorMeta
from autoprec.graph.site import LOSS_MODULE, Site

BLOCKS = (10, 100, 1000)  # of 30 nodes each
ALGORITHMS = {"preflow_push": flow.preflow_push, "boykov_kolmogorov": flow.boykov_kolmogorov, "dinitz": flow.dinitz}
TOO_SLOW_S = 5.0
LARGEST_SWEEP = 100  # blocks; ten times more have thousands of plans of thousands of sites
PLANS = 20
_FLOATS = (TensorMeta(shape=(8, 8), dtype="float32"),)


def transformer(num_blocks: int) -> OpGraph:
    """Return the op graph of a pre-norm transformer with its loss."""
    digraph: nx.DiGraph[str] = nx.DiGraph()

    def add(name: str, op: str, reads: tuple[str, ...], module: str | None = None, kind: NodeKind = "op") -> str:
        site = None if module is None else Site(module, op, 0 if name[-1] != "2" else 1)
        digraph.add_node(name, call=OpNode(name=name, kind=kind, op=op, site=site, inputs=_FLOATS, outputs=_FLOATS))
        digraph.add_edges_from((source, name) for source in reads)
        return name

    def linear(name: str, source: str, module: str) -> str:
        weight = add(f"{name}_weight", "", (), kind="parameter")
        bias = add(f"{name}_bias", "", (), kind="parameter")
        return add(name, "linear", (source, weight, bias), module)

    x = add("x", "", (), kind="input")
    for number in range(num_blocks):
        at, block = f"b{number}", f"blocks.{number}"
        normed = add(f"{at}_norm1", "layer_norm", (x, add(f"{at}_gain1", "", (), kind="parameter")), f"{block}.norm1")
        heads = []
        for part in "qkv":
            view = add(f"{at}_{part}_view", "view", (linear(f"{at}_{part}", normed, f"{block}.{part}"),))
            heads.append(add(f"{at}_{part}_heads", "transpose", (view,)))
        mixed = add(f"{at}_attention", "scaled_dot_product_attention", tuple(heads), f"{block}.attention")
        x = add(f"{at}_add1", "add", (x, linear(f"{at}_out", mixed, f"{block}.out")), block)
        normed = add(f"{at}_norm2", "layer_norm", (x, add(f"{at}_gain2", "", (), kind="parameter")), f"{block}.norm2")
        hidden = add(f"{at}_gelu", "gelu", (linear(f"{at}_up", normed, f"{block}.up"),), f"{block}.act")
        x = add(f"{at}_add2", "add", (x, linear(f"{at}_down", hidden, f"{block}.down")), block)
    loss = add("loss", "cross_entropy", (linear("head", x, "head"),), LOSS_MODULE)
    add("output", "", (loss,), kind="output")
    return OpGraph(digraph)


def made_up(op_graph: OpGraph, seed: int) -> CutProblem:
    """Return a problem with costs in which low wins in matmuls, costs a little elsewhere, and casts matter."""
    rng = random.Random(seed)
    costs, casts = {}, {}
    for node in op_graph:
        if node.site is not None:
            seconds, error = rng.lognormvariate(-7, 1), rng.lognormvariate(-9, 2)
            is_matmul = node.op == "linear"
            costs[node.name] = OpCost(
                fp32_s=seconds,
                low_s=seconds * rng.uniform(0.2, 0.6) if is_matmul else seconds * rng.uniform(0.5, 1.5),
                error=math.inf if node.op == "cross_entropy" else error,
                fp32_bytes=rng.randrange(1000),
                low_bytes=rng.randrange(500),
                fp8_s=seconds * rng.uniform(0.1, 0.4) if is_matmul else math.inf,
                fp8_error=16 * error if is_matmul else math.inf,
            )
        casts[node.name] = CastCost(down_s=rng.lognormvariate(-9, 1), up_s=rng.lognormvariate(-9, 1))
    return cut_problem(op_graph, costs, casts)


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def cut_seconds(problem: CutProblem, price: float, algorithm: Callable[..., object], *, whole: bool) -> float:
    """Return the time of one cut; `whole`: of the network as it is, in which nothing has been settled before."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cut, "preflow_push", algorithm))
        if whole:
            stack.enter_context(mock.patch.object(cut, "settled", only_what_must))
        return seconds(lambda: cheapest(problem, error_price=price))


def only_what_must(_: CutProblem, __: bytes, dearer: dict[int, float]) -> dict[int, bool]:
    """Return the units that cannot run low."""
    return {unit: False for unit, more in dearer.items() if more == math.inf}


def measure(num_blocks: int, rounds: int, tried: dict[str, Callable[..., object]]) -> dict[str, object]:
    """Return what planning one graph takes; algorithms that are too slow are dropped from those that are tried."""
    op_graph = transformer(num_blocks)
    problem = made_up(op_graph, seed=0)
    plans = sweep(problem, max_plans=PLANS)
    price = plans[len(plans) // 2].error_price
    cuts: list[float] = []
    sweeps: list[float] = []
    whole: dict[str, list[float]] = {name: [] for name in tried}
    for _ in range(rounds):
        cuts.append(cut_seconds(problem, price, flow.preflow_push, whole=False))
        sweeps.append(seconds(lambda: sweep(problem, max_plans=PLANS)))
        for name in list(tried):
            whole[name].append(cut_seconds(problem, price, tried[name], whole=True))
            if whole[name][-1] > TOO_SLOW_S:
                del tried[name]
    result: dict[str, object] = {
        "nodes": len(op_graph),
        "sites": len(problem.sites),
        "set_up_s": round(seconds(lambda: made_up(op_graph, seed=0)), 4),
        "cut_s": round(statistics.median(cuts), 4),
        "cut_of_the_whole_network_s": {name: round(statistics.median(taken), 4) for name, taken in whole.items()},
        f"sweep_of_{PLANS}_plans_s": round(statistics.median(sweeps), 4),
    }
    if num_blocks <= LARGEST_SWEEP:
        started = time.perf_counter()
        result["plans_of_a_full_sweep"] = len(sweep(problem))
        result["full_sweep_s"] = round(time.perf_counter() - started, 4)
    return result


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tried = {name: ALGORITHMS[name] for name in options.algorithms}
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "networkx": nx.__version__,
        "rounds": options.rounds,
        "graphs": [measure(each, options.rounds, tried) for each in options.blocks],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
