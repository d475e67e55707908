"""Adagrad adds squared gradients to a start value of 0.1: in bf16 the sum never leaves it and the step never shrinks."""
import torch
from torch import nn
from torch.nn import functional as F

import autoprec

CASE = {
    "id": "adagrad-sum-bf16",
    "source": "tenstorrent/tt-metal#33076, Nerogar/OneTrainer#1005, zyushun/Adam-mini#26",
    "mechanism": "gradients of 1e-3 to 1e-2 have squares under 2e-4, half a bf16 spacing of 0.1, so adding them changes nothing",
    "kind": "optimizer",
    "expect": "keep the state sum in fp32; it only grows",
    "formats": {}, "flag_sites": [], "fix_sites": [],
}


class ClickNet(nn.Module):
    """Click prediction from two categories and a few numbers."""

    def __init__(self):
        super().__init__()
        self.site, self.ad = nn.Embedding(30, 12), nn.Embedding(40, 12)
        self.dense, self.norm = nn.Linear(6, 12), nn.LayerNorm(36)
        self.hidden, self.out = nn.Linear(36, 24), nn.Linear(24, 1)

    def forward(self, site, ad, numbers):
        x = self.norm(torch.cat([self.site(site), self.ad(ad), self.dense(numbers)], dim=-1))
        return self.out(F.relu(self.hidden(x))).squeeze(-1)


def batches():
    generator = torch.Generator().manual_seed(0)
    like = torch.randn(30, 40, generator=generator)
    for _ in range(8):
        site, ad = torch.randint(30, (64,), generator=generator), torch.randint(40, (64,), generator=generator)
        numbers = torch.randn(64, 6, generator=generator)
        chance = torch.sigmoid(like[site, ad] + numbers[:, 0])
        yield site, ad, numbers, (torch.rand(64, generator=generator) < chance).float()


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(*batch[:3]), batch[3])


def workload():
    return autoprec.Workload(
        model=ClickNet,
        batches=batches,
        loss=loss,
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.02, initial_accumulator_value=0.1),
    )


def never_moved(stored_in, steps=60):
    """Share of the entries of all sums that are still at their start value."""
    torch.manual_seed(0)
    model = ClickNet()
    optimizer, data = workload().optimizer(model.parameters()), list(batches())
    start = torch.tensor(0.1).to(stored_in).float()
    for state in optimizer.state.values():
        state["sum"].fill_(start)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model, data[step % len(data)])
        value.backward()
        losses.append(value.item())
        seen = [p.grad != 0 for p in model.parameters()] if step == 0 else [
            old | (p.grad != 0) for old, p in zip(seen, model.parameters(), strict=True)]
        optimizer.step()
        for state in optimizer.state.values():
            state["sum"].copy_(state["sum"].to(stored_in))
    still = torch.cat([(optimizer.state[p]["sum"] == start)[old] for old, p in zip(seen, model.parameters(), strict=True)])
    return still.float().mean().item(), losses


def verify():
    share, losses = never_moved(torch.float32)
    low_share, _ = never_moved(torch.bfloat16)
    return {
        "fp32: nearly every sum with a gradient has grown": share < 0.05,
        "bf16: most of them have not": low_share > 0.6,
        "it learns": sum(losses[-8:]) < sum(losses[:8]),
    }
