"""Which plan of a front is tried next."""

from dataclasses import replace

from autoprec.records.run import TrialRecord
from autoprec.search.choices import CLASSES
from autoprec.search.plans import Plan
from autoprec.search.walk import next_plan
from tests.unit.records.samples import FAITHFUL, trial

ERRORS = {"beyond-1": 0.9, "beyond-0": 0.5, "cut-0": 0.3, "cut-1": 0.2, "cut-2": 0.1, "cut-3": 0.05, "cut-4": 0.001}


def plan(name: str, low: str = "bf16") -> Plan:
    return Plan(name=f"{name}-{low}", choice={"low": low, "plan": name}, front=low)


FRONT = [plan(name) for name in ERRORS]
OTHER = Plan(name="free-ops", choice={"low": "bf16", "plan": CLASSES})


def walked(
    faithful: set[str], front: list[Plan] = FRONT, errors: dict[str, float] | None = None, *, is_whole: bool = False
) -> list[str]:
    """Return the plans of a whole walk in order, where those in `faithful` turn out to be so."""
    known = ERRORS if errors is None else errors
    trials: list[TrialRecord] = []

    def error(each: Plan) -> float | None:
        return known.get(str(each.choice["plan"]))

    while (found := next_plan(front, trials, error, is_whole=is_whole)) is not None:
        name = str(found.choice["plan"])
        verdict = "faithful" if name in faithful else "unfaithful"
        trials.append(replace(trial(found.name, 1.2, kind="plan", verdict=verdict), choice=found.choice))
        assert len(trials) <= len(front), "a plan was asked for twice"
    return [str(each.choice["plan"]) for each in trials]


def test_the_walk_begins_with_the_fastest_healthy_plan_and_ends_between_neighbors() -> None:
    # A healthy step in bf16 is off by 0.1375 at most.
    assert walked({"cut-2", "cut-3", "cut-4"}) == ["cut-2", "cut-1"]
    assert walked({"cut-4"}) == ["cut-2", "cut-3", "cut-4"]
    assert walked(set()) == ["cut-2", "cut-3", "cut-4"]


def test_what_lies_beyond_marks_is_tried_once_the_front_is_known_to_be_faithful() -> None:
    cuts = {name for name in ERRORS if name.startswith("cut")}
    assert walked(cuts) == ["cut-2", "cut-1", "beyond-0", "cut-0"]
    assert walked({*cuts, "beyond-0"}) == ["cut-2", "cut-1", "beyond-0", "beyond-1"]
    assert walked({*cuts, "beyond-0", "beyond-1"}) == ["cut-2", "cut-1", "beyond-0", "beyond-1"]
    assert walked({"beyond-0"}) == ["cut-2", "cut-3", "cut-4"], "never without a faithful plan beside it"


def test_for_several_goals_exact_plans_are_tried_too() -> None:
    good = {name for name in ERRORS if name.startswith("cut")}
    assert walked(good, is_whole=True) == ["cut-2", "cut-1", "beyond-0", "cut-0", "cut-3", "cut-4"]
    front = [plan(f"cut-{place}") for place in range(9)]
    names = {f"cut-{place}" for place in range(9)}
    assert walked(names, front, dict.fromkeys(names, 0.001), is_whole=True) == [f"cut-{k}" for k in (0, 2, 4, 6, 8)]
    assert walked(names, front[:1], is_whole=True) == ["cut-0"]


def test_strides_grow_where_plans_fail() -> None:
    front = [plan(f"cut-{place}") for place in range(12)]
    errors = {f"cut-{place}": 0.001 for place in range(12)}
    assert walked({f"cut-{place}" for place in range(6, 12)}, front, errors) == [
        "cut-0", "cut-1", "cut-3", "cut-7", "cut-5", "cut-6",
    ]  # fmt: skip


def test_errors_that_are_not_known_are_no_hindrance_and_unhealthy_ones_leave_the_most_exact_plan() -> None:
    assert walked(set(ERRORS), errors={})[0] == "cut-0"
    assert walked(set(), errors=dict.fromkeys(ERRORS, 0.5)) == ["cut-4"]


def test_a_plan_that_was_ended_for_being_outrun_leads_to_faster_ones_and_a_slow_one_to_less_low_sites() -> None:
    front = FRONT[2:]
    begun = replace(trial("cut-2-bf16", 1.3, kind="plan", state="pruned"), fidelity=None)
    slow = replace(begun, speedup=replace(begun.speedup, value=0.2))
    names = [next_plan(front, [each], lambda plan: ERRORS[str(plan.choice["plan"])]) for each in (begun, slow)]
    assert [each.name for each in names if each] == ["cut-1-bf16", "cut-3-bf16"]
    known = replace(trial("cut-2-bf16", 1.3, kind="plan", state="duplicate"), fidelity=FAITHFUL)
    assert next_plan(front, [known], lambda plan: ERRORS[str(plan.choice["plan"])]) == front[1]


def test_fronts_take_turns_and_other_plans_come_where_they_stand() -> None:
    fused, last = replace(OTHER, name="fp32-fused"), OTHER
    both = [fused, *(each for name in ("cut-0", "cut-1") for each in (plan(name), plan(name, "fp16"))), last]
    trials: list[TrialRecord] = []
    while (found := next_plan(both, trials, lambda _: 0.001)) is not None:
        trials.append(replace(trial(found.name, 1.2, kind="plan", verdict="unfaithful"), choice=found.choice))
    names = [each.name for each in trials]
    assert names == ["fp32-fused", "cut-0-bf16", "cut-0-fp16", "cut-1-bf16", "cut-1-fp16", "free-ops"]
    assert next_plan([], [], lambda _: None) is None


def test_a_plan_that_was_ended_for_its_time_leads_to_faster_ones_but_not_beyond_marks() -> None:
    def ended(*names: str) -> list[TrialRecord]:
        found = [next(each for each in FRONT if each.choice["plan"] == name) for name in names]
        trials = [replace(trial(each.name, 1.2, kind="plan"), choice=each.choice) for each in found]
        return [replace(each, state="pruned", fidelity=None) for each in trials]

    def after(trials: list[TrialRecord]) -> object:
        found = next_plan(FRONT, trials, lambda each: ERRORS[str(each.choice["plan"])])
        return found and found.choice["plan"]

    assert after(ended("cut-2")) == "cut-1"
    assert after(ended("cut-2", "cut-1")) == "cut-0"
    assert after(ended("cut-2", "cut-1", "cut-0")) is None, "none of them is known to be faithful"
    faithful = [replace(each, fidelity=FAITHFUL, state="complete") for each in ended("cut-2")]
    assert after([*faithful, *ended("cut-1", "cut-0")]) == "beyond-1"
