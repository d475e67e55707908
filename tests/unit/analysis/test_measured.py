import dataclasses
import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.analysis import MeasuredNumerics, SiteTensor, TensorNumerics, measured_numerics, seen
from autoprec.analysis.loss_scale import run_backward
from autoprec.analysis.tensor_numerics import tensor_numerics
from autoprec.capture import record
from autoprec.graph.site import Site
from autoprec.workload import Workload

FORMATS = ("fp16", "bf16")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def workload(make: Callable[[], nn.Module], batch, loss=None, optimizer=sgd) -> Workload:
    return Workload(
        model=make, batches=lambda: [batch], loss=loss or (lambda model, x: model(x).sum()), optimizer=optimizer
    )  # fmt: skip


def measured(make, batch, loss=None, optimizer=sgd, formats=FORMATS) -> MeasuredNumerics:
    return measured_numerics([record(workload(make, batch, loss))], optimizer, formats)


def of(found: MeasuredNumerics, site: str) -> dict[str, TensorNumerics]:
    return {f"{each.role}{each.index}": each.numerics for each in found.sites[Site.parse(site)]}


def module(function, **parameters: torch.Tensor) -> Callable[[], nn.Module]:
    """Return what makes a module with parameters whose forward is `function(module, x)`."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in parameters.items():
                self.register_parameter(name, nn.Parameter(value.clone()))

        def forward(self, x):
            return function(self, x)

    return Made


W = torch.tensor([2.0])


def test_every_role_of_a_site_and_every_part_of_a_parameter():
    """y = w x, loss = sum(y) / 4: dl/dy = 1/4, dl/dw = sum(x) / 4 = 2, and SGD adds -1/2 of that."""
    found = measured(
        module(lambda m, x: m.w * x, w=W), torch.tensor([1.0, 7.0]), lambda model, x: model(x).sum() / 4
    )  # fmt: skip
    roles = of(found, ":mul#0")
    assert {name: each.histogram.counts for name, each in roles.items()} == {
        "input0": ((1, 1),), "input1": ((0, 1), (2, 1)), "output0": ((1, 1), (3, 1)), "gradient0": ((-2, 2),),
    }  # fmt: skip
    assert (roles["output0"].minimum, roles["output0"].maximum) == (2, 14)
    assert list(of(found, "@loss:sum#0")) == ["input0", "output0", "gradient0"]
    weight = found.parameters["w"]
    assert (weight.value.maximum, weight.gradient.maximum, weight.update.minimum) == (2, 2, -1)
    assert (found.formats, found.num_batches) == (FORMATS, 1)


def test_inputs_name_their_sources_and_a_tensor_read_twice_is_one():
    recording = record(workload(module(lambda m, x: torch.mul(m.w + x, m.w + x) * m.w, w=W), torch.ones(2)))
    found = measured_numerics([recording], sgd, FORMATS)
    names = {
        str(site): [recording.op_graph[name].op or recording.op_graph[name].target for name in each.sources]
        for site, tensors in found.sites.items()
        for each in tensors
        if each.role == "input" and each.index == 0
    }
    assert names[":mul#0"] == ["add"]
    square = measured(module(lambda m, x: (z := m.w + x) * z, w=W), torch.ones(2))
    assert list(of(square, ":mul#0")) == ["input0", "output0", "gradient0"]


def test_each_tensor_is_read_once_however_many_sites_read_it(monkeypatch):
    reads = []
    monkeypatch.setattr(seen, "tensor_numerics", lambda tensor, f: reads.append(tensor) or tensor_numerics(tensor, f))

    def forward(m, x):
        y = m.w * x
        return y.exp() + y.sin() + y.view(-1).cos().view(2, 3) + y.t().relu().t()

    measured(module(forward, w=torch.ones(3)), torch.randn(2, 3))
    same = [each for each in reads if each.numel() == 6]
    # x, y, exp, sin, cos, relu, three sums; backwards dl/dsum, which all sums share, and those of y by way of each op
    assert len(same) <= 9 + 6


def test_gradients_are_those_of_the_loss_scale_analysis():
    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2))

    recording = record(workload(make, torch.randn(5, 3)))
    assert measured_numerics([recording], sgd, FORMATS).gradients() == run_backward([recording])


def test_a_tensor_edited_in_place_is_what_it_was_when_it_was_read():
    def forward(m, x):
        y = m.w * x
        z = y + 0
        y.mul_(1024)
        y.view(-1).add_(0)
        return z + y

    found = measured(module(forward, w=W), torch.ones(3))
    assert [of(found, site)["input0"].maximum for site in (":add#0", ":mul#1", ":add#1")] == [2, 2, 2048]
    assert of(found, ":mul#1")["output0"].maximum == 2048
    assert of(found, ":add#2")["input1"].maximum == 2048


def test_edits_behind_the_version_counter_are_seen():
    def forward(m, x):
        y = x * 1
        a = y + 1
        y.data.mul_(16)
        return (a + (y + 2)) * m.w

    found = measured(module(forward, w=W), torch.ones(3))
    assert [of(found, site)["input0"].maximum for site in (":add#0", ":add#1")] == [1, 16]


def test_running_statistics_are_read_anew_at_every_call():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1, momentum=1.0, affine=False)
            self.w = nn.Parameter(W.clone())

        def forward(self, x):
            return self.norm(self.norm(x) + 64 + 0 * self.w)

    found = measured(Twice, torch.tensor([[8.0], [24.0]]))
    # the mean is 0 before the first call and 16, that of the first, before the second
    mean = next(each for each in found.sites[Site("norm", "batch_norm", 0)] if each.role == "input" and each.index == 1)
    assert (mean.numerics.minimum, mean.numerics.maximum) == (0, 16)


def test_calls_of_one_site_add_up():
    def make():
        block = nn.Linear(2, 2)
        return nn.Sequential(block, nn.ReLU(), block)

    found = measured(make, torch.ones(3, 2))
    roles = of(found, "0:linear#0") if Site("0", "linear", 0) in found.sites else of(found, "2:linear#0")
    assert (roles["output0"].num_elements, roles["gradient0"].num_elements) == (12, 12)
    assert roles["output0"].num_tensors == 2
    site = next(iter(found.sites.values()))
    assert len(next(each for each in site if each.role == "input" and each.index == 0).sources) == 2


def test_several_outputs_have_a_gradient_each():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(2, 3)

        def forward(self, x):
            out, (_, c) = self.lstm(x)
            first, second = out.split(2)
            return first.sum() + 2 * second.exp().sum() + c.sum()

    found = measured(Recurrent, torch.randn(4, 1, 2))
    roles = of(found, "lstm:lstm#0")
    assert [roles[f"output{index}"].num_elements for index in range(3)] == [12, 3, 3]
    assert [f"gradient{index}" in roles for index in range(3)] == [True, False, True]
    assert of(found, ":sum#0")["input0"].num_elements == 6


def test_integers_and_flags_have_no_numbers_and_complex_ones_two():
    def forward(m, x):
        mask = x > 0
        spectrum = torch.fft.fft(x * m.w)
        return torch.where(mask, spectrum.real, 0.0)[torch.argsort(x)]

    found = measured(module(forward, w=W), torch.randn(6))
    assert [name for name in of(found, ":where#0") if name.startswith("input")] == ["input1"]
    roles = of(found, ":fft_fft#0")
    assert roles["output0"].num_elements == 2 * roles["input0"].num_elements
    assert roles["gradient0"].num_elements == 12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_read_as_they_are(dtype):
    found = measured(module(lambda m, x: m.w * x, w=W.to(dtype)), torch.tensor([0.1, 1e4], dtype=dtype))
    roles = of(found, ":mul#0")
    assert roles["input1"] == dataclasses.replace(tensor_numerics(torch.tensor([0.1, 1e4], dtype=dtype), FORMATS))
    assert roles["gradient0"].num_elements == 2


def test_tensors_of_no_elements_and_of_no_dimension():
    found = measured(module(lambda m, x: (x[:0] * m.w).sum() + m.w.sum(), w=W), torch.ones(3))
    assert of(found, ":mul#0")["output0"].num_elements == 0
    assert of(found, ":mul#0")["gradient0"].histogram.headroom is not None
    assert of(found, ":add#0")["output0"].num_elements == 1


def test_what_runs_under_no_grad_has_no_gradient():
    def forward(m, x):
        with torch.no_grad():
            scale = x.abs().amax()
        return m.w * (x / scale)

    found = measured(module(forward, w=W), torch.randn(4))
    assert [name for name in of(found, ":amax#0") if name.startswith("gradient")] == []


def test_strides_do_not_matter():
    found = measured(module(lambda m, x: (x.t()[::2] * m.w).exp(), w=W), torch.arange(12.0).view(3, 4))
    assert of(found, ":mul#0")["input0"].num_elements == 6
    assert of(found, ":mul#0")["input0"].maximum == 10


def test_values_that_are_not_finite_are_counted():
    found = measured(module(lambda m, x: (x * m.w).log(), w=W), torch.tensor([-1.0, 0.0, 1.0]))
    output = of(found, ":log#0")["output0"]
    assert (output.num_nan, output.num_inf, output.maximum) == (1, 1, pytest.approx(math.log(2)))


def test_a_gradient_that_the_loss_computes_itself_is_no_gradient_of_the_loss():
    """The loss is w x^2 + (d sum(w x^2) / dx)^2 = w x^2 + (2 w x)^2: at w = 2, x = 3, dl/dw = x^2 + 8 w x^2 = 153."""

    def penalty(model, x):
        x = x.clone().requires_grad_()
        y = model(x).sum()
        (slope,) = torch.autograd.grad(y * 1024, x, create_graph=True)
        return y + (slope / 1024).pow(2).sum()

    found = measured(module(lambda m, x: m.w * x.pow(2), w=W), torch.tensor([3.0]), penalty)
    assert found.parameters["w"].gradient.maximum == 153
    assert of(found, ":mul#0")["gradient0"].maximum == 1


def test_sparse_gradients_are_what_they_store():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 2, sparse=True)

        def forward(self, x):
            return self.table(x)

    found = measured(Table, torch.tensor([1, 1, 3]))
    table = found.parameters["table.weight"]
    assert (table.gradient.num_elements, table.gradient.maximum) == (4, 2)
    assert (table.update.histogram.num_zero, table.update.num_elements) == (16, 20)


def test_a_parameter_without_a_gradient_has_neither_gradient_nor_update():
    found = measured(module(lambda m, x: m.w * x, w=W, unused=W), torch.ones(2))
    assert (found.parameters["unused"].gradient, found.parameters["unused"].update) == (None, None)
    assert found.parameters["unused"].value.maximum == 2


def test_a_frozen_parameter_is_read_too():
    def make():
        made = module(lambda m, x: m.w * x * m.scale, w=W, scale=W)()
        made.scale.requires_grad_(False)
        return made

    found = measured(make, torch.ones(2))
    assert (found.parameters["scale"].value.maximum, found.parameters["scale"].gradient) == (2, None)


def test_an_optimizer_that_wants_a_closure_takes_no_step():
    found = measured(module(lambda m, x: m.w * x, w=W), torch.ones(2), optimizer=torch.optim.LBFGS)
    assert found.parameters["w"].gradient.maximum == 2
    assert found.parameters["w"].update is None


def test_a_parameter_of_no_optimizer_is_not_updated():
    found = measured(
        module(lambda m, x: m.w * x + m.b, w=W, b=W), torch.ones(2), optimizer=lambda parameters: sgd([*parameters][:1])
    )  # fmt: skip
    assert found.parameters["w"].update is not None
    assert found.parameters["b"].update is None


def test_the_model_stays_as_it_was_with_the_gradients_of_the_last_step():
    recording = record(workload(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.randn(4, 2)))
    before = {name: each.clone() for name, each in recording.model.state_dict().items()}
    measured_numerics([recording], lambda parameters: torch.optim.AdamW(parameters), FORMATS)
    assert all(torch.equal(each, before[name]) for name, each in recording.model.state_dict().items())
    assert all(parameter.grad is not None for parameter in recording.model.parameters())
    assert recording.replay_matches


def test_a_step_that_fails_leaves_the_model_as_it_was():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            raise RuntimeError("no more")

    recording = record(workload(module(lambda m, x: m.w * x, w=W), torch.ones(2)))
    with pytest.raises(RuntimeError, match="no more"):
        measured_numerics([recording], lambda parameters: Broken(parameters, lr=1.0), FORMATS)
    assert recording.model.w.item() == 2


def test_batches_are_steps_of_one_training_run():
    """SGD moves w from 2 by -0.5 * 2, then, on the second batch, by -0.5 * 8."""
    recording = record(workload(module(lambda m, x: m.w * x, w=W), torch.ones(2)))
    second = dataclasses.replace(recording, inputs=(torch.full((2,), 4.0),))
    found = measured_numerics([recording, second], sgd, FORMATS)
    roles, weight = of(found, ":mul#0"), found.parameters["w"]
    assert found.num_batches == 2
    assert (roles["input1"].num_elements, roles["input1"].maximum, roles["input1"].num_tensors) == (4, 4, 2)
    assert (roles["input0"].minimum, roles["input0"].maximum) == (1, 2)
    assert (weight.gradient.minimum, weight.gradient.maximum) == (2, 8)
    assert (weight.update.minimum, weight.update.maximum) == (-4, -1)
    assert recording.model.w.item() == 2


def test_every_site_is_there_once_in_order_of_roles():
    recording = record(workload(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), torch.randn(3, 2)))
    found = measured_numerics([recording], sgd, FORMATS)
    assert tuple(found.sites) == recording.op_graph.sites()
    for tensors in found.sites.values():
        order = [("input", "output", "gradient").index(each.role) for each in tensors]
        assert order == sorted(order)
        assert all(isinstance(each, SiteTensor) for each in tensors)


class LiveBytes(TorchDispatchMode):
    """Follows the memory of every tensor that an operation makes, and notes the most that was alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor) and each.layout == torch.strided:
                storage = each.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


