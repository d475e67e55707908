import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from autoprec.workload.loader import replayed


class Noisy(Dataset):
    """Augments with the global random states, as most transforms do."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index, torch.rand(()), random.random(), float(np.random.rand())


def seeded():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "in order": lambda: DataLoader(Noisy(), batch_size=2),
    "shuffled": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True, generator=seeded()),
    "sampler with a generator": lambda: DataLoader(
        Noisy(), batch_size=2, sampler=RandomSampler(Noisy(), generator=seeded())
    ),
}


def as_numbers(batches):
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_every_call_reads_the_same_batches(make):
    batches = replayed(make())
    first = as_numbers(batches())
    torch.rand(3)
    assert as_numbers(batches()) == first
    assert sorted(index for batch in first for index in batch[0]) == list(range(6))


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_model_that_draws_numbers_changes_no_batch_and_is_not_disturbed(make):
    batches = replayed(make())
    alone = as_numbers(batches())
    torch.manual_seed(7)
    expected = [torch.rand(2) for _ in alone]
    torch.manual_seed(7)
    seen, drawn = [], []
    for batch in batches():
        seen.append(batch)
        drawn.append(torch.rand(2))
    assert as_numbers(seen) == alone
    assert all(torch.equal(one, other) for one, other in zip(drawn, expected, strict=True))


def test_random_numbers_go_on_from_batch_to_batch():
    noise = [number for batch in as_numbers(replayed(LOADERS["in order"]())()) for part in batch[1:] for number in part]
    assert len(set(noise)) == 18


def test_shuffling_is_not_undone():
    orders = {str(as_numbers(replayed(LOADERS[name]())())) for name in LOADERS}
    assert len(orders) > 1


def test_a_loader_that_raises_gives_the_random_state_back():
    class Broken(Noisy):
        def __getitem__(self, index):
            raise OSError("disk")

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with pytest.raises(OSError, match="disk"):
        next(replayed(DataLoader(Broken()))())
    assert torch.equal(torch.rand(1), expected)
