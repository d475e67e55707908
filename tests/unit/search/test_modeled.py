"""Plans for a device that is not at hand, on a device whose figures are round."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from autoprec import Workload
from autoprec.capture import record
from autoprec.errors import FormatError
from autoprec.graph.site import Site
from autoprec.measure.device_profiles import PROFILES, DeviceProfile, Figure
from autoprec.policy import load_policy, resolve, save_policy
from autoprec.runtime.device import describe
from autoprec.search.modeled import chosen_formats, model_plan, written_policy

from .mlp import workload


def figure(value: float) -> Figure:
    return Figure(value=value, source="a test", date="2026-11")


def profile(launch: float = 1e-12, bandwidth: float = 1e6, **peaks: float) -> DeviceProfile:
    rates = peaks or {"fp32": 1e6, "bf16": 8e6}
    return DeviceProfile(
        name="round", title="Testium", kind="cuda", lists="cuda", space="cuda",
        peaks={name: figure(rate) for name, rate in rates.items()},
        bandwidth=figure(bandwidth), launch=figure(launch),
    )  # fmt: skip


def planned(run: Workload, device: DeviceProfile, formats: tuple[str, ...] = ()):
    return model_plan(record(run), device, describe("cpu"), formats)


def low_sites(each, sites) -> set[Site]:
    return {site for site, fmt in resolve(each.policy, sites).formats.items() if fmt not in ("fp32", "fp8_e4m3")}


@pytest.fixture(scope="module")
def mlp():
    return planned(workload(), profile())


def test_the_best_is_the_fastest_healthy_policy_of_all(mlp):
    assert mlp.plan is not None
    assert mlp.plan.num_low > 0
    assert mlp.plan.error <= mlp.plan.limit < math.inf
    assert mlp.best.step_s == min(each.step_s for each in (*mlp.baselines, mlp.plan) if each.is_healthy)
    assert mlp.best.step_s < mlp.fp32.step_s
    assert mlp.best.saved_bytes < mlp.fp32.saved_bytes


def test_the_front_goes_from_fast_to_faithful(mlp):
    times = [each.step_s for each in mlp.front]
    assert times == sorted(times)
    for slow, fast in zip(mlp.front[1:], mlp.front, strict=False):
        assert slow.predicted_error < fast.predicted_error or slow.saved_bytes < fast.saved_bytes


def test_baselines_are_predicted_by_the_same_model_or_the_reason_is_told(mlp):
    names = {each.name for each in mlp.baselines}
    assert {"fp32", "autocast-bf16", "tf-graph-pass-bf16", "tpu-bf16"} <= names
    assert "autocast-fp16" not in names  # the device has no units for it
    assert mlp.left_out.keys() == {"low-bf16", "bf16-master", "bf16-stochastic"}
    assert all("stores parameters" in reason for reason in mlp.left_out.values())
    autocast = next(each for each in mlp.baselines if each.name == "autocast-bf16")
    assert 0 < autocast.error < autocast.limit
    assert mlp.plan.step_s <= autocast.step_s


def test_what_is_kept_has_reasons(mlp):
    assert sum(mlp.kept.values()) + mlp.best.num_low == mlp.num_sites


def test_where_casts_cost_more_than_they_gain_fp32_is_best():
    found = planned(workload(), profile(launch=1e-12, bandwidth=1e3, fp32=1e12, bf16=1e12))
    assert found.plan is None or found.plan.step_s < found.fp32.step_s
    slow_casts = planned(workload(), profile(launch=1.0))
    assert (slow_casts.plan, slow_casts.best, slow_casts.front) == (None, slow_casts.fp32, ())
    assert slow_casts.kept == {"the policy says so": slow_casts.num_sites}


def test_a_device_without_low_formats_is_left_with_fp32():
    found = planned(workload(), profile(fp32=1e6))
    assert (found.formats, found.front, found.plan, found.best) == ((), (), None, found.fp32)
    assert [each.name for each in found.baselines] == ["fp32"]


class Scale(nn.Module):
    """Divides by a range that is zero in one row, so that all hangs on a small number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        return self.first((x - low) / (high - low + 1e-8)).exp()


def test_a_site_that_a_format_breaks_stays_fp32_and_says_why():
    batch = torch.tensor([[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 2.0]])
    run = Workload(model=Scale, batches=lambda: [batch], loss=lambda model, x: model(x).mean())
    found = planned(run, profile(fp32=1e3, fp16=8e3), ("fp16",))
    assert found.plan is not None
    sites = record(run).op_graph.sites()
    assert Site("first", "linear", 0) in low_sites(found.plan, sites)
    assert Site("", "add", 0) not in low_sites(found.plan, sites)
    broken = next(each for each in found.baselines if each.name == "fp16-resnet")
    assert not broken.is_healthy
    assert found.plan.policy.loss_scale.kind == "dynamic"


def test_tf32_is_a_baseline_and_is_combined_with_low_sites():
    found = planned(workload(), profile(launch=1e-3, fp32=1e6, tf32=4e6, bf16=8e6))
    tf32 = next(each for each in found.baselines if each.name == "fp32-matmul-tf32")
    assert tf32.step_s < found.fp32.step_s
    assert 0 < tf32.error < tf32.limit  # bounded by bf16 in the same matmuls
    assert not replace(tf32, error=math.nan).is_healthy
    assert {each.policy.float32_matmul for each in found.front} <= {"ieee", "tf32"}


def test_fp8_is_a_way_of_being_low_and_its_policy_is_well_formed(tmp_path):
    pytest.importorskip("torchao")

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).relu())

    batch = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    run = Workload(model=Wide, batches=lambda: [batch], loss=lambda m, x: m(x).square().mean())
    device = profile(bandwidth=1e12, fp32=1e3, bf16=8e3, fp16=8e3, fp8_e4m3=64e3)
    found = planned(run, device, ("bf16", "fp8_e4m3"))
    assert found.plan is not None
    assert found.plan.num_float8 == 2
    assert found.plan.step_s < min(each.step_s for each in found.baselines if each.num_float8 == 0)
    save_policy(written_policy(found, "wide"), tmp_path / "policy.yaml")
    policy = load_policy(tmp_path / "policy.yaml")
    assert "fp8_e4m3" in policy.formats
    assert policy.evidence["modeled"] is True


def test_the_written_policy_says_that_it_is_modeled(mlp):
    policy = written_policy(mlp, "mlp")
    assert policy.name == "mlp"
    assert policy.device == {"kind": "cuda", "name": "Testium"}
    assert policy.evidence["modeled"] is True
    assert policy.evidence["device_profile"] == "round"
    assert policy.evidence["modeled_speedup_vs_fp32"] == pytest.approx(mlp.fp32.step_s / mlp.best.step_s)
    assert policy.evidence["emulated_gradient_error"] == mlp.best.error


def test_formats_that_the_device_lacks_are_told():
    with pytest.raises(FormatError, match=r'A100 SXM 80 GB has no units for "fp8_e4m3"; .* profile a100: bf16, fp16'):
        chosen_formats(PROFILES["a100"], ("bf16", "fp8_e4m3"))
    with pytest.raises(FormatError, match=r'has no units for "bf16"; low formats of the profile cpu-avx2: none'):
        chosen_formats(PROFILES["cpu-avx2"], ("bf16",))
    with pytest.raises(FormatError, match=r"fp8_e4m3 alone; what does not multiply runs in bf16"):
        chosen_formats(PROFILES["h100"], ("fp16", "fp8_e4m3"))
    assert chosen_formats(PROFILES["h100"], ()) == ("bf16", "fp16", "fp8_e4m3")
