"""How fast a good policy is found: OMP_NUM_THREADS=1 python benchmarks/search_efficiency.py [--json FILE].

On the workloads of `search_cases.py`, autoprec's planner and search against four strategies that choose the format of
each site (`search_strategies.py`). All are judged alike: a trial is one training run here, in bf16 that this machine
may emulate, paired with the same FP32 curve and ended early if it is hopeless; the step time is modeled, that of one
core of a CPU with AMX on batches 64 times as large, as low formats may be slow where this runs, and small steps are
launches alone. What is told of each: trials and wall time up to the first faithful policy within 2 % of the best known:
what any of them found, and single flips from there. The wall time of a trial is that of its training run, the same for
all; that of autoprec has recording, marking, errors of sites and cuts before its first trial, but no op times, as they
are modeled. The FP32 run, which all need, is not counted, nor what torch loads with it. A strategy that is cut off at
`--trials` trials is a lower bound; one that ended by itself without coming there never does.
"""

import argparse
import contextlib
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from search_cases import COUNT, NAMES, workload
from search_strategies import STRATEGIES, Low, OutOfTrials, Trial

from autoprec.analysis import mark_recordings, run_backward
from autoprec.analysis.low_format import low_format
from autoprec.analysis.site_errors import site_errors
from autoprec.capture import Recording, record
from autoprec.graph.layers import layers_of
from autoprec.measure import Training, compare, hopeless
from autoprec.measure.device_profiles import DeviceProfile, Figure, profile_named
from autoprec.measure.roofline import modeled_op_times, optimizer_seconds
from autoprec.policy import Policy, Rule, preset, resolve
from autoprec.records.run import Interval, TrialRecord
from autoprec.runtime.device import DeviceInfo, describe
from autoprec.search.budget import Budget
from autoprec.search.choices import dimensions
from autoprec.search.cost_model import CostModel
from autoprec.search.fronts import beyond_of, front_of, kept_in
from autoprec.search.layout import layout_of, lowerable_sites
from autoprec.search.objective import fidelity_record
from autoprec.search.observer import Observer
from autoprec.search.plans import plans
from autoprec.search.space import Space
from autoprec.search.study import Asked, open_study
from autoprec.search.trials import Catalog, run_trials
from autoprec.workload import Workload, load_batches

LOW, WITHIN, MARGIN, CORES = "bf16", 1.02, 0.01, 56
LARGER, OWN_TRIALS, POLISH = 64, 12, 20
OURS = "autoprec"


def one_core() -> DeviceProfile:
    """Return one core's share of the CPU with AMX; at 64 wide, a whole socket waits for launches alone."""
    whole = profile_named("cpu-amx")

    def share(figure: Figure) -> Figure:
        return replace(figure, value=figure.value / CORES, source=f"a {CORES}th of: {figure.source}")

    return replace(
        whole,
        title=f"one core of {whole.title}",
        peaks={name: share(figure) for name, figure in whole.peaks.items()},
        bandwidth=share(whole.bandwidth),
    )


class Oracle:
    """Judges sets of low sites of one workload, each once: a training run, and the modeled time of a step."""

    def __init__(self, case: Workload, large: Recording, profile: DeviceProfile, horizon: int) -> None:
        self.model = CostModel(
            op_graph=large.op_graph,
            op_times=modeled_op_times(large, profile, (LOW,)),
            overhead_s=optimizer_seconds(large, profile),
        )
        lowerable = lowerable_sites(large.op_graph)
        self.sites = tuple(site for site in large.op_graph.sites() if site in lowerable)
        self._workload, self._horizon = case, horizon
        self._batches = load_batches(case, COUNT, "cpu")
        self._known: dict[Low, Trial] = {}
        self.losses, self.fp32_wall_s = self._trained(preset("fp32", "cpu"), None)
        self.fp32_s = self.step_s(frozenset())

    def step_s(self, low: Low) -> float:
        """Return the modeled step time."""
        return self.model.predict({s: LOW if s in low else "fp32" for s in self.model.op_graph.sites()}).step_s

    def trial(self, low: Low) -> Trial:
        """Return what a trial gives."""
        if low not in self._known:
            rules = tuple(Rule(sites=str(site), format=LOW) for site in self.sites if site in low)
            losses, wall_s = self._trained(
                Policy(name="trial", rules=(*rules, Rule(sites="*", format="fp32"))), self.losses
            )
            found = compare(self.losses[: len(losses)], losses, margin=MARGIN)
            lost = found.steps_lost_frac if math.isfinite(found.steps_lost_frac) else math.inf
            is_whole = len(losses) == self._horizon
            self._known[low] = Trial(
                step_s=self.step_s(low),
                is_faithful=is_whole and found.verdict == "faithful",
                lost_frac=lost,
                wall_s=wall_s,
            )
        return self._known[low]

    def record(self, low: Low) -> Any:
        """Return the fidelity of a trial as records hold it."""
        trial = self.trial(low)
        same = fidelity_record(compare(self.losses, self.losses, margin=MARGIN))
        verdict = "faithful" if trial.is_faithful else "unfaithful"
        return replace(same, verdict=verdict, steps_lost_frac=trial.lost_frac, upper_frac=trial.lost_frac)

    @property
    def best(self) -> Low:
        """Return the fastest faithful set that anyone asked for."""
        faithful = [low for low, each in self._known.items() if each.is_faithful]
        return min(faithful, key=self.step_s, default=frozenset())

    def is_known(self, low: Low) -> bool:
        """Return whether anyone asked for this set."""
        return low in self._known

    @property
    def best_s(self) -> float:
        """Return the modeled step time of the best faithful policy that anyone asked for."""
        return min([self.fp32_s, *(each.step_s for each in self._known.values() if each.is_faithful)])

    @property
    def num_trained(self) -> int:
        """Return how many policies were trained."""
        return len(self._known)

    def _trained(self, policy: Policy, reference: tuple[float, ...] | None) -> tuple[tuple[float, ...], float]:
        started = time.perf_counter()
        losses: list[float] = []
        with Training(self._workload, policy, device="cpu", seed=0, batches=self._batches) as run:
            while len(losses) < self._horizon:
                losses.append(run.step())
                if reference and hopeless(reference, losses, MARGIN, horizon=self._horizon):
                    break
        return tuple(losses), time.perf_counter() - started


