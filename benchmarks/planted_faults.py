"""Is every planted fault caught, and no healthy run refused: python benchmarks/planted_faults.py [--json FILE].

Runs the rows of tests/faults/, each with every gate of its file or every detector of the guard, so that it shows what
else fires beside the one that was meant; and the gates over examples and controls of tests/ under presets and policies
that suit them, where they scale the loss at the initial scale that `autoprec inspect` advises: at GradScaler's 65536
the first steps of some are skipped, which is a fault and stands among these. Exit 1 if a fault is missed or a healthy
run is refused.
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from autoprec.analysis import loss_scale_advice, run_backward  # noqa: E402
from autoprec.audit.audit import run_gates  # noqa: E402
from autoprec.audit.audited import Audited  # noqa: E402
from autoprec.audit.gates import GATES  # noqa: E402
from autoprec.audit.gates.fidelity import paired_run  # noqa: E402
from autoprec.policy import LossScale, Policy, Rule, preset  # noqa: E402
from autoprec.runtime.device import describe  # noqa: E402
from autoprec.workload import load  # noqa: E402
from tests.faults.fault import Fault  # noqa: E402
from tests.faults.planted import run_planted  # noqa: E402

FILES = ("audit_faults_a", "audit_faults_b", "guard_faults")  # those that are there
OF_FILES = ("match", "capable", "honoured", "fidelity", "speed", "memory", "cost")
# What a small or busy machine decides is no fault of a policy: those gates have planted faults of their own.
OF_THE_MACHINE = frozenset({"capable", "speed", "memory", "cost"})


def main() -> None:
    """Print the table, and write it as JSON, row by row: a run that is stopped is gone on with part by part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here; rows that are not run again stay")
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument("--part", choices=(*FILES, "healthy"), help="only the rows of this file, or the healthy runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table: dict[str, dict[str, Any]] = {"faults": {}, "healthy": {}}
    if options.json and options.json.exists():
        stored = json.loads(options.json.read_text())
        known = {"faults": {fault.name for _, fault in _faults()}, "healthy": {name for name, *_ in _runs()}}
        table = {key: {row["name"]: row for row in stored[key] if row["name"] in known[key]} for key in table}
    for key, row in _rows(options.only, options.part):
        table[key][row["name"]] = row
        if options.json:
            options.json.write_text(json.dumps(_found(table), indent=1) + "\n")
    found = _found(table)
    print(
        f"{found['num_caught']} of {found['num_faults']} faults caught; {found['num_false_alarms']} false alarms over "
        f"{found['num_healthy']} healthy runs"
    )
    sys.exit(found["num_caught"] < found["num_faults"] or found["num_false_alarms"] > 0)


def _found(table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    faults, healthy = list(table["faults"].values()), list(table["healthy"].values())
    return {
        "command": "python benchmarks/planted_faults.py --json reports/planted_faults.json",
        "device": describe("cpu").name,
        "torch": torch.__version__,
        "num_faults": len(faults),
        "num_caught": sum(row["caught"] for row in faults),
        "num_healthy": len(healthy),
        "num_false_alarms": sum(len(row["false_alarms"]) for row in healthy),
        "faults": faults,
        "healthy": healthy,
    }


def _rows(only: str, part: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    for file, fault in _faults():
        if part in (None, file) and only in fault.name:
            yield "faults", _row(fault, file)
    for name, path, policy in _runs():
        if part in (None, "healthy") and only in name:
            yield "healthy", _healthy(name, path, policy)


def _faults() -> Iterator[tuple[str, Fault]]:
    """Yield the rows of each file that is there."""
    for name in FILES:
        if find_spec(f"tests.faults.{name}") is not None:
            for fault in importlib.import_module(f"tests.faults.{name}").FAULTS:
                yield name, _KINDS[name](fault)


def _of_loops(row: Any) -> Fault:
    """Return a row of `tests/faults/guard_faults.py`, a loop under the guard, as a `Fault`."""

    def run(_: Path) -> frozenset[str]:
        return frozenset(detector for detector, _ in row.plant())

    return Fault(name=row.name, planted=row.planted, meant_for=row.detector, run=run)


def _of_files(row: Any) -> Fault:
    """Return a row of `tests/faults/audit_faults_a.py`, which plants in files and audits these, as a `Fault`."""

    def run(folder: Path) -> frozenset[str]:
        return frozenset(record.gate for record in run_planted(row.how, folder, only=OF_FILES).failed)

    return Fault(name=row.name, planted=row.planted, meant_for=row.gate, run=run)


def _as_it_is(row: Fault) -> Fault:
    return row


_KINDS: dict[str, Callable[[Any], Fault]] = {
    "audit_faults_a": _of_files,
    "audit_faults_b": _as_it_is,
    "guard_faults": _of_loops,
}


def _row(fault: Fault, file: str) -> dict[str, Any]:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        fired = fault.run(Path(folder))
    row = {
        "name": fault.name,
        "planted": fault.planted,
        "file": file,
        "meant_for": fault.meant_for,
        "caught_by": sorted(fired),
        "caught": fault.meant_for in fired,
        "wall_s": round(time.perf_counter() - started, 1),
    }
    print(f"{'caught' if row['caught'] else 'MISSED'}  {fault.name}: {', '.join(row['caught_by'])}", flush=True)
    return row


def _low(*low: tuple[str, str], **settings: Any) -> Policy:
    rules = (*(Rule(sites=sites, format=name) for sites, name in low), Rule(sites="*", format="fp32"))
    return Policy(**{"name": ", ".join(f"{sites} in {name}" for sites, name in low), "rules": rules, **settings})


def _runs() -> Iterator[tuple[str, Path, Policy]]:
    """Yield what is healthy: examples with the few low sites that a CPU without units can afford, and controls."""
    scaled = {"loss_scale": LossScale(kind="dynamic")}
    policies = {
        "examples/char_gpt.py": (_low(("*.mlp.1:gelu", "bf16")), _low(("*.mlp.1:gelu", "fp16"), **scaled)),
        "examples/digits_vit.py": (_low(("head:linear", "bf16")), _low(("patches:conv2d", "fp16"), **scaled)),
    }
    for name, each in policies.items():
        for policy in each:
            yield f"{name}, {policy.name}", ROOT / name, policy
    for number, path in enumerate(sorted((ROOT / "tests" / "controls").glob("*.py"))):
        name = ("autocast-fp16", "autocast-bf16")[number % 2]  # in turn: on a CPU without units each takes a minute
        yield f"tests/controls/{path.name}, {name}", path, preset(name, "cpu")


def _at_the_advised_scale(audited: Audited) -> Audited:
    """Return what is audited with the initial loss scale that `autoprec inspect` advises, if it scales the loss."""
    policy = audited.policy
    if policy.loss_scale.kind == "none":
        return audited
    initial = loss_scale_advice(run_backward((audited.recording,)), "fp16").initial
    return replace(audited, policy=replace(policy, loss_scale=replace(policy.loss_scale, initial=initial)))


def _healthy(name: str, path: Path, policy: Policy) -> dict[str, Any]:
    started = time.perf_counter()
    audited = _at_the_advised_scale(
        Audited(
            loaded=load(str(path)),
            policy=policy,
            policy_file=None,
            rule_lines=(),
            device=describe("cpu"),
            seed=17,
            skip=2,
            **paired_run({}, is_judged=True),
        )
    )
    gates = [gate for gate in GATES if gate.name not in OF_THE_MACHINE]
    records = run_gates(gates, audited, {})
    row = {
        "name": name,
        "loss_scale": audited.policy.loss_scale.initial if audited.policy.loss_scale.kind != "none" else None,
        "gates": {record.gate: record.verdict for record in records},
        "false_alarms": {record.gate: record.measured for record in records if record.verdict == "fail"},
        "wall_s": round(time.perf_counter() - started, 1),
    }
    print(f"{'REFUSED' if row['false_alarms'] else 'quiet'}  {name} {row['false_alarms'] or ''}", flush=True)
    return row


if __name__ == "__main__":
    main()
