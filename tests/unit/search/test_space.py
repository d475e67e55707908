"""Search space files."""

import dataclasses
from pathlib import Path

import pytest
import torch

from autoprec.analysis import GradientHistograms
from autoprec.analysis.histogram import exponent_histogram
from autoprec.errors import SpaceError
from autoprec.graph.layers import layers_of
from autoprec.runtime.device import DeviceInfo, describe
from autoprec.search import subject
from autoprec.search.choices import dimensions
from autoprec.search.layout import layout_of
from autoprec.search.space import Space, load_space, space_name, space_path
from autoprec.search.subject import (
    compile_s,
    cut_to_compiler,
    cut_to_device,
    cut_to_graph,
    cut_to_optimizer,
    in_order_of_use,
)
from tests.op_graphs import chain, node, tensor

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", sorted((ROOT / "search_spaces").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_spaces_load(path: Path) -> None:
    space = load_space(path)
    assert space.low
    if path.stem != "tpu":  # whose compiler lays tensors out itself
        assert space.memory_format == ("as_given", "channels_last")
        assert space.optimizer == ("as_given", "fused")


def test_every_device_kind_has_a_space() -> None:
    assert [space_path(kind).stem for kind in ("cpu", "cuda", "mps")] == ["cpu", "cuda", "default"]


@pytest.mark.parametrize(
    ("kind", "name", "capability", "native", "expected"),
    [
        ("cpu", "Xeon, AMX", {}, ("fp32", "bf16"), "cpu-amx"),
        ("cpu", "EPYC, AVX2", {}, ("fp32",), "cpu"),
        ("cuda", "NVIDIA GeForce RTX 4090, sm_89", {"compute_capability": "8.9"}, ("fp32", "bf16"), "rtx"),
        ("cuda", "NVIDIA GeForce RTX 5090, sm_120", {"compute_capability": "12.0"}, ("fp32", "bf16"), "rtx"),
        ("cuda", "NVIDIA A100-SXM4-80GB, sm_80", {"compute_capability": "8.0"}, ("fp32", "bf16"), "a100"),
        ("cuda", "NVIDIA H200, sm_90", {"compute_capability": "9.0"}, ("fp32", "bf16"), "hopper"),
        ("cuda", "NVIDIA B200, sm_100", {"compute_capability": "10.0"}, ("fp32", "bf16"), "hopper"),
        ("cuda", "Tesla V100, sm_70", {"compute_capability": "7.0"}, ("fp32", "fp16"), "cuda"),
        ("cuda", "AMD MI300X", {"compute_capability": "9.0", "rocm": "6.4"}, ("fp32",), "cuda"),
        ("mps", "Apple GPU (arm)", {}, ("fp32", "fp16"), "mps"),
    ],
)
def test_a_device_has_the_space_of_its_family(kind, name, capability, native, expected) -> None:
    device = DeviceInfo(
        kind=kind,
        name=name,
        capability=capability,
        formats=native,
        native_formats=native,
        num_threads=1,
        torch_version="2.13.0",
    )
    assert space_name(device) == expected
    assert space_path(expected).stem == ("default" if expected == "mps" else expected)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text("autoprec_space: 1\n" + text)
    return path


def test_every_key_is_read(tmp_path: Path) -> None:
    text = """low: [fp16]
grouping: module
prefer: ["*:softmax", "blocks.*"]
float32_matmul: [ieee, tf32]
storage: [fp32, bf16-master]
memory_format: [channels_last, as_given]
optimizer: [as_given, fused]
compile: [inductor]
loss_scale:
  initial: [16, 32]
  growth_interval: [7]
slow_limit: 3
horizon: 40
margin: 0.02
baselines: [default, apex-o2]
"""
    assert load_space(write(tmp_path, text)) == Space(
        low=("fp16",),
        grouping="module",
        prefer=("*:softmax", "blocks.*"),
        float32_matmul=("ieee", "tf32"),
        storage=("fp32", "bf16-master"),
        memory_format=("channels_last", "as_given"),
        optimizer=("as_given", "fused"),
        compile=("inductor",),
        loss_scale_initial=(16.0, 32.0),
        loss_scale_growth_interval=(7,),
        slow_limit=3.0,
        horizon=40,
        margin=0.02,
        baselines=("default", "apex-o2"),
    )


