"""What each format would hold of parameters, gradients, optimizer state and buffers, measured in a few real steps.

Every statement about parameters is about storing them in the format without FP32 master copies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoprec.analysis.cast_optimizer import CastOptimizer, cast_optimizers
from autoprec.analysis.ema import (
    AverageMoves,
    WeightAverage,
    average_faults,
    average_moves,
    weight_averages,
)
from autoprec.analysis.rounded_step import RoundingProbe, rounding_faults
from autoprec.analysis.short_run import NUM_MICRO_BATCHES, ShortRun, short_run
from autoprec.analysis.stored_buffers import statistic_faults
from autoprec.analysis.stored_gradients import gradient_faults
from autoprec.analysis.stored_moments import Moments, moments
from autoprec.analysis.stored_parameters import parameter_faults
from autoprec.analysis.stored_values import STORED_VERDICTS, StoredFault, StoredVerdict
from autoprec.capture import Recording
from autoprec.capture.memory import named_tensors
from autoprec.numerics import format_named
from autoprec.workload import Workload, load_batches

STORED_PARTS = ("parameters", "gradients", "optimizer_state", "buffers")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredParameter:
    """One parameter: its size, the elements of optimizer state that go with it, and what rounding does to its steps.

    `lost_update_frac` says for each format which fraction of the updates of its elements change nothing; empty if no
    step was taken or no gradient reaches it.
    """

    name: str
    shape: tuple[int, ...]
    num_elements: int
    num_state_elements: int
    lost_update_frac: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBuffer:
    """One floating-point buffer; `momentum` is set for statistics that forward passes move, where it was measured."""

    name: str
    shape: tuple[int, ...]
    num_elements: int
    momentum: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """The verdict on storing one part of a run in a format: the worst one on a tensor of it.

    `names` are the tensors with that verdict, worst first (all of them if it is `fine`), of `num_tensors` that were
    measured; `reason` is the first one's.
    """

    part: str
    format: str
    verdict: StoredVerdict
    names: tuple[str, ...]
    num_tensors: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """What a training run stores.

    `measured` says whether optimizer steps were taken: if not (the optimizer wants a closure), state and updates are
    unknown. `lr`, `eps` and `second_moment_decay` (Adam's beta2) are the optimizer's, None where it has none.
    `faults` holds what was measured of every tensor, part and format, `fine` ones included. `not_followed` names the
    parameters whose optimizer state could not be: the optimizer's step on them is not elementwise.
    """

    optimizer: str
    measured: bool
    lr: float | None
    eps: float | None
    second_moment_decay: float | None
    parameters: tuple[StoredParameter, ...]
    buffers: tuple[StoredBuffer, ...]
    num_steps: int = 0
    faults: tuple[StoredFault, ...] = ()
    cast: tuple[CastOptimizer, ...] = ()
    averages: tuple[WeightAverage, ...] = ()
    average_moves: tuple[AverageMoves, ...] = ()
    not_followed: tuple[str, ...] = ()

    def num_bytes(self, part: str, format_name: str) -> int:
        """Return the size of `parameters`, `gradients`, `optimizer_state` or `buffers` if stored in a format."""
        counts = {
            "parameters": (each.num_elements for each in self.parameters),
            "gradients": (each.num_elements for each in self.parameters),
            "optimizer_state": (each.num_state_elements for each in self.parameters),
            "buffers": (each.num_elements for each in self.buffers),
        }
        return sum(counts[part]) * format_named(format_name).storage_bits // 8

    def parts(self) -> tuple[StoredPart, ...]:
        """Return the verdict on each part in each format, in the order they were measured."""
        groups: dict[tuple[str, str], list[StoredFault]] = {}
        for fault in self.faults:
            groups.setdefault((fault.part, fault.format), []).append(fault)
        return tuple(_part(group) for group in groups.values())


def storage_of(recordings: Sequence[Recording], workload: Workload, formats: Sequence[str]) -> Storage:
    """Return what a run of the recorded model stores, and what becomes of that in each format.

    Steps are taken on a fresh model with the values of the recorded one, which is left as it is. `recordings` are of
    one model; the rounding of what the step reads is judged on the first.
    Costs 6 forward and backward passes, one more for each format (up to 12 more for one in which rounding the model
    changes the step), two forward passes for a model with running statistics, and the arithmetic on the samples, which
    takes about as long as one pass; and the memory of a second model in training.
    """
    recording = recordings[0]
    batches = load_batches(workload, NUM_MICRO_BATCHES, recording.device)
    run = short_run(
        workload, batches, device=recording.device, seed=recording.seed, state=named_tensors(recording.model)
    )
    averages = weight_averages(recording.model, run.buffers)
    found = moments(run, formats)
    faults = (
        *parameter_faults(run, formats),
        *gradient_faults(run, formats),
        *found.faults,
        *statistic_faults(run, formats, averaged=frozenset(name for each in averages for name in each.pairs)),
        *rounding_faults(RoundingProbe(recording), formats),
        *average_faults(run, averages, formats),
    )
    return _storage(recording.model, run, faults, found, averages, formats)


def frozen_parameters(storage: Storage, format_name: str, frozen_frac: float = 0.999) -> tuple[str, ...]:
    """Return the names of the parameters that practically did not move in any step if stored in the format."""
    return tuple(each.name for each in storage.parameters if each.lost_update_frac.get(format_name, 0) >= frozen_frac)


def _storage(
    model: nn.Module,
    run: ShortRun,
    faults: tuple[StoredFault, ...],
    found: Moments,
    averages: tuple[WeightAverage, ...],
    formats: Sequence[str],
) -> Storage:
    lost: dict[str, dict[str, float]] = {}
    for fault in faults:
        if fault.part == "parameters" and "lost_update_frac" in fault.numbers:
            lost.setdefault(fault.name, {})[fault.format] = fault.numbers["lost_update_frac"]
    betas = _of_groups(run, "betas")
    return Storage(
        optimizer=type(run.optimizer).__name__,
        measured=run.num_steps > 0,
        lr=_number(_of_groups(run, "lr")),
        eps=_number(_of_groups(run, "eps")),
        second_moment_decay=_number(betas[1]) if isinstance(betas, tuple | list) and len(betas) > 1 else None,
        parameters=tuple(
            StoredParameter(
                name=name,
                shape=tuple(parameter.shape),
                num_elements=parameter.numel(),
                num_state_elements=run.state_numel.get(name, 0),
                lost_update_frac=lost.get(name, {}),
            )
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ),
        buffers=tuple(_buffers(model, run)),
        num_steps=run.num_steps,
        faults=faults,
        cast=cast_optimizers(run, formats),
        averages=averages,
        average_moves=average_moves(run, formats),
        not_followed=found.not_followed,
    )


def _part(group: Sequence[StoredFault]) -> StoredPart:
    worst = max((fault.verdict for fault in group), key=STORED_VERDICTS.index)
    same = sorted((fault for fault in group if fault.verdict == worst), key=lambda fault: -_size(fault))
    first = same[0]
    names = tuple(dict.fromkeys(fault.name for fault in same))
    num_tensors = len({fault.name for fault in group})
    return StoredPart(
        part=first.part, format=first.format, verdict=worst, names=names, num_tensors=num_tensors, reason=first.reason
    )


def _size(fault: StoredFault) -> float:
    """Return the number that decided: the first one that was noted."""
    return next(iter(fault.numbers.values()), 0.0)


def _of_groups(run: ShortRun, key: str) -> Any:
    """Return the first parameter group's value for `key`."""
    return run.optimizer.param_groups[0].get(key)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _buffers(model: nn.Module, run: ShortRun) -> Iterator[StoredBuffer]:
    momenta = {each.name: 1 - each.decay for each in run.buffers if each.decay is not None}
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            yield StoredBuffer(
                name=name, shape=tuple(buffer.shape), num_elements=buffer.numel(), momentum=momenta.get(name)
            )
