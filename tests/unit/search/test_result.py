"""What is written about an outcome."""

from dataclasses import replace

from autoprec.policy import preset, resolve
from autoprec.records.run import Interval
from autoprec.search.choices import defaults, dimensions
from autoprec.search.choose import Outcome
from autoprec.search.prices import Prices
from autoprec.search.result import chosen_record, policy_of_outcome
from autoprec.search.trials import Catalog
from tests.unit.records.samples import trial
from tests.unit.search.blocks import SPACE, layout, mark, site

FAULTS = tuple(site(f"blocks.{number}.attn:matmul#0") for number in (0, 1))
LAYOUT = layout(extra=tuple(mark(each, "bf16", "must", "cancels") for each in FAULTS))
CATALOG = Catalog(
    baselines={"fp32": preset("fp32", "cpu"), "low-bf16": preset("low-bf16", "cpu")},
    layout=replace(LAYOUT, fronts={"bf16": (frozenset(),)}, beyond={"bf16": (frozenset(LAYOUT.sites),)}),
    device={"kind": "cpu", "name": "Testium"},
)
WHY = "measured faithful: trial 7; marked: cancels"


def outcome(plan: str) -> Outcome:
    choice = {**defaults(dimensions(SPACE, CATALOG.layout), "bf16"), "plan": plan}
    won = replace(trial("won", 1.2, number=7, kind="plan"), choice=choice if plan else {})
    won = won if plan else replace(won, name="low-bf16", kind="baseline")
    versus = Interval(value=1.2, low=1.1, high=1.3)
    fp32 = replace(trial("fp32", 1.0, kind="baseline"), choice={})
    return Outcome(trial=won, best=fp32, verdict="improved", versus=versus, verified=True)


def test_a_marked_site_that_runs_low_names_the_trial_that_showed_it_can() -> None:
    for plan, is_low in (("beyond-0", True), ("cut-0", False), ("", True)):
        found, prices = outcome(plan), Prices(model=None)
        policy = policy_of_outcome(
            found, CATALOG, (), name="net", sites=CATALOG.sites, evidence={"seed": 1}, prices=prices
        )
        record = chosen_record(found, CATALOG, policy, prices)
        assert {resolve(policy, CATALOG.sites).format(each) for each in FAULTS} == {"bf16" if is_low else "fp32"}
        assert sum(row.num_sites for row in record.lowered) == (2 if is_low else 0)
        assert {row.why for row in record.lowered} == ({WHY} if is_low else set())
        assert set(policy.evidence.get("lowered_marks", {}).values()) == ({WHY} if is_low else set())
        assert set(policy.evidence.get("lowered_marks", {})) == {row.sites for row in record.lowered}
