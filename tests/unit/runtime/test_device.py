import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoprec.errors import DeviceError, FormatError
from autoprec.numerics import FORMATS
from autoprec.policy import Policy, Rule
from autoprec.runtime import device
from autoprec.runtime.device import describe, emulated_formats

SAPPHIRE_RAPIDS = """processor : 0
model name : Intel(R) Xeon(R) Platinum 8480+
flags : fpu sse2 avx2 avx512f avx512_bf16 avx512_fp16 amx_tile amx_bf16
"""
COOPER_LAKE = "model name : Intel(R) Xeon(R) Gold 6348H\nflags : avx2 avx512f avx512_bf16\n"
ZEN_3 = "model name\t: AMD EPYC\nflags\t\t: fpu avx2 f16c\n"
GRAVITON_3 = "processor : 0\nFeatures : fp asimd asimdhp sve bf16\n"


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)


def use_cpuinfo(monkeypatch: pytest.MonkeyPatch, path: Path, text: str | None) -> None:
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(device, "CPUINFO", path)


@pytest.mark.parametrize(
    ("text", "native", "name"),
    [
        (SAPPHIRE_RAPIDS, ("fp32", "bf16", "fp16"), "Intel(R) Xeon(R) Platinum 8480+, AMX"),
        (COOPER_LAKE, ("fp32", "bf16"), "Intel(R) Xeon(R) Gold 6348H, AVX-512"),
        (ZEN_3, ("fp32",), "AMD EPYC, AVX2"),
    ],
)
def test_x86_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, native: tuple[str, ...], name: str
) -> None:
    use_cpuinfo(monkeypatch, tmp_path / "cpuinfo", text)
    info = describe("cpu")
    assert (info.native_formats, info.name) == (native, name)
    assert info.capability["source"] == str(tmp_path / "cpuinfo")


def test_arm_features(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_cpuinfo(monkeypatch, tmp_path / "cpuinfo", GRAVITON_3)
    info = describe("cpu")
    assert info.native_formats == ("fp32", "bf16", "fp16")
    assert info.name.endswith(", SVE")
    assert (info.capability["arm_bf16"], info.capability["amx_bf16"]) == (True, False)


@pytest.mark.parametrize("text", [None, "", "flags without a colon\n"])
def test_without_cpuinfo_torch_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None) -> None:
    use_cpuinfo(monkeypatch, tmp_path / "cpuinfo", text)
    told = {"cpu_name": "Apple M2", "neon": True, "bf16": True, "fp16_arith": True, "sve": False, "num_sockets": 1}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    info = describe("cpu")
    assert (info.name, info.native_formats) == ("Apple M2, NEON", ("fp32", "bf16", "fp16"))
    assert info.capability["source"] == "torch.cpu.get_capabilities()"


def test_the_last_source_claims_only_what_it_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_cpuinfo(monkeypatch, tmp_path / "missing", None)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    info = describe("cpu")
    assert info.native_formats == ("fp32",)
    assert info.name.endswith(", AVX-512")
    assert info.capability["source"] == "torch.backends.cpu.get_cpu_capability()"


def test_this_cpu() -> None:
    info = describe("cpu")
    assert info.kind == "cpu"
    assert {"fp32", "bf16", "fp16"} <= set(info.formats)
    assert not {"fp8_e4m3", "fp8_e5m2"} & set(info.formats)
    assert set(info.native_formats) <= set(FORMATS)
    assert info.num_threads == torch.get_num_threads()
    assert info.torch_version == torch.__version__
    assert type(info.torch_version) is str
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.kind = "cuda"  # type: ignore[misc]


def test_auto_falls_back_to_cpu() -> None:
    assert describe() == describe("auto") == describe("cpu")


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps")]
)
def test_auto_takes_cuda_then_mps(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.mps, "is_available", lambda: mps)
    monkeypatch.setattr(device, "_DESCRIBERS", {kind: lambda kind=kind: kind for kind in ("cuda", "mps", "cpu")})
    assert describe() == expected


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_missing_device_says_what_is_there(kind: str) -> None:
    with pytest.raises(DeviceError, match=f"no {kind} device is there; devices here: cpu"):
        describe(kind)


@pytest.mark.parametrize("kind", ["tpu", "cuda:0", ""])
def test_an_unknown_kind_lists_the_kinds(kind: str) -> None:
    with pytest.raises(DeviceError, match=f'"{kind}" is not a device kind; kinds: auto, cuda, mps, cpu'):
        describe(kind)


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((6, 1), ("fp32",)),
        ((7, 5), ("fp32", "fp16")),
        ((8, 6), ("fp32", "tf32", "bf16", "fp16")),
        ((8, 9), tuple(FORMATS)),
        ((10, 0), tuple(FORMATS)),
    ],
)
def test_cuda_units_follow_the_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: tuple[str, ...]
) -> None:
    fake_cuda(monkeypatch, capability)
    info = describe("cuda")
    assert info.native_formats == native
    assert info.name == f"NVIDIA Something, sm_{capability[0]}{capability[1]}"
    assert info.capability["compute_capability"] == f"{capability[0]}.{capability[1]}"


def test_rocm_claims_only_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    info = describe("cuda")
    assert (info.native_formats, info.name, info.capability["rocm"]) == (("fp32",), "NVIDIA Something", "6.4")


def fake_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Something")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=2**34))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(device, "_running_formats", lambda kind: ("fp32",))


def test_a_matmul_that_is_not_implemented_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise RuntimeError('"addmm_impl_cpu_" not implemented for Half')

    monkeypatch.setattr(torch.Tensor, "__matmul__", missing)
    assert not device._runs("fp16", "cpu")


def _policy(*formats: str, sites: str = "*:linear", **settings: Any) -> Policy:
    rules = [*(Rule(sites=sites, format=name) for name in formats), Rule(sites="*", format="fp32")]
    return Policy(name="p", rules=tuple(rules), **settings)


def test_formats_without_kernels_are_emulated_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    info = describe("cpu")
    assert info.emulated_formats == emulated_formats("cpu") == ("fp8_e4m3", "fp8_e5m2")
    assert info.emulates(_policy("fp8_e4m3", "bf16")) == ("fp8_e4m3",)
    assert info.emulates(_policy("bf16")) == ()
    hopper = dataclasses.replace(info, formats=(*info.formats, "fp8_e4m3", "fp8_e5m2"))
    assert hopper.emulated_formats == hopper.emulates(_policy("fp8_e4m3")) == ()
    monkeypatch.setattr(device, "_running_formats", lambda _: ("fp32", "fp8_e4m3", "fp8_e5m2"))
    assert emulated_formats("cuda") == ()


def test_what_a_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.matmul_precision, "_supported", lambda _: ("ieee", "bf16"))
    info = dataclasses.replace(describe("cpu"), formats=("fp32", "bf16"), name="this")
    info.require(_policy("bf16", "fp8_e4m3", "fp32_bf16", float32_matmul="bf16"))
    with pytest.raises(FormatError, match='policy "p" uses fp16, which this does not run; it runs fp32, bf16'):
        info.require(_policy("fp16"))
    message = 'policy "p" uses tf32 inside FP32 matmuls, which changes nothing on this; it supports ieee, bf16'
    for policy in (_policy("tf32"), _policy(float32_matmul="tf32")):
        with pytest.raises(DeviceError, match=message):
            info.require(policy)


@pytest.mark.gpu
def test_formats_of_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    info = describe("cuda")
    assert set(info.native_formats) <= set(info.formats)
