import pytest
import torch

from autoprec.analysis import pieces
from autoprec.analysis.pieces import has_numbers, pieces_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_CPU_PIECE", 5)


def elements(tensor: torch.Tensor) -> list[float]:
    """Return all elements in order, checking that the pieces are what they promise."""
    found: list[float] = []
    for piece, times in pieces_of(tensor):
        assert piece.dim() == 1
        assert piece.is_contiguous()
        assert piece.dtype in (torch.float32, torch.float64)
        assert 0 < piece.numel() <= (10 if tensor.is_complex() else 5)
        found += piece.tolist() * times
    return sorted(found)


X = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        X, X.half(), X.bfloat16(), X.double(), X.mT, X.permute(2, 0, 1), X[:, ::2], X[..., 1:3],
        X.flip(0), X[:, :1].expand(2, 3, 4), X[0, 0, 0], X[:0], X.unfold(2, 2, 1), X.as_strided((4, 4), (1, 1)),
        torch.nn.Parameter(X), X.to(torch.float8_e5m2), X[:, None].expand(2, 2, 3, 4), X.expand(1, 2, 3, 4),
        torch.tensor(3.0).expand(4, 3), X.to(memory_format=torch.contiguous_format)[:, 1],
    ],
)  # fmt: skip
def test_every_element_is_there_once(tensor):
    assert elements(tensor) == sorted(tensor.detach().double().reshape(-1).tolist())


def test_an_expanded_dimension_is_read_once():
    ((piece, times),) = pieces_of(torch.arange(4.0).expand(1000, 4))
    assert (piece.tolist(), times) == ([0, 1, 2, 3], 1000)


def test_what_can_be_viewed_is_not_copied():
    x = torch.arange(24.0).reshape(4, 6)
    memory = x.untyped_storage().data_ptr()
    assert {piece.untyped_storage().data_ptr() for piece, _ in pieces_of(x.t())} == {memory}


def test_complex_numbers_are_their_parts():
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert elements(x) == [-4, 1, 2, 3]
    assert elements(x.conj()) == [-2, 1, 3, 4]
    assert elements(x.conj().imag) == [-2, 4]  # a lazy negation
    assert elements(x.to(torch.complex128)) == [-4, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_what_they_store():
    coo = torch.sparse_coo_tensor([[0, 1, 1]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    assert elements(coo) == [1, 5]
    assert elements(torch.sparse_csr_tensor([0, 1, 2], [0, 1], [3.0, 4.0], check_invariants=True)) == [3, 4]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_their_parts():
    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=layout)
        assert has_numbers(nested)
        assert elements(nested) == [0, 0, 0, 1, 1]


def test_a_subclass_is_read_as_a_plain_tensor():
    class Image(torch.Tensor):
        pass

    ((piece, _),) = pieces_of(torch.ones(2).as_subclass(Image))
    assert type(piece) is torch.Tensor


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*", "ignore:torch.quantize")
def test_only_numbers_with_values_are_read():
    numbers = [X, X.half(), X.to(torch.complex64), torch.empty(0), X.to_sparse()]
    others = [X.long(), X > 1, torch.empty(2, device="meta"), torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)]
    assert all(map(has_numbers, numbers))
    assert not any(map(has_numbers, others))
