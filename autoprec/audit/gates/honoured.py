"""`honoured`: what really ran, site by site, is what the policy says."""

from collections.abc import Mapping

from torch import nn

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.errors import TraceError
from autoprec.measure import Training
from autoprec.records.audit import EvidenceRecord
from autoprec.runtime.dtypes import torch_dtype
from autoprec.runtime.kernels import format_name
from autoprec.runtime.trace import SiteTrace


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    with audited.train(audited.policy, audited.batches(1)) as run:
        try:
            found = run.trace()
        except TraceError as error:
            return Finding(verdict="not-applicable", measured=f"the step cannot be traced: {error}")
        widened = _widened(run)
    total, exempt, wrong = len(found.rows), len(found.exempt), found.dishonored
    allowed = thresholds["max_dishonoured"]
    passed = len(wrong) + len(widened) <= allowed
    measured = f"{total - exempt - len(wrong)} of {total} sites ran as the policy says"
    measured += f", {exempt} otherwise as its semantics allow" if exempt else ""
    measured += f", {len(wrong)} against it" if wrong else ""
    measured += f"; {len(widened)} parameters are not stored as it says" if widened else ""
    return Finding(
        verdict="pass" if passed else "fail",
        measured=measured,
        value=len(wrong) + len(widened),
        threshold=allowed,
        unit="sites and parameters, at most",
        evidence=(*(_evidence(row) for row in wrong), *widened),
        advice=""
        if passed
        else f"see every kernel: autoprec policy trace {audited.workload_name} --policy "
        f"{audited.policy_text}; give these sites a rule with the format that ran, or mend the "
        "code that casts",
    )


def _widened(run: Training) -> tuple[EvidenceRecord, ...]:
    """Return the parameters that were stored low and that the step, the model's own `.to()` for one, stored anew."""
    storage, held = run.precision.storage, dict(run.model.named_parameters())
    wanted = torch_dtype(storage.settings.storage)
    return tuple(
        EvidenceRecord(
            where=name, what=f"stored in {storage.settings.storage}, and in {_format_of(held, name)} after it"
        )
        for name in storage.names
        if name not in held or held[name].dtype != wanted
    )


def _format_of(held: Mapping[str, nn.Parameter], name: str) -> str:
    return format_name(held[name].dtype) if name in held else "no parameter of the model's"


def _evidence(row: SiteTrace) -> EvidenceRecord:
    ran = ", ".join(dict.fromkeys((*row.ran, *row.ran_backward))) or "nothing"
    return EvidenceRecord(where=str(row.site), what=f"asked for {row.asked}, ran in {ran}: {row.reason}")


HONOURED = Gate(
    name="honoured",
    proves="the kernels of every site run in the format that the policy says, forward and backward",
    check=_check,
    thresholds={
        "max_dishonoured": Threshold(
            default=0,
            unit="sites",
            means="how many sites may run, or parameters be stored, otherwise than the policy says",
            whole=True,
        ),
    },
)
