"""The minimal result: the winner without the FP32 islands, rules and settings that it turns out not to need.

Delta debugging over the groups of kept sites. What is cheap speaks first: a selection that is predicted to make the
step longer is not tried. All others are trained and verified as the winner was, on other batches, another seed and a
longer horizon, and what comes out is timed beside the winner and beside the best baseline. A site that a `must` mark
protects is never tried: there a run has shown the fault already.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from autoprec.analysis.reduction import reduced
from autoprec.graph.site import Site
from autoprec.ops import lookup
from autoprec.policy import AS_GIVEN, COMPANIONS, LossScale, Policy, Rule
from autoprec.records.planner import MinimalRecord, minimal_name
from autoprec.records.run import Interval, MemoryRecord, VerificationRecord
from autoprec.search.choices import FP32, targets_of
from autoprec.search.choose import Outcome
from autoprec.search.decide import decide
from autoprec.search.layout import Group, Layout
from autoprec.search.prices import Prices, price_text
from autoprec.search.rules import cover, rules_of
from autoprec.search.trials import Catalog

ProvePolicy: TypeAlias = Callable[[str, Policy], VerificationRecord]
VersusPolicy: TypeAlias = Callable[[Policy, Policy], Interval]

# A rule fewer is worth that part of a step, in prediction; a setting fewer, in a measurement that is sure of it.
_WORTH_FRAC = 0.001
_SURELY_NO_SLOWER = 0.99
_PREDICTED = "predicted"
# Settings beside the formats that a policy can do without, and what it has then.
_SETTINGS: Mapping[str, Any] = {**dict.fromkeys(COMPANIONS, AS_GIVEN), "float32_matmul": "ieee"}
# Gradients shrink, and spike, later in training than a proof sees: without a loss scale there must be room for both.
_ROOM = 2.0**10


@dataclass(frozen=True, kw_only=True)
class Minimal:
    """The policy that is left, why sites stay FP32 in it, and what was tried; measured where anything was taken out.

    `versus_winner` is its speed-up over the winner, `versus_best` over the best baseline.
    """

    policy: Policy
    why: Mapping[Site, str]
    record: MinimalRecord
    check: VerificationRecord | None = None
    versus_winner: Interval | None = None
    versus_best: Interval | None = None
    memory: MemoryRecord | None = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How a policy is judged: trained against FP32, timed beside another one, and whether there is time for that."""

    prove: ProvePolicy
    versus: VersusPolicy
    has_time: Callable[[], bool]
    memory: Callable[[Policy], MemoryRecord]


class _OutOfTime(Exception):  # noqa: N818  ends a search, is no error
    pass


def minimized(outcome: Outcome, catalog: Catalog, bench: Bench, prices: Prices) -> Minimal | None:
    """Return the minimal policy of a proven winner of the search; None for a baseline, which is what it is.

    What was taken out until the time was over counts; the record says which groups were not tried.
    """
    trial = outcome.trial
    if not trial.choice or outcome.verdict != "improved":
        return None
    winner = catalog.policy(trial.name, trial.choice)
    targets, why = targets_of(trial.choice, catalog.layout)
    search = _Minimizing(
        low=str(trial.choice["low"]),
        layout=catalog.layout,
        bench=bench,
        prices=prices,
        name=trial.name,
        targets=targets,
        why=why,
        policy=winner,
    )
    try:
        search.take_out_islands()
        search.take_out_settings()
        search.take_out_loss_scale()
        is_whole = True
    except _OutOfTime:
        is_whole = False
    record = search.record(is_whole=is_whole)
    smaller = None
    if search.removed:
        smaller = _timed(search, winner, catalog.policy(outcome.best.name, outcome.best.choice), record)
        record = replace(record, removed=(), reason="what was left without the others was slower: none was taken out")
    return smaller or Minimal(
        policy=search.explained(winner, frozenset()), why=search.reasons(frozenset()), record=record
    )


def _timed(search: "_Minimizing", winner: Policy, best: Policy, record: MinimalRecord) -> Minimal | None:
    """Return what is left with its times; None if it is slower than the winner, or not surely faster than the bar."""
    versus_winner = search.bench.versus(search.policy, winner)
    if decide(versus_winner) == "baseline":
        return None
    versus_best = search.bench.versus(search.policy, best)
    if decide(versus_best) != "improved":
        return None
    memory = search.bench.memory(search.policy)
    return Minimal(
        policy=search.explained(search.policy, search.lowered),
        why=search.reasons(search.lowered),
        record=replace(record, memory_bytes=memory.total_bytes),
        check=search.check,
        versus_winner=versus_winner,
        versus_best=versus_best,
        memory=memory,
    )


