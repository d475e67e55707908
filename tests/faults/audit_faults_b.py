"""Planted faults for the gates that train: what fails only in the middle of a run, on another batch, or after it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch

from autoprec.audit.audit import run_gates
from autoprec.audit.audited import Audited
from autoprec.audit.gate import Gate, Thresholds
from autoprec.audit.gates.headroom import HEADROOM
from autoprec.audit.gates.repeat import REPEAT
from autoprec.audit.gates.resume import RESUME
from autoprec.audit.gates.rollback import ROLLBACK
from autoprec.audit.gates.scaler import SCALER
from autoprec.audit.gates.stress import STRESS
from autoprec.policy import LossScale, Policy, Rule
from autoprec.records.audit import GateRecord
from autoprec.runtime.device import describe
from autoprec.runtime.loss_scale import BoundedGradScaler
from autoprec.workload import LoadedWorkload, Workload
from tests.faults import planted_models as models
from tests.faults.fault import Fault

GATES: Mapping[str, Gate] = {gate.name: gate for gate in (HEADROOM, STRESS, SCALER, RESUME, ROLLBACK, REPEAT)}
DYNAMIC = LossScale(kind="dynamic", initial=1024.0, growth_interval=1000)
FP32 = Rule(sites="*", format="fp32")


def policy(*low: tuple[str, str], **settings: Any) -> Policy:
    """Return a policy with some sites in low formats, the rest in FP32."""
    rules = (*(Rule(sites=sites, format=name) for sites, name in low), FP32)
    return Policy(**{"name": "planted", "rules": rules, **settings})


LINEAR_BF16 = policy(("*:linear", "bf16"))
LINEAR_FP16 = policy(("*:linear", "fp16"), loss_scale=DYNAMIC)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What is audited: a run, a policy, checkpoints made by `checkpoints(folder)`, under what `around()` changes."""

    workload: Workload
    policy: Policy
    checkpoints: Callable[[Path], tuple[Path, ...]] = lambda _: ()
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def audited(planted: Planted, folder: Path) -> Audited:
    """Return what is planted, as the gates take it."""
    return Audited(
        loaded=LoadedWorkload(workload=planted.workload, name="run", path=folder / "run.py"),
        policy=planted.policy,
        policy_file=folder / "policy.yaml",
        rule_lines=tuple(range(1, len(planted.policy.rules) + 1)),
        device=describe("cpu"),
        seed=3,
        skip=4,
        checkpoints=planted.checkpoints(folder),
    )


def verdicts(
    planted: Planted,
    folder: Path,
    thresholds: Thresholds = MappingProxyType({}),
    gates: Sequence[Gate] = tuple(GATES.values()),
) -> tuple[GateRecord, ...]:
    """Return what gates say of what is planted; `thresholds` are those that all of them have."""
    with planted.around():
        return run_gates(gates, audited(planted, folder), {gate.name: thresholds for gate in gates})


def failed(planted: Planted, folder: Path) -> frozenset[str]:
    """Return the gates that fail."""
    return frozenset(record.gate for record in verdicts(planted, folder) if record.verdict == "fail")


def two_checkpoints(model: Callable[[], torch.nn.Module], name: str, factors: Sequence[float]) -> Any:
    """Return a function that saves a model once for each factor that a parameter of it is multiplied by."""

    def save(folder: Path) -> tuple[Path, ...]:
        files = []
        for number, factor in enumerate(factors):
            torch.manual_seed(0)
            state = model().state_dict()
            state[name] = state[name] * factor
            files.append(folder / f"step{number}.pt")
            torch.save(state, files[-1])
        return tuple(files)

    return save


