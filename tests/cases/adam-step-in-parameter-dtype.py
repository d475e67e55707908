"""A home-made Adam keeps its step in the dtype of the parameter: bf16 counts to 256 and corrects the bias forever."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "adam-step-in-parameter-dtype",
    "source": "pytorch/ao#4915, deepspeedai/DeepSpeed#8496",
    "mechanism": "256 + 1 is 256 in bf16, so 1 - 0.999**step stays at 0.226 and later steps shrink to half their length",
    "kind": "optimizer",
    "expect": "keep the state step in fp32 or as an integer",
    "formats": {}, "flag_sites": [], "fix_sites": [],
}


class PlainAdam(torch.optim.Optimizer):
    """Moments in fp32, the counter made like the parameter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state, gradient = self.state[p], p.grad.float()
                if not state:
                    state["step"] = p.new_zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
                state["step"] += 1
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                count = state["step"].item()
                scale = (state["exp_avg_sq"] / (1 - second ** count)).sqrt() + group["eps"]
                p.copy_(p.float() - group["lr"] / (1 - first ** count) * state["exp_avg"] / scale)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 16, 5, stride=2), nn.GroupNorm(4, 16)
        self.hidden, self.out = nn.Linear(16 * 14, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.out(F.gelu(self.hidden(F.gelu(self.norm(self.conv(x))).flatten(1)))).squeeze(-1)


def batches():
    generator = torch.Generator().manual_seed(0)
    time = torch.linspace(0, 6.28, 32)
    for _ in range(8):
        phase = 6.28 * torch.rand(32, 1, 1, generator=generator)
        yield torch.sin(time + phase) + 0.3 * torch.randn(32, 2, 32, generator=generator), torch.sin(phase.flatten() + 7)


def loss(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


def workload():
    return autoprec.Workload(model=Forecaster, batches=batches, loss=loss, optimizer=lambda params: PlainAdam(params, lr=1e-3))


def step_length(dtype):
    """The counter, and the length of the step after 400 steps of a gradient of 0.1 per weight."""
    weight = nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = PlainAdam([weight])
    for _ in range(400):
        weight.data.zero_()  # so that the weight itself never rounds
        weight.grad = torch.full_like(weight, 0.1)
        optimizer.step()
    return optimizer.state[weight]["step"].item(), -weight.detach().float().mean().item()


def verify():
    count, length = step_length(torch.float32)
    low_count, low_length = step_length(torch.bfloat16)
    torch.manual_seed(0)
    model = Forecaster()
    optimizer, losses = workload().optimizer(model.parameters()), []
    for batch in list(batches()) * 4:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return {
        "fp32: the step is lr long and the counter at 400": count == 400 and abs(length - 1e-3) < 2e-5,
        "bf16: the counter stands at 256": low_count == 256,
        "bf16: the step is shorter than it should be by a seventh and more": low_length < 0.85 * length,
        "the optimizer learns in fp32": losses[-1] < 0.5 * losses[0],
    }
