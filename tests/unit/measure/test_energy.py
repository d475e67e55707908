"""Energy: NVML where it is, nothing elsewhere."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from autoprec.measure import Energy, energy_meter


def test_a_cpu_has_no_meter():
    assert energy_meter("cpu") is None


def test_medians_of_both():
    assert Energy.of([1.0, 3.0, 2.0], [1.0]) == Energy(reference_j=2.0, candidate_j=1.0)


@pytest.mark.parametrize(("reference", "candidate"), [([], []), ([1.0], []), ([0.0, 0.0, 1.0], [1.0])])
def test_a_counter_that_stands_still_says_nothing(reference, candidate):
    assert Energy.of(reference, candidate) is None


@pytest.fixture
def nvml(monkeypatch):
    """Stand in for pynvml and for the GPU that it asks torch about."""
    module = ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.nvmlInit = lambda: None
    module.handles = []
    module.nvmlDeviceGetHandleByUUID = lambda uuid: module.handles.append(uuid) or "handle"
    module.millijoules = iter([500, 1500, 4000])
    module.nvmlDeviceGetTotalEnergyConsumption = lambda handle: next(module.millijoules)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.version, "hip", None)
    return module


def test_joules_of_the_gpu_that_torch_means(nvml):
    meter = energy_meter("cuda:0")
    assert (meter(), meter()) == (1.5, 4.0)
    assert nvml.handles == [b"GPU-abc"]


def test_a_gpu_without_a_counter_and_a_machine_without_pynvml(nvml, monkeypatch):
    def refuse(handle):
        raise nvml.NVMLError

    nvml.nvmlDeviceGetTotalEnergyConsumption = refuse
    assert energy_meter("cuda") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy_meter("cuda") is None
