"""The subject: a workload recorded, marked, and seen through a search space that fits the device."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autoprec.analysis import (
    GradientHistograms,
    Mark,
    loss_scale_advice,
    mark_recordings,
    run_backward,
    static_marks,
)
from autoprec.analysis.deadline import after
from autoprec.capture import record, require_reproducible
from autoprec.errors import SpaceError
from autoprec.graph.convolutions import has_convolutions
from autoprec.graph.layers import layers_of
from autoprec.graph.opgraph import OpGraph
from autoprec.policy import MatmulPrecision
from autoprec.runtime.compilation import compile_fault
from autoprec.runtime.device import DeviceInfo
from autoprec.runtime.fused import fused_fault, is_fused_throughout
from autoprec.runtime.matmul_precision import supported
from autoprec.search.baselines import baselines, check_chosen
from autoprec.search.broken import check_first_loss
from autoprec.search.choices import Dimension, dimensions
from autoprec.search.fronts import Fronts, fronts_of
from autoprec.search.layout import layout_of, lowerable_sites
from autoprec.search.space import STORAGES, Space, load_space, space_name, space_path
from autoprec.search.stored_fronts import keep_fronts, kept_fronts
from autoprec.search.trials import Catalog
from autoprec.workload import LoadedWorkload
from autoprec.workload.parts import build_optimizer

# Steps to find out where a format breaks the first batch: trials tell the rest.
_MOST_STEPS = 100
_MARKING_SHARE = 0.15  # of the budget
# Measured on two cores with models of 60 to 600 ops; a warm disk cache of inductor's takes a fifth of it.
_COMPILE_START_S, _COMPILE_OP_S = 15.0, 0.25
_COMPILE_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is tuned, on what, and what may be chosen; `notes` say what the budget left out on the way there."""

    loaded: LoadedWorkload
    device: DeviceInfo
    seed: int
    op_graph: OpGraph
    space: Space
    catalog: Catalog
    rows: tuple[Dimension, ...]
    fronts: Fronts | None = None
    notes: tuple[str, ...] = ()


def record_and_mark(
    loaded: LoadedWorkload,
    device: DeviceInfo,
    space_file: Path | None,
    seed: int,
    chosen: Sequence[str] = (),
    budget_s: float = 0.0,
    fronts_file: Path | None = None,
    *,
    resumes: bool = False,
) -> Subject:
    """Return the subject of a run: one recorded step, its marks, and the space as far as the device allows.

    `chosen` are the baselines; none: those that the space names. Without a budget for a search nothing is run to know
    what a search would need: the marks are those of the op classes, and there are no plans. Plans are written to
    `fronts_file`, or read from it where the run `resumes` a study.

    The recording and its model are gone afterwards: trials need the room.

    Raises: `WorkloadError` if the loss is not finite, naming the op; `ReplayError` if the workload does not repeat
    itself; `SpaceError` if the device runs no low format of the space, or not a baseline that was chosen.
    """
    precisions = supported(device.kind)
    space = load_space(space_file or space_path(space_name(device)))
    space = cut_to_device(replace(space, baselines=tuple(chosen) or space.baselines), device, precisions)
    check_chosen(space.baselines, device, precisions)
    space, op_graph, marks, fronts, notes = _looked_at(loaded, device, space, seed, budget_s)
    if fronts is not None and fronts_file is not None:
        if resumes:
            fronts = kept_fronts(fronts, op_graph, fronts_file)
        else:
            keep_fronts(fronts, op_graph, fronts_file)
    gc.collect()  # replays hang together in cycles, and in them the recording and its model
    catalog = catalog_of(op_graph, marks, space, device, precisions, fronts)
    return Subject(
        loaded=loaded,
        device=device,
        seed=seed,
        op_graph=op_graph,
        space=space,
        catalog=catalog,
        rows=dimensions(space, catalog.layout),
        fronts=fronts,
        notes=notes,
    )


