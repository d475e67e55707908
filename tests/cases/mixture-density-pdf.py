"""A mixture density head adds up densities and takes their log; far from all modes every fp16 density is 0."""
import math

import torch
from torch import nn

import autoprec

CASE = {
    "id": "mixture-density-pdf",
    "source": "emited/VariationalRecurrentNeuralNetwork#2, pytorch/pytorch#187053",
    "mechanism": "a target six sigmas off has exp(-18) = 1.5e-8, which underflows in fp16: log(0)",
    "formats": {"fp16": "unsafe", "bf16": "safe"},
    "flag_sites": [("criterion", "exp"), ("criterion", "mul", 2), ("criterion", "sum"), ("criterion", "log")],
    "fix_sites": [("criterion", "mul"), ("criterion", "div"), ("criterion", "exp"), ("criterion", "sum"),
                  ("criterion", "log")],
}
MODES, WIDTH = 5, 48


class MixtureLoss(nn.Module):
    def forward(self, weight, centre, spread, target):
        z = (target[:, None] - centre) / spread
        density = torch.exp(-0.5 * z ** 2) / (spread * math.sqrt(2 * math.pi))
        return -torch.log((weight * density).sum(dim=1)).mean()


class StrokeNet(nn.Module):
    """Predicts the next pen offset from the last twelve with a GRU written out as layers."""

    def __init__(self):
        super().__init__()
        self.gates, self.update = nn.Linear(WIDTH + 1, 2 * WIDTH), nn.Linear(WIDTH + 1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.weight, self.centre, self.spread = (nn.Linear(WIDTH, MODES) for _ in range(3))
        self.criterion = MixtureLoss()
        with torch.no_grad():
            self.spread.bias.fill_(-0.7)
            self.centre.bias.copy_(torch.linspace(-0.5, 0.5, MODES))

    def forward(self, offsets):
        state = offsets.new_zeros(len(offsets), WIDTH)
        for step in offsets.unbind(1):
            reset, keep = self.gates(torch.cat([state, step[:, None]], -1)).sigmoid().chunk(2, -1)
            candidate = torch.tanh(self.update(torch.cat([reset * state, step[:, None]], -1)))
            state = keep * state + (1 - keep) * candidate
        state = self.norm(state)
        return self.weight(state).softmax(-1), self.centre(state), self.spread(state).exp()


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        walk = torch.randn(128, 13, generator=generator).cumsum(1) * 0.2
        walk[::16, -1] += 5.0  # the pen is lifted to a new word
        yield walk[:, :-1], walk[:, -1]


def workload():
    return autoprec.Workload(
        model=StrokeNet,
        batches=batches,
        loss=lambda model, batch: model.criterion(*model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3),
    )
