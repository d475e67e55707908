"""Outlier batches: what is made of tensors of each kind, and that the real batch stays as it is."""

import torch

from autoprec.audit.stress_batches import StressBatch, stress_batches


def made(*batches: object) -> dict[str, StressBatch]:
    return {stress.name: stress for stress in stress_batches(batches)}


def test_numbers_are_scaled_leveled_and_made_huge_one_by_one() -> None:
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    found = made({"x": x, "label": torch.tensor([1, 0])})
    assert torch.equal(found["inputs times 100"].batch["x"], x * 100)
    assert torch.equal(found["one value 4 times the largest"].batch["x"], torch.tensor([[12.0, -2.0], [0.5, 3.0]]))
    assert not found["all inputs zero"].batch["x"].any()
    assert torch.equal(found["all inputs the same"].batch["x"], torch.ones(2, 2))
    assert found["inputs times 10000"].factor == 1e4
    assert all(torch.equal(stress.batch["label"][:1], torch.tensor([1])) for stress in found.values())
    assert torch.equal(x, torch.tensor([[1.0, -2.0], [0.5, 3.0]]))


def test_tokens_become_one_token_and_labels_without_rows_stay() -> None:
    tokens = torch.tensor([[3, 4, 5], [6, 7, 8]])
    found = made((tokens, torch.tensor([2, 3])))
    assert torch.equal(found["every token the smallest seen"].batch[0], torch.full((2, 3), 3))
    assert torch.equal(found["every token the largest seen"].batch[0], torch.full((2, 3), 8))
    assert torch.equal(found["one token repeated in each row"].batch[0], torch.tensor([[3, 3, 3], [6, 6, 6]]))
    assert torch.equal(found["every token the smallest seen"].batch[1], torch.tensor([2, 3]))
    assert "inputs times 4" not in found


def test_masks_lose_their_first_row_both_ways() -> None:
    for mask in (torch.tensor([[True, False], [True, True]]), torch.tensor([[1, 0], [1, 1]])):
        found = made((torch.tensor([[5, 6], [7, 8]]), mask))
        assert found["first row of the mask all 0"].batch[1].tolist() == [[0, 0], [1, 1]]
        assert found["first row of the mask all 1"].batch[1].tolist() == [[1, 1], [1, 1]]
        assert mask.tolist() == [[1, 0], [1, 1]]


def test_lengths_are_those_of_every_tensor_that_shares_them() -> None:
    def batch(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(2 * length).view(2, length) + 2, torch.ones(2, length, length) * 0.5

    found = made(batch(3), batch(5))
    assert [tensor.shape for tensor in found["length 1"].batch] == [(2, 1), (2, 1, 1)]
    assert [tensor.shape for tensor in found["twice the largest length, 10"].batch] == [(2, 10), (2, 10, 10)]
    assert found["the largest length seen, 5"].batch[0].shape == (2, 5)
    assert found["twice the largest length, 10"].is_risky
    assert [tensor.shape[0] for tensor in found["batch of one"].batch] == [1, 1]


def test_what_would_change_nothing_is_left_out() -> None:
    assert made((torch.tensor([1]),)) == {}
    assert "length 1" not in made((torch.rand(4, 1),))
    assert "the largest length seen, 3" not in made((torch.rand(4, 3),), (torch.rand(4, 3),))
