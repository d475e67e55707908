"""Batches further on, and how many of them nobody has seen."""

import pytest
import torch

from autoprec.errors import WorkloadError
from autoprec.workload import batches_after, fitting_batches
from tests.unit.measure.workloads import workload


def numbered(count):
    return workload(batches=lambda: [torch.tensor([float(number)]) for number in range(count)])


@pytest.mark.parametrize(
    ("skip", "count", "expected", "num_new"),
    [
        (0, 2, [0, 1], 2),
        (3, 2, [3, 4], 2),
        (4, 3, [4, 0, 1], 1),
        (5, 2, [0, 1], 0),
        (12, 2, [2, 3], 0),
        (5, 6, [*range(5), 0], 0),
    ],
)
def test_batches_after_those_that_are_skipped(skip, count, expected, num_new):
    found, new = batches_after(numbered(5), skip, count, "cpu")
    assert [int(batch) for batch in found] == expected
    assert new == num_new


def test_batches_belong_to_the_caller():
    batch = torch.zeros(1)
    (found,), _ = batches_after(workload(batches=lambda: [batch]), 1, 1, "cpu")
    found.fill_(1.0)
    assert batch.item() == 0.0


def test_batches_that_differ_are_refused():
    with pytest.raises(WorkloadError, match="begins with another batch"):
        batches_after(workload(batches=lambda: [torch.rand(2)]), 0, 1, "cpu")


def test_as_many_batches_as_fit():
    half_a_gibibyte = workload(batches=lambda: [torch.empty(2**27).expand(1, -1)[:, :1].clone()])
    assert fitting_batches(half_a_gibibyte, 5, "cpu") == 5
    large = workload(batches=lambda: [torch.zeros(2**18)])  # a mebibyte
    assert fitting_batches(large, 10**6, "cpu") == 1024
    assert fitting_batches(numbered(1), 1, "cpu") == 1
