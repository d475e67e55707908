"""Records: what was measured, where and how, as frozen values that go to JSON and back without loss.

A run leaves one `RunRecord` (`runs/<name>/record.json`); reports and audits read records and nothing else.
"""

from autoprec.records.cost import CostErrorRecord, CostModelRecord
from autoprec.records.file import dump_record, load_record, save_record
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
    "SCHEMA_VERSION",
    "ChosenRecord",
    "CostErrorRecord",
    "CostModelRecord",
    "DeviceRecord",
    "FidelityRecord",
    "GraphRecord",
    "Interval",
    "KeptRecord",
    "MemoryRecord",
    "RunRecord",
    "TrialRecord",
    "VerificationRecord",
    "dump_record",
    "load_record",
    "save_record",
]
