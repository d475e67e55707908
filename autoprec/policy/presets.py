"""Policies nobody searched for, one row each: what every search has to beat."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeAlias

from autoprec.errors import PolicyError
from autoprec.policy.apex import apex_o1, apex_o2, apex_o3
from autoprec.policy.parameters import Parameters
from autoprec.policy.policy import LossScale, Policy
from autoprec.policy.recipes import fp8_h100, fp16_resnet, tpu_bf16
from autoprec.policy.torch_presets import GRAD_SCALER, autocast, bf16_throughout, float8_matmul, fp32, reduced_matmul

DEVICE_KINDS = ("cpu", "cuda", "mps")
_FLOAT8_KINDS = ("cpu", "cuda")  # emulated where the device has no FP8 kernels

Baseline: TypeAlias = Literal["runs", "native"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A policy that has a name.

    `build` takes a kind of device; None: the policy is made for the graph of a workload. `stands_for` is the system
    that it repeats, `does` what that comes to, `leaves_out` what of the original no policy can say. It is a baseline
    of `tune` where the device `runs` its formats, or only where it has `native` units for them; never where it
    emulates; and one `for_convolutions` only where there are some. `has_twin`: there is a second row, with the weights
    of convolutions channels last. `has_compiled_twin`: for each of these there is one under torch.compile.
    """

    name: str
    stands_for: str
    does: str
    leaves_out: tuple[str, ...] = ()
    build: Callable[[str], Policy] | None
    kinds: tuple[str, ...] = DEVICE_KINDS
    baseline: Baseline = "native"
    for_convolutions: bool = False
    has_twin: bool = False
    has_compiled_twin: bool = False


def _twin(row: Preset) -> Preset:
    """Return the row of a preset with channels_last."""
    name = f"{row.name}-channels-last"

    def build(device_kind: str) -> Policy:
        assert row.build is not None
        return replace(row.build(device_kind), name=name, memory_format="channels_last")

    return replace(
        row,
        name=name,
        stands_for=f"{row.stands_for}, after model.to(memory_format=torch.channels_last)",
        does=f"as {row.name}, with the weights of convolutions channels last",
        build=build,
        for_convolutions=True,
        has_twin=False,
    )


def _compiled_twin(row: Preset) -> Preset:
    """Return the row of a preset under torch.compile."""
    name = f"{row.name}-compiled"

    def build(device_kind: str) -> Policy:
        assert row.build is not None
        return replace(row.build(device_kind), name=name, compile="inductor")

    return replace(
        row,
        name=name,
        stands_for=f"{row.stands_for}, under torch.compile",
        does=f"as {row.name}, compiled with inductor",
        build=build,
        has_compiled_twin=False,
    )


def _with_twins(row: Preset) -> tuple[Preset, ...]:
    """Return a row and its twins."""
    rows = (row, _twin(row)) if row.has_twin else (row,)
    compiled = tuple(_compiled_twin(each) for each in rows) if row.has_compiled_twin else ()
    return (*rows, *compiled)


