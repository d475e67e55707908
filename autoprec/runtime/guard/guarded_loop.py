"""`Guard`: one step of a guarded training run, with what is looked at, decided and done around it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoprec.errors import GuardError, a_or_an
from autoprec.policy import Policy, dump_policy, parse_policy
from autoprec.runtime.checkpoint import policy_hash
from autoprec.runtime.guard import detectors
from autoprec.runtime.guard.calibration import Calibration, calibration_of
from autoprec.runtime.guard.changed import fallback_of, is_fallen_back
from autoprec.runtime.guard.detectors import DETECTORS, Finding, GuardLimits, Sample
from autoprec.runtime.guard.events import Events, GuardEvent, Reaction
from autoprec.runtime.guard.ladder import Ladder
from autoprec.runtime.guard.looks import GradientLook, Movement, broken_layer, look_at_gradients, narrow_layers
from autoprec.runtime.guard.outcome import GuardOutcome
from autoprec.runtime.guard.ranks import Ranks, is_replicated
from autoprec.runtime.guard.reactions import Place, Run, surest
from autoprec.runtime.guard.samples import local_numbers, merged, minimum_scale
from autoprec.runtime.guard.snapshot import Snapshots
from autoprec.runtime.guard.window import Window
from autoprec.runtime.step import Scheduler, StepOutcome

SCHEMA = 1
_MOST_PROMOTIONS = 8


class Guard:
    """Watches a run. `step(loss)` stands in the loop where `precision.step(optimizer)` stood.

    `num_steps` counts its calls, `position` the steps of training: restoring a good state goes back in it.
    Made by `autoprec.guard`.
    """

    def __init__(
        self,
        run: Run,
        *,
        every: int,
        snapshot_every: int | None,
        snapshots: Snapshots,
        reactions: Sequence[Reaction],
        limits: GuardLimits,
        events: Events,
        ranks: Ranks,
    ) -> None:
        self.num_steps = 0
        self.position = 0
        self.limits = limits
        self._run, self._ranks, self._events, self._snapshots = run, ranks, events, snapshots
        self._every, self._snapshot_every = every, snapshot_every
        self._base_hash = policy_hash(run.precision.policy)
        self._calibration: Calibration | None = calibration_of(run.precision.policy)
        self._ladder = Ladder(reactions, limits.calm * every)
        self._window = Window(limits.window)
        self._lowest_loss = math.inf
        self._last_snapshot: int | None = None
        self._num_promotions = 0
        self._has_told_rest = False
        self._is_replicated: bool | None = None if not ranks.is_alone else False
        self._broken_layer = ""
        self._now: list[GuardEvent] = []
        self._restored_to: int | None = None
        self._has_reacted = False

    @property
    def policy(self) -> Policy:
        """Return the policy that runs now: the one applied, or what the guard has made of it."""
        return self._run.precision.policy

    def step(
        self,
        loss: torch.Tensor,
        *,
        batch: Any = None,
        max_norm: float | None = None,
        scheduler: Scheduler | None = None,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> GuardOutcome:
        """Step as `precision.step` does, unless gradients or loss are not finite; then look, and react.

        `loss` is that of the step, of micro-batches any one or their mean. `optimizers` are those to step now, all if
        None.

        Raises: `GuardError` when the guard stops the run; whatever `precision.step` and the receivers of events raise.
        """
        chosen = self._run.optimizers if optimizers is None else tuple(optimizers)
        self._check(loss, chosen)
        self._begin(scheduler)
        precision = self._run.precision
        is_due = self.num_steps % self._every == 0
        look, movement = (self._look(), Movement(precision, chosen)) if is_due else (GradientLook(), None)
        if self._window.in_row + 1 >= self.limits.patience and max_norm is None:
            self._broken_layer = broken_layer(precision)
        value = loss.detach()
        outcome = precision.step(
            *chosen,
            max_norm=max_norm,
            scheduler=scheduler,
            skip_non_finite=True,
            loss=value if self._ranks.is_alone else None,  # of several ranks, gradients decide: all have the same
        )
        stepped = self._window.note(value, outcome)
        self.position += 1
        if stepped is False:
            self._skipped(value, batch, outcome)
        if is_due and not self._has_reacted:
            self._sample(look, movement if stepped else None, batch)
        return GuardOutcome(
            step=self.num_steps, outcome=outcome, events=tuple(self._now), restored_to=self._restored_to
        )

    def snapshot(self) -> None:
        """Keep the present state as a good one, beside those that are kept by themselves.

        Raises: `OutputError` if its file cannot be written.
        """
        state = {**self._run.state(), "guard": {"lowest_loss": self._lowest_loss}}
        self._snapshots.take(state, position=self.position, step=self.num_steps)
        self._last_snapshot = self.position

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs of the guard; good states that it keeps are not in it."""
        self._window.settle(known=self._knows_at_once())
        return {
            "schema": SCHEMA,
            "policy_hash": self._base_hash,
            "policy": dump_policy(self.policy),
            "num_steps": self.num_steps,
            "position": self.position,
            "lowest_loss": self._lowest_loss,
            "num_promotions": self._num_promotions,
            "has_told_rest": self._has_told_rest,
            "ladder": self._ladder.state_dict(),
            "window": self._window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, before `precision.load_state_dict`: a policy that was promoted is put in place.

        Raises: `GuardError`, before anything is changed, if it is no such state or that of a run under another policy.
        """
        self._check_state(state)
        policy = parse_policy(state["policy"], "the checkpoint of the guard")
        if policy_hash(policy) != policy_hash(self.policy):
            self._run.exchange(policy)
        self.num_steps, self.position = state["num_steps"], state["position"]
        self._lowest_loss, self._num_promotions = state["lowest_loss"], state["num_promotions"]
        self._has_told_rest = state["has_told_rest"]
        self._ladder.load_state_dict(state["ladder"])
        self._window.load_state_dict(state["window"])
        self._last_snapshot = None

    def _begin(self, scheduler: Scheduler | None) -> None:
        """Do what comes before a step; the first one keeps the state that training starts from."""
        self._now, self._restored_to, self._has_reacted, self._broken_layer = [], None, False, ""
        self.num_steps += 1
        if scheduler is not None:
            self._run.scheduler = scheduler
        if self._is_replicated is None:
            self._is_replicated = is_replicated(self._run.precision.model, self._run.model)
        if self._last_snapshot is None and self._snapshot_every is not None:
            self.snapshot()
        if not self._has_told_rest:
            self._has_told_rest = True
            self._tell_rest()

    def _tell_rest(self) -> None:
        rows = detectors.resting(self._calibration)
        if self._calibration is not None and next(narrow_layers(self._run.precision), None) is None:
            rows = tuple(row for row in rows if row[0] not in ("flush", "overflow"))
        if rows:
            what = "no calibration" if self._calibration is None else "no calibration for all detectors"
            self._send(
                GuardEvent(
                    step=self.num_steps,
                    detector="guard",
                    reaction="info",
                    message=f'policy "{self.policy.name}" has {what}; these rest: {", ".join(name for name, _ in rows)}',
                    advice="autoprec tune writes it into the policy (said once)",
                )
            )

    def _look(self) -> GradientLook:
        """Look at the gradients as the backward pass left them; those that were unscaled by hand are scaled again."""
        precision = self._run.precision
        by_hand = any(precision.scaler.is_unscaled(each) for each in self._run.optimizers)
        return look_at_gradients(precision, scale=precision.scaler.get_scale() if by_hand else 1.0)

    def _skipped(self, loss: torch.Tensor, batch: Any, outcome: StepOutcome) -> None:
        """React to a step that was skipped: known at once, with the batch at hand."""
        in_row, scaled = self._window.in_row, outcome.scale is not None
        is_bad = not bool(torch.isfinite(loss).all())
        if is_bad:
            self._window.drop_last_loss()
        is_grave = in_row >= self.limits.patience
        if is_grave:  # the same on all ranks, as their gradients are; their losses are not
            is_bad = any(row["bad"] for row in self._ranks.gathered({"bad": float(is_bad)}))
        if scaled and not is_bad:
            self._judge_collapse(outcome, batch)
            return
        finding = _non_finite(float(loss) if is_bad else math.inf, in_row, self.limits.patience, is_loss=is_bad)
        if is_grave:
            self._react(finding, batch)
        else:
            self._ladder.warn(finding.detector, self.num_steps)
            self._tell(finding, "warn", f"{finding.message}; the step was skipped")

    def _judge_collapse(self, outcome: StepOutcome, batch: Any) -> None:
        sample = Sample(
            position=self.position,
            skipped_in_row=self._window.in_row,
            is_scaled=True,
            loss_scale=outcome.loss_scale,
            minimum_scale=minimum_scale(self.policy),
        )
        found = DETECTORS["loss_scale_collapse"].judge(sample, self._calibration or Calibration(), self.limits)
        if found is not None:
            self._react(found, batch)

    def _sample(self, look: GradientLook, movement: Movement | None, batch: Any) -> None:
        """Judge what was seen since the last sample, on all ranks alike, and react to the gravest that is new."""
        self._window.settle(known=self._knows_at_once())
        numbers, names = local_numbers(
            self._run.precision, self._window, look, movement, replicated=bool(self._is_replicated)
        )
        rows = self._ranks.gathered({**numbers, "step": float(self.num_steps)})
        sample = merged(rows, names, self.policy, position=self.position, lowest_loss=self._lowest_loss)
        found = detectors.findings(sample, self._calibration or Calibration(), self.limits)
        self._window.begin()
        for each in found:
            if self._react(each, batch) != "warn":
                return
        self._events.draw(_drawn(sample), self.num_steps)
        if math.isfinite(sample.loss_mean) and not found:
            self._lowest_loss = min(self._lowest_loss, sample.loss_mean)
        if not found and not sample.skipped_in_row and self._is_snapshot_due():
            self.snapshot()

    def _is_snapshot_due(self) -> bool:
        since = self.position - (self._last_snapshot or 0)
        return self._snapshot_every is not None and since >= self._snapshot_every and self._ladder.is_calm(self.num_steps)

    def _react(self, finding: Finding, batch: Any) -> Reaction:
        """Do the next thing about a finding, and say so.

        Raises: `GuardError` if that is to stop.
        """
        self._has_reacted = True
        row = DETECTORS[finding.detector]
        place = self._place(finding, batch)
        promoted = self._promoted(finding, place)

        def can(reaction: Reaction) -> bool:
            if reaction == "stop":
                return place.kind != "data" or self._window.in_row >= self.limits.collapse_steps
            if reaction == "restore":
                return place.kind != "data" and len(self._snapshots) > 0
            if reaction == "fallback":
                return place.kind not in ("data", "state") and self._can_fall_back()
            return reaction == "warn" or promoted is not None

        reaction = self._ladder.climb(finding.detector, row.reactions, self.num_steps, can)
        at = place.name or finding.site
        told = replace(finding, site=at, message=f"{finding.message}; {place.detail}" if place.detail else finding.message)
        if reaction == "promote" and promoted is not None:
            self._num_promotions += 1
            self._run.exchange(promoted)
            self._turn(told, reaction, f"{at} is in fp32 from here on")
        elif reaction == "fallback":
            rule = fallback_of(self.policy).rules[0]
            self._run.fall_back()
            self._turn(told, reaction, f'falls back to {{sites: "{rule.sites}", format: {rule.format}}}')
        elif reaction == "restore":
            self._restore(told)
        else:
            self._tell(told, reaction, told.message)
        if reaction == "stop":
            raise GuardError(f"the guard stopped the run: {self._now[-1]}")
        return reaction

    def _turn(self, finding: Finding, reaction: Reaction, what: str) -> None:
        """Begin anew after the policy changed."""
        self._window.in_row = 0
        self._tell(finding, reaction, f"{finding.message}; {what}")

    def _restore(self, finding: Finding) -> None:
        snapshot, state = self._snapshots.pop()
        lost = self.position - snapshot.position
        self._run.restore(state)
        self._window.clear()
        self.position = self._restored_to = self._last_snapshot = snapshot.position
        self._lowest_loss = state["guard"]["lowest_loss"]
        what = (
            f"went back {lost} steps, to the good state of step {snapshot.step}: model, optimizer, loss scale, "
            "scheduler and random states; batches go on, they are not rewound"
        )
        self._tell(finding, "restore", f"{finding.message}; {what}")

    def _place(self, finding: Finding, batch: Any) -> Place:
        """Return where the fault is, as the rank that knows best has it."""
        return surest(self._ranks.all_of(self._run.find(finding, batch, self._broken_layer)))

    def _can_fall_back(self) -> bool:
        policy = self.policy
        return not is_fallen_back(policy) and self._run.precision.can_exchange(fallback_of(policy))

    def _promoted(self, finding: Finding, place: Place) -> Policy | None:
        if self._num_promotions >= _MOST_PROMOTIONS:
            return None
        why = f"guard, step {self.num_steps}: {finding.detector}"
        return self._run.promoted(place, why)

    def _tell(self, finding: Finding, reaction: Reaction, message: str) -> None:
        self._send(
            GuardEvent(
                step=self.num_steps,
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

    def _send(self, event: GuardEvent) -> None:
        self._now.append(event)
        self._events.send(event)

    def _knows_at_once(self) -> bool:
        return not any(getattr(each, "_step_supports_amp_scaling", False) for each in self._run.optimizers)

    def _check(self, loss: object, chosen: Sequence[torch.optim.Optimizer]) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else a_or_an(loss)
            raise GuardError(f"guard.step: the loss is {what}; give the scalar tensor that went into backward")
        for each in chosen:
            if each not in self._run.optimizers:
                raise GuardError(
                    f"guard.step: {type(each).__name__} is none of the optimizers of this guard; give it to "
                    "autoprec.guard as well"
                )

    def _check_state(self, state: object) -> None:
        if not isinstance(state, Mapping) or "schema" not in state or "ladder" not in state:
            raise GuardError("guard.load_state_dict: this is not what Guard.state_dict() returned; save and load that")
        if state["schema"] != SCHEMA:
            raise GuardError(
                f"guard.load_state_dict: the state has schema {state['schema']} and this autoprec reads {SCHEMA}; "
                "load it with the autoprec that wrote it"
            )
        if state["policy_hash"] != self._base_hash:
            raise GuardError(
                f"guard.load_state_dict: the checkpoint is of a run that began under another policy "
                f'({state["policy_hash"]}) than "{self.policy.name}" ({self._base_hash}); apply that one, or leave the '
                "guard's state out to begin anew"
            )


def _non_finite(number: float, in_row: int, patience: int, *, is_loss: bool) -> Finding:
    what = "the loss is" if is_loss else "gradients are"
    return Finding(
        detector="non_finite_loss" if is_loss else "non_finite_gradient",
        message=f"{what} not finite, {in_row} steps in a row" if in_row > 1 else f"{what} not finite",
        advice="look at this batch; guard.step(loss, batch=batch) with guard(..., loss=...) has the site named",
        number=number,
        threshold=patience,
    )


def _drawn(sample: Sample) -> tuple[tuple[str, float], ...]:
    numbers = (
        ("loss", sample.loss_mean),
        ("loss_scale", sample.loss_scale),
        ("skipped_frac", sample.skipped_frac),
        ("flush_frac", sample.flush_frac),
        ("overflow_frac", sample.overflow_frac),
        ("frozen_frac", sample.frozen_frac),
    )
    return tuple((name, number) for name, number in numbers if number is not None and math.isfinite(number))
