"""Operations counted from shapes, against torch's own counter where that counts, else against the definition."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from autoprec.graph.flops import flops_of, is_depthwise
from tests.op_graphs import node, tensor
from tests.recorded import recorded

IMAGE, WEIGHT = torch.ones(2, 6, 9, 8), torch.ones(4, 3, 3, 2)
COUNTED = {
    "linear": (F.linear, torch.ones(2, 3, 5), torch.ones(7, 5), torch.ones(7)),
    "matmul": (torch.matmul, torch.ones(2, 3, 5), torch.ones(2, 5, 4)),
    "matmul of batches by a matrix": (torch.matmul, torch.ones(2, 3, 5), torch.ones(5, 4)),
    "matmul of a vector": (torch.matmul, torch.ones(5), torch.ones(5, 4)),
    "mm": (torch.mm, torch.ones(3, 5), torch.ones(5, 4)),
    "bmm": (torch.bmm, torch.ones(2, 3, 5), torch.ones(2, 5, 4)),
    "addmm": (torch.addmm, torch.ones(4), torch.ones(3, 5), torch.ones(5, 4)),
    "baddbmm": (torch.baddbmm, torch.ones(2, 3, 4), torch.ones(2, 3, 5), torch.ones(2, 5, 4)),
    "einsum": (lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), torch.ones(2, 3, 4, 5), torch.ones(2, 3, 6, 5)),
    "einsum with dots": (lambda a, b: torch.einsum("...ij,jk->...ik", a, b), torch.ones(2, 3, 4, 5), torch.ones(5, 6)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=2), torch.ones(3, 4, 5), torch.ones(4, 5, 6)),
    "inner": (torch.inner, torch.ones(3, 5), torch.ones(4, 5)),
    "conv1d": (F.conv1d, torch.ones(2, 3, 9), torch.ones(4, 3, 3)),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=2), IMAGE, WEIGHT),
    "conv2d by depth": (lambda x, w: F.conv2d(x, w, groups=6), IMAGE, torch.ones(6, 1, 3, 3)),
    "conv3d": (F.conv3d, torch.ones(1, 2, 5, 5, 5), torch.ones(3, 2, 2, 2, 2)),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), IMAGE, torch.ones(6, 4, 3, 3)),
    "pointwise": (lambda a, b: (a + b).exp(), torch.ones(3, 5), torch.ones(3, 5)),
}


def counted(lines, *batch) -> int:
    return sum(flops_of(each) for each in recorded(lines, *batch).op_graph)


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_torch(name):
    lines, *batch = COUNTED[name]
    with FlopCounterMode(display=False) as counter:
        lines(*batch)
    assert counted(lines, *batch) == counter.get_total_flops()


def test_a_model_counts_as_torch_does():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    batch = torch.ones(2, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        model(batch)
    assert counted(model, batch) == counter.get_total_flops() > 0


def test_attention_counts_its_whole_score_matrix():
    query, key, value = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 5, 8), torch.ones(2, 3, 5, 6)
    expected = sdpa_flop_count(query.shape, key.shape, value.shape)
    assert counted(F.scaled_dot_product_attention, query, key, value) == expected


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_count_their_weights_at_each_step(kind, gates):
    layer = kind(5, 7, num_layers=2, batch_first=True)
    weights = gates * 7 * (5 + 7) + gates * 7 * (7 + 7)
    assert counted(lambda x: layer(x)[0], torch.ones(3, 4, 5)) == 2 * 3 * 4 * weights


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_recurrent_cells_do_not_count_their_state_for_a_weight(kind, gates):
    cell = kind(5, 7)
    assert counted(cell, torch.ones(3, 5)) == 2 * 3 * gates * 7 * (5 + 7)


@pytest.mark.parametrize(
    ("op", "shapes", "made", "expected"),
    [
        ("addbmm", ((3, 4), (2, 3, 5), (2, 5, 4)), (3, 4), 2 * 2 * 3 * 5 * 4),
        ("bilinear", ((3, 4), (3, 5), (6, 4, 5)), (3, 6), 2 * 3 * 6 * 4 * 5 + 2 * 3 * 6 * 5),
        ("conv_tbc", ((9, 2, 3), (3, 3, 4), (4,)), (9, 2, 4), 2 * 9 * 2 * 4 * 3 * 3),
        ("mv", ((3, 4), (4,)), (3,), 2 * 3 * 4),
        ("dot", ((4,), (4,)), (), 2 * 4),
        ("linear", ((3, 4),), (3, 5), 0),
        ("addmm", ((3, 4), (3, 4)), (3, 4), 0),
        ("scaled_dot_product_attention", ((3, 4), (3, 4)), (3, 4), 0),
    ],
)
def test_ops_that_torch_does_not_count(op, shapes, made, expected):
    call = node("a", op, inputs=tuple(tensor(*shape) for shape in shapes), outputs=(tensor(*made),))
    assert flops_of(call) == expected


def test_an_equation_over_three_tensors_is_not_counted():
    assert counted(lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), *(torch.ones(2, 2) for _ in range(3))) == 0


@pytest.mark.parametrize(
    ("op", "given", "weight", "made", "expected"),
    [
        ("conv2d", (2, 6, 9, 9), (6, 1, 3, 3), (2, 6, 7, 7), True),
        ("conv1d", (6, 9), (12, 1, 3), (12, 7), True),
        ("conv2d", (2, 1, 9, 9), (6, 1, 3, 3), (2, 6, 7, 7), False),
        ("conv2d", (2, 6, 9, 9), (6, 2, 3, 3), (2, 6, 7, 7), False),
        ("conv_transpose1d", (2, 6, 9), (6, 1, 3), (2, 6, 11), True),
        ("conv_transpose1d", (2, 6, 9), (6, 1, 3), (2, 1, 11), False),
        ("linear", (2, 6), (6, 1), (2, 6), False),
    ],
)
def test_depthwise_convolutions(op, given, weight, made, expected):
    call = node("a", op, inputs=(tensor(*given), tensor(*weight)), outputs=(tensor(*made),))
    assert is_depthwise(call) is expected
