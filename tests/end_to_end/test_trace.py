"""Every preset is honored by the kernels of architectures that nobody of us wrote; what is exempt is known."""

import itertools
from typing import Any

import pytest
import torch

from autoprec import runtime
from autoprec.errors import DeviceError, FormatError
from autoprec.policy import preset_names
from tests.tiny_models import MODELS

TRACED = ("GPT-2", "BERT", "T5", "Llama", "Mamba", "ViT", "ConvNeXt", "CNN")
IMAGES = ("ViT", "ConvNeXt", "CNN")
FORMATS = {"autocast-bf16": "bf16", "autocast-fp16": "fp16", "low-bf16": "bf16"}
FORMATS |= {"bf16-master": "bf16", "bf16-stochastic": "bf16", "fp8-matmul": "bf16", "fp8-h100": "bf16"}
FORMATS |= {"apex-o1": "fp16", "apex-o2": "fp16", "apex-o3": "fp16", "tpu-bf16": "bf16", "fp16-resnet": "fp16"}
FORMATS |= {f"{name}-channels-last": FORMATS[name] for name in ("autocast-bf16", "autocast-fp16", "bf16-master")}
FLOAT8 = ("fp8-matmul", "fp8-h100")
EXEMPT = (
    "torch's own kernel casts to fp32",
    "left alone: no_grad",
    "writes to",
    "the call names",
    "no kernel computed",
)


def _traced() -> list[Any]:
    found = []
    for name, preset in itertools.product(TRACED, preset_names("cpu")):
        if not preset.endswith("-compiled"):  # traced as it is written: that of its eager twin
            is_twin = (
                preset.endswith("-channels-last") and name not in IMAGES
            )  # without images the layouts are the same
            found.append(pytest.param(name, preset, marks=pytest.mark.long if is_twin else ()))
    return found


@pytest.mark.parametrize(("name", "preset"), _traced())
def test_presets_are_honored(name: str, preset: str) -> None:
    build, batch = MODELS[name]()
    torch.manual_seed(0)
    model = build()
    try:
        precision = runtime.apply(model, preset)
    except DeviceError as error:
        pytest.skip(str(error))  # no such unit inside this CPU
    with precision:
        try:
            trace = precision.trace(batch, lambda model, batch: model(**batch).loss)
        except FormatError as error:
            if preset not in FLOAT8 or "not a multiple of 16" not in str(error):
                raise
            pytest.skip("FP8 kernels take multiples of 16")
    trace.check()
    assert trace.rows
    for row in trace.exempt:  # attention with dropout has no fused kernel on a CPU; rotations are made under no_grad
        assert row.reason.startswith(EXEMPT)
    given = (
        "scaled_dot_product_attention" if preset == "apex-o1" else ""
    )  # newer than Apex's lists: whatever reaches it
    listed = [row for row in trace.rows if row.honored and row.site.op != given]
    matmuls = [k for row in listed for k in (*row.kernels, *row.backward_kernels) if k.is_matmul]
    assert matmuls
    emulated = {kernel for row in trace.rows if row.emulated for kernel in (*row.kernels, *row.backward_kernels)}
    assert bool(emulated) == (preset in FLOAT8)
    ran = {name for kernel in matmuls if kernel not in emulated for name in kernel.takes}
    assert ran <= {FORMATS.get(preset, "fp32")}
    assert {kernel.inside for kernel in matmuls} <= {"", "bf16" if preset.startswith("fp32-matmul-bf16") else "ieee"}
    backward = [row for row in trace.rows if row.honored and any(k.is_matmul for k in row.backward_kernels)]
    assert all(row.ran_backward == row.ran for row in backward)
    assert len(backward) >= len([row for row in trace.rows if row.site.op == "linear"])
