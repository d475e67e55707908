import collections
import dataclasses
from itertools import chain
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from autoprec.errors import WorkloadError
from autoprec.workload import Workload, load_batches, to_device
from autoprec.workload.batches import first_batches

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Mutable:
    x: torch.Tensor
    note: str = "kept"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    pairs: tuple[Pair, ...] = ()

    def __post_init__(self):
        assert self.x.device.type == "cpu", "moving must not run the checks of a new batch"


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    y: torch.Tensor = dataclasses.field(init=False)


class Graph:
    """A class of the user's that moves itself."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))


class Known:
    """A class that only torch's pytree knows."""

    def __init__(self, x):
        self.x = x


pytree.register_pytree_node(Known, lambda known: ([known.x], None), lambda children, _: Known(*children))


def tensor():
    return torch.arange(3.0)


# what is on the meta device has moved: no second real device is needed
BATCHES = {
    "tensor": (tensor, lambda b: b),
    "tuple": (lambda: (tensor(), 3, "text", None), lambda b: b[0]),
    "list": (lambda: [tensor()], lambda b: b[0]),
    "namedtuple": (lambda: Pair(tensor(), 2), lambda b: b.x),
    "dict": (lambda: {"x": [tensor()]}, lambda b: b["x"][0]),
    "ordered dict": (lambda: collections.OrderedDict(x=tensor()), lambda b: b["x"]),
    "default dict": (lambda: collections.defaultdict(list, x=tensor()), lambda b: b["x"]),
    "user dict": (lambda: collections.UserDict(x=tensor()), lambda b: b["x"]),
    "read-only mapping": (lambda: MappingProxyType({"x": tensor()}), lambda b: b["x"]),
    "BatchEncoding": (lambda: BatchEncoding({"x": tensor()}), lambda b: b["x"]),
    "ModelOutput": (lambda: CausalLMOutput(loss=tensor()), lambda b: b.loss),
    "dataclass": (lambda: Mutable(tensor()), lambda b: b.x),
    "frozen dataclass": (lambda: Frozen(tensor(), (Pair(tensor(), 1),)), lambda b: b.pairs[0].x),
    "dataclass with an unset field": (lambda: Derived(tensor()), lambda b: b.x),
    "object with to()": (lambda: Graph(tensor()), lambda b: b.x),
    "pytree node": (lambda: Known({"x": tensor()}), lambda b: b.x["x"]),
    "packed sequence": (lambda: pack_sequence([tensor(), tensor()[:2]]), lambda b: b.data),
    "empty tuple": (lambda: ((), torch.empty(0, 2)), lambda b: b[1]),
}


@pytest.mark.parametrize(("make", "pick"), BATCHES.values(), ids=BATCHES)
def test_to_device_moves_every_tensor_and_keeps_the_type(make, pick):
    batch = make()
    moved = to_device(batch, "meta")
    assert type(moved) is type(batch)
    assert pick(moved).device.type == "meta"
    assert pick(batch).device.type == "cpu", "the batch itself must stay as it was"


@pytest.mark.parametrize(("make", "pick"), BATCHES.values(), ids=BATCHES)
def test_loaded_batches_are_copies_with_the_same_values(make, pick):
    source = make()
    (loaded,) = load_batches(workload(lambda: [source]), 1, "cpu")
    assert type(loaded) is type(source)
    assert torch.equal(pick(loaded), pick(source))
    assert pick(loaded).data_ptr() != pick(source).data_ptr() or pick(source).numel() == 0


def test_what_holds_no_tensor_is_passed_through():
    batch = ("text", 3, None, {1, 2}, Mutable)
    assert to_device(batch, "meta") == batch


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_cpu():
    moved = to_device(pack_sequence([tensor(), tensor()[:2]], enforce_sorted=False), "meta")
    assert (moved.batch_sizes.device.type, moved.sorted_indices.device.type) == ("cpu", "meta")


def test_requires_grad_survives_as_a_leaf():
    (loaded,) = load_batches(workload(lambda: [tensor().requires_grad_()]), 1, "cpu")
    assert loaded.requires_grad
    assert loaded.is_leaf


def workload(batches):
    return Workload(model=lambda: nn.Linear(1, 1), batches=batches)


def numbers(count):
    return lambda: (torch.tensor(float(i)) for i in range(count))


@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (7, [0, 1, 2, 0, 1, 2, 0])])
def test_batches_start_again_when_they_run_out(count, expected):
    assert [batch.item() for batch in load_batches(workload(numbers(3)), count, "cpu")] == expected


