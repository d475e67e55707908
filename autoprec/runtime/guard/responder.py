"""Doing something about a finding: the next reaction on its ladder, and the event that says so."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoprec.errors import GuardError
from autoprec.policy import Policy
from autoprec.runtime.guard.changed import fallback_of, is_fallen_back
from autoprec.runtime.guard.detectors import DETECTORS
from autoprec.runtime.guard.events import Events, GuardEvent, Reaction
from autoprec.runtime.guard.ladder import Ladder
from autoprec.runtime.guard.limits import GuardLimits
from autoprec.runtime.guard.progress import Progress
from autoprec.runtime.guard.ranks import Ranks
from autoprec.runtime.guard.reactions import Place, Run, surest
from autoprec.runtime.guard.sample import Finding
from autoprec.runtime.guard.snapshot import Snapshots
from autoprec.runtime.guard.window import Window

_MOST_PROMOTIONS = 8


class Responder:
    """Reacts on all ranks alike. `events` are those of the present step, `restored_to` where it went back to, if so."""

    def __init__(
        self,
        run: Run,
        progress: Progress,
        *,
        ladder: Ladder,
        window: Window,
        snapshots: Snapshots,
        limits: GuardLimits,
        sinks: Events,
        ranks: Ranks,
    ) -> None:
        self.events: list[GuardEvent] = []
        self.restored_to: int | None = None
        self.has_reacted = False
        self._run, self._progress, self._ladder, self._window = run, progress, ladder, window
        self._snapshots, self._limits, self._sinks, self._ranks = snapshots, limits, sinks, ranks

    def begin(self) -> None:
        """Begin a step."""
        self.events, self.restored_to, self.has_reacted = [], None, False

    def warn(self, finding: Finding, what: str) -> None:
        """Warn, without asking where the fault is or climbing: one rank may see what others do not."""
        self.tell(finding, "warn", f"{finding.message}{what}")

    def react(self, finding: Finding, batch: Any, broken_layer: str, *, warned: bool = False) -> Reaction:
        """Do the next thing about a finding, say so, and return what it was; called on all ranks or on none.

        Raises: `GuardError` if that is to stop.
        """
        self.has_reacted = True
        place = surest(self._ranks.all_of(self._run.find(finding, batch, broken_layer)))
        promoted = self._promoted(finding, place)
        reaction = self._next(finding, place, promoted, warned=warned)
        told = replace(
            finding,
            site=place.name or finding.site,
            message=f"{finding.message}; {place.detail}" if place.detail else finding.message,
        )
        if reaction == "promote" and promoted is not None:
            self._progress.num_promotions += 1
            self._run.exchange(promoted)
            self._turned(told, reaction, f"{told.site} is in fp32 from here on")
        elif reaction == "fallback":
            rule = self._run.precision.policy.fallback
            self._run.fall_back()
            self._turned(told, reaction, f'falls back to {{sites: "{rule.sites}", format: {rule.format}}}')
        elif reaction == "restore":
            self._restore(told)
        else:
            self.tell(told, reaction, told.message)
        if reaction == "stop":
            raise GuardError(f"the guard stopped the run: {self.events[-1]}")
        return reaction

    def tell(self, finding: Finding, reaction: Reaction, message: str) -> None:
        """Report a finding."""
        self.send(
            GuardEvent(
                step=self._progress.num_steps,
                detector=finding.detector,
                reaction=reaction,
                message=message,
                advice=finding.advice,
                site=finding.site,
                number=finding.number,
                threshold=finding.threshold,
                rank=self._ranks.rank,
            )
        )

    def inform(self, detector: str, message: str, advice: str) -> None:
        """Report what is no fault."""
        self.send(
            GuardEvent(
                step=self._progress.num_steps,
                detector=detector,
                reaction="info",
                message=message,
                advice=advice,
                rank=self._ranks.rank,
            )
        )

    def send(self, event: GuardEvent) -> None:
        """Report an event."""
        self.events.append(event)
        self._sinks.send(event)

    def draw(self, numbers: Sequence[tuple[str, float]]) -> None:
        """Draw what was sampled."""
        self._sinks.draw(numbers, self._progress.num_steps)

    def _next(self, finding: Finding, place: Place, promoted: Policy | None, *, warned: bool) -> Reaction:
        """Return the next reaction that makes sense: no precision mends a broken batch, or a broken state."""
        policy, precision = self._run.precision.policy, self._run.precision
        is_precision = place.kind not in ("data", "state")
        falls_back = is_precision and not is_fallen_back(policy) and precision.can_exchange(fallback_of(policy))
        possible: Mapping[Reaction, bool] = {
            "warn": True,
            "promote": promoted is not None,
            "fallback": falls_back,
            "restore": place.kind != "data" and len(self._snapshots) > 0,
            "stop": place.kind != "data" or self._window.in_row >= self._limits.collapse_steps,
        }
        row = DETECTORS[finding.detector]
        step = self._progress.num_steps
        return self._ladder.climb(row.climbs, row.reactions, step, possible.__getitem__, warned=warned)

    def _promoted(self, finding: Finding, place: Place) -> Policy | None:
        if self._progress.num_promotions >= _MOST_PROMOTIONS:
            return None
        changed = self._run.promoted(place, f"guard, step {self._progress.num_steps}: {finding.detector}")
        return changed if changed is not None and self._run.precision.can_exchange(changed) else None

    def _turned(self, finding: Finding, reaction: Reaction, what: str) -> None:
        """Begin to count anew after the policy changed."""
        self._window.clear()
        self.tell(finding, reaction, f"{finding.message}; {what}")

    def _restore(self, finding: Finding) -> None:
        progress = self._progress
        snapshot, state = self._snapshots.pop()
        lost = progress.position - snapshot.position
        self._run.restore(state)
        self._window.clear()
        progress.position = self.restored_to = progress.last_snapshot = snapshot.position
        progress.lowest_loss = state["guard"]["lowest_loss"]
        what = (
            f"went back {lost} steps, to the good state of step {snapshot.step}: model, optimizer, loss scale, "
            "scheduler and random states; batches go on, they are not rewound"
        )
        self.tell(finding, "restore", f"{finding.message}; {what}")