@dataclass
class Log:
    """The trials that one strategy asked for, in order; what it asked for again is not counted."""

    oracle: Oracle
    most: int
    before_s: float = 0.0
    is_cut_off: bool = False
    asked: dict[Low, Trial] = field(default_factory=dict)

    def __call__(self, low: Low) -> Trial:
        """Return what a trial gives."""
        if low not in self.asked:
            if len(self.asked) == self.most:
                self.is_cut_off = True
                raise OutOfTrials
            self.asked[low] = self.oracle.trial(low)
        return self.asked[low]

    def summary(self) -> dict[str, Any]:
        """Return trials and time to come near the best policy known, and the best of this strategy."""
        target = WITHIN * self.oracle.best_s
        trials = list(self.asked.values())
        hits = [place for place, each in enumerate(trials, 1) if each.is_faithful and each.step_s <= target]
        own = min([self.oracle.fp32_s, *(each.step_s for each in trials if each.is_faithful)])
        walls = [each.wall_s for each in trials[: hits[0] if hits else None]]
        return {
            "reached": bool(hits),
            "cut_off": self.is_cut_off,
            "trials": hits[0] if hits else len(trials),
            "wall_s": round(self.before_s + sum(walls), 3),
            "before_first_trial_s": round(self.before_s, 3),
            "best_modeled_speedup": round(self.oracle.fp32_s / own, 4),
            "trials_in_all": len(trials),
        }


class Simulated:
    """Stands where the search has its objective: fidelity by training here, times modeled."""

    def __init__(self, log: Log, horizon: int) -> None:
        self.step_s = log.oracle.fp32_s
        self.protocol = SimpleNamespace(horizon=horizon, num_rounds=1, slow_limit=math.inf)
        self._log = log

    def measure(self, asked: Asked, policy: Policy, key: str, report: Callable[[int, float], bool]) -> TrialRecord:
        """Return what a trial gives; FP32 is not counted."""
        oracle = self._log.oracle
        formats = resolve(policy, oracle.sites).formats
        low = frozenset(site for site, fmt in formats.items() if fmt == LOW)
        found = self._log(low) if low else oracle.trial(low)
        report(0, found.step_s / oracle.fp32_s)
        ratio = oracle.fp32_s / found.step_s
        return TrialRecord(
            number=asked.number, name=asked.name, kind=asked.kind, choice=asked.choice, key=key, state="complete",
            speedup=Interval(value=ratio, low=ratio, high=ratio), fidelity=oracle.record(low), num_steps=1,
        )  # fmt: skip


