"""Batches further on in a workload, for whoever must not see those that were used before; and how many fit."""

from typing import Any

from autoprec.workload.batches import copied, epoch_of, load_batches, tensors_of
from autoprec.workload.workload import Workload

_ROOM_BYTES = 2**30


def batches_after(workload: Workload, skip: int, count: int, device: str) -> tuple[tuple[Any, ...], int]:
    """Return `count` batches after the first `skip`, and how many of them are new: in no epoch before.

    Where one call of `batches()` yields fewer, the next ones go on, and what they yield was seen before.

    Raises: `WorkloadError` as `load_batches` does.
    """
    load_batches(workload, 1, "cpu")  # proves that every epoch is the same
    seen: list[Any] = []
    found: list[Any] = []
    place, num_new = 0, None
    while len(found) < count:
        for batch in epoch_of(workload, seen):
            if place >= skip:
                found.append(copied(batch, device))
            place += 1
            if len(found) == count:
                break
        if num_new is None:  # the first epoch is over
            num_new = len(found)
    return tuple(found), num_new or 0


def fitting_batches(workload: Workload, count: int, device: str) -> int:
    """Return `count`, or as many batches of the size of the first as fit into a gibibyte, and at least one."""
    (first,) = load_batches(workload, 1, device)
    fitting = _ROOM_BYTES // max(sum(tensor.nbytes for tensor in tensors_of(first)), 1)
    return max(1, min(count, fitting))
