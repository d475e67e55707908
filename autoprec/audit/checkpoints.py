"""Checkpoints: those of the user, read with care, and what two of ours differ in."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoprec.errors import WorkloadError
from autoprec.workload.batches import same_bits
from autoprec.workload.parts import build_model
from autoprec.workload.seeding import seeded

if TYPE_CHECKING:
    from autoprec.audit.audited import Audited

_KEYS = ("model", "model_state_dict", "state_dict")


def model_state(path: Path, audited: "Audited") -> Mapping[str, torch.Tensor]:
    """Return the state of the workload's model in a checkpoint: a state dict, or one under a usual key of a mapping.

    Raises: `WorkloadError` if the file cannot be read without running code from it, or is that of another model.
    """
    try:
        found = torch.load(path, map_location=audited.device.kind, weights_only=True)
    except FileNotFoundError as error:
        raise WorkloadError(f'audit: there is no checkpoint "{path}"; give files that torch.save wrote') from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise WorkloadError(
            f'audit: checkpoint "{path}" cannot be read with torch.load(weights_only=True): '
            f"{str(error).splitlines()[0]}; save model.state_dict()"
        ) from error
    state = found
    if isinstance(found, Mapping):
        state = next((found[key] for key in _KEYS if isinstance(found.get(key), Mapping)), found)
    _check(path, state, audited)
    checked: Mapping[str, torch.Tensor] = state
    return checked


def _check(path: Path, state: object, audited: "Audited") -> None:
    """Refuse a state that is not one of this model, name by name and shape by shape."""
    if not isinstance(state, Mapping):
        raise WorkloadError(
            f'audit: checkpoint "{path}" holds {type(state).__name__}; allowed: model.state_dict(), or a mapping with '
            f"one under {', '.join(_KEYS)}"
        )
    with seeded(audited.seed):
        own = build_model(audited.loaded.workload, "cpu").state_dict()
    lacking, foreign = sorted(own.keys() - state.keys()), sorted(map(str, state.keys() - own.keys()))
    if lacking or foreign:
        what = f'lacks "{lacking[0]}"' if lacking else f'has "{foreign[0]}", which the model has not'
        raise WorkloadError(
            f'audit: checkpoint "{path}" is that of another model: it {what} (and {len(lacking or foreign) - 1} more '
            f"like it); give checkpoints of the model in {audited.loaded.path.name}"
        )
    for name, tensor in own.items():
        shape = getattr(state[name], "shape", None)
        if isinstance(tensor, torch.Tensor) and shape != tensor.shape:
            raise WorkloadError(
                f'audit: checkpoint "{path}" is that of another model: "{name}" is {_shape(shape)} there and '
                f"{_shape(tensor.shape)} here; give checkpoints of the model in {audited.loaded.path.name}"
            )


def _shape(shape: Any) -> str:
    return "no tensor" if shape is None else "x".join(map(str, shape)) or "a single number"


def differences(one: Any, other: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Yield where two checkpoints differ in bits, and by how much at most (inf where that is no number)."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            yield where, float("inf")
        elif not same_bits(one.detach().cpu(), other.detach().cpu()):
            yield where, _distance(one, other)
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            yield from differences(one.get(key), other.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{where}.{index}")
    elif isinstance(one, float) and isinstance(other, float):
        if one != other and not (one != one and other != other):  # noqa: PLR0124 NaN is the same as NaN here
            yield where, abs(one - other)
    elif type(one) is not type(other) or one != other:
        yield where, float("inf")


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.is_floating_point():
        return float("inf")
    apart = (one.double() - other.double()).abs()
    return float(apart.nan_to_num(nan=float("inf")).max())
