"""Which presets are baselines on which device, and what people may ask for."""

from types import MappingProxyType

import pytest
import torch

from autoprec.errors import SpaceError
from autoprec.policy import PRESETS, preset
from autoprec.runtime.device import DeviceInfo
from autoprec.search.baselines import baselines, coarsest_format, names_in, rounding_of
from tests.op_graphs import chain, node, tensor

GRAPH = chain(node("a", "linear"), node("b", "linear", index=1), node("bad", "exp"))
CLASSIC = ["fp32", "autocast-bf16", "autocast-fp16", "low-bf16", "bf16-master", "bf16-stochastic"]
BF16_SYSTEMS = ["tf-graph-pass-bf16", "tpu-bf16"]
FP16_SYSTEMS = ["apex-o1", "apex-o2", "apex-o3", "tf-graph-pass-fp16", "fp16-resnet"]
FP8 = ["fp8-matmul", "fp8-h100"]


def device(kind: str, native: tuple[str, ...], runs: tuple[str, ...] = ("fp32", "bf16", "fp16")) -> DeviceInfo:
    return DeviceInfo(
        kind=kind,
        name="Testium",
        capability=MappingProxyType({}),
        formats=runs,
        native_formats=native,
        num_threads=1,
        torch_version="2.13.0",
    )


AVX2 = device("cpu", ("fp32",))
AMX = device("cpu", ("fp32", "bf16"))
A100 = device("cuda", ("fp32", "tf32", "bf16", "fp16"))
_EIGHT = ("fp8_e4m3", "fp8_e5m2")
H100 = device("cuda", ("fp32", "tf32", "bf16", "fp16", *_EIGHT), ("fp32", "bf16", "fp16", *_EIGHT))
TURING = device("cuda", ("fp32", "fp16"))


@pytest.mark.parametrize(
    ("where", "precisions", "expected"),
    [
        (AVX2, ("ieee",), CLASSIC),
        (AMX, ("ieee", "bf16"), [*CLASSIC, *BF16_SYSTEMS, "fp32-matmul-bf16"]),
        (TURING, ("ieee",), [*CLASSIC, *FP16_SYSTEMS]),
        (A100, ("ieee", "tf32"), [*CLASSIC, *FP16_SYSTEMS, *BF16_SYSTEMS, "fp32-matmul-tf32"]),
        (H100, ("ieee", "tf32"), [*CLASSIC, *FP16_SYSTEMS, *BF16_SYSTEMS, *FP8, "fp32-matmul-tf32"]),
    ],
)
def test_by_default_a_system_is_a_baseline_where_its_formats_are_native(
    where: DeviceInfo, precisions: tuple[str, ...], expected: list[str]
) -> None:
    found = baselines(where, precisions, GRAPH)
    assert set(found) == set(expected)
    assert list(found) == [name for name in PRESETS if name in found], "in the order of the presets"
    assert all(policy.name == name for name, policy in found.items())


def test_all_are_those_that_run_and_none_that_is_emulated() -> None:
    found = baselines(AVX2, ("ieee",), GRAPH, ("all",))
    assert set(found) == {*CLASSIC, *BF16_SYSTEMS, *FP16_SYSTEMS}


def test_compiled_twins_are_baselines_where_torch_compile_is_tried_or_they_are_named() -> None:
    twins = ["fp32-compiled", "autocast-bf16-compiled", "bf16-master-compiled"]
    assert set(baselines(AVX2, ("ieee",), GRAPH, compiled=True)) == {*CLASSIC, *twins}
    assert list(baselines(AVX2, ("ieee",), GRAPH, ("fp32-compiled",))) == ["fp32", "fp32-compiled"]
    images = chain(node("a", "conv2d", inputs=(tensor(2, 3, 8, 8),)))
    found = baselines(AVX2, ("ieee",), images, compiled=True)
    assert {"fp32-channels-last-compiled", "autocast-bf16-channels-last-compiled"} <= set(found)
    compiled = found["autocast-bf16-channels-last-compiled"]
    assert (compiled.compile, compiled.memory_format) == ("inductor", "channels_last")
    assert coarsest_format(preset("fp32-compiled", "cpu")) == "fp32"


def test_names_are_taken_and_fp32_is_always_there() -> None:
    assert list(baselines(AVX2, ("ieee",), GRAPH, ("tpu-bf16", "apex-o2"))) == ["fp32", "apex-o2", "tpu-bf16"]
    assert set(baselines(AVX2, ("ieee",), GRAPH, ("default", "apex-o2"))) == {*CLASSIC, "apex-o2"}
    assert list(baselines(AVX2, ("ieee",), GRAPH, ("fp32",))) == ["fp32"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("apex-04", 'baseline "apex-04" is not a preset for cpu; allowed: default, all, fp32, .*; nearest: "apex-o'),
        ("fp32-matmul-tf32", 'baseline "fp32-matmul-tf32" is not a preset for cpu'),
        ("fp8-h100", 'baseline "fp8-h100" uses fp8_e4m3, which Testium does not run, or only emulates, so its speed'),
        ("fp32-matmul-bf16", 'baseline "fp32-matmul-bf16" uses bf16, which Testium does not run'),
    ],
)
def test_what_cannot_be_a_baseline_is_told(name: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        baselines(AVX2, ("ieee",), GRAPH, (name,))


IMAGES = chain(node("a", "conv2d", inputs=(tensor(2, 3, 8, 8),)), node("b", "linear", index=1))
TWINS = [f"{name}-channels-last" for name in ("fp32", "autocast-bf16", "autocast-fp16", "bf16-master")]


def test_where_convolutions_run_their_layout_is_a_baseline_too() -> None:
    assert set(baselines(AVX2, ("ieee",), IMAGES)) == {*CLASSIC, *TWINS}
    amx = set(baselines(AMX, ("ieee", "bf16"), IMAGES))
    assert {name for name in amx if "channels" in name} == {*TWINS, "fp32-matmul-bf16-channels-last"}
    assert set(baselines(AVX2, ("ieee",), IMAGES, with_layouts=False)) == set(CLASSIC)
    without = baselines(A100, ("ieee",), IMAGES, with_layouts=False)
    assert {policy.memory_format for policy in without.values()} == {"as_given"}
    assert "fp16-resnet" in baselines(A100, ("ieee",), IMAGES)


def test_a_layout_that_is_asked_for_by_name_is_a_baseline_anywhere() -> None:
    assert list(baselines(AVX2, ("ieee",), GRAPH, ("fp32-channels-last",))) == ["fp32", "fp32-channels-last"]


def test_other_kernels_may_drift_as_far_as_one_rounding_to_fp32_makes_fp32_drift() -> None:
    assert coarsest_format(preset("fp32", "cpu")) is None
    assert coarsest_format(preset("fp32-channels-last", "cpu")) == "fp32"
    assert coarsest_format(preset("autocast-bf16-channels-last", "cpu")) == "bf16"


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_one_rounding_is_half_the_distance_of_one_to_the_next_number(name: str, dtype: torch.dtype) -> None:
    assert rounding_of(name) == torch.finfo(dtype).eps / 2


def test_names_in_a_text() -> None:
    assert names_in(None) == names_in("") == ()
    assert names_in("fp32, apex-o1,") == ("fp32", "apex-o1")
