"""The loop over trials, on injected measurements."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.policy import Policy, Rule, preset
from autoprec.records.run import TrialRecord
from autoprec.search.budget import Budget, horizon_for
from autoprec.search.choices import defaults, dimensions, policy_of
from autoprec.search.observer import Observer
from autoprec.search.plans import Plan, plans
from autoprec.search.study import Asked, Study, open_study
from autoprec.search.trials import Catalog, fastest, run_trials
from tests.unit.records.samples import trial
from tests.unit.search.blocks import SPACE, layout, rows
from tests.unit.search.memory import keep_studies_in_memory
from tests.unit.search.test_study import start

CATALOG = Catalog(
    baselines={name: preset(name, "cpu") for name in ("fp32", "autocast-bf16")},
    layout=layout(),
    device={"kind": "cpu", "name": "Testium"},
)


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_studies_in_memory(monkeypatch)


@dataclass
class FakeObjective:
    """Measures what `outcome` says, and how often it was asked."""

    outcome: Callable[[Asked], TrialRecord]
    step_s: float = 0.001
    protocol: Any = field(default_factory=lambda: SimpleNamespace(horizon=24, num_rounds=4))
    measured: list[tuple[str, Policy]] = field(default_factory=list)

    def measure(self, asked: Asked, policy: Policy, key: str, report: Callable[[int, float], bool]) -> TrialRecord:
        self.measured.append((asked.name, policy))
        report(0, 0.9)
        return replace(
            self.outcome(asked), number=asked.number, kind=asked.kind, name=asked.name, choice=asked.choice, key=key
        )


def good(asked: Asked) -> TrialRecord:
    return replace(trial(asked.name, 1.1), duplicate_of=None)


def search(study: Study, objective: FakeObjective, *, trials: int | None = None, seconds: float = 100) -> None:
    budget = Budget(seconds=seconds, trials=trials)
    run_trials(study, objective, CATALOG, plans(rows())[:2], budget, Observer())  # type: ignore[arg-type]


def test_baselines_then_plans_then_proposals(tmp_path: Path) -> None:
    study, objective = start(tmp_path), FakeObjective(good)
    search(study, objective, trials=3)
    assert [record.name for record in study.trials()][:4] == [
        "fp32",
        "autocast-bf16",
        "free-ops-bf16",
        "free-ops-and-norms-bf16",
    ]
    kinds = [record.kind for record in study.trials() if record.state != "duplicate"]
    assert kinds == ["baseline", "baseline", "plan", "plan", "search"]


def test_the_number_of_trials_counts_over_resumed_runs(tmp_path: Path) -> None:
    search(start(tmp_path), FakeObjective(good), trials=1)
    objective = FakeObjective(good)
    search(start(tmp_path), objective, trials=1)
    assert objective.measured == []


def test_a_spent_budget_still_measures_fp32_and_nothing_else(tmp_path: Path) -> None:
    objective = FakeObjective(good)
    search(start(tmp_path), objective, seconds=1e-9)
    assert [name for name, _ in objective.measured] == ["fp32"]


def test_no_trial_begins_that_would_eat_the_time_of_the_proof(tmp_path: Path) -> None:
    objective = FakeObjective(good, step_s=1.0)
    search(start(tmp_path), objective, seconds=90)
    assert [name for name, _ in objective.measured] == ["fp32", "autocast-bf16"]


def test_a_policy_is_measured_once(tmp_path: Path) -> None:
    study, objective = start(tmp_path), FakeObjective(good)
    everything_fp32 = {row.name: "fp32" for row in rows() if row.name.startswith("layer:")}
    study.enqueue("baseline", "fp32", {})
    study.enqueue("plan", "nothing-low", {**plans(rows())[0].choice, **everything_fp32})
    search(study, objective, trials=0)
    assert [name for name, _ in objective.measured] == ["fp32", "autocast-bf16"]


def test_baselines_that_run_alike_are_measured_once(tmp_path: Path) -> None:
    twin = replace(preset("low-bf16", "cpu"), name="twin", rules=(Rule(sites="*:*", format="bf16"),))
    other = replace(twin, outputs="fp32")
    policies = {"fp32": preset("fp32", "cpu"), "low-bf16": preset("low-bf16", "cpu"), "twin": twin, "other": other}
    study, objective = start(tmp_path), FakeObjective(good)
    catalog = replace(CATALOG, baselines=policies)
    run_trials(study, objective, catalog, (), Budget(seconds=100, trials=0), Observer())  # type: ignore[arg-type]
    assert [name for name, _ in objective.measured] == ["fp32", "low-bf16", "other"]
    assert [record.state for record in study.trials()] == ["complete", "complete", "duplicate", "complete"]


def test_a_plan_that_is_a_baseline_is_not_measured_again(tmp_path: Path) -> None:
    plan = plans(rows())[0]
    made = replace(policy_of(plan.choice, CATALOG.layout, name="made", device={}), name="made")
    catalog = replace(CATALOG, baselines={"fp32": preset("fp32", "cpu"), "made": made})
    objective = FakeObjective(good)
    run_trials(start(tmp_path), objective, catalog, (plan,), Budget(seconds=100, trials=1), Observer())  # type: ignore[arg-type]
    assert [name for name, _ in objective.measured][:2] == ["fp32", "made"]
    assert plan.name not in [name for name, _ in objective.measured]


def test_a_failing_trial_never_ends_the_study(tmp_path: Path) -> None:
    study = start(tmp_path)
    search(study, FakeObjective(lambda asked: replace(trial(asked.name, None), state="failed")), trials=4)
    assert [record.state for record in study.trials()].count("failed") >= 4


def test_a_search_without_new_ideas_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "key", lambda self, name, choice: "same" if choice else name)
    study, objective = start(tmp_path), FakeObjective(good)
    search(study, objective)
    assert len(objective.measured) == 3


def test_an_interrupted_trial_is_measured_again_by_the_next_run(tmp_path: Path) -> None:
    def interrupted(asked: Asked) -> TrialRecord:
        if asked.name == "autocast-bf16":
            raise KeyboardInterrupt
        return good(asked)

    study = start(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        search(study, FakeObjective(interrupted))
    assert [record.name for record in study.trials()] == ["fp32"]
    objective = FakeObjective(good)
    search(start(tmp_path), objective, trials=0)
    assert [name for name, _ in objective.measured] == ["autocast-bf16"]


def test_every_trial_is_observed(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watch(Observer):
        def trial_begins(self, name: str, number: int) -> None:
            seen.append(f"begin {name}")

        def round_ends(self, done_frac: float, ratio: float) -> None:
            seen.append(f"round {done_frac} {ratio}")

        def trial_ends(self, record: TrialRecord, best: TrialRecord | None) -> None:
            seen.append(f"end {record.name}, best {best.name if best else None}")

    study = start(tmp_path)
    run_trials(study, FakeObjective(good), CATALOG, (), Budget(seconds=100, trials=0), Watch())  # type: ignore[arg-type]
    assert seen[:3] == ["begin fp32", "round 0.25 0.9", "end fp32, best fp32"]


def test_the_fastest_is_faithful() -> None:
    trials = [trial("a", 1.2), trial("b", 1.4, verdict="unfaithful"), trial("c", 1.3, state="pruned"), trial("d", 1.1)]
    best = fastest(trials)
    assert best is not None
    assert best.name == "a"
    assert fastest([]) is None


@pytest.mark.parametrize(("budget_s", "step_s", "steps"), [(1, 1, 24), (300, 0.1, 59), (1e6, 0.1, 200)])
def test_the_horizon_fits_the_budget(budget_s: float, step_s: float, steps: int) -> None:
    assert horizon_for(budget_s, step_s) == steps


def test_what_the_times_of_its_ops_rule_out_is_not_tried(tmp_path: Path) -> None:
    ratios = {"fp32": 9.0, "autocast-bf16": 2.5}
    model = SimpleNamespace(slowdown=lambda policy, step_s: ratios.get(policy.name))
    objective = FakeObjective(good, protocol=SimpleNamespace(horizon=24, num_rounds=4, slow_limit=2.0))
    study = start(tmp_path)
    catalog = replace(CATALOG, cost_model=model)  # type: ignore[arg-type]
    run_trials(study, objective, catalog, (), Budget(seconds=100, trials=0), Observer())  # type: ignore[arg-type]
    assert [name for name, _ in objective.measured] == ["fp32"]  # what all are held against is always measured
    (slow,) = [record for record in study.trials() if record.name == "autocast-bf16"]
    assert slow.state == "pruned"
    assert slow.reason == "predicted to be 2.5x slower than fp32 from the times of its ops: not tried"
    assert slow.speedup is None


def test_what_is_within_the_limit_or_cannot_be_predicted_is_tried(tmp_path: Path) -> None:
    for name, ratio in (("near", 1.9), ("unknown", None)):
        model = SimpleNamespace(slowdown=lambda policy, step_s, ratio=ratio: ratio)
        objective = FakeObjective(good, protocol=SimpleNamespace(horizon=24, num_rounds=4, slow_limit=2.0))
        catalog = replace(CATALOG, cost_model=model)  # type: ignore[arg-type]
        (tmp_path / name).mkdir()
        study = start(tmp_path / name)
        run_trials(study, objective, catalog, (), Budget(seconds=100, trials=0), Observer())  # type: ignore[arg-type]
        assert [measured for measured, _ in objective.measured] == ["fp32", "autocast-bf16"]


def test_compiled_baselines_come_last_and_only_while_there_is_time(tmp_path: Path) -> None:
    compiled = replace(CATALOG.baselines["fp32"], name="fp32-compiled", compile="inductor")
    fp32, *others = CATALOG.baselines.items()
    catalog = replace(CATALOG, baselines=dict([fp32, ("fp32-compiled", compiled), *others]))
    names = list(CATALOG.baselines)
    for seconds, expected in ((1e6, [*names, "fp32-compiled"]), (1e-9, names[:1])):
        objective = FakeObjective(good)
        folder = tmp_path / str(seconds)
        folder.mkdir()
        run_trials(start(folder), objective, catalog, (), Budget(seconds=seconds, trials=0), Observer())  # type: ignore[arg-type]
        assert [name for name, _ in objective.measured] == expected


def test_plans_ahead_of_the_first_compiled_one_are_tried_before_compiled_baselines(tmp_path: Path) -> None:
    compiled = replace(CATALOG.baselines["fp32"], name="fp32-compiled", compile="inductor")
    catalog = replace(CATALOG, baselines={**CATALOG.baselines, "fp32-compiled": compiled})
    first, second, *_ = plans(rows())
    later = Plan(name="later", choice={**second.choice, "compile": "inductor"})
    for planned, order in (
        ((first, later, second), [*CATALOG.baselines, first.name, "fp32-compiled"]),
        ((first, second), [*CATALOG.baselines, "fp32-compiled", first.name]),
    ):
        objective = FakeObjective(good)
        folder = tmp_path / str(len(planned))
        folder.mkdir()
        run_trials(start(folder), objective, catalog, planned, Budget(seconds=1e6, trials=1), Observer())  # type: ignore[arg-type]
        assert [name for name, _ in objective.measured] == order


def test_only_a_plan_that_was_faithful_lets_the_sampler_lower_marked_sites(tmp_path: Path) -> None:
    some = frozenset(CATALOG.layout.sites[:4])
    catalog = replace(CATALOG, layout=replace(CATALOG.layout, beyond={"bf16": (some,), "fp16": (some,)}))
    planned = dimensions(SPACE, catalog.layout)
    choices = {low: {**defaults(planned, low), "plan": "beyond-0"} for low in ("bf16", "fp16")}
    study = open_study(
        f"sqlite:///{tmp_path / 'study.db'}", "s", identity={}, rows=planned, seed=0, note=lambda _: None
    )
    objective = FakeObjective(good)
    objective.protocol.slow_limit = 5.0
    study.enqueue("plan", "beyond-0-bf16", choices["bf16"])
    for low, choice in choices.items():
        study.enqueue("search", f"from-{low}", choice | {"layer:head": "fp32", "float32_matmul": "tf32"})
    run_trials(study, objective, catalog, (), Budget(seconds=100, trials=3), Observer())  # type: ignore[arg-type]
    found = {record.name: record for record in study.trials()}
    assert found["from-bf16"].state == "complete"
    assert found["from-fp16"].state == "pruned"
    assert found["from-fp16"].reason == (
        "lowers marked sites as beyond-0 does, which was not measured to be faithful: not tried"
    )
    assert not found["from-fp16"].was_run
