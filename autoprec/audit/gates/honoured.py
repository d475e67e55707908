"""`honoured`: what really ran, site by site, is what the policy says."""

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.errors import TraceError
from autoprec.records.audit import EvidenceRecord
from autoprec.runtime.trace import SiteTrace


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    with audited.train(audited.policy, audited.batches(1)) as run:
        try:
            found = run.trace()
        except TraceError as error:
            return Finding(verdict="not-applicable", measured=f"the step cannot be traced: {error}")
    total, exempt, wrong = len(found.rows), len(found.exempt), found.dishonored
    allowed = thresholds["max_dishonoured"]
    passed = len(wrong) <= allowed
    measured = f"{total - exempt - len(wrong)} of {total} sites ran as the policy says"
    measured += f", {exempt} otherwise as its semantics allow" if exempt else ""
    measured += f", {len(wrong)} against it" if wrong else ""
    return Finding(
        verdict="pass" if passed else "fail",
        measured=measured,
        value=len(wrong),
        threshold=allowed,
        unit="sites, at most",
        evidence=tuple(_evidence(row) for row in wrong),
        advice=""
        if passed
        else f"see every kernel: autoprec policy trace {audited.workload_name} --policy "
        f"{audited.policy_text}; give these sites a rule with the format that ran, or mend the "
        "code that casts",
    )


def _evidence(row: SiteTrace) -> EvidenceRecord:
    ran = ", ".join(dict.fromkeys((*row.ran, *row.ran_backward))) or "nothing"
    return EvidenceRecord(where=str(row.site), what=f"asked for {row.asked}, ran in {ran}: {row.reason}")


HONOURED = Gate(
    name="honoured",
    proves="the kernels of every site run in the format that the policy says, forward and backward",
    check=_check,
    thresholds={
        "max_dishonoured": Threshold(
            default=0, unit="sites", means="how many sites may run otherwise than the policy says", whole=True
        ),
    },
)
