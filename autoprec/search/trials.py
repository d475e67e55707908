"""The loop over trials: baselines, plans, then what the sampler proposes, until budget or ideas are spent."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoprec.graph.site import Site
from autoprec.policy import AS_GIVEN, Policy, resolve
from autoprec.records.run import UNPROVEN, SearchEnd, TrialKind, TrialRecord
from autoprec.search.budget import Budget, proof_s, reserve_s, trial_s
from autoprec.search.choices import Choice, choice_key, goes_beyond, policy_of, run_key
from autoprec.search.cost_model import CostModel
from autoprec.search.decide import best_baseline, contenders
from autoprec.search.layout import Layout
from autoprec.search.objective import Objective
from autoprec.search.observer import Observer
from autoprec.search.plans import Plan
from autoprec.search.study import Asked, Study
from autoprec.search.walk import next_plan

_FOLLOWS = ("as_given", "promote")
# So many proposals in a row that were all measured before, or that were all ruled out: the space has nothing new.
_STALE_PROPOSALS, _IDLE_PROPOSALS = 25, 100


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """What trials are made from: the baselines, the layout that choices decide about, and the device they name.

    `errors` are those of sites in each low format, squares of relative gradient errors. With a `cost_model`, a policy
    that is predicted to be far too slow is not tried.
    """

    baselines: Mapping[str, Policy]
    layout: Layout
    device: Mapping[str, str]
    cost_model: CostModel | None = None
    errors: Mapping[str, Mapping[Site, float]] = field(default_factory=dict)

    def policy(self, name: str, choice: Choice) -> Policy:
        """Return the policy of a trial; a trial without a choice is a baseline."""
        return policy_of(choice, self.layout, name=name, device=self.device) if choice else self.baselines[name]

    def key(self, name: str, choice: Choice) -> str:
        """Return a text that two trials share exactly if they train and run alike."""
        if choice:
            return choice_key(choice, self.layout)
        policy = self.baselines[name]
        return run_key(policy, resolve(policy, self.sites).formats)

    def gradient_error(self, policy: Policy) -> float | None:
        """Return the predicted gradient error of a policy; None where it rounds something whose error is not known."""
        low = {site: fmt for site, fmt in resolve(policy, self.sites).formats.items() if fmt not in ("fp32", *_FOLLOWS)}
        is_plain = policy.parameters.storage == "fp32" and policy.float32_matmul == "ieee"
        if not is_plain or not set(low.values()) <= set(self.errors):
            return None
        return math.sqrt(sum(self.errors[fmt].get(site, math.inf) for site, fmt in low.items()))

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return the sites that may run low."""
        return self.layout.sites


def run_trials(
    study: Study,
    objective: Objective,
    catalog: Catalog,
    planned: Sequence[Plan],
    budget: Budget,
    observer: Observer,
    dismissed: Collection[str] = (),
) -> SearchEnd:
    """Measure baselines, then plans, then what the sampler proposes, as much as the budget allows; fp32 always.

    For `dismissed` trials no time is kept: their proof is done. An interrupted trial goes back into the queue. What the
    study has already is not measured again. Returns what ended the search: the budget's time, its number of trials, or
    that nothing new was proposed.
    """
    records = list(study.trials())
    _measure_baselines(study, objective, catalog, planned, records, budget, observer)

    def gradient_error(plan: Plan) -> float | None:
        return catalog.gradient_error(catalog.policy(plan.name, plan.choice))

    stale = idle = 0
    while stale < _STALE_PROPOSALS and idle < _IDLE_PROPOSALS:
        if _are_spent(budget, records):
            return "trials"
        if not has_time_to_search(objective, budget, [each for each in records if each.name not in dismissed]):
            return "budget"
        plan = next_plan(planned, records, gradient_error, is_whole=study.aim == "pareto")
        if plan is not None:  # what an interruption put back is asked for first
            study.enqueue("plan", plan.name, plan.choice)
        records.append(_next_trial(study, objective, catalog, records, observer))
        stale = stale + 1 if records[-1].state == "duplicate" else 0
        idle = 0 if records[-1].was_run else idle + 1
    return "exhausted"


def _measure_baselines(
    study: Study,
    objective: Objective,
    catalog: Catalog,
    planned: Sequence[Plan],
    records: list[TrialRecord],
    budget: Budget,
    observer: Observer,
) -> None:
    """Measure the baselines and add them to `records`.

    Compiled ones come last, and only as long as the search has time: each compiles for long.
    """

    def measure_waiting(kind: TrialKind) -> None:
        while study.has_waiting(kind) and (not records or budget.left_s() > 0):
            records.append(_next_trial(study, objective, catalog, records, observer))

    compiled = [name for name, policy in catalog.baselines.items() if policy.compile != AS_GIVEN]
    for name in (name for name in catalog.baselines if name not in compiled):
        study.enqueue("baseline", name, {})
    measure_waiting("baseline")
    for plan in _plans_before_compiling(planned) if compiled else ():
        if has_time_to_search(objective, budget, records) and not _are_spent(budget, records):
            study.enqueue("plan", plan.name, plan.choice)
            measure_waiting("plan")
    for name in compiled:
        if has_time_to_search(objective, budget, records):
            study.enqueue("baseline", name, {})
            measure_waiting("baseline")
    missing = [name for name in catalog.baselines if name not in {record.name for record in records}]
    if missing:
        observer.note(f"the budget is over: {', '.join(missing)} not measured; the same command goes on with it")


