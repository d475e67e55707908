"""What a fault costs a guarded run: python benchmarks/rollback.py [--json reports/rollback.json].

A small net in fp16 trains under a guard, calibrated on a run of another seed, with a fault planted on the way: an
activation that leaves fp16 for good, NaN batches, weights that something breaks, a learning rate that throws them far
off. Nobody restarts anything. `lost_steps` is how much later than the run without the fault it reaches the same loss:
over the last quarter of the horizon, the difference of the mean log losses over the slope of the healthy one.
`allowed_steps` is the fidelity margin (1 % of the horizon) plus the steps that were skipped and those that were undone
by going back.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import autoprec  # noqa: E402
from autoprec.policy import LossScale, Policy, Rule  # noqa: E402
from autoprec.runtime.device import describe  # noqa: E402
from autoprec.runtime.guard.calibration import Calibration, loss_band, to_plain  # noqa: E402
from tests.faults.guarded import Batch, batch_at, loss_of, net  # noqa: E402

HORIZON, AT, MARGIN, EVERY, SNAPSHOT_EVERY = 600, 200, 0.01, 5, 10


class Loud(nn.Module):
    """The identity, until `factor` is set: then what passes grows beyond fp16, and is divided again."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.shrink, self.factor = nn.Identity(), nn.Identity(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        if self.factor == 1.0:
            return x
        return torch.mul(x, self.factor) / self.factor


class Run:
    """One guarded run; `plant(run, step)` does its harm before the step."""

    def __init__(self, policy: Policy, seed: int) -> None:
        base = net()
        self.loud = Loud()
        self.model = nn.Sequential(*list(base)[:3], self.loud, base[3])
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.add_(0.01 * noise)
        self.seed = seed
        self.precision = autoprec.apply(self.model, policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.events: list[autoprec.GuardEvent] = []
        self.guard = autoprec.guard(
            self.model, self.optimizer, self.precision, loss=loss_of, every=EVERY, snapshot_every=SNAPSHOT_EVERY,
            on_event=self.events.append,
        )  # fmt: skip
        self.losses: list[float] = []
        self.num_skipped = self.num_undone = 0

    def train(self, plant: Callable[["Run", int, Batch], Batch]) -> "Run":
        """Train to the horizon."""
        for step in range(HORIZON):
            batch = plant(self, step, batch_at(step + 10_000 * self.seed))
            self.optimizer.zero_grad()
            with self.precision.loss():
                loss = loss_of(self.model, batch)
            self.precision.backward(loss)
            self.losses.append(float(loss.detach()))
            before = self.guard.position
            outcome = self.guard.step(loss, batch=batch)
            self.num_skipped += not outcome.stepped
            if outcome.restored_to is not None:
                self.num_undone += before + 1 - outcome.restored_to
        return self


def nothing(_: Run, __: int, batch: Batch) -> Batch:
    """Plant nothing."""
    return batch


def loud_for_good(run: Run, step: int, batch: Batch) -> Batch:
    """An activation leaves fp16 from AT on, for good."""
    if step == AT:
        run.loud.factor = 1e6
    return batch


def nan_batches(_: Run, step: int, batch: Batch) -> Batch:
    """Two batches in a row, and a third later, hold a NaN."""
    return (batch[0] * torch.nan, batch[1]) if step in (AT, AT + 1, AT + 50) else batch


def broken_weights(run: Run, step: int, batch: Batch) -> Batch:
    """Something writes infinities into a layer."""
    if step == AT + 3:
        with torch.no_grad():
            run.model[0].weight.fill_(torch.inf)
    return batch


def diverges(run: Run, step: int, batch: Batch) -> Batch:
    """The learning rate jumps a thousandfold for one step: the weights are thrown far off."""
    if step == AT + 3:
        run.optimizer.param_groups[0]["lr"] = 2.0
    elif step == AT + 4:
        run.optimizer.param_groups[0]["lr"] = 2e-3
    return batch


FAULTS = {each.__name__: each for each in (nothing, loud_for_good, nan_batches, broken_weights, diverges)}


def policy_of(calibration: Calibration | None = None) -> Policy:
    """Return a policy in fp16 with a dynamic loss scale."""
    return Policy(
        name="fp16",
        rules=(
            Rule(sites="*:layer_norm", format="fp32"),
            Rule(sites="@loss", format="fp32"),
            Rule(sites="*", format="fp16"),
        ),
        loss_scale=LossScale(kind="dynamic", initial=2.0**10, growth_interval=100),
        evidence={} if calibration is None else {"calibration": to_plain(calibration)},
    )


def lost_steps(healthy: Sequence[float], faulty: Sequence[float]) -> float:
    """Return by how many steps `faulty` lags behind at the end: its mean loss over the local slope of the other."""
    quarter = HORIZON // 4
    logs = [torch.tensor(each).log().tolist() for each in (healthy, faulty)]
    ours, theirs = (statistics.fmean(each[-quarter:]) for each in (logs[1], logs[0]))
    earlier = statistics.fmean(logs[0][-2 * quarter : -quarter])
    slope = (earlier - theirs) / quarter
    return (ours - theirs) / slope


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        recorded = Run(policy_of(), seed + 100).train(nothing)
        calibration = Calibration(losses=loss_band(recorded.losses), loss_scale=2.0**10, skipped_frac=0.0)
        healthy: Run | None = None
        for name, plant in FAULTS.items():
            run = Run(policy_of(calibration), seed).train(plant)
            healthy = healthy or run
            reactions = [(event.detector, event.reaction) for event in run.events if event.reaction != "info"]
            gone = run.num_skipped + run.num_undone
            lost = lost_steps(healthy.losses, run.losses)
            rows.append(
                {
                    "fault": name, "seed": seed, "reactions": [list(each) for each in reactions],
                    "num_skipped": run.num_skipped, "num_undone": run.num_undone, "lost_steps": round(lost, 2),
                    "allowed_steps": MARGIN * HORIZON + gone, "is_within": lost <= MARGIN * HORIZON + gone,
                    "is_finite": all(bool(torch.isfinite(each).all()) for each in run.model.parameters()),
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/rollback.py",
        "device": describe("cpu").name,
        "torch": torch.__version__,
        "horizon": HORIZON,
        "margin": MARGIN,
        "every": EVERY,
        "snapshot_every": SNAPSHOT_EVERY,
        "num_within": sum(row["is_within"] and row["is_finite"] for row in rows),
        "num_runs": len(rows),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
