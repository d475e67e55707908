"""Records: what was measured, where and how, as frozen values that go to JSON and back without loss.

A run leaves one `RunRecord` (`runs/<name>/record.json`), an audit one `AuditRecord` (`audit.json` beside it); reports
read records and nothing else.
"""

from autoprec.records.audit import AUDIT_SCHEMA_VERSION, AuditRecord, EvidenceRecord, GateRecord
from autoprec.records.cost import CostErrorRecord, CostModelRecord
from autoprec.records.file import dump_audit, dump_record, load_audit, load_record, save_audit, save_record
from autoprec.records.run import (
    SCHEMA_VERSION,
    ChosenRecord,
    DeviceRecord,
    FidelityRecord,
    GraphRecord,
    Interval,
    KeptRecord,
    MemoryRecord,
    RunRecord,
    TrialRecord,
    VerificationRecord,
)

__all__ = [
    "AUDIT_SCHEMA_VERSION",
    "SCHEMA_VERSION",
    "AuditRecord",
    "ChosenRecord",
    "CostErrorRecord",
    "CostModelRecord",
    "DeviceRecord",
    "EvidenceRecord",
    "FidelityRecord",
    "GateRecord",
    "GraphRecord",
    "Interval",
    "KeptRecord",
    "MemoryRecord",
    "RunRecord",
    "TrialRecord",
    "VerificationRecord",
    "dump_audit",
    "dump_record",
    "load_audit",
    "load_record",
    "save_audit",
    "save_record",
]
