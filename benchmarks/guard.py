"""What the guard costs on the example GPT: python benchmarks/guard.py [--json reports/guard.json].

Two runs train from one seed in interleaved rounds, one steps with `precision.step`, the other with `guard.step` at the
default sampling. A round is as many steps as the guard samples in, so that each holds one sample. `overhead_frac` is
the mean, over rounds, of what the step call of the guarded run takes longer, over the time of a whole step: forward and
backward are the same code in both, so that they are timed for the denominator alone. `whole_step_frac` is the ratio of
whole steps, less 1, with its interval: what the machine's noise leaves of it. With one thread the clock is the CPU time
of the process, since such a machine may be shared. Rows: with clipping, as in examples/train_with_policy.py, where the
norm is there already; without; and under loss scaling, with layer norms in fp16 so that gradients are looked at.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import char_gpt  # noqa: E402

import autoprec  # noqa: E402
from autoprec.measure import speedup  # noqa: E402
from autoprec.policy import LossScale, Policy, Rule, preset  # noqa: E402
from autoprec.runtime.device import describe  # noqa: E402

EVERY = 20
BAND = {"schema": 1, "losses": {"steps": [0.0, 100.0], "means": [5.6, 2.6], "scatter": 0.1}}
FACTS = {**BAND, "flush_frac": 0.5, "layer_flush_frac": 0.9, "overflow_frac": 0.0, "loss_scale": 65536.0}


def policies() -> dict[str, tuple[Policy, float | None]]:
    """Return policy and norm to clip to of each row."""
    fp32 = Policy(name="fp32", rules=preset("fp32", "cpu").rules, evidence={"calibration": BAND})
    scaled = Policy(
        name="fp16-norms",
        rules=(Rule(sites="*:layer_norm", format="fp16"), Rule(sites="*", format="fp32")),
        loss_scale=LossScale(kind="dynamic"),
        evidence={"calibration": FACTS},
    )
    return {
        "fp32, clipped as in the example": (fp32, 1.0),
        "fp32, not clipped": (fp32, None),
        "layer norms in fp16, loss scaled, clipped": (scaled, 1.0),
    }


class Run:
    """One run; `step()` returns the seconds of its step call, and of the whole step."""

    def __init__(self, policy: Policy, max_norm: float | None, clock: Callable[[], float], *, guarded: bool) -> None:
        torch.manual_seed(0)
        self.model = char_gpt.GPT()
        self.precision = autoprec.apply(self.model, policy)
        self.optimizer = char_gpt.optimizer(self.model.parameters())
        self.events: list[autoprec.GuardEvent] = []
        self.batches = cycle(list(islice(char_gpt.batches(), 100)))
        self.max_norm, self.clock = max_norm, clock
        self.guard = None
        if guarded:
            self.guard = autoprec.guard(self.model, self.optimizer, self.precision, on_event=self.events.append)

    def step(self) -> tuple[float, float]:
        """Train one step."""
        batch = next(self.batches)
        started = self.clock()
        self.optimizer.zero_grad()
        with self.precision.loss():
            loss = char_gpt.loss(self.model, batch)
        self.precision.backward(loss)
        stepping = self.clock()
        if self.guard is None:
            self.precision.step(self.optimizer, max_norm=self.max_norm)
        else:
            self.guard.step(loss, batch=batch, max_norm=self.max_norm)
        ended = self.clock()
        return ended - stepping, ended - started


def row(policy: Policy, max_norm: float | None, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Return the cost of the guard on one policy; steps of the two runs alternate."""
    runs = [Run(policy, max_norm, clock, guarded=guarded) for guarded in (False, True)]
    for run in runs:
        for _ in range(2):
            run.step()
    calls: tuple[list[float], list[float]] = ([], [])
    wholes: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        times: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
        for step in range(EVERY):
            for which in (0, 1) if (number + step) % 2 else (1, 0):
                times[which].append(runs[which].step())
        for which in (0, 1):
            calls[which].append(statistics.fmean(call for call, _ in times[which]))
            wholes[which].extend(whole for _, whole in times[which])  # steps of one place in a round are pairs
    step_s = statistics.median(wholes[0])
    differences = [ours - plain for plain, ours in zip(*calls, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    ratio = speedup(wholes[1], wholes[0])
    return {
        "step_ms": round(1e3 * step_s, 3),
        "overhead_us_per_step": round(1e6 * statistics.fmean(differences), 1),
        "overhead_frac": round(statistics.fmean(differences) / step_s, 6),
        "overhead_frac_interval": [
            round((statistics.fmean(differences) + sign * 1.96 * error) / step_s, 6) for sign in (-1, 1)
        ],
        "overhead_frac_median": round(statistics.median(differences) / step_s, 6),
        "whole_step_frac": round(ratio.median - 1, 5),
        "whole_step_frac_interval": [round(ratio.low - 1, 5), round(ratio.high - 1, 5)],
        "events": [str(event) for event in runs[1].events],
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help=f"of {EVERY} steps each")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    rows = {
        name: row(policy, max_norm, options.rounds, clock)
        for name, (policy, max_norm) in policies().items()
        if options.only in name
    }
    result = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/guard.py",
        "device": describe("cpu").name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "clock": "CPU time of the process" if torch.get_num_threads() == 1 else "wall",
        "every": EVERY,
        "rounds": options.rounds,
        "limit_frac": 0.005,
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
