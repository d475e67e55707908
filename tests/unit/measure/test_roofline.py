"""Modeled times against the roofline worked out by hand, on a device whose figures are round."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoprec import Workload
from autoprec.capture import record
from autoprec.measure.device_profiles import DeviceProfile, Figure
from autoprec.measure.roofline import ACHIEVABLE, ACHIEVABLE_BANDWIDTH, modeled_op_times, optimizer_seconds

MATMUL = ACHIEVABLE["matmul"]


def figure(value: float) -> Figure:
    return Figure(value=value, source="a test", date="2026-11")


def profile(bandwidth: float = 1e30, launch: float = 1e-9, **peaks: float) -> DeviceProfile:
    rates = {"fp32": 1.0, "tf32": 4.0, "bf16": 8.0, "fp16": 8.0, "fp8_e4m3": 16.0} | peaks
    return DeviceProfile(
        name="round", title="Testium", kind="cuda", lists="cuda", space="cuda",
        peaks={name: figure(rate) for name, rate in rates.items()},
        bandwidth=figure(bandwidth), launch=figure(launch),
    )  # fmt: skip


class One(nn.Module):
    """Runs `lines(x, weight)`."""

    def __init__(self, lines, *shape):
        super().__init__()
        self.lines, self.weight = lines, nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return self.lines(x, self.weight)


def times(lines, x, shape, given=None, *, formats=("bf16",), inside="ieee", op="linear"):
    """Return what the first call of `op` takes and keeps in each format."""
    recording = record(
        Workload(model=lambda: One(lines, *shape), batches=lambda: [x], loss=lambda model, each: model(each).sum())
    )
    op_times = modeled_op_times(recording, given or profile(), formats, inside=inside)
    name = next(node.name for node in recording.op_graph if node.op == op)
    signature = next(facts.signature for facts in op_times.facts if facts.name == name)
    return op_times.times[signature]


FLOPS = 2 * 3 * 16 * 32  # of a linear layer on 3 rows


def linear(x, weight):
    return F.linear(x, weight)


X, SHAPE = torch.ones(3, 16), (32, 16)


def test_a_product_takes_its_operations_over_the_rate_within_reach():
    found = times(linear, X, SHAPE)
    assert found["fp32"].timing.forward_s == pytest.approx(FLOPS / MATMUL, rel=1e-6)
    assert found["bf16"].timing.forward_s == pytest.approx(FLOPS / MATMUL / 8, rel=1e-6)


def test_the_backward_pass_multiplies_once_for_each_operand_that_needs_a_gradient():
    assert times(linear, X, SHAPE)["fp32"].timing.backward_s == pytest.approx(FLOPS / MATMUL, rel=1e-6)
    needed = times(linear, X.clone().requires_grad_(), SHAPE)["fp32"].timing.backward_s
    assert needed == pytest.approx(2 * FLOPS / MATMUL, rel=1e-6)


def test_nothing_goes_backward_under_no_grad():
    def still(x, weight):
        with torch.no_grad():
            made = F.linear(x, weight)
        return made.sum() * weight.sum()

    assert times(still, X, SHAPE)["fp32"].timing.backward_s == 0.0


def test_memory_bounds_a_product_on_a_device_with_fast_units():
    device = profile(bandwidth=1.0, launch=100.0, fp32=1e30, bf16=1e30)
    found = times(linear, X, SHAPE, device)
    numel = 3 * 16 + 32 * 16 + 3 * 32
    assert found["fp32"].timing.forward_s == pytest.approx(4 * numel / ACHIEVABLE_BANDWIDTH + 100)
    assert found["bf16"].timing.forward_s == pytest.approx(2 * numel / ACHIEVABLE_BANDWIDTH + 100)
    assert found["bf16"].timing.backward_s == found["bf16"].timing.forward_s  # one product, which moves as much


def test_a_pointwise_op_moves_its_tensors_and_what_it_saved():
    found = times(lambda x, w: (x * w).tanh(), X, (16,), profile(bandwidth=1.0), op="tanh")["fp32"]
    numel = 3 * 16
    assert found.timing.forward_s == pytest.approx(4 * 2 * numel / ACHIEVABLE_BANDWIDTH)
    # the saved result and the gradient of the result are read, the gradient of the input is written
    assert found.timing.backward_s == pytest.approx(4 * 3 * numel / ACHIEVABLE_BANDWIDTH)
    assert found.kept.saved_outputs == (0,)


def test_an_expanded_tensor_has_no_more_bytes_than_its_memory():
    def lines(x, weight):
        return torch.add(x, weight.expand(3, 16))

    found = times(lines, X, (1,), profile(bandwidth=1.0), op="add")["fp32"]
    assert found.timing.forward_s == pytest.approx(4 * (2 * 48 + 1) / ACHIEVABLE_BANDWIDTH)


def test_a_gather_reads_of_its_table_what_it_returns():
    index = torch.tensor([1, 2])

    def lines(x, weight):
        return F.embedding(index.to(x.device), weight) * x.sum()

    found = times(lines, X, (1000, 4), profile(bandwidth=1.0), op="embedding")["fp32"]
    assert found.timing.forward_s == pytest.approx((2 * 8 + 2 * 4 * 8) / ACHIEVABLE_BANDWIDTH)
    assert found.timing.backward_s > 4 * 1000 * 4  # the gradient of the whole table is written


def test_a_view_costs_nothing_and_a_write_does():
    device = profile(bandwidth=1.0)
    assert times(lambda x, w: (x * w).view(-1), X, (16,), device, op="view")["fp32"].timing.total_s == 0.0
    written = times(lambda x, w: (x * w).add_(1), X, (16,), device, op="add")["fp32"]
    assert written.timing.forward_s == pytest.approx(4 * 2 * 48 / ACHIEVABLE_BANDWIDTH)


def test_tf32_is_inside_fp32_products_alone():
    found = times(linear, X, SHAPE, inside="tf32")
    assert found["fp32"].timing.forward_s == pytest.approx(FLOPS / MATMUL / 4, rel=1e-6)
    assert found["bf16"] == times(linear, X, SHAPE)["bf16"]

    def attention(x, weight):
        return F.scaled_dot_product_attention(*(x[None] * weight,) * 3)

    name = "scaled_dot_product_attention"
    assert times(attention, X, (16,), inside="tf32", op=name) == times(attention, X, (16,), op=name)


def test_attention_computes_its_scores_anew_in_the_backward_pass():
    def attention(x, weight):
        return F.scaled_dot_product_attention(*(x[None] * weight,) * 3)

    timing = times(attention, X, (16,), op="scaled_dot_product_attention")["fp32"].timing
    assert timing.forward_s == pytest.approx(2 * 3 * 3 * 32 / ACHIEVABLE["attention"], rel=1e-6)
    assert timing.backward_s == pytest.approx(2.5 * timing.forward_s, rel=1e-6)


def test_a_depthwise_convolution_has_no_low_units():
    def lines(x, weight):
        return F.conv1d(x[None], weight, groups=3)

    found = times(lines, X, (3, 1, 5), op="conv1d", inside="tf32")
    assert found["bf16"].timing.forward_s == pytest.approx(found["fp32"].timing.forward_s, rel=1e-6)
    assert found["fp32"].timing.forward_s == pytest.approx(2 * 3 * 12 * 5 / ACHIEVABLE["convolution"], rel=1e-6)


def test_what_is_kept_follows_the_format_and_a_dtype_that_is_named_does_not():
    kept = times(lambda x, w: (x * w).tanh(), X, (16,), op="tanh")
    assert (kept["fp32"].kept.outputs, kept["bf16"].kept.outputs) == (("float32",), ("bfloat16",))

    def named(x, weight):
        return F.softmax(x * weight, -1, dtype=torch.float32)

    assert times(named, X, (16,), op="softmax")["bf16"].kept.outputs == ("float32",)


def test_of_a_norm_only_the_first_input_is_low():
    found = times(lambda x, w: F.layer_norm(x, (16,), w), X, (16,), profile(bandwidth=1.0), op="layer_norm")
    saved = found["fp32"].timing.forward_s - found["bf16"].timing.forward_s
    assert saved == pytest.approx(2 * 2 * 48 / ACHIEVABLE_BANDWIDTH)


def test_fp8_is_for_products_whose_sizes_its_kernels_take():
    device = replace(profile(), bandwidth=figure(1e6))
    found = times(linear, X, SHAPE, device, formats=("bf16", "fp8_e4m3"))
    assert found["fp8_e4m3"].kept.outputs == ("bfloat16",)
    rounded = 5 * 3 * 16 + 9 * 32 * 16  # bf16 rows and the FP32 weight, each read twice and written once
    expected = FLOPS / MATMUL / 16 + rounded / (1e6 * ACHIEVABLE_BANDWIDTH)
    assert found["fp8_e4m3"].timing.forward_s == pytest.approx(expected, rel=1e-6)
    backward = FLOPS / MATMUL / 16 + (rounded + 5 * 3 * 32) / (1e6 * ACHIEVABLE_BANDWIDTH)
    assert found["fp8_e4m3"].timing.backward_s == pytest.approx(backward, rel=1e-6)
    assert "fp8_e4m3" not in times(linear, torch.ones(3, 8), (32, 8), formats=("bf16", "fp8_e4m3"))


def test_casts_move_six_bytes_an_element():
    recording = record(Workload(model=lambda: One(linear, *SHAPE), batches=lambda: [X], loss=lambda m, x: m(x).sum()))
    casts = modeled_op_times(recording, profile(bandwidth=1.0, launch=10.0), ("bf16",)).casts
    once = 10 + 6 * 1000 / ACHIEVABLE_BANDWIDTH
    assert casts.seconds("bf16", "down", 1000, grad=False) == pytest.approx(once)
    assert casts.seconds("bf16", "up", 1000, layout="strided") == pytest.approx(2 * once)


def test_the_optimizer_moves_seven_numbers_a_parameter():
    recording = record(Workload(model=lambda: One(linear, *SHAPE), batches=lambda: [X], loss=lambda m, x: m(x).sum()))
    expected = 28 * 512 / ACHIEVABLE_BANDWIDTH + 10
    assert optimizer_seconds(recording, profile(bandwidth=1.0, launch=10.0)) == pytest.approx(expected)


def test_modeling_repeats_the_step_and_disturbs_nothing():
    def lines(x, weight):
        return F.dropout(x * weight, 0.5)

    recording = record(Workload(model=lambda: One(lines, 16), batches=lambda: [X], loss=lambda m, x: m(x).sum()))
    before, state = recording.replay().item(), torch.get_rng_state()
    modeled_op_times(recording, profile(), ("bf16",))
    assert recording.replay().item() == before
    assert torch.equal(torch.get_rng_state(), state)
