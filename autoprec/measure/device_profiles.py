"""Devices that are not at hand, one row each: what a data sheet says of them, with the source and date of each figure.

Rates are dense, without structured sparsity, and accumulate in FP32. The roofline that reads them is
`autoprec.measure.roofline`. Figures whose source ends in "(from memory)" were written down without the document open;
those with "(checked)" were compared with a copy of it or with a table that cites it.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from autoprec.errors import DeviceError
from autoprec.numerics import FORMATS
from autoprec.policy import FLOAT8, MatmulPrecision

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A number in SI units, where it comes from and of which date that is (`YYYY-MM`)."""

    value: float
    source: str
    date: str


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """A device as a roofline sees it.

    `peaks` are operations a second of matrix products by format; a format without one has no units there. `kind` is
    what policies say; `lists` the kind whose autocast lists and presets stand for it; `space` its search space file.
    *Units*: `bandwidth` bytes a second, `launch` seconds from one op to the next, whatever it computes.
    """

    name: str
    title: str
    kind: str
    lists: str
    space: str
    peaks: Mapping[str, Figure]
    bandwidth: Figure
    launch: Figure

    @property
    def low_formats(self) -> tuple[str, ...]:
        """Return the 16 bit formats that the device has units for."""
        return tuple(name for name in ("bf16", "fp16") if name in self.peaks)

    @property
    def has_float8(self) -> bool:
        """Return whether the device multiplies in FP8."""
        return FLOAT8 in self.peaks

    @property
    def has_tf32(self) -> bool:
        """Return whether the device has TF32 inside FP32 matmuls."""
        return "tf32" in self.peaks

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the formats that the device has units for; with FP8, gradients are in e5m2."""
        return tuple(name for name in FORMATS if name in self.peaks or (self.has_float8 and name.startswith("fp8")))

    @property
    def inside(self) -> Mapping[MatmulPrecision, float]:
        """Return the rates of FP32 matmuls by the precision inside them."""
        found: dict[MatmulPrecision, float] = {"ieee": self.peaks["fp32"].value}
        if self.has_tf32:
            found["tf32"] = self.peaks["tf32"].value
        if self.lists == "cpu" and "bf16" in self.peaks:
            found["bf16"] = self.peaks["bf16"].value
        return found

    def figures(self) -> Mapping[str, Figure]:
        """Return every figure by its name."""
        return {**{f"peak {name}": each for name, each in self.peaks.items()},
                "bandwidth": self.bandwidth, "launch": self.launch}  # fmt: skip


def profile_named(name: str) -> DeviceProfile:
    """Return the profile called `name`.

    Raises: `DeviceError` if there is none; the message lists those there are.
    """
    if name not in PROFILES:
        near = difflib.get_close_matches(name, PROFILES, n=1, cutoff=0.4)
        hint = f'; nearest: "{near[0]}"' if near else ""
        raise DeviceError(f'no device profile is called "{name}"; profiles: {", ".join(PROFILES)}{hint}')
    return PROFILES[name]


def _peaks(source: str, date: str, **tera: float) -> Mapping[str, Figure]:
    """Return the rates of a row, given in units of 10^12 operations a second."""
    return MappingProxyType({name: Figure(value=each * _TERA, source=source, date=date) for name, each in tera.items()})


def _launch(micro: float, why: str) -> Figure:
    return Figure(value=micro * _MICRO, source=f"assumed, no data sheet states it: {why}", date="2026-11")


def _gigabytes(value: float, source: str, date: str) -> Figure:
    return Figure(value=value * _GIGA, source=source, date=date)


_eager_cuda = partial(_launch, 5.0, "eager torch, where Python and dispatch are longer than most launches")
_eager_cpu = partial(_launch, 3.0, "eager torch on one process, dispatch and the start of its threads")

_SPR = "Intel Xeon Platinum 8480+ data sheet and optimization manual: 56 cores at 2.0 GHz base"
_ICX = "Intel Xeon Platinum 8380 data sheet: 40 cores at 2.3 GHz base, 2 FMA units of 16 lanes (from memory)"
_MILAN = "AMD EPYC 7763 data sheet: 64 cores at 2.45 GHz base, 2 FMA units of 8 lanes (from memory)"
_DDR5 = "Intel Xeon Platinum 8480+ data sheet: 8 channels DDR5-4800 (from memory)"
_DDR4 = "{} data sheet: 8 channels DDR4-3200 (from memory)"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A, dense, FP32 accumulate (checked)"
_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet, dense column (from memory)"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet, SXM, half of the figures with sparsity (from memory)"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, SXM, half of the figures with sparsity (from memory)"
_BLACKWELL = "NVIDIA Blackwell architecture brief, HGX B200 at 1000 W, dense (checked)"
_V5E = "Google Cloud TPU documentation, TPU v5e (checked)"

_ROWS = (
    DeviceProfile(
        name="cpu-amx",
        title="Intel Xeon Platinum 8480+ (AMX), one socket",
        kind="cpu",
        lists="cpu",
        space="cpu-amx",
        peaks={
            **_peaks(f"{_SPR}, 2 FMA units of 16 lanes (from memory)", "2023-01", fp32=56 * 2.0e9 * 64 / _TERA),
            **_peaks(f"{_SPR}, 1024 operations a cycle and core in AMX (from memory)", "2023-01",
                     bf16=56 * 2.0e9 * 1024 / _TERA),
        },
        bandwidth=_gigabytes(307.2, _DDR5, "2023-01"),
        launch=_eager_cpu(),
    ),
    DeviceProfile(
        name="cpu-avx512",
        title="Intel Xeon Platinum 8380 (AVX-512, no bf16), one socket",
        kind="cpu",
        lists="cpu",
        space="cpu",
        peaks=_peaks(_ICX, "2021-04", fp32=40 * 2.3e9 * 64 / _TERA),
        bandwidth=_gigabytes(204.8, _DDR4.format("Intel Xeon Platinum 8380"), "2021-04"),
        launch=_eager_cpu(),
    ),
    DeviceProfile(
        name="cpu-avx2",
        title="AMD EPYC 7763 (AVX2), one socket",
        kind="cpu",
        lists="cpu",
        space="cpu",
        peaks=_peaks(_MILAN, "2021-03", fp32=64 * 2.45e9 * 32 / _TERA),
        bandwidth=_gigabytes(204.8, _DDR4.format("AMD EPYC 7763"), "2021-03"),
        launch=_eager_cpu(),
    ),
    DeviceProfile(
        name="rtx-4090",
        title="NVIDIA GeForce RTX 4090",
        kind="cuda",
        lists="cuda",
        space="rtx",
        peaks=_peaks(_ADA, "2023-01", fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8_e4m3=330.3),
        bandwidth=_gigabytes(1008, _ADA, "2023-01"),
        launch=_eager_cuda(),
    ),
    DeviceProfile(
        name="a100",
        title="NVIDIA A100 SXM 80 GB",
        kind="cuda",
        lists="cuda",
        space="a100",
        peaks=_peaks(_AMPERE, "2021-06", fp32=19.5, tf32=156, bf16=312, fp16=312),
        bandwidth=_gigabytes(2039, _AMPERE, "2021-06"),
        launch=_eager_cuda(),
    ),
    DeviceProfile(
        name="h100",
        title="NVIDIA H100 SXM",
        kind="cuda",
        lists="cuda",
        space="hopper",
        peaks=_peaks(_HOPPER, "2023-03", fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, fp8_e4m3=1978.9),
        bandwidth=_gigabytes(3350, _HOPPER, "2023-03"),
        launch=_eager_cuda(),
    ),
    DeviceProfile(
        name="h200",
        title="NVIDIA H200 SXM",
        kind="cuda",
        lists="cuda",
        space="hopper",
        peaks=_peaks(_H200, "2023-11", fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, fp8_e4m3=1978.9),
        bandwidth=_gigabytes(4800, _H200, "2023-11"),
        launch=_eager_cuda(),
    ),
    DeviceProfile(
        name="b200",
        title="NVIDIA B200 (HGX)",
        kind="cuda",
        lists="cuda",
        space="hopper",
        peaks=_peaks(_BLACKWELL, "2024-03", fp32=80, tf32=1100, bf16=2250, fp16=2250, fp8_e4m3=4500),
        bandwidth=_gigabytes(8000, _BLACKWELL, "2024-03"),
        launch=_eager_cuda(),
    ),
    DeviceProfile(
        name="tpu-v5e",
        title="Google TPU v5e, one chip",
        kind="xla",
        lists="cuda",
        space="tpu",
        peaks={
            **_peaks("derived: FP32 of a TPU is six passes in bf16 (jax.lax.Precision.HIGHEST) of what "
                     f"{_V5E} states", "2023-11", fp32=197 / 6),
            **_peaks(_V5E, "2023-11", bf16=197),
        },
        bandwidth=_gigabytes(819, _V5E, "2023-11"),
        launch=_launch(0.5, "XLA runs one compiled program; what it fuses is not modeled"),
    ),
)  # fmt: skip
PROFILES: Mapping[str, DeviceProfile] = MappingProxyType({row.name: row for row in _ROWS})
