"""Random streams of a run: its own, repeatable ones, with the caller's put back afterwards."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

MODEL_STREAM = 0
"""The stream that building the model draws from, which is the seed itself, as after `torch.manual_seed(seed)` in a
script; step k of a run draws from stream k + 1."""


@contextmanager
def seeded(seed: int, stream: int = MODEL_STREAM, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch (CPU and `device`), Python and numpy from (`seed`, `stream`); put all states back at the end."""
    device = torch.device(device)
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  what user code draws from
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        word = seed if stream == MODEL_STREAM else mixed(seed, stream)
        _seed_torch(word)
        random.seed(word)
        np.random.seed(word % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def _seed_torch(word: int) -> None:
    """Seed torch on every device there is.

    For each kind of device that is not there, `torch.manual_seed` writes down the whole stack: 1 to 3 ms a step.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(word)
    else:
        torch.default_generator.manual_seed(word)


def mixed(seed: int, stream: int) -> int:
    """Return a 63-bit seed for stream `stream` of `seed`; close pairs give unrelated words, in every process."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> np.uint64(1))
