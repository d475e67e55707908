"""What every test relies on: one seed, no network, and a reasoned skip where there is no CUDA device."""

import gc
import os
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.two_ranks import PAIR, TwoRanks

os.environ["HF_HUB_OFFLINE"] = "1"  # models are built from configs; nothing may be fetched
os.environ.pop("AUTOPREC_DEBUG", None)
# Op times are kept for the tests of one run, and apart from those of whoever runs them. Workers inherit the folder.
os.environ.setdefault("AUTOPREC_CACHE", tempfile.mkdtemp(prefix="autoprec-op-times-"))

# A test must say the same on every run and machine: examples are derived from the test, and nothing is timed.
# `make test-long` draws more.
hypothesis.settings.register_profile("autoprec", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=500)
hypothesis.settings.load_profile("autoprec")


# Tracing doubles the time of Python, so coverage is of the tests that mirror the package: what proves contracts on many
# models and examples runs untraced.
TRACED = ("tests/unit/", "tests/architecture/", "tests/contracts/test_ranges.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.nodeid.startswith(TRACED):
            item.add_marker(pytest.mark.no_cover)
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device: make gpu")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True, scope="module")
def _what_is_loaded_is_no_garbage() -> None:
    """Keep what is loaded by now out of every garbage collection: each run of the tuner ends with one.

    It would look through what torch.compile and transformers keep, which is 0.2 s after their tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_seed() -> Iterator[None]:
    """Start every test from one seed and give the random state back, so that no test depends on its neighbors."""
    state = torch.get_rng_state()
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # 2 us; torch.manual_seed formats the stack three times for 2000
    yield
    torch.set_rng_state(state)


@pytest.fixture
def ranks() -> TwoRanks:
    """Return two processes for the tests of this worker that train in parallel."""
    return PAIR


def pytest_sessionfinish() -> None:
    PAIR.end()
