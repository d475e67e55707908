import gc
import weakref

import pytest
import torch

from autoprec.analysis import seen
from autoprec.analysis.seen import Seen
from autoprec.analysis.tensor_numerics import tensor_numerics


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every tensor that is really read."""
    found: list[int] = []

    def counted(tensor, formats):
        found.append(tensor.numel())
        return tensor_numerics(tensor, formats)

    monkeypatch.setattr(seen, "tensor_numerics", counted)
    return found


def test_a_tensor_and_its_views_are_read_once(reads):
    known, x = Seen(()), torch.randn(2, 3, 4)
    for same in (x, x.view(6, 4), x.permute(2, 0, 1), x.detach(), x[None], x.flatten(), x.mT):
        assert known.numerics(same) == tensor_numerics(x, ())
    assert reads == [24]


def test_parts_and_other_readings_of_memory_are_tensors_of_their_own(reads):
    known, x = Seen(()), torch.randn(4, 6)
    for other in (x, x[:2], x[2:], x[:, ::2], x[:, 1::2], x.view(torch.int32).view(torch.float32)[:1], x.double()):
        assert known.numerics(other) == tensor_numerics(other, ())
    z = torch.view_as_complex(x.view(4, 3, 2))
    assert known.numerics(z) == tensor_numerics(z, ())
    assert known.numerics(z.conj()).minimum == tensor_numerics(z.conj().resolve_conj(), ()).minimum
    assert known.numerics(x.expand(3, 4, 6)).num_elements == 72
    assert len(reads) == 10


def test_what_was_edited_in_place_is_read_again(reads):
    known, x = Seen(()), torch.ones(3)
    known.numerics(x)
    x[0].mul_(8)  # through a view
    assert known.numerics(x).maximum == 8
    x.data.mul_(2)  # behind the version counter
    known.forget(x)
    assert known.numerics(x).maximum == 16
    assert reads == [3, 3, 3]


def test_memory_that_is_used_again_is_read_again():
    known = Seen(())
    for size in range(200):
        assert known.numerics(torch.full((4,), float(size))).maximum == size
    assert len(known._known) <= 64


def test_nothing_is_kept_alive():
    known, x = Seen(()), torch.randn(10)
    known.numerics(x)
    gone = weakref.ref(x)
    storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    del x
    gc.collect()
    assert gone() is None
    assert storage.expired()


def test_tensors_without_numbers_have_none_and_the_rest_is_read_every_time(reads):
    known = Seen(())
    assert known.numerics(torch.arange(3)) is None
    sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (4,), check_invariants=True)
    with torch.inference_mode():
        unversioned = torch.ones(2)
    for each in (sparse, sparse, unversioned, unversioned):
        known.forget(each)
        assert known.numerics(each).num_elements == 2
    assert len(reads) == 4
