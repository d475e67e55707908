"""Energy of a step, where the device counts it: NVML's counter of NVIDIA GPUs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Meter: TypeAlias = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy:
    """Joules of a step of a reference and of a candidate: medians over their rounds."""

    reference_j: float
    candidate_j: float

    @classmethod
    def of(cls, reference: Sequence[float], candidate: Sequence[float]) -> "Energy | None":
        """Return the medians; None where the counter stood still, as it does in steps shorter than its period."""
        if not reference or not candidate:
            return None
        found = cls(reference_j=statistics.median(reference), candidate_j=statistics.median(candidate))
        return found if found.reference_j > 0 and found.candidate_j > 0 else None


def energy_meter(device: str | torch.device) -> Meter | None:
    """Return a function that waits for the device and returns the joules it has used since its driver was loaded.

    None without an NVIDIA GPU, without pynvml, or where the GPU has no such counter (before Volta).
    Source: NVML, nvmlDeviceGetTotalEnergyConsumption.
    """
    found = torch.device(device)
    if found.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        handle = _handle(pynvml, found)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None

    def joules() -> float:
        torch.cuda.synchronize(found)
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

    return joules


def _handle(pynvml: Any, device: torch.device) -> Any:
    """Return NVML's handle of a device, which torch may number otherwise: they agree on the UUID."""
    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(device.index or 0).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
