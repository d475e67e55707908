"""How honest is the verdict on fidelity: python benchmarks/fidelity.py [--json reports/fidelity.json].

Sound candidates (FP32 nudged, summed in another order, rounded like autocast) and planted faults train over many seeds
on four small workloads. What a candidate truly loses is measured over all seeds: only where that is surely above or
below the margin does it count as bad or good; the others are listed and left out, and so is what changes nothing. Bad
later is what is not surely bad at the horizon and is so in the long run. Each seed's pair of curves is then judged as
`autoprec tune` judges a trial (margin 1 %, early end if hopeless, margin widened by FP32 nudged by one bf16 rounding),
and as it proves a winner: on twice the horizon, with the batches and weights of another seed; the truth is then that of
twice the horizon. False accept: a bad one called faithful. False reject: a good one called unfaithful. Inconclusive is
neither: it is trained longer, and not written.

The proportions have Clopper-Pearson 95 % intervals, as if all pairs were independent; pairs of one seed share
FP32, and a sound candidate of one bf16 rounding is what widens the margin, drawn anew.
`--curves DIR` keeps the curves there, or reads them where they are.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import scipy.special
import torch
from fidelity_cases import CANDIDATES, CASES, CHAOS
from fidelity_curves import curves
from fidelity_judge import HORIZONS, MARGIN, STEPS, Curves, Judged, judged, without_effect

from autoprec.runtime.device import describe

SEEDS, CHUNK = 32, 16
TRUTHS = {"search": "truth", "proven": "proof_truth"}


def proportion(hits: int, of: int) -> dict[str, Any]:
    """Return a proportion with its Clopper-Pearson 95 % interval."""
    low = 0.0 if hits == 0 else float(scipy.special.betaincinv(hits, of - hits + 1, 0.025))
    high = 1.0 if hits == of else float(scipy.special.betaincinv(hits + 1, of - hits, 0.975))
    return {"hits": hits, "of": of, "frac": round(hits / of, 4) if of else None,
            "interval": [round(low, 4), round(high, 4)]}  # fmt: skip


def counts(rows: Iterable[Judged]) -> dict[str, Any]:
    """Return false accepts, false rejects and what stayed inconclusive, after the search and after the proof."""
    rows = list(rows)
    return {stage: _counts(rows, stage, TRUTHS[stage]) for stage in TRUTHS}


def _counts(rows: list[Judged], stage: str, truth: str) -> dict[str, Any]:
    def share(kind: str, verdict: str, *, faults: tuple[bool, ...] = (False, True)) -> dict[str, Any]:
        inside = [row for row in rows if getattr(row, truth) == kind and row.is_fault in faults]
        return proportion(sum(getattr(row, stage) == verdict for row in inside), len(inside))

    return {
        "false_accept": share("bad", "faithful"),
        "false_accept_of_bad_later": share("bad later", "faithful"),
        "false_reject": share("good", "unfaithful"),
        "false_reject_of_tiny_perturbations": share("good", "unfaithful", faults=(False,)),
        "inconclusive_bad": share("bad", "inconclusive"),
        "inconclusive_bad_later": share("bad later", "inconclusive"),
        "inconclusive_good": share("good", "inconclusive"),
        "inconclusive_tiny_perturbations": share("good", "inconclusive", faults=(False,)),
    }


def wrong(rows: Iterable[Judged]) -> list[dict[str, Any]]:
    """Return which candidates were judged wrongly, and how often, the most frequent first."""
    groups: dict[tuple[str, int, str], list[Judged]] = defaultdict(list)
    for row in rows:
        groups[row.case, row.horizon, row.candidate].append(row)
    found = []
    for (case, horizon, name), each in groups.items():
        false = {stage: sum(_is_wrong(row, stage) for row in each) for stage in TRUTHS}
        if any(false.values()):
            first = each[0]
            found.append(
                {
                    "workload": case,
                    "horizon": horizon,
                    "candidate": name,
                    "of": len(each),
                    "search": {"truth": first.truth, "lost_frac": round(first.lost, 4), "wrong": false["search"]},
                    "proven": {
                        "truth": first.proof_truth,
                        "lost_frac": round(first.proof_lost, 4),
                        "wrong": false["proven"],
                    },
                    "widened": sum(row.widened for row in each),
                }
            )
    return sorted(found, key=lambda row: (-row["proven"]["wrong"], -row["search"]["wrong"]))


def _is_wrong(row: Judged, stage: str) -> bool:
    false = {"good": "unfaithful", "bad": "faithful", "bad later": "faithful", "unclear": None}
    return bool(getattr(row, stage) == false[getattr(row, TRUTHS[stage])])


def by_size(rows: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return how a loss of so many margins was judged, whatever it was called."""
    edges = (-math.inf, 0.0, 0.5, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
    found = []
    for low, high in pairwise(edges):
        searched = [row.search for row in rows if low * MARGIN < row.lost <= high * MARGIN]
        proven = [row.proven for row in rows if low * MARGIN < row.proof_lost <= high * MARGIN]
        found.append(
            {"margins_lost": [str(low), str(high)], "search": dict(Counter(searched)), "proven": dict(Counter(proven))}
        )
    return found


def early(rows: Sequence[Judged]) -> dict[str, Any]:
    """Return what accepting early would save and get wrong."""
    kept = [row for row in rows if row.search != "unfaithful" or row.early_at is not None]
    return {
        "false_accept": proportion(*_hits(rows, "bad")),
        "false_accept_of_bad_later": proportion(*_hits(rows, "bad later")),
        "good_accepted": proportion(*_hits(rows, "good")),
        "steps_saved_frac_of_trials_not_refused": round(
            sum(row.horizon - row.early_at for row in kept if row.early_at) / max(sum(row.horizon for row in kept), 1),
            4,
        ),
    }  # fmt: skip


def _hits(rows: Sequence[Judged], truth: str) -> tuple[int, int]:
    inside = [row for row in rows if row.truth == truth]
    return sum(row.early_at is not None for row in inside), len(inside)


def report(rows: Sequence[Judged]) -> dict[str, Any]:
    """Return all counts."""

    def pick(case: str, horizon: int) -> list[Judged]:
        return [row for row in rows if row.case == case and row.horizon == horizon]

    split = {f"{case} {horizon}": pick(case, horizon) for case, horizon in product(CASES, HORIZONS)}
    return {
        "all": counts(rows),
        "by_horizon": {str(horizon): counts(row for row in rows if row.horizon == horizon) for horizon in HORIZONS},
        "by_workload_and_horizon": {name: counts(each) for name, each in split.items()},
        "verdicts_by_size": by_size(rows),
        "median_power_frac": {
            name: round(statistics.median(row.power for row in each if not row.cut_short), 5)
            for name, each in split.items()
        },
        "widened_frac": {name: round(statistics.mean(row.widened for row in each), 3) for name, each in split.items()},
        "early_accept": early(rows),
        "wrong": wrong(rows),
        "truth": {name: _truths(each) for name, each in split.items()},
    }


def _truths(rows: Sequence[Judged]) -> dict[str, list[str]]:
    """Return what the candidates turned out to be at the horizon of the search; unclear ones were left out."""
    told = {(row.candidate, row.truth, row.lost) for row in rows}
    return {
        truth: sorted(f"{name} ({lost:.2%})" for name, kind, lost in told if kind == truth)
        for truth in ("good", "bad", "bad later", "unclear")
    }


def trained(case: str, chunk: int, folder: Path | None) -> tuple[str, Curves]:
    """Return the curves of one chunk of seeds, from `folder` where they are."""
    path = None if folder is None else folder / f"{case}_{chunk}.npz"
    if path is not None and path.exists():
        return case, dict(np.load(path))
    torch.set_num_threads(1)
    found = curves(case, [CHAOS, *CANDIDATES], range(CHUNK * chunk, CHUNK * (chunk + 1)), STEPS)
    if path is not None:
        np.savez(path, **found)
    return case, found


def main() -> None:
    """Print the counts, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--curves", type=Path, help="keep the curves in this folder, and read those that are there")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many, a multiple of {CHUNK}")
    options = parser.parse_args()
    started = time.perf_counter()
    tasks = [(case, chunk, options.curves) for chunk in range(options.seeds // CHUNK) for case in CASES]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(trained, *zip(*tasks, strict=True)))
        whole = [
            (case, {name: np.concatenate([part[name] for of, part in parts if of == case]) for name in parts[0][1]})
            for case in CASES
        ]
        rows = [row for each in pool.map(judged, *zip(*whole, strict=True)) for row in each]
    found = {
        "command": shlex.join(["python", "benchmarks/fidelity.py", *sys.argv[1:]]),
        "device": describe("cpu").name,
        "torch": torch.__version__,
        "margin": MARGIN,
        "seeds": options.seeds,
        "wall_s": round(time.perf_counter() - started),
        "left_out_without_effect": {case: without_effect(each) for case, each in whole},
        **report(rows),
    }
    print(json.dumps({key: found[key] for key in ("wall_s", "all", "early_accept")}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
