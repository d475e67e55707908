"""Every planted fault is caught by the detector meant for it, and healthy workloads are left in peace."""

from pathlib import Path

import pytest
import torch
from torch import nn

import autoprec
from autoprec.policy import LossScale, Policy, Rule, preset
from autoprec.runtime.guard.calibration import Calibration, loss_band, to_plain
from autoprec.runtime.guard.looks import look_at_gradients
from autoprec.workload import Workload
from tests.case_files import CONTROLS, load_file
from tests.faults.guard_faults import FAULTS, caught

SLOW = {"odd-rank"}
QUICK = {"nc-autoencoder-bce", "hc-vae-clamped", "hc-sinkhorn-log"}
STEPS, RECORDED = 40, 24
LOW = {
    "bf16": preset("autocast-bf16", "cpu").rules,
    "fp16": preset("autocast-fp16", "cpu").rules,
}
SCALES = {"bf16": LossScale(), "fp16": LossScale(kind="dynamic", initial=2.0**12, growth_interval=10)}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.name, marks=[pytest.mark.slow] if fault.name in SLOW else []) for fault in FAULTS],
)
def test_a_planted_fault_is_caught_by_the_detector_meant_for_it(fault):
    assert caught(fault, fault.plant()) == fault.reaction


def guarded(
    workload: Workload, policy: Policy, *, seed: int, steps: int
) -> tuple[list[autoprec.GuardEvent], Calibration]:
    """Train a workload under a guard; return its events, and what the run would be calibrated as."""
    torch.manual_seed(seed)
    model: nn.Module = workload.model()
    precision = autoprec.apply(model, policy)
    optimizer = precision.optimizer(
        workload.optimizer(model.parameters()) if workload.optimizer else torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    events: list[autoprec.GuardEvent] = []
    guard = autoprec.guard(model, optimizer, precision, loss=workload.loss, every=5, on_event=events.append)
    losses: list[float] = []
    look = None
    while len(losses) < steps:
        for batch in workload.batches():
            optimizer.zero_grad()
            with precision.loss():
                loss = workload.loss(model, batch)
            precision.backward(loss)
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                look = look_at_gradients(precision)
            guard.step(loss, batch=batch, max_norm=1.0 if seed % 2 else None)
            if len(losses) == steps:
                break
    precision.remove()
    assert look is not None
    scale = precision.scaler.get_scale() if policy.loss_scale.kind != "none" else None
    return events, Calibration(
        losses=loss_band(losses),
        skipped_frac=None if scale is None else 0.0,
        loss_scale=scale,
        flush_frac=look.flush_frac,
        layer_flush_frac=max(look.flush, default=None),
        overflow_frac=look.overflow_frac,
    )


def false_alarms(path: Path, name: str) -> list[str]:
    """Return what the guard says of a healthy workload, calibrated on a shorter run of another seed."""
    workload = load_file(path).workload()
    policy = Policy(name=name, rules=LOW[name], loss_scale=SCALES[name])
    _, calibration = guarded(workload, policy, seed=0, steps=RECORDED)
    known = Policy(name=name, rules=LOW[name], loss_scale=SCALES[name], evidence={"calibration": to_plain(calibration)})
    events, _ = guarded(workload, known, seed=1, steps=STEPS)
    return [str(event) for event in events]


@pytest.mark.parametrize("name", sorted(LOW))
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else [pytest.mark.long]) for path in CONTROLS],
)
def test_a_healthy_workload_raises_no_alarm(path, name):
    assert false_alarms(path, name) == []


def test_a_float32_run_of_a_healthy_policy_is_left_alone():
    assert Rule(sites="*", format="fp32") in preset("fp32", "cpu").rules
    workload = load_file(next(path for path in CONTROLS if path.stem == "nc-autoencoder-bce")).workload()
    events, _ = guarded(workload, Policy(name="fp32", rules=preset("fp32", "cpu").rules), seed=0, steps=10)
    assert [event.reaction for event in events] == ["info"]
