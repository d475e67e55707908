"""The planner against all assignments there are, on random steps, with costs from a walk through each step."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.graph.cut import CastCost, OpCost, cheapest, cut_problem, dominates, predicted
from autoprec.graph.front import sweep
from autoprec.graph.reads import choices_of
from autoprec.graph.site import LOSS_MODULE
from tests.op_graphs import node, op_graph

PRICES = (0.0, 0.5, 1.0, 3.0, 100.0, math.inf)
SECONDS = st.integers(0, 8).map(float)
SOMETIMES_INFINITE = st.one_of(SECONDS, SECONDS, SECONDS, st.just(math.inf))
OPS = ("add", "add", "add", "linear", "layer_norm", "view", "float", "zeros_like")


@st.composite
def steps(draw, most=12):
    """Return a graph, its costs and casts, ties, and whether FP8 is among the choices."""
    inputs = [node(f"p{i}", kind="parameter") for i in range(draw(st.integers(1, 3)))]
    nodes, edges = list(inputs), []
    num_ops = draw(st.integers(1, most))
    loss_from = draw(st.integers(1, num_ops + 2))
    for i in range(num_ops):
        op = draw(st.sampled_from(OPS))
        same = draw(st.booleans()) and draw(st.booleans())
        module = LOSS_MODULE if i >= loss_from else ""
        kind = draw(st.sampled_from(["cast"] * 6 + ["left_alone", "writes"]))
        each = node(
            f"n{i}",
            op,
            module=module,
            index=None if op in ("view", "float", "zeros_like") else i - 1 if same else i,
            left_alone=kind == "left_alone",
            writes=kind == "writes",
        )
        sources = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique_by=lambda n: n.name))
        edges += [(source.name, each.name) for source in sources]
        nodes.append(each)
    edges.append((nodes[-1].name, "out"))
    nodes.append(node("out", kind="output", outputs=()))
    graph = op_graph(nodes, edges)
    fp8 = len(choices_of(graph)) <= 5
    costs = {
        each.name: OpCost(
            fp32_s=draw(SECONDS),
            low_s=draw(SOMETIMES_INFINITE),
            error=draw(SOMETIMES_INFINITE),
            fp32_bytes=draw(st.integers(0, 4)),
            low_bytes=draw(st.integers(0, 4)),
            fp8_s=draw(SOMETIMES_INFINITE) if fp8 else math.inf,
            fp8_error=draw(SOMETIMES_INFINITE) if fp8 else math.inf,
        )
        for each in graph.calls()
    }
    casts = {
        each.name: CastCost(down_s=draw(SECONDS), up_s=draw(SECONDS), shared=draw(st.booleans()))
        for each in nodes
        if draw(st.integers(0, 4))
    }
    sites = list(choices_of(graph))
    ties = [draw(st.lists(st.sampled_from(sites), min_size=2, max_size=3, unique=True))] if len(sites) > 4 else []
    return graph, costs, casts, ties, fp8


class Walk:
    """What a step costs under an assignment, found by walking through it with the dtype of every tensor at hand."""

    def __init__(self, graph, costs, casts, assignment):
        self.graph, self.casts, self.assignment = graph, casts, assignment
        self.low, self.always, self.loss, self.view_of, self.paid = {}, set(), set(), {}, {}
        self.mixed = set()
        self.time_s = self.error = self.bytes = 0.0
        self.disagree = False
        for each in graph:
            self.visit(each, costs)
        self.time_s += sum(self.paid.values())

    def visit(self, each, costs):
        sources = list(self.graph.digraph.predecessors(each.name))
        in_loss = each.site is not None and each.site.module == LOSS_MODULE
        if each.kind != "op":
            if each.kind == "output":
                for source in sources:
                    self.cast(source, False, "leaves", leaves=True)
            self.low[each.name] = False
            self.always.add(each.name)
        elif each.site is not None and not each.left_alone and not each.writes:
            self.run(each, sources[:1] if each.op == "layer_norm" else sources, in_loss, costs[each.name])
        elif each.op == "float":
            self.cast(sources[0], False, each.name)
            for source in sources[1:]:
                self.cast(source, False, each.name)
            self.low[each.name] = False
            self.always.add(each.name)
        else:
            self.keep(each, sources, in_loss)

    def run(self, each, sources, in_loss, cost):
        precision = self.assignment.get(each.site, "fp32")
        self.time_s += {"fp32": cost.fp32_s, "low": cost.low_s, "fp8": cost.fp8_s}[precision]
        self.error += {"fp32": 0.0, "low": cost.error, "fp8": cost.fp8_error}[precision]
        self.bytes += cost.fp32_bytes if precision == "fp32" else cost.low_bytes
        for source in sources:
            if self.leaves(source, in_loss):
                self.cast(source, False, "leaves", leaves=True)
                if precision != "fp32":
                    self.pay(source, "down", f"left {each.name}", "left")
            else:
                self.cast(source, precision != "fp32", each.name)
        self.low[each.name] = precision != "fp32"
        if in_loss:
            self.loss.add(each.name)

    def keep(self, each, sources, in_loss):
        if each.writes or each.op in ("view", "zeros_like"):
            first = sources[0]
            self.low[each.name] = self.low[first]
            if each.op == "view":
                self.view_of[each.name] = first
            self.always |= {each.name} if first in self.always else set()
            self.loss |= {each.name} if first in self.loss or in_loss else set()
            for source in sources:
                if self.leaves(source, in_loss):
                    self.cast(source, False, "leaves", leaves=True)
            if self.leaves(first, in_loss):
                self.low[each.name] = False
                self.always.add(each.name)
            elif first in self.mixed:
                self.mixed.add(each.name)
            return
        given = {}
        for source in sources:
            given[source] = self.low[source]
            if self.leaves(source, in_loss):
                self.cast(source, False, "leaves", leaves=True)
                given[source] = None
            elif source in self.always:
                given[source] = None
        if None in given.values():
            self.always.add(each.name)
        elif len(set(given.values())) > 1 or self.mixed.intersection(sources):
            self.mixed.add(each.name)
        self.low[each.name] = all(given.values())
        if in_loss or all(source in self.loss for source in sources):
            self.loss.add(each.name)

    def leaves(self, source, in_loss):
        return in_loss and source not in self.loss and source not in self.always

    def cast(self, source, low, reader, leaves=False):
        if source in self.mixed and self.cost_of(source, leaves):
            self.disagree = True
        if self.low[source] != low:
            self.pay(source, "down" if low else "up", reader, "", leaves)

    def pay(self, source, way, reader, state, leaves=False):
        found = self.cost_of(source, leaves)
        if found:
            name, cost = found
            key = (name, way, state, "" if cost.shared else reader if leaves else (reader, source))
            self.paid[key] = cost.down_s if way == "down" else cost.up_s

    def cost_of(self, source, leaves):
        chain = [source]
        while chain[-1] in self.view_of:
            chain.append(self.view_of[chain[-1]])
        return next(
            ((name, self.casts[name]) for name in (chain[::-1] if leaves else chain) if name in self.casts), None
        )


def all_walks(graph, costs, casts, ties, fp8):
    """Return every assignment that is allowed, with its walk."""
    sites = list(choices_of(graph))
    found = []
    for codes in itertools.product(("fp32", "low", "fp8") if fp8 else ("fp32", "low"), repeat=len(sites)):
        assignment = dict(zip(sites, codes, strict=True))
        if any(len({assignment[site] == "fp32" for site in tie}) > 1 for tie in ties):
            continue
        walk = Walk(graph, costs, casts, assignment)
        if not walk.disagree:
            found.append((assignment, walk))
    return found


def value(found, price, byte_price=0.0):
    if found.error == math.inf or (price == math.inf and found.error):
        return math.inf
    return found.time_s + byte_price * found.bytes + (price * found.error if price < math.inf else 0.0)


def lows(assignment):
    return {site for site, precision in assignment.items() if precision != "fp32"}


@settings(max_examples=50, deadline=None)
@given(step=steps(), byte_price=st.sampled_from([0.0, 1.0]))
def test_no_assignment_is_better_and_none_as_good_has_fewer_low_sites(step, byte_price):
    graph, costs, casts, ties, fp8 = step
    problem = cut_problem(graph, costs, casts, ties)
    walks = all_walks(graph, costs, casts, ties, fp8)
    for price in PRICES:
        plan = cheapest(problem, error_price=price, byte_price=byte_price)
        best = min(value(walk, price, byte_price) for _, walk in walks)
        assert value(plan.predicted, price, byte_price) == best
        for assignment, walk in walks:
            if value(walk, price, byte_price) == best:
                assert lows(plan.assignment) <= lows(assignment)


@settings(max_examples=60, deadline=None)
@given(step=steps(), data=st.data())
def test_any_assignment_is_predicted_as_the_walk_finds_it_even_one_that_parts_ties(step, data):
    graph, costs, casts, ties, _ = step
    problem = cut_problem(graph, costs, casts, ties)
    for _ in range(5):
        assignment = {site: data.draw(st.sampled_from(["fp32", "low", "fp8"])) for site in problem.sites}
        found, walk = predicted(problem, assignment), Walk(graph, costs, casts, assignment)
        assert (found.time_s, found.error, found.bytes) == (walk.time_s, walk.error, walk.bytes)


@settings(max_examples=60, deadline=None)
@given(step=steps(most=9), byte_price=st.sampled_from([0.0, 1.0]))
def test_a_sweep_holds_what_is_best_at_every_price(step, byte_price):
    graph, costs, casts, ties, fp8 = step
    plans = sweep(cut_problem(graph, costs, casts, ties), byte_price=byte_price)
    walks = [walk for _, walk in all_walks(graph, costs, casts, ties, fp8)]
    for plan in plans:
        assert value(plan.predicted, plan.error_price, byte_price) == pytest.approx(
            min(value(walk, plan.error_price, byte_price) for walk in walks), rel=1e-12
        )
    for price in (*PRICES, *(k / 7 for k in range(1, 40))):
        best = min(value(walk, price, byte_price) for walk in walks)
        assert min(value(plan.predicted, price, byte_price) for plan in plans) == pytest.approx(best, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_along_a_sweep_time_rises_and_error_and_low_sites_fall(step):
    graph, costs, casts, ties, _ = step
    plans = sweep(cut_problem(graph, costs, casts, ties))
    for one, other in itertools.pairwise(plans):
        assert one.error_price < other.error_price
        assert one.predicted.time_s < other.predicted.time_s
        assert one.predicted.error > other.predicted.error
        assert lows(one.assignment) >= lows(other.assignment)
        assert not dominates(one.predicted, other.predicted)
        assert not dominates(other.predicted, one.predicted)
