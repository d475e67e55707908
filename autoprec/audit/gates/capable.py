"""`capable`: the device has units for every format of the policy, and emulates none."""

from collections.abc import Iterator

from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.records.audit import EvidenceRecord
from autoprec.runtime.matmul_precision import supported


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    device, policy = audited.device, audited.policy
    used = tuple(dict.fromkeys((*policy.formats, policy.parameters.storage)))
    lacking = tuple(_lacking(audited, used))
    allowed = thresholds["max_lacking"]
    passed = len(lacking) <= allowed
    has = f"{device.name} has units for {', '.join(device.native_formats)}"
    what = f"{len(lacking)} of {len(used)} formats are not native" if lacking else f"{', '.join(used)}: all native"
    return Finding(
        verdict="pass" if passed else "fail",
        measured=f"{what}; {has}",
        value=len(lacking),
        threshold=allowed,
        unit="formats, at most",
        evidence=lacking,
        advice=""
        if passed
        else f"run on a device that has them (autoprec env shows this one), or tune for this one: autoprec tune "
        f"{audited.workload_name}",
    )


def _lacking(audited: Audited, used: tuple[str, ...]) -> Iterator[EvidenceRecord]:
    """Yield a row for each format, and each precision inside FP32, that the hardware has no units for."""
    device, policy = audited.device, audited.policy
    inside = set(supported(device.kind))
    for name in used:
        if name in device.native_formats:
            continue
        sites = sum(rule.format == name for rule in (audited.resolved.rule(site) for site in audited.resolved.winners))
        where = f"{name} at {sites} site{'s' * (sites != 1)}" if sites else f"{name} as storage"
        if name in device.emulated_formats:
            yield EvidenceRecord(where=where, what="emulated: it shows its fidelity here, and not its speed")
        elif name not in device.formats:
            yield EvidenceRecord(where=where, what="does not run here at all")
        else:
            yield EvidenceRecord(where=where, what="runs in software, mostly far slower than fp32")
    for precision in policy.matmul_precisions:
        if precision not in inside:
            yield EvidenceRecord(where=f"{precision} inside FP32 matmuls", what="changes nothing here")


CAPABLE = Gate(
    name="capable",
    proves="the device runs every format of the policy natively, and emulates none",
    check=_check,
    thresholds={
        "max_lacking": Threshold(
            default=0, unit="formats", means="how many formats of the policy the device may lack units for", whole=True
        ),
    },
)