class Deep(nn.Module):
    """Of 40 results of 64 KiB, autograd saves one: what is kept beyond it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        y = x * self.w
        for number in range(20):
            y = y.view(-1).view(x.shape) + number
            unread = y * 2  # noqa: F841 fx keeps what nobody reads
        return y


def test_memory_is_bounded_by_that_of_the_step():
    x = torch.randn(128, 128)
    recording = record(workload(Deep, x))
    with LiveBytes() as instrumented:
        measured_numerics([recording], sgd, FORMATS)
    model = Deep()
    with LiveBytes() as plain:
        model(x).sum().backward()
    size = x.numel() * 4
    assert plain.peak >= 2 * size
    # What is read in pieces needs five of them for a moment; here a tensor is a fourth of a piece.
    assert instrumented.peak <= plain.peak + 7 * size


def test_pieces_are_all_that_a_large_tensor_takes_beyond_the_step():
    x = torch.randn(1024, 1024)  # 4 MiB, 16 pieces
    recording = record(workload(Deep, x))
    with LiveBytes() as instrumented:
        measured_numerics([recording], sgd, FORMATS)
    model = Deep()
    with LiveBytes() as plain:
        model(x).sum().backward()
    assert instrumented.peak <= 1.5 * plain.peak


def test_nothing_holds_the_model_afterwards():
    recording = record(workload(lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(5, 3)))
    model = weakref.ref(recording.model)
    measured_numerics([recording], sgd, FORMATS)
    del recording
    gc.collect()
    assert model() is None
