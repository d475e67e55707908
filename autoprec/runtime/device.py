"""What device there is, and which formats it multiplies in."""

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from autoprec.errors import DeviceError, FormatError
from autoprec.numerics import FORMATS
from autoprec.policy import Policy
from autoprec.runtime import matmul_precision
from autoprec.runtime.dtypes import DTYPES

Fact: TypeAlias = str | int | bool

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """A device as far as precision is concerned.

    `formats` are those that a small matmul was seen to run in; fp8 counts only as a scaled matmul in hardware, as it
    is emulated elsewhere. `native_formats` have units of their own in the hardware, as far as `capability` tells.
    """

    kind: str
    name: str
    capability: Mapping[str, Fact]
    formats: tuple[str, ...]
    native_formats: tuple[str, ...]
    num_threads: int
    torch_version: str

    @property
    def emulated_formats(self) -> tuple[str, ...]:
        """Return the formats that show their numerics here, and not their speed: FP8 without kernels for it."""
        return _emulated(self.formats)

    def emulates(self, policy: Policy) -> tuple[str, ...]:
        """Return the formats of `policy` that are emulated here; such a policy is never timed."""
        return tuple(name for name in policy.formats if name in self.emulated_formats)

    def require(self, policy: Policy) -> None:
        """Return if the device runs or emulates all that `policy` asks for.

        Raises: `FormatError` for a format it does not, `DeviceError` for a precision inside FP32 matmuls.
        """
        missing = sorted({*policy.formats, policy.parameters.storage} - {*self.formats, *self.emulated_formats, "tf32"})
        if missing:
            raise FormatError(
                f'policy "{policy.name}" uses {", ".join(missing)}, which {self.name} does not run; '
                f"it runs {', '.join(self.formats)}"
            )
        allowed = matmul_precision.supported(self.kind)
        inside = sorted(set(policy.matmul_precisions) - set(allowed))
        if inside:
            raise DeviceError(
                f'policy "{policy.name}" uses {", ".join(inside)} inside FP32 matmuls, which changes nothing on '
                f"{self.name}; it supports {', '.join(allowed)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unit:
    """A feature of a CPU: the flags that announce it in any of the sources, and the format it multiplies in."""

    name: str
    flags: frozenset[str]
    fmt: str | None = None


# The first of these that a CPU has goes into its name: from wide to narrow.
_VECTOR_UNITS = (
    _Unit(name="AMX", flags=frozenset({"amx_tile"})),
    _Unit(name="AVX-512", flags=frozenset({"avx512f", "avx512_f", "AVX512"})),
    _Unit(name="AVX2", flags=frozenset({"avx2", "AVX2"})),
    _Unit(name="SVE", flags=frozenset({"sve", "SVE256"})),
    _Unit(name="NEON", flags=frozenset({"asimd", "neon"})),
)

# Spellings: Linux on x86 and Arm, then torch.cpu.get_capabilities() where it differs.
_MATMUL_UNITS = (
    _Unit(name="amx_bf16", fmt="bf16", flags=frozenset({"amx_bf16"})),
    _Unit(name="avx512_bf16", fmt="bf16", flags=frozenset({"avx512_bf16"})),
    _Unit(name="arm_bf16", fmt="bf16", flags=frozenset({"bf16"})),
    _Unit(name="amx_fp16", fmt="fp16", flags=frozenset({"amx_fp16"})),
    _Unit(name="avx512_fp16", fmt="fp16", flags=frozenset({"avx512_fp16"})),
    _Unit(name="arm_fp16", fmt="fp16", flags=frozenset({"asimdhp", "fp16_arith"})),
)

# Compute capability from which on the tensor cores (for fp32 the plain cores) take the format.
# Source: CUDA C++ Programming Guide, tensor core data types by compute capability.
_CUDA_NATIVE_SINCE: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"fp32": (0, 0), "tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0), "fp8_e4m3": (8, 9), "fp8_e5m2": (8, 9)}
)

# Apple documents fp32 and fp16; bf16 depends on a GPU generation that torch does not tell.
_MPS_NATIVE = ("fp32", "fp16")


def describe(kind: str = "auto") -> DeviceInfo:
    """Return what there is to know about the device of `kind`; `auto` takes cuda, then mps, then cpu.

    Raises: `DeviceError` if `kind` is unknown or no such device is there.
    """
    there = [name for name in _DESCRIBERS if _is_there(name)]
    if kind == "auto":
        kind = there[0]
    if kind not in _DESCRIBERS:
        raise DeviceError(f'"{kind}" is not a device kind; kinds: auto, {", ".join(_DESCRIBERS)}')
    if kind not in there:
        raise DeviceError(f"no {kind} device is there; devices here: {', '.join(there)}")
    return _DESCRIBERS[kind]()