_ROWS = (
    Preset(
        name="fp32",
        stands_for="plain training",
        does="nothing is installed",
        build=fp32,
        baseline="runs",
        has_twin=True,
        has_compiled_twin=True,
    ),
    Preset(
        name="fp32-matmul-bf16",
        stands_for="torch.backends.mkldnn.matmul.fp32_precision",
        does="FP32 tensors, bf16 inside matmuls and convolutions",
        build=partial(reduced_matmul, "bf16"),
        kinds=("cpu",),
        baseline="runs",
        has_twin=True,
    ),
    Preset(
        name="fp32-matmul-tf32",
        stands_for="torch.backends.cuda.matmul.fp32_precision",
        does="FP32 tensors, TF32 inside matmuls and convolutions",
        build=partial(reduced_matmul, "tf32"),
        kinds=("cuda",),
        baseline="runs",
        has_twin=True,
    ),
    Preset(
        name="autocast-bf16",
        stands_for="torch.autocast in bf16",
        does="torch's lists for the device as rules, one an op",
        leaves_out=("ops under no_grad, which autocast lowers", "what autocast does inside GRU and RNN cells"),
        build=partial(autocast, "bf16", LossScale()),
        baseline="runs",
        has_twin=True,
        has_compiled_twin=True,
    ),
    Preset(
        name="autocast-fp16",
        stands_for="torch.autocast in fp16 with GradScaler",
        does="torch's lists for the device as rules, one an op; dynamic loss scale",
        leaves_out=("ops under no_grad, which autocast lowers", "what autocast does inside GRU and RNN cells"),
        build=partial(autocast, "fp16", GRAD_SCALER),
        baseline="runs",
        has_twin=True,
    ),
    Preset(
        name="fp8-matmul",
        stands_for="torchao's float8 training under torch.autocast",
        does="every linear in FP8, the rest as autocast-bf16",
        leaves_out=("torchao's choice of layers by name: put a rule for these above",),
        build=float8_matmul,
        kinds=_FLOAT8_KINDS,
        baseline="runs",
    ),
    Preset(
        name="low-bf16",
        stands_for="model.to(torch.bfloat16)",
        does="bf16 sites and parameters; updates below half an ulp of a weight are lost",
        leaves_out=("bf16 buffers: they stay FP32",),
        build=partial(bf16_throughout, "low-bf16", Parameters(storage="bf16"), "as model.to(torch.bfloat16)"),
        baseline="runs",
    ),
    Preset(
        name="bf16-master",
        stands_for="bf16 training with FP32 master weights, as large language models are trained",
        does="bf16 sites and parameters, no FP32 island; optimizers step on FP32 masters",
        build=partial(
            bf16_throughout,
            "bf16-master",
            Parameters(storage="bf16", master="fp32"),
            "bf16 throughout with FP32 master weights",
        ),
        baseline="runs",
        has_twin=True,
        has_compiled_twin=True,
    ),
    Preset(
        name="bf16-stochastic",
        stands_for="bf16 training with stochastic rounding",
        does="bf16 sites and parameters; each step is rounded stochastically",
        build=partial(
            bf16_throughout,
            "bf16-stochastic",
            Parameters(storage="bf16", rounding="stochastic"),
            "bf16 throughout, steps rounded stochastically",
        ),
        baseline="runs",
    ),
    Preset(
        name="apex-o1",
        stands_for="NVIDIA Apex amp, opt_level O1",
        does="Apex's lists as rules, one an op; all else as given; dynamic loss scale",
        leaves_out=(
            "functions and methods of one name are one op: Apex does not patch Tensor.softmax or torch.sub",
            "local_response_norm and multilabel_soft_margin_loss are entered: the ops inside follow the lists",
            "ops newer than its lists, such as scaled_dot_product_attention, run as given",
            "binary_cross_entropy is refused on fp16 by Apex, and runs as given here",
            "a loss scale for each of several losses",
        ),
        build=apex_o1,
    ),
    Preset(
        name="apex-o2",
        stands_for="NVIDIA Apex amp, opt_level O2",
        does="fp16 sites and parameters but for batch norms, FP32 masters and outputs; dynamic loss scale",
        leaves_out=(
            "a tensor that forward makes in FP32 promotes what it meets; here it is cast to fp16 at the site",
            "fp16 buffers: they stay FP32 and are cast where they are read",
            "fp16 gradients: the parts of the gradient of a weight that is read twice are summed in FP32",
            "a batch norm without parameters keeps FP32 statistics",
        ),
        build=apex_o2,
    ),
    Preset(
        name="apex-o3",
        stands_for="NVIDIA Apex amp, opt_level O3",
        does="fp16 sites and parameters, FP32 outputs; no masters, no loss scale",
        leaves_out=(
            "a tensor that forward makes in FP32 promotes what it meets; here it is cast to fp16 at the site",
            "fp16 buffers, running statistics among them: they stay FP32",
        ),
        build=apex_o3,
    ),
    Preset(
        name="tf-graph-pass-bf16",
        stands_for="TensorFlow's auto_mixed_precision graph pass, bf16",
        does="allow, infer, deny and clear ops painted on the recorded graph, in rules for its sites",
        leaves_out=(
            "gradient ops are painted for themselves; here the backward of a site follows its forward",
            "each call of a shared module is painted for itself; here FP32 in one call is FP32 in all",
            "what the environment variables of TensorFlow add to its lists",
        ),
        build=None,
    ),
    Preset(
        name="tf-graph-pass-fp16",
        stands_for="TensorFlow's auto_mixed_precision graph pass, fp16, with LossScaleOptimizer",
        does="as tf-graph-pass-bf16; dynamic loss scale from 2^15",
        leaves_out=("as tf-graph-pass-bf16", "ops that lack an fp16 kernel on the device are not left out"),
        build=None,
    ),
    Preset(
        name="tpu-bf16",
        stands_for="GPT-style training on TPUs: Flax modules with dtype bfloat16 and FP32 parameters",
        does="bf16 sites; norms, softmaxes and losses in FP32; FP32 parameters, which are the masters",
        leaves_out=(
            "bf16 passes inside FP32 matmuls, the default of a TPU: none is FP32 here",
            "a norm that is written out op by op: put a rule such as *norm* above",
            "the softmax inside a fused attention, which is the kernel's own",
            "the last projection in FP32, as T5X has it: put a rule for it above",
        ),
        build=tpu_bf16,
    ),
    Preset(
        name="fp16-resnet",
        stands_for="FP16 training of a ResNet with loss scaling, as on a consumer RTX card",
        does="fp16 sites, channels last; softmaxes, losses, batch norm statistics and parameters in FP32; "
        "dynamic loss scale",
        leaves_out=("fp16 accumulation inside matmuls, which GeForce cards run twice as fast",),
        build=fp16_resnet,
    ),
    Preset(
        name="fp8-h100",
        stands_for="FP8 training on H100, as torchao (tensorwise) and TransformerEngine (current scaling)",
        does="every linear in FP8, all else in bf16; softmaxes and losses in FP32; FP32 parameters",
        leaves_out=(
            "factors from the largest values of earlier steps, TransformerEngine's DelayedScaling",
            "FP8 weights kept between micro-batches, and FP8 all-gather",
            "torchao's choice of layers by name and size: put a rule for these above",
        ),
        build=fp8_h100,
        kinds=_FLOAT8_KINDS,
    ),
)
PRESETS: Mapping[str, Preset] = MappingProxyType({row.name: row for first in _ROWS for row in _with_twins(first)})