def _no_scaler_state() -> AbstractContextManager[Any]:
    return mock.patch.object(BoundedGradScaler, "load_state_dict", return_value=None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One planted fault: its name, what is wrong, the gate meant to catch it, a word that gate says, and the run."""

    name: str
    planted: str
    meant_for: str
    says: str
    how: Planted


ROWS: tuple[Row, ...] = (
    Row(
        name="activations near the limit of fp16",
        planted="what the head takes is amplified to 40,000",
        meant_for="headroom",
        says="head:linear#0",
        how=Planted(workload=models.workload(partial(models.Loud, 1.2e5)), policy=LINEAR_FP16),
    ),
    Row(
        name="gradients flushed without a loss scale",
        planted="the loss is so small that its gradients vanish in fp16",
        meant_for="headroom",
        says="round to zero",
        how=Planted(
            workload=models.workload(loss=models.times(1e-6), optimizer=torch.optim.Adam),
            policy=policy(("*:linear", "fp16")),
        ),
    ),
    Row(
        name="parameter beyond the range of its format",
        planted="a learned factor of 100,000 is read in fp16",
        meant_for="headroom",
        says="factor",
        how=Planted(workload=models.workload(models.Scaled), policy=policy((":mul", "fp16"), loss_scale=DYNAMIC)),
    ),
    Row(
        name="static loss scale too large",
        planted="gradients times the static scale reach half of what fp16 holds",
        meant_for="headroom",
        says="computed at head:linear#0",
        how=Planted(
            workload=models.workload(),
            policy=policy(
                ("head:linear", "fp16"), loss_scale=LossScale(kind="static", initial=2.0**18, maximum=2.0**24)
            ),
        ),
    ),
    Row(
        name="drift towards overflow between checkpoints",
        planted="a layer grew a hundred times between two checkpoints",
        meant_for="headroom",
        says="lost",
        how=Planted(
            workload=models.workload(),
            policy=LINEAR_FP16,
            checkpoints=two_checkpoints(models.Net, "outer.weight", (1.0, 300.0)),
        ),
    ),
    Row(
        name="underflow that grows slowly",
        planted="the head shrinks from checkpoint to checkpoint, and with it what flows back through it",
        meant_for="headroom",
        says="grew from",
        how=Planted(
            workload=models.workload(optimizer=partial(torch.optim.SGD, lr=1e-9)),
            policy=policy(("inner:linear", "fp16")),
            checkpoints=two_checkpoints(models.Net, "head.weight", (2e-4, 1e-4)),
        ),
    ),
    Row(
        name="mask of -1e9 in fp16",
        planted="a row without any visible position is NaN in fp16, and no batch of training has one",
        meant_for="stress",
        says="mask all 0",
        how=Planted(
            workload=models.workload(models.Masked, batches=models.masked_batches, loss=models.masked_loss),
            policy=policy((":where", "fp16"), (":softmax", "fp16"), loss_scale=DYNAMIC),
        ),
    ),
    Row(
        name="norm over one position",
        planted="an eps of 1e-9 that fp16 rounds to zero: 0/0 at length 1",
        meant_for="stress",
        says="length 1",
        how=Planted(
            workload=models.workload(models.NormalizedOverLength),
            policy=policy((":add#0", "fp16"), (":sqrt", "fp16"), (":div", "fp16"), loss_scale=DYNAMIC),
        ),
    ),
    Row(
        name="energy of louder inputs",
        planted="the sum of squares leaves fp16 for inputs four times as large",
        meant_for="stress",
        says="inputs times 4",
        how=Planted(
            workload=models.workload(models.Energy),
            policy=policy((":square", "fp16"), (":sum", "fp16"), loss_scale=DYNAMIC),
        ),
    ),
    Row(
        name="hidden counter",
        planted="the model anneals by a counter that is in no state dict",
        meant_for="resume",
        says="after the checkpoint",
        how=Planted(workload=models.workload(models.Counting), policy=LINEAR_BF16),
    ),
    Row(
        name="buffer that is not saved",
        planted="a running mean in a buffer with persistent=False",
        meant_for="resume",
        says="after the checkpoint",
        how=Planted(workload=models.workload(models.Averaging), policy=LINEAR_BF16),
    ),
    Row(
        name="optimizer state that is not saved",
        planted="an optimizer keeps its momentum outside Optimizer.state",
        meant_for="resume",
        says="after the checkpoint",
        how=Planted(workload=models.workload(optimizer=models.ForgetfulSGD), policy=LINEAR_BF16),
    ),
    Row(
        name="scaler not restored",
        planted="the loss scale of the checkpoint is not loaded, so that its first steps overflow again",
        meant_for="resume",
        says="precision.scaler",
        how=Planted(
            workload=models.workload(),
            policy=policy(("*:linear", "fp16"), loss_scale=LossScale(kind="dynamic", initial=2.0**24)),
            around=_no_scaler_state,
        ),
    ),
    Row(
        name="fallback that diverges",
        planted="the policy keeps loud sites in bf16, and its fallback runs them in fp16",
        meant_for="rollback",
        says="policy to fallback",
        how=Planted(
            workload=models.workload(partial(models.Loud, 1e6)),
            policy=policy(("*:linear", "bf16"), fallback=Rule(sites="*", format="fp16")),
        ),
    ),
    Row(
        name="fallback for another model",
        planted="the fallback names sites that this model has not",
        meant_for="rollback",
        says="encoder.*",
        how=Planted(
            workload=models.workload(),
            policy=policy(("*:linear", "bf16"), fallback=Rule(sites="encoder.*", format="fp32")),
        ),
    ),
    Row(
        name="loss scale without bound",
        planted="a dynamic scale over bf16 sites, which never overflow, with a maximum of 2**127",
        meant_for="scaler",
        says="nothing stops it",
        how=Planted(
            workload=models.workload(),
            policy=policy(
                ("*:linear", "bf16"),
                loss_scale=LossScale(kind="dynamic", initial=2.0**16, growth_interval=1, maximum=2.0**127),
            ),
        ),
    ),
    Row(
        name="loss scale collapses",
        planted="a gradient of a million, which no loss scale fits into fp16",
        meant_for="scaler",
        says="collapsed",
        how=Planted(
            workload=models.workload(loss=models.times(1e7), optimizer=partial(torch.optim.SGD, lr=1e-9)),
            policy=policy(("*:linear", "fp16"), loss_scale=DYNAMIC),
        ),
    ),
    Row(
        name="initial loss scale too large",
        planted="a scale that skips a third of the first steps until it fits",
        meant_for="scaler",
        says="before the first that was taken",
        how=Planted(
            workload=models.workload(),
            policy=policy(("*:linear", "fp16"), loss_scale=LossScale(kind="dynamic", initial=2.0**36, maximum=2.0**40)),
        ),
    ),
    Row(
        name="loss scale grows every step",
        planted="a growth interval of 1: every second step overflows",
        meant_for="scaler",
        says="after the first that was taken",
        how=Planted(
            workload=models.workload(),
            policy=policy(
                ("*:linear", "fp16"),
                loss_scale=LossScale(kind="dynamic", initial=2.0**16, growth_interval=1, maximum=2.0**30),
            ),
        ),
    ),
    Row(
        name="dropout with a generator of its own",
        planted="the generator goes on from run to run",
        meant_for="repeat",
        says="two runs",
        how=Planted(workload=models.workload(models.OwnDropout), policy=LINEAR_BF16),
    ),
    Row(
        name="other weights each time",
        planted="the model draws its weights from a generator that nobody seeds",
        meant_for="repeat",
        says="two runs",
        how=Planted(workload=models.workload(models.OwnStart), policy=LINEAR_BF16),
    ),
)

FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=row.name, planted=row.planted, meant_for=row.meant_for, run=partial(failed, row.how)) for row in ROWS
)

HEALTHY: Mapping[str, Planted] = {
    "net, linear in bf16": Planted(workload=models.workload(), policy=LINEAR_BF16),
    "net, linear in fp16": Planted(workload=models.workload(), policy=LINEAR_FP16),
    "net, all in fp32": Planted(workload=models.workload(), policy=policy()),
    "net with checkpoints that do not drift": Planted(
        workload=models.workload(),
        policy=LINEAR_FP16,
        checkpoints=two_checkpoints(models.Net, "outer.weight", (1.0, 1.02)),
    ),
    "masked, attention in bf16": Planted(
        workload=models.workload(models.Masked, batches=models.masked_batches, loss=models.masked_loss),
        policy=policy((":where", "bf16"), ("*:linear", "bf16")),
    ),
    "Adam, linear in fp16": Planted(workload=models.workload(optimizer=torch.optim.Adam), policy=LINEAR_FP16),
}