def _looked_at(
    loaded: LoadedWorkload, device: DeviceInfo, space: Space, seed: int, budget_s: float
) -> tuple[Space, OpGraph, tuple[Mark, ...], Fronts | None, tuple[str, ...]]:
    """Return the space as far as the workload has a use for it, the graph of a recorded step, its marks, and plans.

    There are plans with a budget for a search alone; the last are notes of what it left out.
    """
    recording = record(loaded.workload, device=device.kind, seed=seed)
    space = cut_to_graph(space, recording.op_graph)
    space = cut_to_optimizer(space, build_optimizer(loaded.workload.optimizer, recording.model))
    space = cut_to_compiler(space, device.kind, recording.op_graph, budget_s)
    check_first_loss(recording)
    require_reproducible(recording, loaded.workload)
    op_graph = recording.op_graph
    if budget_s <= 0:
        return space, op_graph, static_marks(op_graph, space.low, device.kind), None, ()
    gradients = run_backward((recording,))
    recording.model.zero_grad(set_to_none=True)
    space = in_order_of_use(space, gradients)
    deadline = after(_MARKING_SHARE * budget_s)
    marking = mark_recordings((recording,), space.low, device, gradients, _MOST_STEPS, deadline=deadline)
    fronts = fronts_of(recording, marking, space.low, device, lowerable_sites(op_graph), budget_s)
    return space, op_graph, marking.marks, fronts, marking.left_out


def cut_to_device(space: Space, device: DeviceInfo, precisions: Sequence[MatmulPrecision]) -> Space:
    """Return `space` with the low formats, FP32 matmul precisions and storage formats that the device has.

    Raises: `SpaceError` if no low format is left.
    """
    low = tuple(name for name in space.low if name in device.formats)
    if not low:
        raise SpaceError(
            f"the search space has the low formats {', '.join(space.low)}, and {device.name} runs "
            f"{', '.join(device.formats)}; give a space with one of these (--space FILE)"
        )
    matmul: tuple[MatmulPrecision, ...] = tuple(name for name in space.float32_matmul if name in precisions)
    storage = tuple(name for name in space.storage if STORAGES[name].storage in device.formats)
    return replace(space, low=low, float32_matmul=matmul or ("ieee",), storage=storage or ("fp32",))


def cut_to_graph(space: Space, op_graph: OpGraph) -> Space:
    """Return `space` without what the graph has no op for: layouts, where nothing convolves."""
    return space if has_convolutions(op_graph) else replace(space, memory_format=("as_given",))


def cut_to_optimizer(space: Space, optimizer: torch.optim.Optimizer) -> Space:
    """Return `space` without fused kernels where the optimizer of the workload has none, or steps in them anyway."""
    is_choice = fused_fault(optimizer) is None and not is_fused_throughout(optimizer)
    return space if is_choice else replace(space, optimizer=("as_given",))


def cut_to_compiler(space: Space, device_kind: str, op_graph: OpGraph, budget_s: float) -> Space:
    """Return `space` without torch.compile where inductor lacks something or the budget has no room for it."""
    has_room = compile_s(op_graph) <= _COMPILE_SHARE * budget_s
    return space if has_room and compile_fault(device_kind) is None else replace(space, compile=("as_given",))


def in_order_of_use(space: Space, gradients: GradientHistograms) -> Space:
    """Return `space` with the initial loss scale that plans take first: the largest that leaves gradients headroom.

    A larger one skips the first steps, which are lost; what the steps after them allow, growing finds out.
    """
    largest = loss_scale_advice(gradients, "fp16").initial
    by_use = sorted(space.loss_scale_initial, key=lambda scale: (scale > largest, scale if scale > largest else -scale))
    return replace(space, loss_scale_initial=tuple(by_use))


def compile_s(op_graph: OpGraph) -> float:
    """Return about how long torch.compile takes for the first time: a rough number, from the number of ops."""
    return _COMPILE_START_S + _COMPILE_OP_S * len(op_graph.sites())


def catalog_of(
    op_graph: OpGraph,
    marks: Sequence[Mark],
    space: Space,
    device: DeviceInfo,
    precisions: Sequence[MatmulPrecision],
    fronts: Fronts | None = None,
) -> Catalog:
    """Return what trials are made from."""
    layout = layout_of(marks, layers_of(op_graph), space, lowerable_sites(op_graph), op_graph)
    found = {} if fronts is None else fronts.by_format
    planned = {low: tuple(plan.low_sites for plan in front.plans) for low, front in found.items()}
    beyond = {low: tuple(plan.low_sites for plan in front.beyond) for low, front in found.items()}
    return Catalog(
        baselines=baselines(
            device,
            precisions,
            op_graph,
            space.baselines,
            with_layouts="channels_last" in space.memory_format,
            compiled="inductor" in space.compile,
        ),
        layout=replace(layout, fronts=planned, beyond=beyond),
        device={"kind": device.kind, "name": device.name},
        cost_model=None if fronts is None else fronts.cost_model,
        errors={low: front.errors.errors for low, front in found.items()},
    )
