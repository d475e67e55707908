"""A good state to come back to: model, optimizers, precision, scheduler and random states of one moment."""

import copy
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoprec.errors import GuardError, OutputError
from autoprec.runtime.guard.tensor_copies import copy_of
from autoprec.runtime.precision import Precision
from autoprec.runtime.stored import STORED

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What was so at `position`, either at hand in `state` or in `file`."""

    position: int
    step: int
    state: Mapping[str, Any] | None = None
    file: Path | None = None


class Snapshots:
    """The last good states, at most `keep` of them, in host memory or as files in `folder`, one a rank.

    Raises: `OutputError` if the folder cannot be used.
    """

    def __init__(self, folder: Path | None = None, *, rank: int = 0, keep: int = 2) -> None:
        self._folder, self._rank, self._keep = folder, rank, keep
        self._kept: list[Snapshot] = []
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(
                    f"guard: snapshots cannot be kept in {folder}: {error.strerror or error}; name another folder, or "
                    'snapshots="memory"'
                ) from error

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, state: Mapping[str, Any], *, position: int, step: int) -> None:
        """Keep `state`, and drop the oldest beyond what is to be kept.

        Raises: `OutputError` if its file cannot be written; the older ones stay.
        """
        if self._folder is None:
            found = Snapshot(position=position, step=step, state=_held(state))
        else:
            file = self._folder / f"step-{step:09d}-rank-{self._rank}.pt"
            _write(file, state)
            found = Snapshot(position=position, step=step, file=file)
        self._kept.append(found)
        while len(self._kept) > self._keep:
            _forget(self._kept.pop(0))

    def pop(self) -> tuple[Snapshot, Mapping[str, Any]]:
        """Return the newest and what it holds; it is kept no longer, so that the next one asked for is older."""
        found = self._kept.pop()
        if found.state is not None:
            return found, found.state
        assert found.file is not None
        try:
            state: Mapping[str, Any] = torch.load(found.file, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError) as error:
            raise GuardError(
                f"guard: the snapshot {found.file} cannot be read: {error}; go on from your last checkpoint"
            ) from error
        _forget(found)
        return found, state


def state_of(precision: Precision, optimizers: Sequence[torch.optim.Optimizer], scheduler: Any) -> Mapping[str, Any]:
    """Return the state of a run as references: what holds it must copy it."""
    model = precision.model
    return {
        "schema": SCHEMA,
        "model": model.state_dict(),
        "optimizers": [each.state_dict() for each in optimizers],
        "precision": precision.state_dict(),
        "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        "random": _random_states(model),
    }


def restore(
    state: Mapping[str, Any], precision: Precision, optimizers: Sequence[torch.optim.Optimizer], scheduler: Any
) -> None:
    """Put back what `state_of` returned, under whatever policy runs now: FP32 masters go where it has their place.

    Gradients are dropped. Which batch comes next is the loop's own affair: a loader is not rewound.
    """
    precision.model.load_state_dict(state["model"])
    _put_masters(precision, state["precision"]["masters"])
    precision.storage.generators.load(dict(state["precision"]["generators"]))
    if precision.scaler.is_enabled() and state["precision"]["scaler"]:
        precision.scaler.load_state_dict(dict(state["precision"]["scaler"]))
    for optimizer, plain in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(_held(plain))
        optimizer.zero_grad(set_to_none=True)
    if scheduler is not None and state["scheduler"] is not None:
        scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
    _set_random_states(state["random"])


def widen_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Hold in FP32 the state of parameters that were stored low when it was made, and are FP32 now."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
                if low and type(value) is torch.Tensor and parameter.dtype == torch.float32:
                    state[name] = value.float()


def _put_masters(precision: Precision, masters: Mapping[str, torch.Tensor]) -> None:
    parameters = dict(precision.model.named_parameters())
    for name, master in masters.items():
        parameter = parameters[name]
        record = STORED.get(parameter)
        if record is not None and record.has_master:
            record.take(parameter, master.to(parameter.device))
        else:
            with torch.no_grad():
                parameter.copy_(master)


def _held(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `state` in host memory; what is no tensor is copied too."""

    def copied(leaf: Any) -> Any:
        return copy_of(leaf, to_host=True) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    held: dict[str, Any] = pytree.tree_map(copied, dict(state))
    return held


def _write(file: Path, state: Mapping[str, Any]) -> None:
    unfinished = file.with_suffix(".unfinished")
    try:
        torch.save(_held(state), unfinished)
        unfinished.replace(file)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
        unfinished.unlink(missing_ok=True)
        raise OutputError(f"guard: the snapshot {file} cannot be written: {error}; free some space") from error


def _forget(snapshot: Snapshot) -> None:
    if snapshot.file is not None:
        snapshot.file.unlink(missing_ok=True)


def _random_states(model: torch.nn.Module) -> Mapping[str, Any]:
    """Return the random states of Python, torch, the model's CUDA devices, and numpy if it is used."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    states["cuda"] = {str(device): torch.cuda.get_rng_state(device) for device in devices}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [str(name), [int(key) for key in keys], *(float(each) for each in rest)]
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(states["torch"].cpu())
    for device, state in states["cuda"].items():
        torch.cuda.set_rng_state(state.cpu(), device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        name, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype="uint32"), int(position), int(has_gauss), gauss))