def preset_names(device_kind: str) -> tuple[str, ...]:
    """Return the names of the presets there are for a kind of device (cpu, cuda, mps) and any workload."""
    return tuple(name for name, row in _rows(device_kind).items() if row.build is not None)


def graph_preset_names() -> tuple[str, ...]:
    """Return the names of the presets that are made for the graph of a workload."""
    return tuple(name for name, row in PRESETS.items() if row.build is None)


def preset(name: str, device_kind: str) -> Policy:
    """Return the preset called `name` for a kind of device (cpu, cuda, mps).

    The autocast presets state torch's lists for that device as rules, one an op.

    Raises: `PolicyError` if there is no such preset for that kind of device, the message lists those there are; or if
    it is made for the graph of a workload.
    """
    rows = _rows(device_kind)
    if name not in rows:
        near = difflib.get_close_matches(name, rows, n=1, cutoff=0.5)
        hint = f'; nearest: "{near[0]}"' if near else ""
        raise PolicyError(f'"{name}" is not a preset for {device_kind}; presets: {", ".join(rows)}{hint}')
    build = rows[name].build
    if build is None:
        raise PolicyError(
            f'preset "{name}" is made for the graph of a workload; write it as a file with '
            f'"autoprec policy show {name} WORKLOAD --out policy.yaml" and give the file'
        )
    return build(device_kind)


def _rows(device_kind: str) -> dict[str, Preset]:
    if device_kind not in DEVICE_KINDS:
        raise PolicyError(f'presets for device kind "{device_kind}"; device kinds: {", ".join(DEVICE_KINDS)}')
    return {name: row for name, row in PRESETS.items() if device_kind in row.kinds}
