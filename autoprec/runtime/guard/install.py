"""`guard`: put a guard around an ordinary training loop."""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from autoprec.errors import GuardError, a_or_an
from autoprec.runtime.guard.events import Events, GuardEvent, Reaction, Writer
from autoprec.runtime.guard.guarded_loop import Guard
from autoprec.runtime.guard.limits import GuardLimits
from autoprec.runtime.guard.ranks import Ranks
from autoprec.runtime.guard.reactions import Run
from autoprec.runtime.guard.snapshot import Snapshots
from autoprec.runtime.one_step import Loss
from autoprec.runtime.precision import Precision

REACTIONS: tuple[Reaction, ...] = ("warn", "promote", "fallback", "restore", "stop")


def guard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    precision: Precision,
    *,
    loss: Loss | None = None,
    every: int = 20,
    snapshot_every: int | None = 1000,
    snapshots: str | PathLike[str] = "memory",
    reactions: Sequence[Reaction] = REACTIONS,
    limits: GuardLimits | None = None,
    on_event: Callable[[GuardEvent], object] | None = None,
    events: str | PathLike[str] | None = None,
    tensorboard: Writer | None = None,
    group: Any = "auto",
) -> Guard:
    """Return a guard of a run: call its `step(loss)` in place of `precision.step(optimizer)`.

    `loss`, a function (model, batch), and `guard.step(loss, batch=batch)` let it find the site of an overflow exactly.
    It samples every `every` steps, keeps a good state every `snapshot_every` (None: never) in host memory or in the
    folder `snapshots`, and takes the `reactions` named, in their order. `events` is a file of JSON lines. `group` is
    the process group that trains together, "auto" the default one, None nobody.

    Raises: `GuardError` for what cannot be guarded; `OutputError` for a file or folder that cannot be written.
    """
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
    _check_parts(model, optimizers, precision)
    _check_count("every", every)
    if snapshot_every is not None:
        _check_count("snapshot_every", snapshot_every)
    _check_reactions(reactions)
    ranks = Ranks(group, next(precision.model.parameters()).device)
    folder = None if snapshots == "memory" else Path(snapshots)
    return Guard(
        Run(precision, optimizers, model, loss),
        every=every,
        snapshot_every=snapshot_every,
        snapshots=Snapshots(folder if snapshot_every is not None else None, rank=ranks.rank),
        reactions=reactions,
        limits=limits or GuardLimits(),
        events=Events(on_event=on_event, file=events, tensorboard=tensorboard, rank=ranks.rank),
        ranks=ranks,
    )


def _check_parts(model: object, optimizers: Sequence[object], precision: object) -> None:
    if not isinstance(precision, Precision):
        raise GuardError(
            f"guard: precision is {a_or_an(precision)}; give it what autoprec.apply(model, policy) returned"
        )
    if not precision.is_installed:
        raise GuardError(f'guard: policy "{precision.policy.name}" is not installed any more; apply it again first')
    if not isinstance(model, nn.Module) or all(each is not precision.model for each in model.modules()):
        raise GuardError(
            f"guard: the model is {a_or_an(model)} that does not hold the one the policy was applied to; give the "
            "model of autoprec.apply, or what wraps it"
        )
    known = set(precision.model.parameters())
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise GuardError(f"guard: {a_or_an(each)} is no optimizer; give one, or a list of them")
        if known.isdisjoint(parameter for group in each.param_groups for parameter in group["params"]):
            raise GuardError(
                f"guard: {type(each).__name__} holds no parameter of the model; build it on model.parameters()"
            )
    if not optimizers:
        raise GuardError("guard: no optimizer was given; give one, or a list of them")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        allowed = "whole numbers from 1" + (", or None for no snapshots" if name == "snapshot_every" else "")
        raise GuardError(f"guard: {name} is {value!r}; allowed: {allowed}")


def _check_reactions(reactions: Sequence[object]) -> None:
    unknown = [each for each in reactions if each not in REACTIONS]
    if unknown or isinstance(reactions, str):
        named = ", ".join(each for each in get_args(Reaction) if each != "info")
        raise GuardError(f"guard: reactions are {reactions!r}; allowed: a list of {named}")
