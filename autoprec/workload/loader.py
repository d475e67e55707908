"""Replay a script's data loader: the same batches in the same order, whoever draws random numbers beside it."""

import random
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

_SEED = 0


def replayed(loader: "DataLoader[Any]") -> Callable[[], Iterator[Any]]:
    """Return a function whose every call reads `loader` from the start, under the same random numbers.

    The loader's own generators are set back to where they stand now. Shuffling and augmentation without a generator
    draw from the global random states of torch, Python and numpy: these are private to the loader while it reads, so
    that a model that draws more or fewer numbers (dropout) changes no batch, and the loader disturbs no model.
    """
    generators = _generators(loader)
    states = [generator.get_state() for generator in generators]

    def batches() -> Iterator[Any]:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return _under_private_randomness(loader)

    return batches


def _generators(loader: "DataLoader[Any]") -> "list[torch.Generator]":
    import torch

    holders = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = {id(held): held for held in (getattr(holder, "generator", None) for holder in holders)}
    return [held for held in found.values() if isinstance(held, torch.Generator)]


def _under_private_randomness(loader: "DataLoader[Any]") -> Iterator[Any]:
    private = _seeded_states()
    iterator: Iterator[Any] | None = None
    while True:
        outer = _states()
        _set_states(private)
        try:
            iterator = iter(loader) if iterator is None else iterator
            batch = next(iterator)
        except StopIteration:
            return
        finally:
            private = _states()
            _set_states(outer)
        yield batch


def _states() -> tuple[Any, ...]:
    """Return the global random states of torch (CPU), Python and, where it is loaded, numpy."""
    import torch

    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


def _set_states(states: tuple[Any, ...]) -> None:
    import torch

    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy = sys.modules.get("numpy")
    if numpy and states[2] is not None:
        numpy.random.set_state(states[2])


def _seeded_states() -> tuple[Any, ...]:
    import torch

    numpy = sys.modules.get("numpy")
    return (
        torch.Generator().manual_seed(_SEED).get_state(),
        random.Random(_SEED).getstate(),
        numpy.random.RandomState(_SEED).get_state() if numpy else None,
    )
