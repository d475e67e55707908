"""`fidelity`: the policy trains as FP32 does, on batches and a seed that the search has not seen."""

import math
from typing import Any

from autoprec.audit.audited import DEFAULT_HORIZON, Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.audit.paired import MARGIN, Paired
from autoprec.measure import Fidelity
from autoprec.measure.fidelity import MIN_HORIZON
from autoprec.records.audit import EvidenceRecord


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    margin, paired = thresholds["margin"], audited.paired
    asked = len(paired.protocol.batches)
    unseen = audited.num_unseen(asked)
    seen_note = (f"{unseen} of {asked} batches are new: the workload has no more that tuning has not seen",)
    notes = (*(seen_note if unseen < asked else ()), *_went_on(paired))
    if unseen < thresholds["unseen_batches"]:
        return Finding(
            verdict="fail",
            measured=f"{unseen} of {asked} batches are new to the policy",
            value=unseen,
            threshold=thresholds["unseen_batches"],
            unit="batches",
            advice="let batches() yield more, or tune anew with a shorter budget, which uses fewer batches",
        )
    if not _can_be_judged(paired):
        return Finding(
            verdict="fail",
            measured=f"not measured: {paired.stopped}",
            advice=f"use a device that runs it, or tune for this one: autoprec tune {audited.workload_name}",
            notes=notes,
        )
    found = paired.fidelity(margin)
    passed = found.verdict == "faithful" and not paired.missed
    return Finding(
        verdict="pass" if passed else "fail",
        measured=f"{paired.missed or found.reason}; seed {audited.seed}",
        value=found.upper_frac,
        threshold=found.margin,
        unit="of the steps, at most",
        evidence=() if passed else _evidence(found, paired),
        advice="" if passed else _advice(audited, found, paired),
        notes=notes,
    )


def _went_on(paired: Paired) -> tuple[str, ...]:
    """Return the note on curves that could not tell at the horizon, and were gone on with."""
    if not paired.undecided:
        return ()
    seen = len(paired.candidate.losses)
    return (f"the same curves were gone on with, to {seen} steps, as they could not tell before ({paired.undecided})",)


def _can_be_judged(paired: Paired) -> bool:
    """Return whether the curves are long enough to compare: a loss that is not finite tells at any length."""
    losses = paired.candidate.losses
    return len(losses) >= MIN_HORIZON or any(not math.isfinite(loss) for loss in losses)


def _evidence(found: Fidelity, paired: Paired) -> tuple[EvidenceRecord, ...]:
    rows = [EvidenceRecord(where="loss curve", what=found.reason, value=found.upper_frac, threshold=found.margin)]
    if paired.missed:
        after = paired.candidate.evaluate_after
        rows.append(EvidenceRecord(where="evaluate", what=paired.missed, value=after))
    return tuple(rows)


def _advice(audited: Audited, found: Fidelity, paired: Paired) -> str:
    if found.verdict == "inconclusive":
        longer = 4 * paired.protocol.horizon
        return f"train longer: write {{horizon: {longer}}} under fidelity in {audited.gates_name} and audit again"
    if not math.isfinite(found.steps_lost_frac):
        return f"see where it breaks: autoprec inspect {audited.workload_name}; then tune again with a longer budget"
    return (
        f"tune again with a longer budget: autoprec tune {audited.workload_name} --budget 30m; until then train under "
        "the fallback"
    )


def paired_run(thresholds: Thresholds, *, is_judged: bool) -> dict[str, Any]:
    """Return the fields of `Audited` that say how long FP32 and the policy train side by side, from a gates file.

    Curves that nobody judges have nothing to tell, and are not gone on with.
    """
    given = {**FIDELITY.defaults, **thresholds}
    longest = int(given["longest"]) if is_judged else 1
    return {"horizon": int(given["horizon"]), "margin": given["margin"], "longest": longest}


FIDELITY = Gate(
    name="fidelity",
    proves="the policy trains as FP32 does, on batches and a seed that the search has not seen",
    check=_check,
    thresholds={
        "horizon": Threshold(
            default=DEFAULT_HORIZON,
            unit="steps",
            means="how long FP32 and the policy train side by side, for speed, memory and cost too",
            minimum=MIN_HORIZON,
            whole=True,
        ),
        "margin": Threshold(
            default=MARGIN,
            unit="fraction of the horizon",
            means="how many steps later than FP32 the policy may reach a loss, at most",
            minimum=0.0001,
            maximum=0.5,
        ),
        "longest": Threshold(
            default=4,
            unit="horizons",
            means="how far to go on with curves that cannot tell at the horizon; 1 never does",
            minimum=1,
            maximum=100,
            whole=True,
        ),
        "unseen_batches": Threshold(
            default=0,
            unit="batches",
            means="how many of the batches must be new to the policy, at least",
            whole=True,
        ),
    },
)
