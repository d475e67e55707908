"""The record of one `autoprec audit`: what each gate measured, held against which threshold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autoprec.records.run import DeviceRecord

AUDIT_SCHEMA_VERSION = 1

GateVerdict: TypeAlias = Literal["pass", "fail", "not-applicable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceRecord:
    """One thing a gate found: where (a site, a parameter, a rule, a flag), what, and the numbers if it has any."""

    where: str
    what: str
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GateRecord:
    """The verdict of one gate.

    `measured` is one sentence with its numbers; `value` is the number that was held against `threshold`, in `unit`, if
    there is one. `evidence` names what failed, worst first. `advice` says what to do, with the next command to run; it
    is empty where the gate passes. `notes` are what a reader should know although no gate fails by it.
    """

    gate: str
    proves: str
    verdict: GateVerdict
    measured: str
    value: float | None
    threshold: float | None
    unit: str
    thresholds: Mapping[str, float]
    evidence: tuple[EvidenceRecord, ...]
    advice: str
    wall_s: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRecord:
    """One audit of one policy on one workload: every gate, in the order they ran. `policy` is the text of its file."""

    name: str
    created: str
    workload: str
    policy_file: str
    policy_name: str
    policy: str
    gates_file: str | None
    seed: int
    device: DeviceRecord
    versions: Mapping[str, str]
    gates: tuple[GateRecord, ...]
    record_file: str
    wall_s: float

    @property
    def passed(self) -> bool:
        """Return whether no gate fails."""
        return not self.failed

    @property
    def failed(self) -> tuple[GateRecord, ...]:
        """Return the gates that fail, in the order they ran."""
        return tuple(gate for gate in self.gates if gate.verdict == "fail")
