"""From an outcome to what is written: the policy with its evidence, and what it keeps in FP32."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoprec.graph.site import Site
from autoprec.policy import Policy, dump_policy, resolve
from autoprec.records.run import (
    ChosenRecord,
    FidelityRecord,
    HealthRecord,
    Interval,
    KeptRecord,
    TrialRecord,
    VerificationRecord,
)
from autoprec.runtime.guard.calibration import Calibration, loss_band, to_plain
from autoprec.search.choices import targets_of
from autoprec.search.choose import Outcome
from autoprec.search.decide import product_of
from autoprec.search.layout import Layout
from autoprec.search.minimize import Minimal
from autoprec.search.prices import Prices, priced
from autoprec.search.rules import cover
from autoprec.search.trials import Catalog


def policy_of_outcome(
    outcome: Outcome,
    catalog: Catalog,
    checks: Sequence[VerificationRecord],
    *,
    name: str,
    sites: Sequence[Site],
    evidence: Mapping[str, Any],
    prices: Prices,
    minimal: Minimal | None = None,
) -> Policy:
    """Return the policy to write, without rules that win nowhere on `sites`, and with the evidence for it.

    It is the `minimal` one where there is one; its rules say what FP32 costs there.
    """
    trial = outcome.trial
    chosen = catalog.policy(trial.name, trial.choice) if minimal is None else minimal.policy
    policy = priced(resolve(chosen, sites).without_dead_rules(), sites, prices)
    fidelity = proven_fidelity(outcome, checks)
    speedup, versus, memory = trial.speedup, outcome.versus, trial.memory
    if minimal is not None and minimal.check is not None:
        fidelity, memory = minimal.check.fidelity, minimal.memory
        speedup, versus = speedups(outcome, minimal)
    measured = {
        "verdict": outcome.verdict,
        "verified": outcome.verified,
        "speedup_vs_fp32": None if speedup is None else speedup.value,
        "spread_vs_fp32": None if speedup is None else speedup.spread,
        "best_baseline": outcome.best.name,
        "speedup_vs_best_baseline": versus.value,
        "spread_vs_best_baseline": versus.spread,
        "fidelity": None if fidelity is None else _fidelity_evidence(fidelity),
        "memory_bytes": None if memory is None else memory.total_bytes,
        "calibration": to_plain(calibration_from(trial)),
    }
    lowered = lowered_marks(trial, catalog.layout, resolve(policy, catalog.sites).formats)
    if lowered:
        measured["lowered_marks"] = {row.sites: row.why for row in _kept(catalog.layout, lowered, lambda _: None)}
    return replace(
        policy,
        name=f"{name}-{trial.name}",
        device=dict(catalog.device),
        evidence=_finite({**evidence, **measured}),
    )


def calibration_from(trial: TrialRecord) -> Calibration:
    """Return what a guard compares a production run with: this trial was a healthy one."""
    health = trial.health or HealthRecord()
    return Calibration(
        losses=loss_band(trial.losses),
        skipped_frac=None if health.loss_scale is None else trial.num_skipped / max(trial.num_steps, 1),
        loss_scale=health.loss_scale,
        flush_frac=health.flush_frac,
        layer_flush_frac=health.layer_flush_frac,
        overflow_frac=health.overflow_frac,
    )


def speedups(outcome: Outcome, minimal: Minimal | None) -> tuple[Interval | None, Interval]:
    """Return the speed-ups of what is written over FP32 and over the best baseline.

    What is left of a winner was timed beside it and beside the best baseline; over FP32 it has both factors.
    """
    trial = outcome.trial
    if minimal is None or minimal.versus_winner is None or minimal.versus_best is None:
        return trial.speedup, outcome.versus
    if outcome.best.name == "fp32":
        return minimal.versus_best, minimal.versus_best
    return None if trial.speedup is None else product_of(trial.speedup, minimal.versus_winner), minimal.versus_best


def chosen_record(
    outcome: Outcome, catalog: Catalog, policy: Policy, prices: Prices, minimal: Minimal | None = None
) -> ChosenRecord:
    """Return what the record says about the policy that is written."""
    trial, layout = outcome.trial, catalog.layout
    resolved = resolve(policy, layout.sites)
    low = [site for site in layout.sites if resolved.format(site) not in ("fp32", "as_given", "promote")]
    why = minimal.why if minimal is not None else _reasons(trial.choice, layout, resolved.formats)
    speedup, versus = speedups(outcome, minimal)
    names = {resolved.format(site) for site in low}

    def price(sites: frozenset[Site]) -> float | None:
        return prices.frac(resolved.formats, policy, sites, next(iter(names))) if len(names) == 1 else None

    return ChosenRecord(
        name=trial.name,
        kind=trial.kind,
        trial=trial.number,
        verified=outcome.verified,
        speedup_vs_fp32=speedup,
        speedup_vs_best_baseline=versus,
        best_baseline=outcome.best.name,
        low_sites=len(low),
        num_sites=len(layout.sites),
        kept=_kept(layout, why, price) if low else (),
        policy=dump_policy(policy),
        lowered=_kept(layout, lowered_marks(trial, layout, resolved.formats), price),
    )


def lowered_marks(trial: TrialRecord, layout: Layout, formats: Mapping[Site, str]) -> dict[Site, str]:
    """Return the sites that run low although they were marked to stay FP32, and what says that they can."""
    return {
        site: f"measured faithful: trial {trial.number}; marked: {layout.detail(site, formats[site])}"
        for site in layout.sites
        if layout.verdict(site, formats.get(site, "fp32")) == "must"
    }


def proven_fidelity(outcome: Outcome, checks: Sequence[VerificationRecord]) -> FidelityRecord | None:
    """Return the fidelity that counts: that of the proof if there was one, else that of the trial."""
    proofs = [
        check.fidelity for check in checks if check.name == outcome.trial.name and check.passed and check.fidelity
    ]
    return proofs[0] if proofs else outcome.trial.fidelity


def _reasons(choice: Mapping[str, Any], layout: Layout, formats: Mapping[Site, str]) -> Mapping[Site, str]:
    """Return why each site that stays FP32 does; a baseline gives the reasons that its marks have."""
    if choice:
        return targets_of(choice, layout)[1]
    lows = [name for _, name in layout.marks]
    low = next((name for name in formats.values() if name in lows), lows[0] if lows else "bf16")
    return {site: layout.detail(site, low) for site, name in formats.items() if name == "fp32"}


def _kept(
    layout: Layout, why: Mapping[Site, str], price: Callable[[frozenset[Site]], float | None]
) -> tuple[KeptRecord, ...]:
    rows = []
    left = frozenset(why)
    for group in cover(left, layout.groups):
        own = group.sites & left
        left -= own
        reason = Counter(why[site] for site in sorted(own)).most_common(1)[0][0] if own else ""
        rows.append(KeptRecord(sites=group.glob, num_sites=len(own), why=reason, price_frac=price(own)))
    return tuple(rows)


def _fidelity_evidence(fidelity: FidelityRecord) -> Mapping[str, Any]:
    return {
        "verdict": fidelity.verdict,
        "steps_lost_frac": fidelity.steps_lost_frac,
        "upper_frac": fidelity.upper_frac,
        "margin": fidelity.margin,
        "power_frac": fidelity.power_frac,
        "horizon": fidelity.horizon,
    }


def _finite(value: Any) -> Any:
    """Return `value` with None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
