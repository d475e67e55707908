"""Loss curves of the cases of benchmarks/fidelity.py: many seeds at once."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from fidelity_cases import CASES, Batch, Candidate, Case, Tensors

from autoprec.workload.seeding import mixed

REFERENCE = Candidate(name="fp32", is_fault=False)


def curves(
    case_name: str, candidates: Sequence[Candidate], seeds: Sequence[int], steps: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Return the losses of FP32 and of each candidate, seeds by steps."""
    case = CASES[case_name]
    each = [case.batches(seed, steps) for seed in seeds]
    batches = [(torch.stack([of[k][0] for of in each]), torch.stack([of[k][1] for of in each])) for k in range(steps)]
    return {how.name: _train(case, how, seeds, batches) for how in (REFERENCE, *candidates)}


def _train(case: Case, how: Candidate, seeds: Sequence[int], batches: Sequence[Batch]) -> npt.NDArray[np.float64]:
    weights = _start(case, how, seeds)
    optimizer = _optimizer(case, how, weights)
    losses = []
    for number, batch in enumerate(batches):
        torch.manual_seed(mixed(seeds[0], 100 + number))  # dropout: alike in all candidates
        loss = case.losses(weights, batch, how)
        optimizer.zero_grad()
        loss.sum().backward()
        _step(how, weights, optimizer)
        losses.append(loss.detach().double().numpy())
    return np.stack(losses, 1)


def _start(case: Case, how: Candidate, seeds: Sequence[int]) -> Tensors:
    each = []
    for seed in seeds:
        weights = case.weights(seed)
        generator = torch.Generator().manual_seed(mixed(seed, 3 + sum(map(ord, how.name))))
        for name, tensor in weights.items():
            how.start(name, tensor, generator)
        each.append(weights)
    return {name: torch.stack([of[name] for of in each]).requires_grad_() for name in case.shapes}


def _optimizer(case: Case, how: Candidate, weights: Tensors) -> torch.optim.Optimizer:
    optimizer = case.optimizer(list(weights.values()))
    group = optimizer.param_groups[0]
    group.update({key: value for key, value in how.group if key in group})
    group.update({key: group[key] * factor for key, factor in how.times})
    return optimizer


@torch.no_grad()
def _step(how: Candidate, weights: Tensors, optimizer: torch.optim.Optimizer) -> None:
    if how.gradient is not None:
        for name, p in weights.items():
            if p.grad is not None:
                p.grad = how.gradient(name, p.grad)
    before = {name: p.clone() for name, p in weights.items()} if how.update != 1 else {}
    optimizer.step()
    for name, old in before.items():
        weights[name].copy_(torch.lerp(old, weights[name], how.update))
    for p in weights.values():
        how.after(p, optimizer.state[p])
