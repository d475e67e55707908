"""Every planted fault is caught by the gate meant for it, which says where; no healthy run is refused by any gate.

Two faults a gate run with every change; the others, and most healthy runs, are left to `make test-long`.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.audit_faults_b import GATES, HEALTHY, ROWS, Row, verdicts

_QUICK_ROWS, _QUICK_RUNS = 2, ("net, linear in bf16", "net with checkpoints that do not drift")


def _rows() -> Iterator[Any]:
    seen = Counter[str]()
    for row in ROWS:
        seen[row.meant_for] += 1
        yield pytest.param(row, id=row.name, marks=[pytest.mark.long] * (seen[row.meant_for] > _QUICK_ROWS))


@pytest.mark.parametrize("row", list(_rows()))
def test_the_gate_meant_for_it_catches_it(row: Row, tmp_path: Path) -> None:
    (found,) = verdicts(row.how, tmp_path, gates=[GATES[row.meant_for]])
    assert found.verdict == "fail", found
    assert row.says in " ".join((found.measured, *(f"{each.where} {each.what}" for each in found.evidence)))
    assert found.evidence
    assert "autoprec audit" in found.advice


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in _QUICK_RUNS)) for name in HEALTHY]
)
def test_no_gate_refuses_a_healthy_run(name: str, tmp_path: Path) -> None:
    found = verdicts(HEALTHY[name], tmp_path)
    assert not [gate for gate in found if gate.verdict == "fail"]
