"""How a fault is planted: in a copy of a healthy training run, in its policy file, its gates file, or its device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import autoprec.pipeline
from autoprec.capture import record
from autoprec.pipeline import AuditOptions, audit
from autoprec.policy import Policy, Rule, dump_policy
from autoprec.records.audit import AuditRecord
from autoprec.runtime.device import DeviceInfo, describe
from autoprec.search.policy_lock import policy_lock
from autoprec.workload import load

HEALTHY = """
import time

import torch
from torch import nn
from torch.nn import functional as F

import autoprec


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(64):
        x = torch.randn(8, 16, generator=generator)
        yield x, x[:, :4].argmax(1)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def optimizer(params):
    return torch.optim.SGD(params, lr=0.05)


def evaluate(model):
    model.eval()
    with torch.no_grad():
        return float(sum(loss(model, batch) for batch in batches())) / 64


def workload():
    return autoprec.Workload(model=Net, batches=batches, loss=loss, optimizer=optimizer, evaluate=evaluate)
"""
HORIZON = 24
EVERY_SITE_FP32 = (Rule(sites="*", format="fp32"),)
BF16 = (Rule(sites="@loss:*", format="fp32"), Rule(sites="*:linear", format="bf16"), Rule(sites="*", format="fp32"))


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A training run, its policy and the rest of what an audit is told; `tuned_on` is the run the policy was tuned for.

    `lock` overwrites what tuning wrote down. `mend` turns the text of the policy file into a wrong one. `only` are the
    gates that it is about; none: all of them.
    """

    workload: str = HEALTHY
    tuned_on: str = HEALTHY
    rules: tuple[Rule, ...] = EVERY_SITE_FP32
    settings: Mapping[str, Any] = field(default_factory=dict)
    lock: Mapping[str, Any] = field(default_factory=dict)
    mend: Callable[[str], str] = str
    gates: str = ""
    native: tuple[str, ...] = ("fp32", "bf16", "fp16")
    lacks: tuple[str, ...] = ()
    price_per_hour: float | None = None
    num_seen: int = 24
    only: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is planted, the gate meant to catch it, and a word that its evidence must say."""

    name: str
    planted: str
    gate: str
    says: str
    how: Planted


def edited(*changes: tuple[str, str]) -> str:
    """Return the healthy run with every first text replaced by the second."""
    text = HEALTHY
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def run_planted(planted: Planted, folder: Path, *, only: tuple[str, ...] = ()) -> AuditRecord:
    """Return the audit of what is planted, in files that are written into `folder`."""
    device = _device(planted)
    run, policy, gates = folder / "run.py", folder / "policy.yaml", folder / "gates.yaml"
    with _flags_put_back():
        policy.write_text(planted.mend(dump_policy(_tuned(planted, folder, device))))
    run.write_text(planted.workload)
    gates.write_text("autoprec_gates: 1\n" + _with_horizon(planted.gates))
    options = AuditOptions(
        workload=str(run),
        policy=policy,
        gates=gates,
        run_dir=folder / "runs",
        device="cpu",
        price_per_hour=planted.price_per_hour,
        only=only or planted.only,
    )
    with _flags_put_back(), mock.patch.object(autoprec.pipeline, "describe", return_value=device):
        return audit(options)


def _with_horizon(gates: str) -> str:
    return gates if "fidelity:" in gates else f"{gates}fidelity: {{horizon: {HORIZON}}}\n"


def _device(planted: Planted) -> DeviceInfo:
    """Return the CPU at hand, with units for what the row says, so that a verdict is the same on every machine."""
    found = describe("cpu")
    formats = tuple(name for name in found.formats if name not in planted.lacks)
    return replace(found, formats=formats, native_formats=planted.native)


def _tuned(planted: Planted, folder: Path, device: DeviceInfo) -> Policy:
    """Return the policy as `tune` would have written it for the run that it was tuned on."""
    evidence = {
        "lock": {**_lock(planted.tuned_on, folder, device), **planted.lock},
        "seed": 0,
        "seeds": [0, 1],
        "batches": planted.num_seen,
    }
    return Policy(
        name="planted", rules=planted.rules, device={"kind": "cpu"}, evidence=evidence, **dict(planted.settings)
    )


def _lock(text: str, folder: Path, device: DeviceInfo) -> Mapping[str, Any]:
    if text not in _LOCKS:
        (folder / "tuned_on.py").write_text(text)
        op_graph = record(load(str(folder / "tuned_on.py")).workload).op_graph
        _LOCKS[text] = policy_lock(op_graph, device)
    return _LOCKS[text]


_LOCKS: dict[str, Mapping[str, Any]] = {}


@contextmanager
def _flags_put_back() -> Iterator[None]:
    """Put back what a planted script sets for the whole process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    matmul = torch._C._get_fp32_precision_getter("mkldnn", "matmul")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch._C._set_fp32_precision_setter("mkldnn", "matmul", matmul)