@dataclass(kw_only=True)
class _Minimizing:
    """The state of one search: the best policy so far, what was taken out for it, and what each try gave."""

    low: str
    layout: Layout
    bench: Bench
    prices: Prices
    name: str
    targets: Mapping[Site, str]
    why: Mapping[Site, str]
    policy: Policy
    lowered: frozenset[Site] = frozenset()
    removed: list[str] = field(default_factory=list)
    check: VerificationRecord | None = None
    num_trials: int = 0
    needed: dict[str, str] = field(default_factory=dict)
    _groups: tuple[Group, ...] = ()
    _tried: dict[frozenset[Site], str] = field(default_factory=dict)

    def take_out_islands(self) -> None:
        """Lower the groups of kept sites that need no FP32: all at once, or what delta debugging leaves of them."""
        self._groups = self._candidates()
        if self._groups and not self._passes(()):
            reduced(self._groups, self._passes)

    def take_out_settings(self) -> None:
        """Drop each setting that gains nothing for sure."""
        for key, plain in _SETTINGS.items():
            if getattr(self.policy, key) == plain:
                continue
            without = replace(self.policy, **{key: plain})
            self._require_time()
            ratio = self.bench.versus(without, self.policy)
            if ratio.low < _SURELY_NO_SLOWER:
                self.needed[key] = f"without it the step takes {_slower(ratio)}"
                continue
            check = self._verification(without)
            if check.passed:
                self.policy, self.check = without, check
                self.removed.append(key)
            else:
                self.needed[key] = check.reason

    def take_out_loss_scale(self) -> None:
        """Drop the loss scale if gradients far smaller and far larger than they are now train as faithfully, and none.

        Fixed scales make them so. Which speed that gains does not matter: nothing is left that could be set wrong.
        """
        if self.policy.loss_scale.kind == "none":
            return
        without = replace(self.policy, loss_scale=LossScale())
        for factor, words in ((1 / _ROOM, "smaller"), (_ROOM, "larger")):
            fixed = LossScale(kind="static", initial=factor, minimum=min(factor, 1.0))
            check = self._verification(replace(without, loss_scale=fixed))
            if not check.passed:
                self.needed["loss_scale"] = f"with gradients {_ROOM:.0f} times {words}: {check.reason}"
                return
        check = self._verification(without)
        if check.passed:
            self.policy, self.check = without, check
            self.removed.append("loss_scale")
        else:
            self.needed["loss_scale"] = check.reason

    def _candidates(self) -> tuple[Group, ...]:
        """Return the groups of kept sites that may be lowered, the cheapest first: those are taken out last."""
        fp32 = frozenset(site for site, target in self.targets.items() if target == FP32)
        free = frozenset(
            site
            for site in fp32
            if self.layout.verdict(site, self.low) != "must" and lookup(site.op).family != "unknown"
        )
        found = [Group(glob=each.glob, sites=each.sites & free) for each in cover(fp32, self.layout.groups)]
        return tuple(sorted((each for each in found if each.sites), key=lambda each: self._price(each.sites) or 0.0))

    def _price(self, sites: frozenset[Site]) -> float | None:
        return self.prices.frac(self.targets, self.policy, sites, self.low)

    def _passes(self, kept: Sequence[Group]) -> bool:
        """Return whether the policy with only these groups in FP32 is worth it, and is proven."""
        stay = frozenset[Site]().union(*(each.sites for each in kept))
        lowered = frozenset[Site]().union(*(each.sites for each in self._groups)) - stay
        new = [each.glob for each in self._groups if each.sites & (lowered - self.lowered)]
        if lowered not in self._tried:
            self._tried[lowered] = self._fault(lowered)
        fault = self._tried[lowered]
        if fault and len(new) == 1:
            self.needed[new[0]] = fault
        return not fault

    def _fault(self, lowered: frozenset[Site]) -> str:
        """Return what speaks against lowering these sites; nothing if it was proven, and then it is taken over."""
        policy = replace(self.policy, rules=self._rules(lowered, self.why))
        saved = self.prices.frac(self._formats(self.lowered), self.policy, lowered, self.low)
        has_more_rules = len(policy.rules) > len(self.policy.rules)
        if saved is not None and saved < (_WORTH_FRAC if has_more_rules else -_WORTH_FRAC):
            return price_text(saved, self.low)
        check = self._verification(policy)
        if check.passed:
            self.policy, self.lowered, self.check = policy, lowered, check
            self.removed = [each.glob for each in self._groups if each.sites <= lowered]
        return "" if check.passed else check.reason

    def _formats(self, lowered: frozenset[Site]) -> dict[Site, str]:
        return {**self.targets, **dict.fromkeys(lowered, self.low)}

    def _rules(self, lowered: frozenset[Site], why: Mapping[Site, str]) -> tuple[Rule, ...]:
        return rules_of(self._formats(lowered), self.layout, self.low, why)

    def explained(self, policy: Policy, lowered: frozenset[Site]) -> Policy:
        """Return the policy, each rule of which says what a try of its sites in the low format showed."""
        return replace(policy, rules=self._rules(lowered, self.reasons(lowered)))

    def _verification(self, policy: Policy) -> VerificationRecord:
        self._require_time()
        self.num_trials += 1
        return self.bench.prove(minimal_name(self.name), policy)

    def _require_time(self) -> None:
        if not self.bench.has_time():
            raise _OutOfTime

    def reasons(self, lowered: frozenset[Site]) -> dict[Site, str]:
        """Return why each site stays FP32 if `lowered` do not: what a try of its group showed is added."""
        found = {site: reason for site, reason in self.why.items() if site not in lowered}
        for group in self._groups:
            if not self.needed.get(group.glob, _PREDICTED).endswith(_PREDICTED):  # rules have their prices anyway
                extra = f"tried in {self.low}: {self.needed[group.glob]}"
                found |= {site: f"{found[site]}; {extra}" for site in group.sites if site in found}
        return found

    def record(self, *, is_whole: bool) -> MinimalRecord:
        """Return what was tried, as records hold it."""
        return MinimalRecord(
            num_groups=len(self._groups),
            num_trials=self.num_trials,
            removed=tuple(self.removed),
            needed={name: why for name, why in self.needed.items() if name not in self.removed},
            is_whole=is_whole,
        )


def _slower(ratio: Interval) -> str:
    """Return a speed-up as how much longer a step takes, at its point estimate and at worst."""
    return f"{100 * (1 / ratio.value - 1):.2g} % longer, up to {100 * (1 / ratio.low - 1):.2g} % in its interval"
