"""Does inspect find the known faults and leave the healthy in peace: python benchmarks/cases.py [--json FILE].

Every case and control of tests/ goes through the analyses of `autoprec inspect` in fp16 and bf16, on three batches.
The repair that is computed is judged by tests/groundtruth, an executor that shares no code with the analyses. The file
says for each whether it was given with the project or written later without a look at the analyses (held out).
"""

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from autoprec.runtime.device import describe  # noqa: E402
from tests.case_files import CASES, CONTROLS, FormatResult, inspect_file, load_file, results_of  # noqa: E402


def main() -> None:
    """Print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", default="", help="only files whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for path in (*CASES, *CONTROLS):
        if options.only in path.name:
            module = load_file(path)
            started = time.perf_counter()
            inspection = inspect_file(module)
            wall_s = time.perf_counter() - started
            for each in results_of(module, inspection):
                row = _row(path, each, wall_s)
                rows.append(row)
                print(_line(row), flush=True)
    summary = {key: _summary([row for row in rows if row["held_out"] is key]) for key in (False, True)}
    found = {
        "command": "python benchmarks/cases.py --json reports/cases.json",
        "device": describe("cpu").name,
        "torch": torch.__version__,
        "given": summary[False],
        "held_out": summary[True],
        "rows": rows,
    }
    print(json.dumps({key: found[key] for key in ("given", "held_out")}, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def _row(path: Path, result: FormatResult, wall_s: float) -> dict[str, Any]:
    held_out = path.name in (ROOT / "tests" / "held_out.txt").read_text().split()
    kind = "control" if path.parent.name == "controls" else "case"
    return {
        **asdict(result), "kind": kind, "held_out": held_out, "is_right": result.is_right, "wall_s": round(wall_s, 2)
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    right = "ok " if row["is_right"] else "BAD"
    repair = f"repair {row['num_repair']} (theirs {row['num_fix']}) {row['repaired_how']}"
    beside = f" beside: {', '.join(row['beside'][:4])}" if row["beside"] else ""
    return f"{right} {row['case']:36} {row['format']} {row['said']:7}" + (
        f"{repair}{beside}" if row["said"] == "unsafe" else f"{row['num_must']} must"
    )


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    unsafe = [row for row in rows if row["said"] == "unsafe"]
    safe = [row for row in rows if row["said"] == "safe"]
    return {
        "num_unsafe": len(unsafe),
        "num_located": sum(row["located"] for row in unsafe),
        "num_safe": len(safe),
        "num_false_alarms": sum(row["num_must"] > 0 for row in safe),
        "num_repairs_no_larger": sum(row["num_repair"] <= row["num_fix"] for row in unsafe),
        "num_repairs_that_pass": sum(row["repaired"] for row in unsafe),
        "num_must_beside": sum(len(row["beside"]) for row in unsafe),
    }


if __name__ == "__main__":
    main()