def search(oracle: Oracle, recording: Recording, most: int, horizon: int, seed: int) -> tuple[Log, dict[str, Any]]:
    """Return the trials of autoprec's own planner and search on a recorded step, and what it had planned."""
    started = time.perf_counter()
    device = DeviceInfo(
        kind="cpu", name="modeled", capability={}, formats=("fp32", LOW), native_formats=("fp32", LOW), num_threads=1,
        torch_version="",
    )  # fmt: skip
    gradients = run_backward((recording,))
    recording.model.zero_grad(set_to_none=True)
    marking = mark_recordings((recording,), (LOW,), device, gradients, 100, kernels="ideal")
    fmt = low_format(LOW, "cpu", device.native_formats, "ideal")
    errors = site_errors(marking.references[0], fmt, oracle.sites)
    front = front_of(oracle.model, LOW, errors, kept_in(marking.marks, LOW))
    beyond = beyond_of(oracle.model, front, marking.marks)
    space = Space(low=(LOW,), prefer=("*",))
    layout = layout_of(marking.marks, layers_of(recording.op_graph), space, oracle.sites)
    fronts, others = ({LOW: tuple(plan.low_sites for plan in each)} for each in (front.plans, beyond))
    layout = replace(layout, fronts=fronts, beyond=others)
    rows = dimensions(space, layout)
    log = Log(oracle, most, before_s=time.perf_counter() - started)
    catalog = Catalog(
        baselines={"fp32": preset("fp32", "cpu")},
        layout=layout,
        device={"kind": "cpu", "name": "modeled"},
        errors={LOW: errors.errors},
    )
    with tempfile.TemporaryDirectory() as folder:
        study = open_study(f"sqlite:///{folder}/study.db", "s", identity={}, rows=rows, seed=seed, note=lambda _: None)
        objective: Any = Simulated(log, horizon)
        with contextlib.suppress(OutOfTrials):
            run_trials(study, objective, catalog, plans(rows), Budget(seconds=math.inf, trials=most), Observer())
    kept = sum(mark.verdict == "must" for mark in marking.marks)
    return log, {"must_stay_fp32": kept, "plans": len(front.plans), "plans_beyond_marks": len(beyond),
            "errors_measured": errors.num_measured}  # fmt: skip


def polish(oracle: Oracle, most: int) -> None:
    """Look for something better than all have found, one flip at a time, the fastest in prediction first: the bar."""
    fresh = 0
    while fresh < most:
        low = oracle.best
        flips = sorted((low ^ {site} for site in oracle.sites), key=oracle.step_s)
        faster = [each for each in flips if oracle.step_s(each) < oracle.best_s and not oracle.is_known(each)]
        if not faster:
            return
        fresh += 1
        oracle.trial(faster[0])


def measure(name: str, most: int, horizon: int, seed: int) -> dict[str, Any]:
    """Return what each strategy needs on one workload."""
    # First the FP32 run, which all need: with its optimizer, torch loads what only its first user would pay for.
    oracle = Oracle(workload(name), record(workload(name, LARGER), device="cpu", seed=0), one_core(), horizon)
    started = time.perf_counter()
    recording = record(workload(name), device="cpu", seed=0)
    record_s = time.perf_counter() - started
    ours, planned = search(oracle, recording, min(most, OWN_TRIALS), horizon, seed)
    ours.before_s += record_s
    logs = {OURS: ours}
    for title, strategy in STRATEGIES.items():
        logs[title] = Log(oracle, most)
        with contextlib.suppress(OutOfTrials):
            strategy(oracle.sites, logs[title], oracle.fp32_s, seed)
        print(f"{name}: {title} done, {oracle.num_trained} policies trained", file=sys.stderr)
    polish(oracle, POLISH)
    found = {title: log.summary() for title, log in logs.items()}
    return {
        "sites": len(oracle.sites),
        **planned,
        "fp32_training_run_s": round(oracle.fp32_wall_s, 3),
        "best_modeled_speedup_known": round(oracle.fp32_s / oracle.best_s, 4),
        "policies_trained": oracle.num_trained,
        "strategies": found,
        "times_fewer": {what: _ratio(found, what) for what in ("trials", "wall_s")},
    }


def _ratio(found: dict[str, dict[str, Any]], what: str) -> dict[str, Any]:
    """Return how often autoprec's number fits into the smallest of the others; a bound where that one was cut off."""
    others = [each for title, each in found.items() if title != OURS and (each["reached"] or each["cut_off"])]
    if not found[OURS]["reached"] or not others:
        return {"value": None, "is_bound": False}
    best = min(others, key=lambda each: each[what])
    return {"value": round(best[what] / found[OURS][what], 2), "is_bound": not best["reached"]}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--horizon", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    cases = {name: measure(name, options.trials, options.horizon, options.seed) for name in options.cases}
    device = describe("cpu")
    ratios = [case["times_fewer"]["trials"]["value"] or 0.0 for case in cases.values()]
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "modeled": f"step times: {one_core().title}; figures of the profile cpu-amx divided by {CORES}; "
        f"batches {LARGER} times as large as those that are trained",
        "measured": f"fidelity: training runs of {options.horizon} steps in FP32 and {LOW} on {device.name}",
        "torch": device.torch_version,
        "within": WITHIN,
        "most_trials": options.trials,
        "cases": cases,
        "median_times_fewer_trials": round(statistics.median(ratios), 2),
        "workloads_with_5_times_fewer": {
            what: sum((case["times_fewer"][what]["value"] or 0.0) >= 5 for case in cases.values())
            for what in ("trials", "wall_s")
        },
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time(), 1),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
