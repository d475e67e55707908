"""`Guard`: one step of a guarded training run, with what is looked at and judged around it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoprec.errors import GuardError, a_or_an
from autoprec.policy import Policy, dump_policy, parse_policy
from autoprec.runtime.checkpoint import policy_hash
from autoprec.runtime.guard import detectors
from autoprec.runtime.guard.calibration import Calibration, calibration_of
from autoprec.runtime.guard.detectors import DETECTORS
from autoprec.runtime.guard.events import Events, Reaction
from autoprec.runtime.guard.ladder import Ladder
from autoprec.runtime.guard.limits import GuardLimits
from autoprec.runtime.guard.looks import GradientLook, Movement, broken_layer, look_at_gradients, narrow_layers
from autoprec.runtime.guard.notices import WATCHING, drawn, non_finite_step
from autoprec.runtime.guard.outcome import GuardOutcome
from autoprec.runtime.guard.progress import SCHEMA, Progress, check_state
from autoprec.runtime.guard.ranks import Ranks, is_replicated
from autoprec.runtime.guard.reactions import Run
from autoprec.runtime.guard.responder import Responder
from autoprec.runtime.guard.sample import Sample
from autoprec.runtime.guard.sampling import local_numbers, merged, minimum_scale
from autoprec.runtime.guard.snapshot import Snapshots
from autoprec.runtime.guard.update_watch import UpdateWatch, Watched
from autoprec.runtime.guard.window import Window
from autoprec.runtime.step import Scheduler, StepOutcome


class Guard:
    """Watches a run. `step(loss)` stands in the loop where `precision.step(optimizer)` stood.

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
        self.limits = limits
        self._run, self._ranks, self._snapshots = run, ranks, snapshots
        self._every, self._snapshot_every = every, snapshot_every
        self._base_hash = policy_hash(run.precision.policy)
        self._calibration = calibration_of(run.precision.policy)
        self._known = self._calibration or Calibration()
        self._progress = Progress()
        self._ladder = Ladder(reactions, limits.calm * every)
        self._window = Window(limits.window)
        self._is_replicated: bool | None = False if ranks.is_alone else None
        self._saved_scale: float | None = None
        self._broken_layer = ""
        self._updates = UpdateWatch(run.precision, run.optimizers, ranks)
        self._told_watched: set[str] = set()
        self._responder = Responder(
            run,
            self._progress,
            ladder=self._ladder,
            window=self._window,
            snapshots=snapshots,
            limits=limits,
            sinks=events,
            ranks=ranks,
        )

    @property
    def policy(self) -> Policy:
        """Return the policy that runs now: the one applied, or what the guard has made of it."""
        return self._run.precision.policy

    @property
    def num_steps(self) -> int:
        """Return how often `step` was called, before the last checkpoint too."""
        return self._progress.num_steps

    @property
    def position(self) -> int:
        """Return how many steps training has come: restoring a good state goes back in it."""
        return self._progress.position

    def step(
        self,
        loss: torch.Tensor,
        *,
        batch: Any = None,
        max_norm: float | None = None,
        scheduler: Scheduler | None = None,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
    ) -> GuardOutcome:
        """Step as `precision.step` does, unless gradients, loss or updates are not finite; then look, and react.

        `loss` is that of the step, of micro-batches any one or their mean. `optimizers` are those to step now, all if
        None.

        Raises: `GuardError` when the guard stops the run; whatever `precision.step` and the receivers of events raise.
        """
        chosen = self._run.optimizers if optimizers is None else tuple(optimizers)
        self._check(loss, chosen)
        self._begin(scheduler)
        precision, value = self._run.precision, loss.detach()
        is_due = self.num_steps % self._every == 0
        look, movement = (self._look(), Movement(precision, chosen)) if is_due else (GradientLook(), None)
        is_long = self._window.in_row + 1 >= self.limits.patience
        self._broken_layer = broken_layer(precision) if is_long else ""
        watched = self._updates.watched(chosen)
        self._tell_watched(watched)
        outcome = precision.step(
            *chosen,
            max_norm=max_norm,
            scheduler=scheduler,
            skip_non_finite=True,
            loss=value if self._ranks.is_alone else None,  # of several ranks, gradients decide: all have the same
            undo=self._updates.keep(chosen, watched).undo_if_broken if watched else None,
        )
        stepped = self._window.note(value, outcome)
        self._progress.position += 1
        if stepped is False:
            self._skipped(value, batch, outcome)
        if is_due and not self._responder.has_reacted:
            self._updates.forget_weights()
            self._sample(look, movement if stepped else None, batch)
        if self._responder.has_reacted:
            self._updates.forget()
        return GuardOutcome(
            step=self.num_steps,
            outcome=outcome,
            events=tuple(self._responder.events),
            restored_to=self._responder.restored_to,
        )

    def snapshot(self) -> None:
        """Keep the present state as a good one, beside those that are kept by themselves.

        Raises: `OutputError` if its file cannot be written.
        """
        state = {**self._run.state(), "guard": {"lowest_loss": self._progress.lowest_loss}}
        self._snapshots.take(state, position=self.position, step=self.num_steps)
        self._progress.last_snapshot = self.position

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs of the guard; good states that it keeps are not in it."""
        self._window.settle()
        return {
            "schema": SCHEMA,
            "policy_hash": self._base_hash,
            "policy": dump_policy(self.policy),
            "loss_scale": self._run.precision.scaler.get_scale(),
            "progress": self._progress.state_dict(),
            "ladder": self._ladder.state_dict(),
            "window": self._window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, before `precision.load_state_dict`: a policy that was promoted is put in place.

        Raises: `GuardError`, before anything is changed, if it is no such state or that of a run under another policy.
        """
        check_state(state, base_hash=self._base_hash, policy=self.policy.name)
        policy = parse_policy(state["policy"], "the checkpoint of the guard")
        if policy_hash(policy) != policy_hash(self.policy):
            self._run.exchange(policy)
        self._saved_scale = state["loss_scale"]
        self._progress.load_state_dict(state["progress"])
        self._ladder.load_state_dict(state["ladder"])
        self._window.load_state_dict(state["window"])

    def _begin(self, scheduler: Scheduler | None) -> None:
        """Do what comes before a step; the first one keeps the state that training starts from."""
        self._responder.begin()
        self._progress.num_steps += 1
        if scheduler is not None:
            self._run.scheduler = scheduler
        if self._is_replicated is None:
            self._is_replicated = is_replicated(self._run.precision.model, self._run.model)
        if self._saved_scale is not None:
            self._check_resumed(self._saved_scale)
            self._saved_scale = None
        if self._progress.last_snapshot is None and self._snapshot_every is not None:
            self.snapshot()
        if not self._progress.has_told_rest:
            self._progress.has_told_rest = True
            self._tell_rest()

    def _check_resumed(self, saved_scale: float) -> None:
        scale = self._run.precision.scaler.get_scale()
        sample = Sample(position=self.position, loss_scale=scale, saved_scale=saved_scale)
        found = DETECTORS["checkpoint"].judge(sample, self._known, self.limits)
        if found is not None:
            self._responder.tell(found, "warn", found.message)

    def _tell_rest(self) -> None:
        rows = detectors.resting(self._calibration)
        if self._calibration is not None and next(narrow_layers(self._run.precision), None) is None:
            rows = tuple(row for row in rows if row[0] not in ("flush", "overflow"))
        if rows:
            lacking = "has no calibration" if self._calibration is None else f"is not calibrated for {rows[0][1]}"
            text = f'policy "{self.policy.name}" {lacking}; these rest: {", ".join(name for name, _ in rows)}'
            self._responder.inform("guard", text, "autoprec tune writes it into the policy (said once)")

    def _tell_watched(self, watched: Sequence[Watched]) -> None:
        """Say once of each group that is watched why it is, in one event."""
        news = [each for each in watched if each.place not in self._told_watched]
        if news:
            self._told_watched |= {each.place for each in news}
            text = f"updates are watched of {'; '.join(map(str, news))}"
            self._responder.inform("non_finite_update", text, WATCHING)

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
            self._window.drop_last_loss()  # told of here
        is_grave = in_row >= self.limits.patience
        if is_grave:  # the same on all ranks, as their gradients are; their losses are not
            is_bad = any(row["bad"] for row in self._ranks.gathered({"bad": float(is_bad)}))
        if outcome.undone is not None:
            sample = Sample(
                position=self.position,
                skipped_in_row=in_row,
                undone_parameter=outcome.undone.parameter,
                num_undone=outcome.undone.num_elements,
            )
            finding = DETECTORS["non_finite_update"].judge(sample, self._known, self.limits)
        elif scaled and not is_bad:
            sample = Sample(
                position=self.position,
                skipped_in_row=in_row,
                is_scaled=True,
                loss_scale=outcome.loss_scale,
                minimum_scale=minimum_scale(self.policy),
            )
            finding = DETECTORS["loss_scale_collapse"].judge(sample, self._known, self.limits)
        else:
            finding = non_finite_step(
                float(loss), in_row, self.limits.patience, is_loss=is_bad, at_hand=batch is not None
            )
        if finding is not None and is_grave:
            self._responder.react(finding, batch, self._broken_layer, warned=True)
        elif finding is not None:
            self._responder.warn(finding, "" if outcome.undone is not None else "; the step was skipped")

    def _sample(self, look: GradientLook, movement: Movement | None, batch: Any) -> None:
        """Judge what was seen since the last sample, on all ranks alike, and react until something was changed."""
        self._window.settle()
        numbers, names = local_numbers(
            self._run.precision, self._window, look, movement, replicated=bool(self._is_replicated)
        )
        rows = self._ranks.gathered({**numbers, "step": float(self.num_steps)})
        progress = self._progress
        sample = merged(rows, names, self.policy, position=progress.position, lowest_loss=progress.lowest_loss)
        found = detectors.findings(sample, self._known, self.limits)
        self._window.begin()
        self._responder.draw(drawn(sample))
        for each in found:
            if self._responder.react(each, batch, self._broken_layer) != "warn":
                return
        if not found and sample.num_losses:
            progress.lowest_loss = min(progress.lowest_loss, sample.loss_mean)
        if not found and not sample.skipped_in_row and self._is_snapshot_due():
            self.snapshot()

    def _is_snapshot_due(self) -> bool:
        since = self.position - (self._progress.last_snapshot or 0)
        is_due = self._snapshot_every is not None and since >= self._snapshot_every
        return is_due and self._ladder.is_calm(self.num_steps)

    def _check(self, loss: object, chosen: Sequence[torch.optim.Optimizer]) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else a_or_an(loss)
            raise GuardError(f"guard.step: the loss is {what}; give the scalar tensor that went into backward")
        for each in chosen:
            if all(each is not known for known in self._run.optimizers):
                raise GuardError(
                    f"guard.step: this {type(each).__name__} is none of the optimizers of this guard; give it to "
                    "autoprec.guard as well"
                )
