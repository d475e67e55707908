"""What is looked at in a step that can be undone."""

import torch
from torch import nn
from torch.optim import SGD

import autoprec
from autoprec.policy import preset
from autoprec.runtime.guard.kept_step import KeptStep


def test_an_imaginary_part_that_is_not_finite_undoes_the_step():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    precision, optimizer = autoprec.apply(model, preset("fp32", "cpu")), SGD(model.parameters(), lr=1.0)
    kept = KeptStep(precision, [optimizer], [model.weight], lambda is_broken: is_broken)
    assert kept.undo_if_broken() is None
    with torch.no_grad():
        model.weight[1] = complex(0.0, torch.inf)
    undone = kept.undo_if_broken()
    assert (undone.parameter, undone.num_elements) == ("weight", 1)
    assert model.weight.tolist() == [1, 1, 1]
