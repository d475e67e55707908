"""The strategies that benchmarks/search_efficiency.py holds autoprec against, each on raw sites in order of execution.

Each asks for trials of sets of low sites until it is done, or until `OutOfTrials` ends it; a set that it asked for
before costs it nothing.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import optuna

from autoprec.graph.site import Site

Sites: TypeAlias = Sequence[Site]
Low: TypeAlias = frozenset[Site]


class OutOfTrials(Exception):  # noqa: N818  ends a strategy, is no error
    """The strategy has had its number of trials."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a training run gave: its modeled step, whether it is faithful, and the fraction of steps that it lost."""

    step_s: float
    is_faithful: bool
    lost_frac: float
    wall_s: float


Try: TypeAlias = Callable[[Low], Trial]


def tpe(sites: Sites, trial: Try, fp32_s: float, seed: int) -> None:
    """Let Optuna's TPE choose the format of each site; what is not faithful counts as twice as slow as FP32."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            asked = study.ask()
            low = frozenset(s for s in sites if asked.suggest_categorical(str(s), ("bf16", "fp32")) == "bf16")
        found = trial(low)
        study.tell(asked, found.step_s / fp32_s if found.is_faithful else 2.0)


def greedy(sites: Sites, trial: Try, fp32_s: float, seed: int) -> None:  # noqa: ARG001
    """Fall back to FP32 one site at a time, most helpful first, then keep every single flip that makes the step faster.

    Source: the fallback of Intel Neural Compressor's basic strategy: each op alone in FP32, then in order of what that
    gained, one after the other.
    """
    everything = frozenset(sites)
    low, best = everything, trial(everything)
    if not best.is_faithful:
        gain = {site: trial(everything - {site}).lost_frac for site in sites}
        for site in sorted(sites, key=gain.__getitem__):
            low = low - {site}
            best = trial(low)
            if best.is_faithful:
                break
    is_better = best.is_faithful
    while is_better:
        is_better = False
        for site in sites:
            flipped = low ^ {site}
            found = trial(flipped)
            if found.is_faithful and found.step_s < best.step_s:
                low, best, is_better = flipped, found, True


def delta_debugging(sites: Sites, trial: Try, fp32_s: float, seed: int) -> None:  # noqa: ARG001
    """Look for a 1-minimal set of FP32 sites: of the chunks and complements that pass, the fastest is gone on with.

    Source: LCCSearch of Precimonious (Rubio-Gonzalez et al. 2013, Tuning Assistant for Floating-Point Precision, SC'13,
    algorithms 1 and 2), with faster than the best so far as its second condition.
    """
    everything = frozenset(sites)
    high, best_s, parts = list(sites), fp32_s, 2
    while high:
        size = -(-len(high) // parts)
        chunks = [high[start : start + size] for start in range(0, len(high), size)]
        tried = [*chunks, *([[s for s in high if s not in chunk] for chunk in chunks] if parts > 2 else [])]
        passing = []
        for stay in tried:
            found = trial(everything - frozenset(stay))
            if found.is_faithful and found.step_s < best_s:
                passing.append((found.step_s, len(passing), stay))
        if passing:
            best_s, _, high = min(passing)
            parts = 2
        elif parts >= len(high):
            return
        else:
            parts = min(2 * parts, len(high))


def prefix_bisection(sites: Sites, trial: Try, fp32_s: float, seed: int) -> None:  # noqa: ARG001
    """Bisect how many of the first sites, and of the last, have to stay FP32."""
    everything = frozenset(sites)
    if trial(everything).is_faithful:
        return
    for order in (list(sites), list(reversed(sites))):
        passes, fails = len(order), 0
        while passes - fails > 1:
            middle = (passes + fails) // 2
            if trial(everything - frozenset(order[:middle])).is_faithful:
                passes = middle
            else:
                fails = middle


STRATEGIES: Mapping[str, Callable[[Sites, Try, float, int], None]] = MappingProxyType(
    {
        "tpe on raw sites": tpe,
        "greedy fallback": greedy,
        "delta debugging": delta_debugging,
        "prefix bisection": prefix_bisection,
    }
)
