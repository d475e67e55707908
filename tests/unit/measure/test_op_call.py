import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec.graph.opgraph import OpNode
from autoprec.graph.site import Site
from autoprec.measure.op_call import isolated, signature_of


def node(op, *, writes=False, left_alone=False):
    return OpNode(name="n", kind="op", op=op, site=Site("", op, 0), writes=writes, left_alone=left_alone)


def signature(func, *args, grad=True, **kwargs):
    return signature_of(func, (args, kwargs), grad=grad)


X = torch.randn(4, 8)


def test_equal_calls_of_two_layers_have_one_signature():
    one, two = nn.Linear(8, 3), nn.Linear(8, 3)
    assert signature(F.linear, X, one.weight, one.bias) == signature(F.linear, X + 1, two.weight, two.bias)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: signature(F.relu, X), lambda: signature(F.gelu, X)),
        (lambda: signature(F.relu, X), lambda: signature(F.relu, X[:2])),
        (lambda: signature(F.relu, X), lambda: signature(F.relu, X.half())),
        (lambda: signature(F.relu, X), lambda: signature(F.relu, torch.randn(8, 4).t())),
        (lambda: signature(F.relu, X), lambda: signature(F.relu, X.clone().requires_grad_())),
        (lambda: signature(F.relu, X), lambda: signature(F.relu, X, inplace=True)),
        (lambda: signature(F.relu, X), lambda: signature(F.relu, X, grad=False)),
        (lambda: signature(torch.mul, X, X), lambda: signature(torch.mul, X, X.clone())),
        (lambda: signature(torch.pow, X, 2.0), lambda: signature(torch.pow, X, 2.5)),
        (lambda: signature(torch.sum, X, dim=0), lambda: signature(torch.sum, X, dim=1)),
        (lambda: signature(torch.cat, [X, X]), lambda: signature(torch.cat, [X, X, X])),
    ],
)
def test_what_a_time_depends_on_is_in_the_signature(one, other):
    assert one() != other()


def test_eps_and_the_order_of_keywords_are_not():
    assert signature(F.layer_norm, X, eps=1e-5, normalized_shape=(8,)) == signature(
        F.layer_norm, X, normalized_shape=(8,), eps=1e-6
    )


def test_a_signature_says_nothing_of_this_process():
    drawn = signature(torch.bernoulli, X, generator=torch.Generator())
    assert "0x" not in drawn
    assert drawn == signature(torch.bernoulli, X, generator=torch.Generator())


def test_a_block_runs_low_with_gradients_and_touches_no_original():
    layer = nn.Linear(8, 3)
    x = X.clone().requires_grad_()
    call = isolated(F.linear, node("linear"), ((x, layer.weight, layer.bias), {}), torch.bfloat16)
    block = call.block(3)
    block.forward()
    block.prepare_backward()
    block.backward()
    assert [each.dtype for each in block._results] == [torch.bfloat16] * 3
    assert len(block._leaves) == 9
    assert x.grad is None
    assert layer.weight.grad is None


def test_a_norm_keeps_its_parameters_as_they_are_stored():
    norm = nn.LayerNorm(8)
    call = isolated(F.layer_norm, node("layer_norm"), ((X, (8,), norm.weight, norm.bias), {}), torch.bfloat16)
    assert [t.dtype for t in call.arguments[0] if isinstance(t, torch.Tensor)] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]


@pytest.mark.parametrize("func", [torch.Tensor.relu_, torch.Tensor.exp_])
def test_a_call_in_place_has_a_copy_for_each_repetition(func):
    x = X.clone().requires_grad_()
    made = x * 1
    before = made.detach().clone()
    call = isolated(func, node(func.__name__.rstrip("_"), writes=True), ((made,), {}), torch.bfloat16)
    block = call.block(2)
    block.forward()
    block.prepare_backward()
    block.backward()
    assert torch.equal(made.detach(), before)
    assert torch.equal(block._results[0], block._results[1])
    assert block._results[0].dtype == torch.bfloat16


def test_running_statistics_stay_as_they_are():
    norm = nn.BatchNorm1d(8)
    arguments = ((X, norm.running_mean, norm.running_var, norm.weight, norm.bias, True), {})
    isolated(F.batch_norm, node("batch_norm"), arguments, torch.float32).block(2).forward()
    assert torch.equal(norm.running_mean, torch.zeros(8))


def test_a_generator_stays_where_it_is():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    isolated(torch.bernoulli, node("bernoulli"), ((X.sigmoid(),), {"generator": generator}), None).block(2).forward()
    assert torch.equal(generator.get_state(), before)


def test_without_grad_there_is_no_backward():
    with torch.no_grad():
        call = isolated(F.relu, node("relu"), ((X.clone().requires_grad_(),), {}), None)
        block = call.block(1)
        block.forward()
        block.prepare_backward()
        block.backward()
    assert block._leaves == []


def test_several_outputs_all_have_gradients():
    x = X.clone().requires_grad_()
    block = isolated(torch.Tensor.unbind, node("unbind"), ((x, 0), {}), torch.float32).block(1)
    block.forward()
    block.prepare_backward()
    assert len(block._roots) == 4
    block.backward()


def test_what_is_kept_for_the_backward_pass_is_told_apart():
    x = X.clone().requires_grad_()
    arguments = ((x,), {})
    relu = isolated(F.relu, node("relu"), arguments, torch.bfloat16).kept()
    assert (relu.outputs, relu.saved_inputs, relu.saved_outputs, relu.fresh_bytes) == (("bfloat16",), (), (0,), 0)
    gelu = isolated(F.gelu, node("gelu"), arguments, torch.float32).kept()
    assert (gelu.outputs, gelu.saved_inputs, gelu.saved_outputs) == (("float32",), (0,), ())
    norm = isolated(F.layer_norm, node("layer_norm"), ((x, (8,)), {}), torch.float32).kept()
    assert norm.saved_inputs == (0,)
    assert norm.fresh_bytes == 2 * 4 * 4  # mean and reciprocal deviation of four rows