def test_a_buffer_that_the_user_fills_again_is_not_shared():
    def reused():
        buffer = torch.zeros(1)
        for _ in range(3):
            buffer += 1
            yield buffer

    assert [batch.item() for batch in load_batches(workload(reused), 3, "cpu")] == [1, 2, 3]


def test_no_batch_more_than_needed_is_read():
    read = []

    def counted():
        for index in range(100):
            read.append(index)
            yield torch.tensor(index)

    load_batches(workload(counted), 2, "cpu")
    assert read == [0, 1, 0]


def test_zero_batches_are_refused():
    with pytest.raises(WorkloadError, match="cannot load 0 batches; ask for at least 1"):
        load_batches(workload(numbers(3)), 0, "cpu")


@pytest.mark.parametrize("empty", [list, lambda: iter(())])
def test_an_empty_iterable_is_refused(empty):
    with pytest.raises(WorkloadError, match="empty iterable; it must yield at least one batch"):
        load_batches(workload(empty), 1, "cpu")


@pytest.mark.parametrize("count", [2, 5])
def test_an_iterator_that_cannot_start_again_is_refused(count):
    used_up = numbers(2)()
    with pytest.raises(WorkloadError, match=r"returned the same iterator again, .* return a new iterable every time"):
        load_batches(workload(lambda: used_up), count, "cpu")


def test_a_new_iterator_over_something_used_up_is_refused():
    used_up = numbers(2)()
    with pytest.raises(
        WorkloadError, match="yielded nothing when it was called again; it must yield the same batches every time"
    ):
        load_batches(workload(lambda: chain(used_up)), 2, "cpu")


def test_an_iterator_that_goes_on_where_it_stood_is_refused():
    going_on = numbers(10)()
    with pytest.raises(WorkloadError, match=r"begins with another batch .* return a new iterable each time"):
        load_batches(workload(lambda: chain(going_on)), 2, "cpu")


def test_batches_that_are_not_callable_are_refused():
    broken = workload(list)
    object.__setattr__(broken, "batches", [1, 2])
    with pytest.raises(WorkloadError, match="batches is a list; it must be a function"):
        load_batches(broken, 1, "cpu")


def test_batches_that_return_no_iterable_are_refused():
    with pytest.raises(WorkloadError, match=r"batches\(\) returned a NoneType; it must return an iterable"):
        load_batches(workload(lambda: None), 1, "cpu")


def test_shuffling_without_a_seed_is_refused():
    def shuffled():
        return iter([{"x": torch.rand(3), "y": 1}])

    with pytest.raises(WorkloadError, match=r"\(tensor 0, float32\[3\], has other values\).*a seeded generator"):
        load_batches(workload(shuffled), 1, "cpu")


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (torch.zeros(2), -torch.zeros(2), "has other values"),
        (torch.zeros(2), torch.zeros(2).double(), r"float32\[2\], then float64\[2\]"),
        (torch.zeros(2), torch.zeros(3), r"float32\[2\], then float32\[3\]"),
        ((torch.zeros(2),), (torch.zeros(2), torch.zeros(2)), "1 tensors, then 2"),
    ],
)
def test_a_difference_is_told(one, other, difference):
    calls = iter([one, other])
    with pytest.raises(WorkloadError, match=difference):
        load_batches(workload(lambda: [next(calls)]), 1, "cpu")


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        torch.tensor([True, False]),
        torch.tensor(3, dtype=torch.int64),
        torch.tensor([1 + 2j]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(4, 4)[:, ::2],
        torch.eye(2).to_sparse(),
        torch.empty(0),
    ],
    ids=lambda value: str(value.dtype),
)
def test_equal_batches_of_any_kind_are_equal(value):
    assert len(load_batches(workload(lambda: [value]), 1, "cpu")) == 1


def test_an_exception_in_batches_is_blamed_at_the_users_line():
    def broken():
        yield torch.ones(1)
        raise OSError("disk")

    with pytest.raises(WorkloadError, match=r"test_batches\.py:\d+: batches\(\) raised OSError: disk") as caught:
        load_batches(workload(broken), 2, "cpu")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(("count", "values"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 1, 2])])
def test_first_batches_holds_no_batch_twice(count, values):
    batches = [torch.tensor(each) for each in range(3)]
    assert [each.item() for each in first_batches(workload(lambda: batches), count, "cpu")] == values


def test_first_batches_refuses_what_cannot_be_started_again():
    stream = iter([tensor()])
    with pytest.raises(WorkloadError, match="again"):
        first_batches(workload(lambda: stream), 1, "cpu")
    with pytest.raises(WorkloadError, match="cannot load 0 batches"):
        first_batches(workload(lambda: [tensor()]), 0, "cpu")
