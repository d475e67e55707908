"""Goals of a search, and the Pareto front of what was measured."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import StudyError
from autoprec.policy import Parameters, preset
from autoprec.records.run import TrialRecord
from autoprec.search.pareto import goals, pareto_front
from autoprec.search.study import Study, open_study
from autoprec.search.trials import Catalog
from tests.unit.records.samples import MEMORY, trial
from tests.unit.search.blocks import SITES, layout, rows, site
from tests.unit.search.test_study import IDENTITY, measured


def point(name: str, speedup: float, memory: int, error: float | None, **changes: object) -> TrialRecord:
    found = replace(trial(name, speedup), memory=replace(MEMORY, total_bytes=memory), gradient_error=error)
    return replace(found, **changes)  # type: ignore[arg-type]


def test_the_front_has_what_nothing_else_is_as_good_as_in_all_goals() -> None:
    trials = [
        point("slow-exact", 1.0, 100, 0.0),
        point("fast", 2.0, 80, 0.1),
        point("dominated", 1.5, 90, 0.1),
        point("small", 1.2, 50, 0.2),
        point("between", 1.5, 90, 0.05),
        point("twin", 2.0, 80, 0.1, number=9),
        point("broken", 3.0, 10, 0.3, state="failed"),
        point("unknown", 3.0, 10, None),
        point("infinite", 3.0, 10, math.inf),
        replace(point("no-memory", 3.0, 10, 0.0), memory=None),
    ]
    assert [each.name for each in pareto_front(trials)] == ["fast", "between", "small", "slow-exact"]
    assert pareto_front([]) == ()


def test_goals_are_made_small() -> None:
    assert goals(point("p", 2.0, 80, 0.1), "time") == (0.5,)
    assert goals(point("p", 2.0, 80, None), "time") == (0.5,)
    assert goals(point("p", 2.0, 80, 0.1), "pareto") == (0.5, 80.0, 0.1)
    noisy = replace(point("fp32", 1.25, 80, 0.0), kind="baseline")
    assert goals(noisy, "time") == (1.0,)  # fp32 is as fast as itself
    assert goals(replace(point("p", 2.0, 80, 0.1), speedup=None), "time") is None


def start(folder: Path, **options: object) -> Study:
    return open_study(
        f"sqlite:///{folder / 'study.db'}", "mlp", identity=IDENTITY | options.pop("identity", {}), rows=rows(),  # type: ignore[operator]
        seed=0, note=lambda _: None, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_study_of_three_goals_takes_every_kind_of_trial_and_goes_on_proposing(tmp_path: Path) -> None:
    study = start(tmp_path, aim="pareto")
    outcomes = ("complete", "pruned", "failed", "complete", "complete")
    for number in range(14):
        asked = study.ask()
        assert not study.report(asked, 0, 5.0)  # nothing is cut short for being slower
        record = replace(measured(asked, 1.0 + 0.01 * number, state=outcomes[number % 5]), gradient_error=0.1)
        study.tell(replace(record, gradient_error=None) if number == 4 else record)
    assert len(study.trials()) == 14
    again = study.tell_duplicate(study.ask(), study.trials()[0])
    assert (again.state, again.duplicate_of) == ("duplicate", 0)


def test_a_study_of_one_aim_is_not_resumed_with_another(tmp_path: Path) -> None:
    start(tmp_path, identity={"objective": "time"})
    with pytest.raises(StudyError, match="objective: 'time' then, 'pareto' now"):
        start(tmp_path, identity={"objective": "pareto"}, aim="pareto")


def test_the_gradient_error_of_a_policy_is_the_root_of_the_sum_over_its_low_sites() -> None:
    errors = {each: 0.04 if each.op == "linear" else 0.0 for each in SITES}
    catalog = Catalog(baselines={}, layout=layout(), device={}, errors={"bf16": errors})
    linears = sum(each.op == "linear" for each in SITES)
    low = preset("low-bf16", "cpu")
    pure = replace(low, parameters=Parameters())
    assert catalog.gradient_error(pure) == pytest.approx(math.sqrt(0.04 * linears))
    assert catalog.gradient_error(preset("fp32", "cpu")) == 0.0
    assert catalog.gradient_error(replace(pure, float32_matmul="tf32")) is None
    assert catalog.gradient_error(preset("autocast-fp16", "cpu")) is None
    broken = replace(catalog, errors={"bf16": {**errors, site("head:linear#0"): math.inf}})
    assert broken.gradient_error(pure) == math.inf
