"""The default random generators: recorded wherever a step sets them, by whatever means."""

from collections.abc import Callable, Iterator
from typing import Any

import torch


def is_default(generator: torch.Generator) -> bool:
    """Return whether `generator` is the one that draws without a generator use."""
    return any(generator is each for each in (torch.default_generator, *torch.cuda.default_generators))


def generator_at(device: torch.device, state: torch.Tensor) -> torch.Generator:
    """Return a new random generator in `state`: a recorded draw starts from where the real one did."""
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


class DefaultRandom:
    """Notices when a default generator was set (`manual_seed`, `fork_rng`) since the last recorded call."""

    def __init__(self, device: str) -> None:
        self._rows: list[tuple[torch.Generator, Callable[..., None], tuple[Any, ...]]] = [
            (torch.default_generator, torch.set_rng_state, ())
        ]
        place = torch.device(device)
        if place.type == "cuda":
            index = torch.cuda.current_device() if ":" not in device else place.index
            self._rows.append((torch.cuda.default_generators[index], torch.cuda.set_rng_state, (index,)))
        self.note()

    def note(self) -> None:
        """Remember the states: a recorded call has just drawn from them."""
        self._states = [generator.get_state() for generator, _, _ in self._rows]

    def set_since(self) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
        """Yield a function and its arguments, a state first, for each generator that was set since `note`."""
        for (generator, set_state, where), noted in zip(self._rows, self._states, strict=True):
            state = generator.get_state()
            if not torch.equal(state, noted):
                yield set_state, (state, *where)
