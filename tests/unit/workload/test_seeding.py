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