def emulated_formats(kind: str) -> tuple[str, ...]:
    """Return the formats that a device of `kind` emulates, see `DeviceInfo.emulated_formats`."""
    return _emulated(_running_formats(kind))


def _emulated(running: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in FORMATS if name.startswith("fp8") and name not in set(running))


def _is_there(kind: str) -> bool:
    return bool(torch.get_device_module(kind).is_available())


def _describe_cpu() -> DeviceInfo:
    model, flags, source = _read_cpu()
    units = {unit.name: bool(unit.flags & flags) for unit in _MATMUL_UNITS}
    native = {"fp32"} | {unit.fmt for unit in _MATMUL_UNITS if units[unit.name]}
    vector = next((unit.name for unit in _VECTOR_UNITS if unit.flags & flags), None)
    return _info(
        "cpu",
        name=f"{model}, {vector}" if vector else model,
        capability={"source": source, "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(), **units},
        native_formats=tuple(name for name in FORMATS if name in native),
    )


def _describe_cuda() -> DeviceInfo:
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    capability: dict[str, Fact] = {
        "compute_capability": f"{major}.{minor}",
        "memory_bytes": torch.cuda.get_device_properties().total_memory,
    }
    if torch.version.hip is not None:
        # AMD numbers its devices otherwise than the table does: nothing but fp32 is claimed for them.
        capability["rocm"] = str(torch.version.hip)
        return _info("cuda", name=name, capability=capability, native_formats=("fp32",))
    capability["cuda"] = str(torch.version.cuda)
    native = tuple(fmt for fmt, since in _CUDA_NATIVE_SINCE.items() if (major, minor) >= since)
    return _info("cuda", name=f"{name}, sm_{major}{minor}", capability=capability, native_formats=native)


def _describe_mps() -> DeviceInfo:
    model = platform.processor() or platform.machine()
    capability: dict[str, Fact] = {"macos": platform.mac_ver()[0], "machine": platform.machine()}
    return _info("mps", name=f"Apple GPU ({model})", capability=capability, native_formats=_MPS_NATIVE)


_DESCRIBERS: Mapping[str, Callable[[], DeviceInfo]] = MappingProxyType(
    {"cuda": _describe_cuda, "mps": _describe_mps, "cpu": _describe_cpu}
)


def _info(kind: str, *, name: str, capability: Mapping[str, Fact], native_formats: tuple[str, ...]) -> DeviceInfo:
    return DeviceInfo(
        kind=kind,
        name=name,
        capability=MappingProxyType(dict(capability)),
        formats=_running_formats(kind),
        native_formats=native_formats,
        num_threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
    )


@cache
def _running_formats(kind: str) -> tuple[str, ...]:
    return tuple(name for name in FORMATS if _runs(name, kind))


def _runs(format_name: str, kind: str) -> bool:
    """Return whether a matmul in the format runs on the device, found out by running one."""
    dtype = DTYPES.get(format_name)
    if dtype is None:
        return format_name in matmul_precision.supported(kind)
    try:
        if dtype.itemsize > 1:
            operand = torch.ones(16, 16, device=kind, dtype=dtype)
            return bool(torch.isfinite(operand @ operand).all())
        return kind == "cuda" and _scaled_matmul_runs(dtype)
    except (RuntimeError, ValueError, TypeError):  # how torch says that a kernel is missing depends on the kernel
        return False


def _scaled_matmul_runs(dtype: torch.dtype) -> bool:
    """Return whether a `dtype` by e4m3 matmul with scales runs; cuBLAS has none of e5m2 by e5m2."""
    left = torch.ones(16, 16, device="cuda").to(dtype)
    right = torch.ones(16, 16, device="cuda").to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device="cuda")
    product = torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    return bool(torch.isfinite(product).all())


def _read_cpu() -> tuple[str, frozenset[str], str]:
    """Return the CPU's model name, its flags, and which source told them."""
    model = platform.processor() or platform.machine()
    try:
        text = CPUINFO.read_text(errors="replace")
    except OSError:
        text = ""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    flags = facts.get("flags") or facts.get("Features")
    if flags:
        return facts.get("model name", model), frozenset(flags.split()), str(CPUINFO)
    told: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if told:
        names = frozenset(name for name, value in told.items() if value is True)
        return str(told.get("cpu_name", model)), names, "torch.cpu.get_capabilities()"
    return model, frozenset({torch.backends.cpu.get_cpu_capability()}), "torch.backends.cpu.get_cpu_capability()"
