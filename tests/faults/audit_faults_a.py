"""Planted faults, one a row, each with the gate that is meant to catch it; and healthy runs that no gate may refuse."""

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from autoprec.policy import LossScale, Parameters, Rule
from autoprec.records.audit import AuditRecord
from tests.faults.planted import BF16, EVERY_SITE_FP32, HEALTHY, Fault, Planted, edited, run_planted

WIDER = edited(("16, 32), nn.Linear(32", "16, 48), nn.Linear(48"))
OTHER_MODEL = edited(("nn.Linear(16, 4)", "nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))"))
SLOW_WHERE_LOW = edited(
    (
        "        return x + self.outer",
        "        time.sleep({seconds} * (self.inner(x).dtype != torch.float32))\n        return x + self.outer",
    )
)
CAST_UNDONE = edited(
    (
        "        for block in self.blocks:\n            x",
        "        self.to(torch.float32)\n        for block in self.blocks:\n            x",
    )
)
STALE = edited(
    (
        "        return x + self.outer(F.gelu(self.inner(self.norm(x))))",
        "        hidden = self.inner(self.norm(x))\n"
        "        if not hasattr(self, 'cast'):\n"
        "            self.cast = self.outer.weight.to(hidden.dtype)\n"
        "            self.cast = self.cast if hidden.dtype == torch.float32 else self.cast.detach().clone()\n"
        "        return x + F.linear(F.gelu(hidden), self.cast)",
    )
)
PRECISION_IN_FORWARD = edited(
    (
        "        return self.head(x)",
        "        torch.backends.mkldnn.matmul.fp32_precision = 'bf16'\n        return self.head(x)",
    )
)
AUTOCAST_INSIDE = edited(
    (
        "        return self.head(x)",
        "        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=x.dtype != torch.float32):\n"
        "            return self.head(x)",
    )
)
TINY_GRADIENTS = edited(
    ("F.cross_entropy(model(batch[0]), batch[1])", "F.cross_entropy(model(batch[0]), batch[1]) * 2e-7"),
    ("lr=0.05", "lr=0.05 / 2e-7"),
    ("/ 64", "/ 64 / 2e-7"),
)
LARGE_VALUES = edited(("return self.head(x)", "return self.head(x * 3e4) / 3e4"))
ROUTED = edited(
    (
        "        return x + self.outer(F.gelu(self.inner(self.norm(x))))",
        "        rows = (self.inner(x)[:, 0] > 0).nonzero()[:, 0]\n"
        "        return x.index_add(0, rows, self.outer(F.gelu(self.inner(self.norm(x[rows])))))",
    )
)
SMALL_UPDATES = edited(("lr=0.05", "lr=0.002"), ("range(64)", "range(128)"))

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="another model",
        planted="the policy was tuned for another model",
        gate="match",
        says="head.0:linear#0",
        how=Planted(tuned_on=OTHER_MODEL),
    ),
    Fault(
        name="layer added",
        planted="a third block",
        gate="match",
        says="blocks.2.inner:linear#0",
        how=Planted(workload=edited(("range(2)", "range(3)"))),
    ),
    Fault(
        name="layer removed",
        planted="one block instead of two",
        gate="match",
        says="blocks.1.inner:linear#0",
        how=Planted(workload=edited(("range(2)", "range(1)"))),
    ),
    Fault(
        name="layer renamed",
        planted="head is called output",
        gate="match",
        says="output:linear#0",
        how=Planted(workload=edited(("self.head", "self.output"))),
    ),
    Fault(
        name="another activation",
        planted="ReLU instead of GELU",
        gate="match",
        says="blocks.0:relu#0",
        how=Planted(workload=edited(("F.gelu", "F.relu"))),
    ),
    Fault(
        name="wider layer",
        planted="48 hidden units instead of 32",
        gate="match",
        says="blocks.0.inner.weight",
        how=Planted(workload=WIDER),
    ),
    Fault(
        name="rewired",
        planted="the residual begins after the norm",
        gate="match",
        says="what reads what",
        how=Planted(
            workload=edited(
                (
                    "return x + self.outer(F.gelu(self.inner(self.norm(x))))",
                    "y = self.norm(x)\n        return y + self.outer(F.gelu(self.inner(y)))",
                )
            )
        ),
    ),
    Fault(
        name="another batch size",
        planted="batches of 12",
        gate="match",
        says="int64[12]",
        how=Planted(workload=edited(("randn(8", "randn(12"))),
    ),
    Fault(
        name="another torch",
        planted="tuned under torch 2.9",
        gate="match",
        says="2.9.1",
        how=Planted(lock={"torch": "2.9.1+cpu"}),
    ),
    Fault(
        name="another device",
        planted="tuned on a GPU",
        gate="match",
        says="cuda",
        how=Planted(lock={"device": {"kind": "cuda", "name": "NVIDIA H100, sm_90"}}),
    ),
    Fault(
        name="autocast lists changed",
        planted="torch casts an op that it left alone",
        gate="match",
        says="matmul",
        how=Planted(lock={"autocast": {"lists": "0" * 16, "gone": ["matmul"], "new": []}}),
    ),
    Fault(
        name="deterministic algorithms",
        planted="the script asks for deterministic algorithms",
        gate="match",
        says="deterministic_algorithms",
        how=Planted(workload=HEALTHY + "\ntorch.use_deterministic_algorithms(True, warn_only=True)\n"),
    ),
    Fault(
        name="FP32 precision",
        planted="the script sets bf16 inside FP32 matmuls",
        gate="match",
        says="fp32_precision.matmul",
        how=Planted(workload=HEALTHY + "\ntorch.backends.mkldnn.matmul.fp32_precision = 'bf16'\n"),
    ),
    Fault(
        name="dead rule",
        planted="a rule for an op that no module runs",
        gate="match",
        says="dead",
        how=Planted(
            mend=lambda text: text.replace(
                '  - {sites: "*"', '  - {sites: "blocks.*:softmax", format: fp32}\n  - {sites: "*"', 1
            )
        ),
    ),
    Fault(
        name="doubly won",
        planted="the same rule twice",
        gate="match",
        says="doubly won",
        how=Planted(
            mend=lambda text: text.replace(
                '  - {sites: "*"', '  - {sites: "*:linear", format: fp32}\n' * 2 + '  - {sites: "*"', 1
            )
        ),
    ),
    Fault(
        name="format without a kernel",
        planted="the device cannot run bf16",
        gate="capable",
        says="does not run here",
        how=Planted(rules=BF16, native=("fp32",), lacks=("bf16",)),
    ),
    Fault(
        name="format without units",
        planted="the device runs bf16 in software",
        gate="capable",
        says="software",
        how=Planted(rules=BF16, native=("fp32",)),
    ),
    Fault(
        name="emulated format",
        planted="FP8, which is emulated here",
        gate="capable",
        says="emulated",
        how=Planted(
            rules=(Rule(sites="blocks.*:linear", format="fp8_e4m3"), *EVERY_SITE_FP32), lacks=("fp8_e4m3", "fp8_e5m2")
        ),
    ),
    Fault(
        name="precision set in forward",
        planted="the model's forward sets bf16 inside FP32 matmuls",
        gate="honoured",
        says="head:linear#0",
        how=Planted(workload=PRECISION_IN_FORWARD, tuned_on=PRECISION_IN_FORWARD),
    ),
    Fault(
        name="cast undone by the model",
        planted="the model's forward calls .to(torch.float32) on itself, and its parameters were stored in bf16",
        gate="honoured",
        says="blocks.0.inner.weight stored in bf16, and in fp32 after it",
        how=Planted(
            workload=CAST_UNDONE,
            tuned_on=CAST_UNDONE,
            rules=BF16,
            settings={"parameters": Parameters(storage="bf16")},
        ),
    ),
    Fault(
        name="autocast inside",
        planted="the model switches autocast on where it is given bf16, so that its FP32 head is cast back",
        gate="honoured",
        says="head:linear#0",
        how=Planted(
            workload=AUTOCAST_INSIDE,
            tuned_on=AUTOCAST_INSIDE,
            rules=(Rule(sites="blocks.*:*", format="bf16"), Rule(sites="*", format="fp32")),
        ),
    ),
    Fault(
        name="weights without master",
        planted="bf16 weights without FP32 masters at a small learning rate",
        gate="fidelity",
        says="unfaithful",
        how=Planted(
            workload=SMALL_UPDATES,
            tuned_on=SMALL_UPDATES,
            settings={"parameters": Parameters(storage="bf16")},
            gates="fidelity: {horizon: 96}\n",
        ),
    ),
    Fault(
        name="stale cast",
        planted="the model keeps a low copy of a weight from its first step",
        gate="fidelity",
        says="unfaithful",
        how=Planted(workload=STALE, tuned_on=STALE, rules=BF16, gates="fidelity: {horizon: 96}\n"),
    ),
    Fault(
        name="gradients underflow",
        planted="fp16 without a loss scale, and gradients of 1e-8",
        gate="fidelity",
        says="unfaithful",
        how=Planted(
            workload=TINY_GRADIENTS,
            tuned_on=TINY_GRADIENTS,
            rules=(Rule(sites="*", format="fp16"),),
            gates="fidelity: {horizon: 64}\n",
        ),
    ),
    Fault(
        name="initial loss scale skips steps",
        planted="a dynamic loss scale that starts at 2**24: eight of 24 steps are skipped before one is taken",
        gate="fidelity",
        says="steps lost",
        how=Planted(
            rules=(Rule(sites="*:linear", format="fp16"), Rule(sites="*", format="fp32")),
            settings={"loss_scale": LossScale(kind="dynamic", initial=2.0**24)},
        ),
    ),
    Fault(
        name="activations overflow",
        planted="fp16 where activations reach 1e5",
        gate="fidelity",
        says="nan",
        how=Planted(workload=LARGE_VALUES, tuned_on=LARGE_VALUES, rules=(Rule(sites="*", format="fp16"),)),
    ),
    Fault(
        name="no batches left",
        planted="the search has seen all batches, and the gates ask for new ones",
        gate="fidelity",
        says="0 of 24 batches",
        how=Planted(num_seen=64, gates="fidelity: {horizon: 24, unseen_batches: 8}\n"),
    ),
    Fault(
        name="slower",
        planted="a layer that waits where its input is bf16",
        gate="speed",
        says="x fp32",
        how=Planted(
            workload=SLOW_WHERE_LOW.format(seconds=0.004), tuned_on=SLOW_WHERE_LOW.format(seconds=0.004), rules=BF16
        ),
    ),
    Fault(
        name="far too slow",
        planted="a layer that waits over a second",
        gate="speed",
        says="over 20 times",
        how=Planted(
            workload=SLOW_WHERE_LOW.format(seconds=1.5), tuned_on=SLOW_WHERE_LOW.format(seconds=1.5), rules=BF16
        ),
    ),
    Fault(
        name="speed-up not reached",
        planted="a policy of fp32 where 3x was agreed",
        gate="speed",
        says="x fp32",
        how=Planted(gates="speed: {min_speedup: 3}\n"),
    ),
    Fault(
        name="more memory",
        planted="casts kept beside every weight and activation",
        gate="memory",
        says="backward",
        how=Planted(rules=BF16, gates="memory: {max_ratio: 1.0}\n"),
    ),
    Fault(
        name="costs more",
        planted="a layer that waits where its input is bf16, and a price",
        gate="cost",
        says="per million samples",
        how=Planted(
            workload=SLOW_WHERE_LOW.format(seconds=0.004),
            tuned_on=SLOW_WHERE_LOW.format(seconds=0.004),
            rules=BF16,
            price_per_hour=2.0,
        ),
    ),
)