def test_keys_left_out_have_their_defaults(tmp_path: Path) -> None:
    assert load_space(write(tmp_path, "horizon: auto\n")) == Space()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("low: [bf16]\nmargn: 0.1\n", r'space.yaml:3: .*no key "margn".*nearest: "margin"'),
        ("loss_scale: {inital: [1]}\n", r'space.yaml:2: .*no key "inital".*nearest: "initial"'),
        ("low: [bf61]\n", r"space.yaml:2: low is \['bf61'\]; allowed: a list of bf16, fp16"),
        ("low: bf16\n", "space.yaml:2: low is 'bf16'"),
        ("low: []\n", "space.yaml:2: low is"),
        ("low: [bf16, bf16]\n", "space.yaml:2: low is"),
        ("grouping: op\n", "space.yaml:2: grouping is 'op'; allowed: pattern, module"),
        ('prefer: ["*:sotfmax"]\n', "space.yaml:2: prefer is"),
        ("storage: [bf16]\n", r"storage is \['bf16'\]; allowed: a list of fp32, bf16-master, bf16-stochastic"),
        ("memory_format: [nhwc]\n", r"memory_format is \['nhwc'\]; allowed: a list of as_given, channels_last"),
        ("optimizer: [foreach]\n", r"optimizer is \['foreach'\]; allowed: a list of as_given, fused"),
        ("compile: [eager]\n", r"compile is \['eager'\]; allowed: a list of as_given, inductor"),
        ("slow_limit: 1\n", "space.yaml:2: slow_limit is 1; allowed: numbers above 1"),
        ("slow_limit: true\n", "space.yaml:2: slow_limit is True"),
        ("horizon: 7\n", "space.yaml:2: horizon is 7; allowed: auto, or whole numbers from 8"),
        ("baselines: [apex-04]\n", r"space.yaml:2: baselines is \['apex-04'\]; allowed: a list of default, all, fp32,"),
        ("baselines: []\n", "space.yaml:2: baselines is "),
        ("margin: 1\n", "space.yaml:2: margin is 1"),
        ("loss_scale:\n  initial: [0]\n", "space.yaml:3: loss_scale.initial is"),
        ("low: [bf16]\nlow: [fp16]\n", "space.yaml:3: .*twice"),
        ("low: [\n", "space.yaml:3: not YAML"),
    ],
)
def test_mistakes_are_reported_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        load_space(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [("low: [bf16]\n", "starts with autoprec_space: 1"), ("autoprec_space: 2\n", "schema 2; this autoprec reads 1")],
)
def test_the_schema_is_checked(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "space.yaml").write_text(text)
    with pytest.raises(SpaceError, match=message):
        load_space(tmp_path / "space.yaml")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SpaceError, match="No such file"):
        load_space(tmp_path / "none.yaml")


def test_a_different_choice_is_a_different_space() -> None:
    assert Space().fingerprint() != Space(margin=0.02).fingerprint()
    assert Space().fingerprint() == Space().fingerprint()


def test_storage_the_device_cannot_hold_is_left_out() -> None:
    device = dataclasses.replace(describe("cpu"), formats=("fp32", "fp16"))
    cut = cut_to_device(Space(storage=("bf16-master",)), device, ())
    assert (cut.low, cut.storage) == (("fp16",), ("fp32",))


@pytest.mark.parametrize(
    ("op", "shape", "kept"),
    [("conv2d", (2, 3, 8, 8), True), ("conv3d", (2, 3, 8, 8, 8), True), ("conv_transpose2d", (2, 3, 8, 8), True),
     ("conv1d", (2, 3, 8), False), ("linear", (2, 3, 8, 8), False)],
)  # fmt: skip
def test_layouts_are_chosen_only_where_there_are_convolutions_over_images(
    op: str, shape: tuple[int, ...], kept: bool
) -> None:
    graph = chain(node("a", "linear"), node("b", op, index=1, inputs=(tensor(*shape),)))
    space = Space(memory_format=("as_given", "channels_last"), margin=0.02)
    assert cut_to_graph(space, graph) == (space if kept else Space(margin=0.02))


def test_fused_kernels_are_chosen_only_where_the_optimizer_has_them_and_does_not_use_them() -> None:
    space = Space(optimizer=("as_given", "fused"), margin=0.02)
    weights = [torch.nn.Parameter(torch.ones(2))]
    assert cut_to_optimizer(space, torch.optim.AdamW(weights)) == space
    for without in (torch.optim.RMSprop(weights), torch.optim.AdamW(weights, fused=True)):
        assert cut_to_optimizer(space, without) == Space(margin=0.02)


@pytest.mark.parametrize(
    ("largest_gradient", "first"),
    [(1e-3, 65536.0), (0.3, 8192.0), (4.0, 1024.0), (60.0, 1024.0)],  # 65504 / 8 / gradient is the most
)
def test_plans_begin_with_the_largest_loss_scale_that_skips_no_first_step(
    largest_gradient: float, first: float
) -> None:
    histogram = exponent_histogram(torch.tensor([1e-7, largest_gradient]))
    space = Space(low=("fp16",), loss_scale_initial=(1024.0, 8192.0, 65536.0))
    found = in_order_of_use(space, GradientHistograms(parameters={"w": histogram}, activations={}))
    assert sorted(found.loss_scale_initial) == [1024.0, 8192.0, 65536.0]
    op_graph = chain(node("a", "linear"), node("b", "linear", index=1))
    rows = dimensions(found, layout_of((), layers_of(op_graph), found))
    assert next(row.default for row in rows if row.name == "loss_scale.initial") == first


def test_torch_compile_is_tried_only_with_a_compiler_and_where_the_budget_has_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = chain(*(node(f"n{place}", "linear", index=place) for place in range(8)))
    space, without = Space(compile=("as_given", "inductor")), Space()
    monkeypatch.setattr(subject, "compile_fault", lambda kind: None)
    assert cut_to_compiler(space, "cpu", graph, 5 * compile_s(graph)) == space
    assert cut_to_compiler(space, "cpu", graph, 4.9 * compile_s(graph)) == without
    assert cut_to_compiler(space, "cpu", graph, 0.0) == without
    monkeypatch.setattr(subject, "compile_fault", lambda kind: f"a compiler for {kind}")
    assert cut_to_compiler(space, "cpu", graph, 1e6) == without
