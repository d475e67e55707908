"""The gates that train: what they leave alone, what they share, and what their verdicts say."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoprec.audit.audit import run_gates
from autoprec.audit.audited import Audited
from autoprec.audit.gates import GATES
from autoprec.audit.gates.headroom import HEADROOM
from autoprec.audit.gates.resume import RESUME, apart_in_losses
from autoprec.audit.gates.rollback import ROLLBACK, fallback_policy
from autoprec.audit.gates.scaler import SCALER
from autoprec.audit.gates.stress import STRESS
from autoprec.audit.runs import Legs
from autoprec.policy import LossScale, Parameters, Rule, dump_policy
from autoprec.runtime.device import describe
from autoprec.workload import load
from tests.faults import planted_models as models
from tests.faults.audit_faults_b import LINEAR_BF16, LINEAR_FP16, Planted, audited, policy, verdicts

FEW = {"steps_before": 2.0, "steps_after": 8.0}

RUN = """
import torch
from torch import nn
import autoprec

def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(24):
        yield torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)

def workload():
    return autoprec.Workload(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        batches=batches,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
"""


def test_an_audit_leaves_the_users_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file, checkpoint = tmp_path / "run.py", tmp_path / "policy.yaml", tmp_path / "step.pt"
    run.write_text(RUN)
    file.write_text(dump_policy(LINEAR_BF16))
    loaded = load(str(run))
    torch.save(loaded.workload.model().state_dict(), checkpoint)
    monkeypatch.chdir(tmp_path)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir() if path.is_file()}
    given = Audited(
        loaded=loaded,
        policy=LINEAR_BF16,
        policy_file=file,
        rule_lines=(),
        device=describe("cpu"),
        seed=3,
        skip=1,
        checkpoints=(checkpoint, checkpoint),
    )
    random_state = torch.get_rng_state()
    ours = [gate for gate in GATES if "steps_before" in gate.thresholds]
    found = run_gates(ours, given, {gate.name: FEW for gate in ours})
    assert {record.gate for record in found} == {"headroom", "stress", "scaler", "resume", "rollback", "repeat"}
    assert not [record for record in found if record.verdict == "fail"]
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir() if path.is_file()}
    assert after == before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_runs_are_trained_once_and_their_checkpoints_go_with_them(tmp_path: Path) -> None:
    given = audited(Planted(workload=models.workload(), policy=LINEAR_BF16), tmp_path)
    legs = Legs(before=1, after=8)
    course = given.runs.under_policy(legs)
    assert given.runs.under_policy(legs) is course
    assert given.runs.under_fallback(legs, fallback_policy(LINEAR_BF16)) is given.runs.in_fp32(legs)
    assert course.saved is not None
    folder = course.saved.parent
    assert folder.parent != Path.cwd()
    del given
    gc.collect()
    assert not folder.exists()


def test_a_run_that_raises_is_not_proven(tmp_path: Path) -> None:
    def raises(model: torch.nn.Module, batch: object) -> torch.Tensor:
        hidden = model.inner(batch[0])
        if hidden.dtype == torch.bfloat16:
            raise ValueError("no kernel")
        return hidden.sum()

    planted = Planted(workload=models.workload(loss=raises), policy=LINEAR_BF16)
    for record in verdicts(planted, tmp_path, FEW, [RESUME, ROLLBACK]):
        assert record.verdict == "fail"
        assert "ValueError: no kernel" in record.measured


def test_headroom_does_not_apply_to_fp32(tmp_path: Path) -> None:
    (found,) = verdicts(Planted(workload=models.workload(), policy=policy()), tmp_path, FEW, [HEADROOM])
    assert found.verdict == "not-applicable"


def test_headroom_names_activation_gradient_and_parameter(tmp_path: Path) -> None:
    (found,) = verdicts(Planted(workload=models.workload(), policy=LINEAR_FP16), tmp_path, FEW, [HEADROOM])
    assert found.verdict == "pass"
    for part in ("activation", "gradient", "parameter", "at loss scale 1024"):
        assert part in found.measured
    assert found.value is not None
    assert found.value > 1


@pytest.mark.parametrize(
    ("low", "scale", "said"),
    [
        (("*:linear", "bf16"), LossScale(), "no gradient in fp16"),
        (("*:linear", "fp16"), LossScale(), "none is needed"),
    ],
)
def test_scaler_says_whether_one_is_missing(low: tuple[str, str], scale: LossScale, said: str, tmp_path: Path) -> None:
    planted = Planted(workload=models.workload(), policy=policy(low, loss_scale=scale))
    (found,) = verdicts(planted, tmp_path, FEW, [SCALER])
    assert found.verdict == "not-applicable"
    assert said in found.measured


def test_stress_lists_what_fp32_does_not_take(tmp_path: Path) -> None:
    def picky(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if batch[0].shape[1] != models.LENGTH:
            raise ValueError("six positions, please")
        return models.loss(model, batch)

    planted = Planted(workload=models.workload(loss=picky), policy=LINEAR_BF16)
    (found,) = verdicts(planted, tmp_path, FEW, [STRESS])
    assert found.verdict == "pass"
    assert "not counted, as FP32 does not take them: length 1, twice the largest length, 12" in found.measured


def test_a_fallback_leaves_storage_and_scale_behind() -> None:
    low = replace(LINEAR_FP16, parameters=Parameters(storage="bf16", master="fp32"), float32_matmul="bf16")
    found = fallback_policy(low)
    assert [(rule.sites, rule.format) for rule in found.rules] == [("*", "fp32")]
    assert (found.parameters, found.loss_scale.kind, found.float32_matmul) == (Parameters(), "none", "ieee")
    partial = fallback_policy(replace(low, fallback=Rule(sites="head:linear", format="fp16")))
    assert [(rule.sites, rule.format) for rule in partial.rules] == [("head:linear", "fp16"), ("*", "fp32")]
    assert partial.loss_scale == low.loss_scale


@pytest.mark.parametrize(
    "settings", [Parameters(storage="bf16", master="fp32"), Parameters(storage="bf16", rounding="stochastic")]
)
def test_low_parameters_resume_and_roll_back(settings: Parameters, tmp_path: Path) -> None:
    low = policy(("*:linear", "bf16"), parameters=settings)
    planted = Planted(workload=models.workload(), policy=low)
    for record in verdicts(planted, tmp_path, FEW, [RESUME, ROLLBACK]):
        assert record.verdict == "pass", record


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ((1.0, 2.0), (1.0, 2.0), 0.0),
        ((1.0, 2.0), (1.0, 2.5), 0.5),
        ((1.0, float("nan")), (1.0, float("nan")), 0.0),
        ((1.0, 2.0), (1.0, float("nan")), float("inf")),
        ((1.0,), (1.0, 2.0), float("inf")),
    ],
)
def test_losses_are_apart(one: tuple[float, ...], other: tuple[float, ...], apart: float) -> None:
    assert apart_in_losses(one, other) == apart
