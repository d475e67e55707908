"""`autoprec audit`: options, exit codes, files, what is printed where."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import autoprec.pipeline
from autoprec.audit.gates import GATES
from autoprec.audit.gates_file import load_gates
from autoprec.cli import main
from autoprec.pipeline import AuditOptions
from autoprec.records import load_audit
from autoprec.records.audit import AuditRecord
from autoprec.search.observer import Observer
from tests.faults.planted import HEALTHY as WORKLOAD
from tests.unit.records.audit_samples import AUDIT, HEALTHY


class Pipeline:
    """Stands in for the pipeline: keeps the options it got and returns a record."""

    def __init__(self, outcome: AuditRecord | BaseException) -> None:
        self.outcome = outcome
        self.options: list[AuditOptions] = []

    def __call__(self, options: AuditOptions, observer: Observer) -> AuditRecord:
        self.options.append(options)
        observer.note("a note")
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def stand_in(monkeypatch: pytest.MonkeyPatch, outcome: AuditRecord | BaseException) -> Pipeline:
    pipeline = Pipeline(outcome)
    monkeypatch.setattr(autoprec.pipeline, "audit", pipeline)
    return pipeline


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(f"print('loading')\n{WORKLOAD}")
    return tmp_path


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = stand_in(monkeypatch, HEALTHY)
    assert main(["audit", "run.py", "--policy", "p.yaml"]) == 0
    line = "audit run.py:f --policy p.yaml --gates g.yaml --run-dir r --seed 9 --device cpu --price-per-hour 2.5"
    assert main([*line.split(), "--checkpoint", "a.pt", "--checkpoint", "b.pt", "--only", "match, speed"]) == 0
    assert pipeline.options == [
        AuditOptions(workload="run.py", policy=Path("p.yaml")),
        AuditOptions(
            workload="run.py:f",
            policy=Path("p.yaml"),
            gates=Path("g.yaml"),
            run_dir=Path("r"),
            seed=9,
            device="cpu",
            price_per_hour=2.5,
            checkpoints=(Path("a.pt"), Path("b.pt")),
            only=("match", "speed"),
        ),
    ]


def test_a_gate_that_fails_is_exit_code_1_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, AUDIT)
    assert main(["audit", "run.py", "--policy", "p.yaml"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("policy.yaml fails 1 of 2 gates: match")
    assert "next  tune again" in out
    assert "\x1b" not in out
    assert "a note" in err
    assert "a note" not in out


def test_json_is_all_that_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(monkeypatch, AUDIT)
    assert main(["audit", "run.py", "--policy", "p.yaml", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == ["match"]


def test_junit_and_page_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, AUDIT)
    files = [str(tmp_path / "new" / name) for name in ("a.xml", "a.html")]
    assert main(["audit", "run.py", "--policy", "p.yaml", "--junit", files[0], "--html", files[1]]) == 1
    assert ET.parse(files[0]).getroot().get("failures") == "1"
    assert "policy.yaml fails" in Path(files[1]).read_text()


def test_a_bug_of_ours_is_exit_code_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    no_record: Any = None
    stand_in(monkeypatch, no_record)
    assert main(["audit", "run.py", "--policy", "p.yaml"]) == 3
    assert "internal error: AttributeError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "audit what? give a workload"),
        (["run.py"], "audit which policy? give --policy FILE"),
        (["run.py", "--policy", "none.yaml"], "none.yaml: there is no such policy file"),
        (["none.py", "--policy", "fp32"], 'cannot load "none.py"'),
        (["run.py", "--policy", "fp32", "--only", "mach"], 'names "mach", which is no gate'),
        (["run.py", "--policy", "fp32", "--gates", "none.yaml"], "none.yaml: the gates file cannot be read"),
        (["run.py", "--policy", "fp32", "--checkpoint", "a.pt"], "--checkpoint was given once"),
        (["run.py", "--policy", "fp32", "--device", "tpu"], '"tpu" is not a device kind'),
        (["run.py", "--policy", "fp32", "--price-per-hour", "-1"], "--price-per-hour"),
        (["run.py", "--policy", "fp32", "--html", "run.py/x.html"], "cannot write into run.py"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["audit", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in " ".join(err.split())
    assert "loading" not in err, "what is wrong is told before anything runs"
    assert not (folder / "runs").exists()


def test_the_default_gates_are_a_gates_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--show-gates"]) == 0
    (tmp_path / "gates.yaml").write_text(capsys.readouterr().out)
    assert set(load_gates(tmp_path / "gates.yaml", GATES).thresholds) == {gate.name for gate in GATES}


def test_an_audit_end_to_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "gates.yaml").write_text("autoprec_gates: 1\ncapable: off\n")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    line = "audit run.py --policy fp32 --gates gates.yaml --only match,capable,honoured --json"
    assert main(line.split()) == 0
    out, err = capsys.readouterr()
    found: dict[str, Any] = json.loads(out)
    assert {gate["gate"]: gate["verdict"] for gate in found["gates"]} == {
        "match": "pass",
        "capable": "not-applicable",
        "honoured": "pass",
    }
    assert found["gates"][1]["measured"] == "turned off on gates.yaml:2"
    assert [line for line in err.splitlines() if line in ("recording", "match", "honoured", "loading")]
    record = load_audit(folder / "runs" / "run" / "audit.json")
    assert record.gates_file == "gates.yaml"
    assert record.policy.startswith("autoprec: 1")
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in (folder / "runs" / "run").iterdir()) == ["audit.json"]


def test_a_workload_that_is_broken_in_fp32_is_no_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "run.py").read_text().replace("model(batch[0]), batch[1])", "model(batch[0]), batch[1]) / 0.0")
    (folder / "run.py").write_text(text)
    assert main(["audit", "run.py", "--policy", "fp32"]) == 2
    assert "inf" in capsys.readouterr().err
    assert not (folder / "runs" / "run" / "audit.json").exists()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_an_interrupted_audit_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    slow = WORKLOAD.replace(
        "def loss(model, batch):", "def loss(model, batch):\n    print('step', flush=True)\n    time.sleep(0.1)"
    )
    (folder / "run.py").write_text(slow)
    command = [sys.executable, "-m", "autoprec", "audit", "run.py", "--policy", "fp32", "--junit", "a.xml"]
    environment = {**os.environ, "PYTHONPATH": str(Path(autoprec.__file__).parents[1])}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.strip() == "fidelity":
                process.send_signal(number)
                break
        process.stderr.read()
    assert process.returncode == 130
    assert not (folder / "a.xml").exists()
    assert list((folder / "runs" / "run").iterdir()) == []


def test_a_seed_that_tuning_used_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from autoprec.policy import preset, save_policy

    save_policy(replace(preset("fp32", "cpu"), evidence={"seeds": [0, 1]}), folder / "policy.yaml")
    assert main(["audit", "run.py", "--policy", "policy.yaml", "--seed", "1"]) == 2
    assert "audit must see others" in " ".join(capsys.readouterr().err.split())