# Runs that no gate may refuse. Whether low formats are fast is this machine's matter: those gates ask for little there.
_ANY_SPEED = "speed: {min_speedup: 0}\ncost: {max_ratio: 1000}\nmemory: {max_ratio: 2}\n"
CONTROLS: Mapping[str, Planted] = {
    "fp32": Planted(price_per_hour=2.0, gates="speed: {min_speedup: 0.2}\ncost: {max_ratio: 5}\n"),
    "bf16 linears": Planted(rules=BF16, gates=_ANY_SPEED),
    "fp16 with a loss scale": Planted(
        rules=(
            Rule(sites="@loss:*", format="fp32"),
            Rule(sites="*:linear", format="fp16"),
            Rule(sites="*", format="fp32"),
        ),
        settings={"loss_scale": LossScale(kind="dynamic", initial=1024.0)},
        gates=_ANY_SPEED,
        price_per_hour=2.0,
    ),
    "bf16 weights with masters": Planted(
        settings={"parameters": Parameters(storage="bf16", master="fp32")}, gates=_ANY_SPEED
    ),
    "routing that depends on weights": Planted(workload=ROUTED, tuned_on=ROUTED, gates=_ANY_SPEED),
    "a model that was edited and tuned again": Planted(workload=WIDER, tuned_on=WIDER, only=("match", "honoured")),
    "another patch of torch": Planted(
        lock={"torch": f"{'.'.join(torch.__version__.split('.')[:2])}.99"}, only=("match",)
    ),
    "a batch size that is meant": Planted(
        workload=edited(("randn(8", "randn(12")), gates="match: {shapes: 0}\n", only=("match", "honoured")
    ),
}


@cache
def audited_control(name: str) -> AuditRecord:
    """Return the audit of a healthy run by all its gates, one a process."""
    with tempfile.TemporaryDirectory(prefix="autoprec-control-") as folder:
        return run_planted(CONTROLS[name], Path(folder))