def _plans_before_compiling(planned: Sequence[Plan]) -> Sequence[Plan]:
    """Return the plans ahead of the first that compiles the model: they cost seconds, and it may cost the budget."""
    compiles = (place for place, plan in enumerate(planned) if plan.choice.get("compile", AS_GIVEN) != AS_GIVEN)
    return planned[: next(compiles, 0)]


def _next_trial(
    study: Study, objective: Objective, catalog: Catalog, records: Sequence[TrialRecord], observer: Observer
) -> TrialRecord:
    asked = study.ask()
    try:
        record = _measured(study, objective, catalog, asked, records, observer)
    except KeyboardInterrupt:
        study.put_back(asked)
        raise
    observer.trial_ends(record, fastest([*records, record]))
    return record


def fastest(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the fastest faithful trial by its point estimate."""
    faithful = [record for record in records if record.is_faithful and record.speedup]
    return max(faithful, key=lambda record: record.speedup.value if record.speedup else 0.0, default=None)


def _are_spent(budget: Budget, records: Sequence[TrialRecord]) -> bool:
    """Return whether as many trials were made as were asked for."""
    done = sum(1 for record in records if record.kind != "baseline" and record.state != "duplicate")
    return budget.trials is not None and done >= budget.trials


def has_time_to_search(objective: Objective, budget: Budget, records: Sequence[TrialRecord]) -> bool:
    """Return whether there is time for one more trial beside that for the proof and the minimal result."""
    protocol, step_s = objective.protocol, pace_s(objective, records)
    if not any(record.name == "fp32" and record.is_faithful for record in records):
        return budget.left_s() > trial_s(protocol, step_s) + proof_s(protocol, step_s)
    best = best_baseline(records)
    kept = reserve_s(
        protocol,
        step_s,
        budget,
        has_find=bool(contenders(records, best)),
        with_baseline=best.name != "fp32",
    )
    compile_s = max((each.compile_s for each in records), default=0.0)  # once for the trial, and twice for its proof
    return budget.left_s() > trial_s(protocol, step_s) + kept + (
        3 * compile_s if contenders(records, best) else compile_s
    )


def pace_s(objective: Objective, records: Sequence[TrialRecord]) -> float:
    """Return about how long a step takes in a trial, all around it included: what whole trials took, FP32 at least."""
    walls = [each.wall_s - each.compile_s for each in records if each.state == "complete" and each.wall_s > 0]
    return max([objective.step_s, *([statistics.median(walls) / (2 * objective.protocol.horizon)] if walls else [])])


def _measured(
    study: Study,
    objective: Objective,
    catalog: Catalog,
    asked: Asked,
    records: Sequence[TrialRecord],
    observer: Observer,
) -> TrialRecord:
    """Return the record of the trial, told to the study; a policy that was measured before is not measured again."""
    key = catalog.key(asked.name, asked.choice)
    original = next((r for r in records if r.key == key and r.state in ("complete", "pruned", "failed")), None)
    if original is not None:
        return study.tell_duplicate(asked, original)
    observer.trial_begins(asked.name, asked.number)

    def report(number: int, ratio: float) -> bool:
        observer.round_ends((number + 1) / objective.protocol.num_rounds, ratio)
        return study.report(asked, number, ratio)

    policy = catalog.policy(asked.name, asked.choice)
    record = _unproven_beyond(asked, key, records) or _predicted_slow(objective, catalog, asked, policy, key)
    if record is None:
        record = objective.measure(asked, policy, key, report)
    else:
        report(0, objective.protocol.slow_limit)
    record = replace(record, gradient_error=catalog.gradient_error(policy))
    study.tell(record)
    return record


def _unproven_beyond(asked: Asked, key: str, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the record of a proposal that lowers marked sites although no run has shown that they can be lowered."""
    if asked.kind != "search" or not goes_beyond(asked.choice):
        return None
    where = [asked.choice[name] for name in ("plan", "low")]
    if any(each.is_faithful and [each.choice.get(name) for name in ("plan", "low")] == where for each in records):
        return None
    reason = f"{UNPROVEN} as {where[0]} does, which was not measured to be faithful: not tried"
    return TrialRecord(
        number=asked.number, name=asked.name, kind=asked.kind, choice=asked.choice, key=key, state="pruned",
        reason=reason,
    )  # fmt: skip


def _predicted_slow(
    objective: Objective, catalog: Catalog, asked: Asked, policy: Policy, key: str
) -> TrialRecord | None:
    """Return the record of a trial that is not worth its time: its ops alone take far longer than an FP32 step."""
    if catalog.cost_model is None or asked.name == "fp32":
        return None
    slowdown = catalog.cost_model.slowdown(policy, objective.step_s)
    if slowdown is None or slowdown <= objective.protocol.slow_limit:
        return None
    reason = f"predicted to be {slowdown:.1f}x slower than fp32 from the times of its ops: not tried"
    return TrialRecord(
        number=asked.number, name=asked.name, kind=asked.kind, choice=asked.choice, key=key, state="pruned",
        reason=reason,
    )  # fmt: skip
