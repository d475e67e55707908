"""`autoprec tune` and `bench` as users run them: a tiny training run, a real study, real files."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import autoprec
from autoprec.cli import main
from autoprec.records import load_record
from autoprec.runtime.guard import calibration_of

WORKLOAD = """
import torch
from torch import nn

import autoprec


def batches():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(32, 4, generator=generator)
    for _ in range(8):
        x = torch.randn(16, 32, generator=generator)
        yield x, (x @ weights).argmax(1)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def workload():
    return autoprec.Workload(
        model=lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)),
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    )
"""
SPACE = """
autoprec_space: 1
low: [bf16]
prefer: ["*:layer_norm"]
horizon: 24
slow_limit: 1000
"""
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mlp.py").write_text(WORKLOAD)
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "autoprec", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=300
    )


def tune(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(folder, "tune", "mlp.py", "--space", "space.yaml", "--device", "cpu", "--budget", "4m", *arguments)


def test_tune_writes_a_policy_a_record_and_a_study_and_bench_measures_the_policy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tune(folder, "--trials", "1", "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result) >= {
        "policy",
        "record",
        "verdict",
        "speedup_vs_fp32",
        "speedup_vs_best_baseline",
        "spread",
        "fidelity",
        "baselines",
        "num_trials",
        "wall_s",
    }
    assert {"fp32", "autocast-bf16", "low-bf16"} <= {each["name"] for each in result["baselines"]}
    assert all({"name", "step_s", "speedup", "fidelity", "memory_bytes"} <= set(each) for each in result["baselines"])

    policy = autoprec.load_policy(folder / result["policy"])
    record = load_record(folder / result["record"])
    assert record.verdict == result["verdict"]
    assert [trial.kind for trial in record.trials].count("plan") == 1
    assert policy.evidence["graph"] == record.graph.fingerprint
    assert policy.evidence["record"] == result["record"]
    assert (policy.evidence["seeds"], policy.evidence["batches"]) == ((0, 1), 72)
    calibration = calibration_of(policy)
    assert calibration is not None
    chosen = next(trial for trial in record.trials if trial.number == record.chosen.trial)
    assert (calibration.losses is None) == (len(chosen.losses) < 16)  # a guard compares with what was trained
    assert policy.device["kind"] == "cpu"
    assert record.chosen is not None
    assert record.chosen.policy == autoprec.dump_policy(policy)
    assert sqlite3.connect(folder / "runs/mlp/study.db").execute("SELECT COUNT(*) FROM trials").fetchone()[0] >= 4

    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "mlp", raising=False)
    assert main(["audit", "mlp.py", "--policy", "policy.yaml", "--device", "cpu", "--only", "match", "--json"]) == 0
    (match,) = json.loads(capsys.readouterr().out)["gates"]
    assert (match["verdict"], match["notes"]) == ("pass", []), match

    line = "bench mlp.py --policy policy.yaml --device cpu --steps 24 --baselines fp32,autocast-bf16 --json"
    assert main(line.split()) == 0
    measured = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in measured["baselines"]} >= {"fp32", "autocast-bf16"}
    assert measured["policy"]["name"] == policy.name


def wait_for_trials(folder: Path, count: int, process: "subprocess.Popen[str]") -> None:
    """Wait until the study has `count` finished trials."""
    database = folder / "runs/mlp/study.db"
    for _ in range(2000):
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        try:
            connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
            done = connection.execute("SELECT COUNT(*) FROM trials WHERE state = 'COMPLETE'").fetchone()[0]
            connection.close()
        except sqlite3.Error:
            done = 0
        if done >= count:
            return
        time.sleep(0.05)
    raise AssertionError("the study never got that far")


def start(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command("tune", "mlp.py", "--space", "space.yaml", "--device", "cpu", "--budget", "10m"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_writes_the_best_so_far_and_the_same_command_resumes(folder: Path, number: signal.Signals) -> None:
    process = start(folder)
    wait_for_trials(folder, 5, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "the same command resumes" in errors
    policy = autoprec.load_policy(folder / "policy.yaml")
    assert policy.evidence["interrupted"] is True
    record = load_record(folder / "runs/mlp/record.json")
    assert record.interrupted
    assert len(record.trials) >= 5

    done = tune(folder, "--trials", "0")
    assert done.returncode == 0, done.stderr
    resumed = load_record(folder / "runs/mlp/record.json")
    assert [trial.losses for trial in resumed.trials[:5]] == [trial.losses for trial in record.trials[:5]]
    assert not resumed.interrupted


@pytest.mark.long
def test_a_killed_run_resumes_and_its_running_trial_is_measured_again(folder: Path) -> None:
    process = start(folder)
    wait_for_trials(folder, 1, process)
    process.kill()
    process.communicate(timeout=60)
    assert not (folder / "policy.yaml").exists()
    done = tune(folder, "--trials", "0")
    assert done.returncode == 0, done.stderr
    names = [trial.name for trial in load_record(folder / "runs/mlp/record.json").baselines]
    assert len(names) == len(set(names))
    assert {"fp32", "autocast-bf16", "low-bf16"} <= set(names)


@pytest.mark.long  # the study of three goals: tests/unit/search/test_pareto.py
def test_a_pareto_front_is_written_beside_the_policy(folder: Path) -> None:
    done = tune(folder, "--trials", "1", "--baselines", "fp32", "--objective", "pareto", "--json")
    assert done.returncode == 0, done.stderr
    record = load_record(folder / "runs" / "mlp" / "record.json")
    assert record.front
    assert [point["name"] for point in json.loads(done.stdout)["front"]] == [point.name for point in record.front]
    for point in record.front:
        assert point.policy_file is not None
        policy = autoprec.load_policy(folder / point.policy_file)
        assert policy.evidence["verified"] is False
    again = tune(folder, "--trials", "1", "--baselines", "fp32")
    assert again.returncode == 2
    assert "objective: 'pareto' then, 'time' now" in " ".join(again.stderr.split())
