"""Tiny workloads for the tests of measure."""

import random

import numpy as np
import torch
from torch import nn

from autoprec.workload import Workload


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))


def cross_entropy(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def batches(count=3, rows=16):
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(rows, 8, generator=generator), torch.randint(4, (rows,), generator=generator))
        for _ in range(count)
    ]


def workload(**fields):
    return Workload(**{"model": mlp, "batches": batches, "loss": cross_entropy, **fields})


def noisy_loss(model, batch):
    """Draw from each of the three generators that user code may use."""
    return cross_entropy(model, batch) * (1 + random.random() + np.random.rand() + torch.rand(()))
