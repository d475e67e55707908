"""An audit as JUnit XML: one test case a gate, as CI systems show tests."""

import re
from xml.etree import ElementTree as ET

from autoprec.records.audit import AuditRecord, GateRecord
from autoprec.report.audit_view import FailureView, audit_view

# What XML 1.0 cannot hold, even escaped; error messages of workloads may.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def audit_junit(record: AuditRecord) -> str:
    """Return the XML: a gate that fails is a failure, one that is not applicable is skipped."""
    failures = {failure.gate: failure for failure in audit_view(record).failures}
    counts = {
        "tests": str(len(record.gates)),
        "failures": str(len(record.failed)),
        "errors": "0",
        "skipped": str(sum(gate.verdict == "not-applicable" for gate in record.gates)),
        "time": f"{sum(gate.wall_s for gate in record.gates):.3f}",
    }
    suites = ET.Element("testsuites", {"name": "autoprec audit", **counts})
    stamp = record.created.partition("+")[0]
    suite = ET.SubElement(
        suites, "testsuite", {"name": _clean(record.policy_file), "timestamp": stamp, "hostname": "", **counts}
    )
    properties = ET.SubElement(suite, "properties")
    for name, value in (
        ("workload", record.workload),
        ("device", record.device.name),
        ("torch", record.versions.get("torch", "")),
        ("seed", str(record.seed)),
        ("gates", record.gates_file or "defaults"),
    ):
        ET.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    for gate in record.gates:
        suite.append(_case(gate, record, failures.get(gate.gate)))
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def _case(gate: GateRecord, record: AuditRecord, failure: FailureView | None) -> ET.Element:
    case = ET.Element(
        "testcase",
        {
            "name": gate.gate,
            "classname": _clean(f"autoprec.audit.{record.name}"),
            "file": _clean(record.policy_file),
            "time": f"{gate.wall_s:.3f}",
        },
    )
    if gate.verdict == "not-applicable":
        ET.SubElement(case, "skipped", {"message": _clean(gate.measured)})
    elif failure is not None:
        element = ET.SubElement(case, "failure", {"message": _clean(gate.measured), "type": gate.gate})
        element.text = _clean(_failure_text(failure))
    notes = ET.SubElement(case, "system-out")
    notes.text = _clean("\n".join((gate.measured, *gate.notes)))
    return case


def _failure_text(failure: FailureView) -> str:
    lines = [f"a pass proves that {failure.proves}", f"found: {failure.measured}"]
    lines += [f"allowed: {failure.threshold}"] if failure.threshold else []
    for row in failure.evidence:
        numbers = " ".join(part for part in (row.number, f"allowed {row.threshold}" if row.threshold else "") if part)
        lines.append(f"  {row.where}: {row.what}{f' ({numbers})' if numbers else ''}")
    lines += [f"  {failure.more}"] if failure.more else []
    lines += [f"next: {failure.advice}"] if failure.advice else []
    return "\n".join(lines)


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
