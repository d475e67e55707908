import torch
from torch import nn

from autoprec.measure.memory import measure_memory
from autoprec.measure.training import Training

from .workloads import workload

ROWS = 32


def use(model, optimizer=torch.optim.AdamW, policy="fp32", loss=lambda model, batch: model(batch).sum()):
    fields = {"model": model, "loss": loss, "optimizer": lambda params: optimizer(params, lr=1e-3)}
    with Training(workload(**fields), policy, device="cpu", seed=0, batches=[torch.ones(ROWS, 64)]) as training:
        return measure_memory(training)


def two_layers():
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))


def test_every_part_of_a_small_network_adds_up():
    found = use(two_layers)
    weights = 4 * (64 * 64 + 64 * 8)
    assert found.parameter_bytes == found.gradient_bytes == weights
    # AdamW: two moments a weight and one FP32 step count a parameter.
    assert found.optimizer_bytes == 2 * weights + 2 * 4
    # Saved: the batch for the first weight's gradient and tanh's output, which tanh and the second layer share.
    assert found.saved_bytes == 4 * (ROWS * 64 + ROWS * 64)
    parts = found.parameter_bytes + found.gradient_bytes + found.optimizer_bytes + found.saved_bytes
    assert found.total_bytes == parts


def test_plain_sgd_has_no_state():
    assert use(two_layers, torch.optim.SGD).optimizer_bytes == 0


def test_tied_weights_and_views_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(64, 64, bias=False)
            self.other = nn.Linear(64, 64, bias=False)
            self.other.weight = self.one.weight
            self.register_buffer("mask", torch.ones(64))

        def forward(self, x):
            first, second = self.one(x).exp().chunk(2, dim=-1)
            return self.other(torch.cat([first * second, first], dim=-1)) * self.mask

    found = use(Tied, torch.optim.SGD)
    assert found.parameter_bytes == 4 * (64 * 64 + 64)
    assert found.gradient_bytes == 4 * 64 * 64
    # The batch, exp's output (saved by exp, and as two views of it by mul) and cat's output; the mask is a buffer.
    assert found.saved_bytes == 3 * 4 * ROWS * 64


def test_low_precision_saves_half_the_activations():
    def activations(policy):
        return use(lambda: nn.Sequential(*[nn.Tanh() for _ in range(4)], nn.Linear(64, 1)), policy=policy).saved_bytes

    # bf16 saves the same tensors in half the bytes, and casts of the last weight (64 elements) and the like on top.
    assert activations("low-bf16") < 0.6 * activations("fp32")


def test_the_step_counts_as_a_step_and_leaves_no_hook():
    fields = {"model": two_layers, "loss": lambda model, batch: model(batch).sum()}
    with Training(workload(**fields), "fp32", device="cpu", seed=0, batches=[torch.ones(2, 64)]) as training:
        first = measure_memory(training)
        assert training.num_steps == 1
        assert measure_memory(training) == first
