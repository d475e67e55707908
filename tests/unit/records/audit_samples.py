"""Audits for tests: one that fails, with every verdict in it."""

from dataclasses import replace

from autoprec.records.audit import AuditRecord, EvidenceRecord, GateRecord
from autoprec.records.run import DeviceRecord

FAILED = GateRecord(
    gate="match",
    proves="the policy still fits",
    verdict="fail",
    measured="not as it was tuned: architecture (blocks.2) <1 & 2>",
    value=9.0,
    threshold=0.0,
    unit="differences, at most",
    thresholds={"torch": 2.0},
    evidence=tuple(
        EvidenceRecord(where=f"blocks.{number}:linear#0", what="is new", value=number / 3, threshold=0.5)
        for number in range(9)
    ),
    advice="tune again: autoprec tune run.py",
    wall_s=0.25,
    notes=("torch was 2.13.0 and is 2.13.1, which is allowed",),
)
PASSED = replace(
    FAILED,
    gate="speed",
    proves="the policy is not slower",
    verdict="pass",
    measured="1.40x fp32",
    value=float("inf"),
    threshold=1.0,
    unit="x fp32, at least",
    evidence=(),
    advice="",
    notes=(),
)
SKIPPED = replace(
    PASSED, gate="cost", verdict="not-applicable", measured="no price is given", value=None, threshold=None, unit=""
)
AUDIT = AuditRecord(
    name="run",
    created="2026-11-30T06:00:00+00:00",
    workload="run.py",
    policy_file="policy.yaml",
    policy_name="gpt",
    policy="autoprec: 1\nname: gpt  # <b>\n",
    gates_file="gates.yaml",
    seed=2,
    device=DeviceRecord(kind="cpu", name="Testium, AMX", formats=("fp32",), capability={"amx": True}),
    versions={"torch": "2.13.0", "autoprec": "0.1.0"},
    gates=(FAILED, PASSED, SKIPPED),
    record_file="runs/run/audit.json",
    wall_s=61.5,
)
HEALTHY = replace(AUDIT, gates=(PASSED, SKIPPED))
