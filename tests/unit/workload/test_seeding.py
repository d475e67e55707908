import random

import numpy as np
import torch

from autoprec.workload.seeding import mixed, seeded


def test_neighboring_seeds_and_streams_do_not_collide():
    words = {mixed(seed, stream) for seed in range(30) for stream in range(30)}
    assert len(words) == 900
    assert all(0 <= word < 2**63 for word in words)


def test_words_are_the_same_in_every_process():
    assert mixed(0, 0) == 15793235383387715774 >> 1  # what numpy documents for SeedSequence(0)


def test_a_stream_repeats_and_nests():
    def draw(stream):
        with seeded(5, stream, torch.device("cpu")):
            return torch.rand(2).tolist()

    with seeded(5, 1, torch.device("cpu")):
        first = torch.rand(1).item()
        draw(2)
        second = torch.rand(1).item()
    assert draw(1) == [first, second]


def test_the_model_is_built_from_the_seed_itself_as_in_a_script():
    torch.manual_seed(7)
    script = torch.nn.Linear(3, 3).weight
    with seeded(7):
        assert torch.equal(torch.nn.Linear(3, 3).weight, script)
    random.seed(7)
    np.random.seed(7)
    drawn = random.random(), np.random.rand()
    with seeded(7):
        assert (random.random(), np.random.rand()) == drawn


def test_steps_draw_from_other_streams_than_the_model():
    def draw(stream):
        with seeded(7, stream):
            return torch.rand(1).item()

    assert len({draw(stream) for stream in range(6)}) == 6


def test_a_device_that_is_there_is_seeded_too(monkeypatch):
    words = []
    monkeypatch.setattr(torch, "manual_seed", words.append)
    with seeded(7):
        pass
    assert words == [7] * torch.accelerator.is_available()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with seeded(8):
        pass
    assert words[-1] == 8
