"""The runs that several gates look at: each trained once, under one seed, with what it saved on the way."""

import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from autoprec.audit.gate import Threshold, Thresholds
from autoprec.audit.site_reach import SiteReach, reach_of
from autoprec.capture import Recording, record_batches
from autoprec.errors import MeasurementError, TraceError
from autoprec.graph.site import Site
from autoprec.measure import Training
from autoprec.policy import Policy, preset
from autoprec.runtime.trace import SiteTrace
from autoprec.workload import fitting_batches
from autoprec.workload.origin import origin

if TYPE_CHECKING:
    from autoprec.audit.audited import Audited

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class Course:
    """One run as it went: by step, the losses, the loss scales in use, and whether the scaler skipped it.

    `saved` is the checkpoint before step `saved_at` (counted from 0), `end` the one after the last step. A run that
    raised has no `end`, and `error` says what it raised; `saved` is None if it did not get that far.
    """

    losses: tuple[float, ...]
    scales: tuple[float, ...]
    skipped: tuple[bool, ...]
    saved: Path | None
    end: Path | None
    error: str = ""

    def require_finished(self) -> None:
        """Return if the run came to its end.

        Raises: `MeasurementError` with what it raised otherwise: what cannot be run is not proven.
        """
        if self.error:
            raise MeasurementError(f"a run under the policy raised {self.error}")

    @property
    def broken_at(self) -> int | None:
        """Return the first step (from 1) whose loss is not finite; None if all are."""
        return next((step for step, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Legs:
    """How long runs are: `before` steps up to the checkpoint, and `after` steps from there on."""

    before: int
    after: int

    @property
    def total(self) -> int:
        """Return the steps of the whole run."""
        return self.before + self.after


HELD_OUT = 8  # batches that no run trains on, at most

LEGS: Mapping[str, Threshold] = MappingProxyType(
    {
        "steps_before": Threshold(
            default=12, unit="steps", means="trained before the checkpoint", minimum=1, whole=True
        ),
        "steps_after": Threshold(default=24, unit="steps", means="trained after the checkpoint", minimum=8, whole=True),
    }
)
"""The thresholds of every gate that trains: gates that agree on them share their runs."""


def legs_of(thresholds: Thresholds) -> Legs:
    """Return the steps that thresholds with those of `LEGS` ask for."""
    return Legs(before=int(thresholds["steps_before"]), after=int(thresholds["steps_after"]))


class Runs:
    """Trains what gates ask for, and keeps it for the next one that asks; checkpoints lie in a temporary folder."""

    def __init__(self, audited: "Audited") -> None:
        self._audited = audited
        self._kept: dict[Hashable, Any] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="autoprec-audit-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def under_policy(self, legs: Legs) -> Course:
        """Return the run under the policy."""
        return self._keep(("policy", legs), lambda: self._train(self._audited.policy, legs))

    def again(self, legs: Legs) -> Course:
        """Return a second run under the policy, of the same seed."""
        return self._keep(("again", legs), lambda: self._train(self._audited.policy, legs))

    def in_fp32(self, legs: Legs) -> Course:
        """Return the run in plain FP32."""
        fp32 = preset("fp32", self._audited.device.kind)
        return self._keep(("fp32", legs), lambda: self._train(fp32, legs))

    def under_fallback(self, legs: Legs, fallback: Policy) -> Course:
        """Return a whole run under a fallback; that of plain FP32 is the one in FP32."""
        if fallback.formats == ("fp32",) and (fallback.memory_format, fallback.optimizer) == ("as_given", "as_given"):
            return self.in_fp32(legs)
        return self._keep(("fallback", legs, fallback.name), lambda: self._train(fallback, legs))

    def nudged(self, legs: Legs, policy: Policy, nudge: float) -> Course:
        """Return a run under `policy` whose first weights are nudged by the fraction `nudge`."""
        key = ("nudged", legs, policy.name, nudge)
        return self._keep(key, lambda: self._train(policy, legs, nudge=nudge))

    def resumed(self, legs: Legs) -> Course:
        """Return a fresh run under the policy that goes on from the checkpoint of `under_policy`."""
        start = self.under_policy(legs).saved
        assert start is not None
        return self._keep(("resumed", legs), lambda: self._train(self._audited.policy, legs, start=start))

    def switched(self, legs: Legs, start: Path, policy: Policy, scaler: Path | None = None) -> Course:
        """Return a run under `policy` that goes on from `start`, the checkpoint of a run under another one.

        `scaler` is the checkpoint that its loss scale comes from; None: that of the policy's file.
        """
        key = ("switched", legs, start, policy.name, scaler)
        return self._keep(key, lambda: self._train(policy, legs, start=start, other_policy=True, scaler_from=scaler))

    def ran_as(self) -> Mapping[Site, str]:
        """Return the format each site computes in: what the policy says or, where that is not a format, what ran.

        Formats without digits or range of their own to lose are left out: FP32 and what computes on FP32 tensors.
        """
        return self._keep("ran as", self._ran_as)

    def recordings(self, weights: Path | None, count: int, legs: Legs) -> tuple[Recording, ...]:
        """Return recorded steps on `count` batches that no run of this audit trains on.

        The model has the weights of the file `weights`, or those of the FP32 run at its end.
        """
        return self._keep(("recordings", weights, count, legs), lambda: self._record(weights, count, legs))

    def reach(self, weights: Path | None, count: int, legs: Legs, scale: float) -> tuple[SiteReach, ...]:
        """Return how far every number of the sites below FP32 is from the ends of its format, see `recordings`."""
        recordings = self.recordings(weights, count, legs)
        key = ("reach", weights, count, legs, scale)
        return self._keep(key, lambda: reach_of(recordings, self._audited, self.ran_as(), scale))

    def batches(self, count: int) -> Sequence[Any]:
        """Return the first `count` batches that the search has not seen."""
        return self._audited.batches(count)

    def _split(self, steps: int, held_out: int) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return batches to train on and others held out: as many as the steps if they fit into memory, or fewer."""
        kind, workload = self._audited.device.kind, self._audited.loaded.workload
        fitting = max(fitting_batches(workload, steps + held_out, kind), held_out + 1)
        found = self._audited.batches(fitting)
        return found[: fitting - held_out], found[fitting - held_out :]

    def _keep(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        if key not in self._kept:
            self._kept[key] = make()
        found: _Value = self._kept[key]
        return found

    def _train(
        self,
        policy: Policy,
        legs: Legs,
        *,
        start: Path | None = None,
        other_policy: bool = False,
        scaler_from: Path | None = None,
        nudge: float = 0.0,
    ) -> Course:
        """Return all of `legs` under `policy`, or those after `start`; what it raises ends the course, to be judged."""
        audited, number = self._audited, len(self._kept)
        steps = legs.total if start is None else legs.after
        losses, scales, skipped = list[float](), list[float](), list[bool]()
        saved, end, raised = None, None, ""
        try:
            with Training(
                audited.loaded.workload, policy, device=audited.device.kind, seed=audited.seed,
                batches=self._split(legs.total, HELD_OUT)[0], nudge=nudge,
            ) as run:  # fmt: skip
                if start is not None:
                    run.load_state_dict(load_checkpoint(start), other_policy=other_policy)
                if scaler_from is not None and run.precision.scaler.is_enabled():
                    run.precision.scaler.load_state_dict(load_checkpoint(scaler_from)["precision"]["scaler"])
                for step in range(steps):
                    if step == legs.before and start is None:
                        saved = self._save(run, f"{number}-half")
                    scales.append(run.precision.scaler.get_scale())
                    before = run.num_skipped
                    losses.append(run.step())
                    skipped.append(run.num_skipped > before)
                end = self._save(run, f"{number}-end")
        except Exception as error:  # noqa: BLE001 kernels and workloads raise anything; the gate says what
            where = origin(error)
            raised = f"{where + ': ' if where else ''}{type(error).__name__}: {error}"
        return Course(
            losses=tuple(losses), scales=tuple(scales), skipped=tuple(skipped), saved=saved, end=end, error=raised
        )

    def _save(self, run: Training, name: str) -> Path:
        path = self._folder / f"{name}.pt"
        torch.save(run.state_dict(), path)
        return path

    def _ran_as(self) -> Mapping[Site, str]:
        audited = self._audited
        asked = {site: audited.policy.format_of(site)[0] for site in audited.recording.op_graph.sites()}
        with audited.train(audited.policy, self.batches(1)) as run:
            try:
                rows = {row.site: row for row in run.trace().rows}
            except TraceError:  # compiled modules hide their kernels; what the policy says stands
                rows = {}
        formats = {site: _format(name, rows.get(site)) for site, name in asked.items()}
        return {site: name for site, name in formats.items() if name in LOW}

    def _record(self, weights: Path | None, count: int, legs: Legs) -> tuple[Recording, ...]:
        audited = self._audited
        workload = audited.loaded.workload
        state = self.weights(weights, legs)

        def trained() -> torch.nn.Module:
            model = workload.model()
            if state is not None:
                model.load_state_dict(state)
            return model

        unseen = self._split(legs.total, HELD_OUT)[1][:count]
        held_out = replace(workload, model=trained, batches=lambda: unseen)
        return record_batches(held_out, count, device=audited.device.kind, seed=audited.seed)

    def weights(self, file: Path | None, legs: Legs) -> Mapping[str, Any] | None:
        """Return the model's state in `file`, or at the end of the FP32 run; None, the initial one, if that broke."""
        from autoprec.audit.checkpoints import model_state

        if file is not None:
            return model_state(file, self._audited)
        course = self.in_fp32(legs)
        if course.end is None or course.broken_at is not None:
            return None
        state: Mapping[str, Any] = load_checkpoint(course.end)["model"]
        return state


# Formats whose range or digits end before those of FP32, and which no factor of their own keeps in range.
LOW = ("bf16", "fp16")


def _format(asked: str, row: SiteTrace | None) -> str:
    """Return the format a site computes in; of several that entered its kernels, the one with the least range."""
    if asked not in ("as_given", "promote") or row is None:
        return asked
    return next((name for name in ("fp16", "bf16") if name in row.ran), "fp32")


def load_checkpoint(path: Path) -> Any:
    """Return what `Runs` saved in `path`: this process wrote it a moment ago, so nothing foreign is unpickled."""
    return torch.load(path, weights_only=False)
