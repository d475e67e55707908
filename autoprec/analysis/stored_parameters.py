"""Parameters stored in a low format without FP32 masters: which updates they lose."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from autoprec.analysis.short_run import ParameterRun, ShortRun
from autoprec.analysis.stored_values import StoredFault, StoredVerdict, frac, percent, stored
from autoprec.runtime.rounding import stochastic_bf16

# A parameter of which this fraction stays where it is does not learn.
FROZEN_FRAC = 0.999
# One that loses fewer of its updates than this loses the small ones: most of its way is made by the others.
SWAMPED_FRAC = 0.5
# Formats that the runtime rounds to stochastically.
STOCHASTIC = ("bf16",)


def parameter_faults(run: ShortRun, formats: Sequence[str]) -> Iterator[StoredFault]:
    """Yield what storing each parameter low does to its first steps, if only the optimizer steps on it.

    The FP32 updates of the run are added to the stored values, which are rounded after each step. `kept_movement` says
    how far that goes along the way that FP32 went (1: as far); `with_stochastic_rounding` says it of that.
    """
    if run.num_steps == 0:
        return
    decayed = _weight_decay(run)
    for index, parameter in enumerate(run.parameters):
        for name in formats:
            yield _fault(parameter, name, None if decayed is None else decayed[index])


def _fault(run: ParameterRun, format_name: str, decayed: torch.Tensor | None) -> StoredFault:
    updates = [new - old for old, new in pairwise(run.values)]
    moved = torch.stack([update != 0 for update in updates])
    path = _path(run.values[0], updates, format_name)
    stays = torch.stack([new == old for old, new in pairwise(path)])
    way = run.values[-1] - run.values[0]
    numbers = {"lost_update_frac": frac(stays, moved), "kept_movement": _along(path[-1] - path[0], way)}
    if format_name in STOCHASTIC:
        end = _stochastic(path[0], updates)
        numbers["with_stochastic_rounding"] = _along(end - path[0], way)
    numbers |= _decay_numbers(run.values[0], decayed, format_name)
    lost = numbers["lost_update_frac"]
    verdict: StoredVerdict = "needs_master" if lost >= SWAMPED_FRAC else "fine"
    reason = f"{percent(lost)} of its updates are below half a spacing of {format_name} and change nothing"
    if lost >= FROZEN_FRAC:
        reason = f"no element moves in {len(updates)} steps: every update is below half a spacing of {format_name}"
    return StoredFault(
        part="parameters", name=run.name, format=format_name, verdict=verdict, reason=reason, numbers=numbers
    )


def _path(start: torch.Tensor, updates: Sequence[torch.Tensor], format_name: str) -> list[torch.Tensor]:
    path = [stored(start, format_name)]
    for update in updates:
        path.append(stored(path[-1] + update, format_name))
    return path


def _stochastic(start: torch.Tensor, updates: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return where stochastic rounding to bf16 ends."""
    generator = torch.Generator(start.device).manual_seed(0)
    value = start
    for update in updates:
        value = stochastic_bf16(value + update, generator).float()
    return value


def _along(movement: torch.Tensor, way: torch.Tensor) -> float:
    """Return how far `movement` goes along `way`, as a fraction of it."""
    square = float(way.double().square().sum())
    return float((movement.double() * way.double()).sum()) / square if square else 1.0


def _decay_numbers(start: torch.Tensor, decayed: torch.Tensor | None, format_name: str) -> dict[str, float]:
    """Return how much weight decay takes off in one step, and of how many elements that is lost, if there is any."""
    if decayed is None or torch.equal(decayed, start):
        return {}
    value = stored(start, format_name)
    after = stored(value + (decayed - start), format_name)
    size = float(((decayed - start).norm() / start.norm()).item()) if bool(start.any()) else 0.0
    return {"weight_decay": size, "lost_weight_decay_frac": frac(after == value, decayed != start)}


def _weight_decay(run: ShortRun) -> list[torch.Tensor] | None:
    """Return what a first step without any gradient makes of the parameters: weight decay is all that is left."""
    twin = run.twin()
    try:
        twin.step([torch.zeros_like(each.values[0]) for each in run.parameters])
    except (RuntimeError, TypeError, ValueError):  # an optimizer that asks for a shape
        return None
    return twin.values()
