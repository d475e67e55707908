"""The proof: a candidate trained again on a longer horizon, other batches and another seed, and timed side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autoprec.errors import TraceError
from autoprec.measure import Training, compare, hopeless, interleave_until, speedup
from autoprec.policy import Policy, preset
from autoprec.records.run import Interval, MemoryRecord, VerificationRecord
from autoprec.runtime.matmul_precision import restore, set_float32_matmul
from autoprec.search.objective import Chaos, Protocol, fidelity_record, interval_of, memory_record
from autoprec.search.same_arithmetic import computes_in_fp32, drifts_as_chaos, settled
from autoprec.workload.origin import origin
from autoprec.workload.seeding import seeded

_HORIZONS = 2
# `evaluate` is one number a run, so its noise is unknown: a candidate may miss this part of what training gained.
_EVALUATE_FRAC = 0.1
_HALF_WIDTH = 0.01
_LOOK_EVERY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The losses of a run, and what `evaluate` said before and after it; None if the workload has none."""

    losses: tuple[float, ...]
    evaluate_before: float | None
    evaluate_after: float | None


class Prover:
    """Trains candidates a second time, paired against FP32, which is trained once for all of them."""

    def __init__(self, protocol: Protocol, other_batches: Sequence[Any]) -> None:
        self.protocol = replace(
            protocol, seed=protocol.seed + 1, horizon=_HORIZONS * protocol.horizon, batches=other_batches
        )
        self._chaos = Chaos(self.protocol)

    def prove(self, name: str, policy: Policy, *, chaotic: bool) -> VerificationRecord:
        """Return whether `policy` trains as FP32 does under the other seed; whatever it raises is a no.

        A policy whose rules the kernels do not honor is not proven either: it is not what would be written.

        `chaotic` says that the search had to widen its margin, so that this one is measured anew.
        """
        blank = VerificationRecord(
            name=name, passed=False, reason="", seed=self.protocol.seed, horizon=self.protocol.horizon
        )
        reference = self.reference
        blank = replace(blank, reference_losses=reference.losses, evaluate_reference=reference.evaluate_after)
        try:
            chaos = self._chaos.of(policy) if chaotic else None
            self._require_honored(policy)
            candidate = self._train(policy, reference.losses)
        except Exception as error:  # noqa: BLE001 kernels and workloads raise anything: that is what a proof finds out
            where = origin(error)
            return replace(blank, reason=f"{where + ': ' if where else ''}{type(error).__name__}: {error}")
        length = len(candidate.losses)
        fidelity = compare(
            reference.losses[:length],
            candidate.losses,
            margin=self.protocol.margin,
            chaos=None if chaos is None else chaos[:length],
        )
        fidelity = settled(
            fidelity,
            self.protocol.train,
            policy,
            self.protocol.device,
            is_chaotic=lambda: self._drifts(policy, reference.losses, candidate.losses),
        )
        missed = evaluate_missed(reference, candidate)
        return replace(
            blank,
            passed=fidelity.verdict == "faithful" and not missed and length == self.protocol.horizon,
            reason=missed or fidelity.reason,
            fidelity=fidelity_record(fidelity),
            evaluate_candidate=candidate.evaluate_after,
            losses=candidate.losses,
        )

    def versus(self, policy: Policy, baseline: Policy, max_s: float) -> Interval:
        """Return the speed-up of `policy` over `baseline`, both timed in the same rounds."""
        protocol = self.protocol
        with protocol.train(policy) as candidate, protocol.train(baseline) as bar:
            times = interleave_until(
                {"baseline": bar, "candidate": candidate},
                "baseline",
                half_width=_HALF_WIDTH,
                max_rounds=max(protocol.horizon // protocol.steps_per_round, 2 * _LOOK_EVERY),
                max_s=max_s,
                steps_per_round=protocol.steps_per_round,
                device=protocol.device,
            )
        return interval_of(speedup(times["baseline"], times["candidate"]))

    def memory(self, policy: Policy) -> MemoryRecord:
        """Return what one copy of a run under `policy` holds."""
        with self.protocol.train(policy) as run:
            run.step()  # until then the optimizer has no state
            return memory_record(run)

    @cached_property
    def reference(self) -> Curve:
        """Return the FP32 curve, trained on first use."""
        return self._train(preset("fp32", self.protocol.device), None)

    def _require_honored(self, policy: Policy) -> None:
        """Return if the kernels run as `policy` says, as far as they can be seen; raise `TraceError` otherwise."""
        with self.protocol.train(policy) as run:
            try:
                found = run.trace()
            except TraceError:  # compiled modules hide their kernels; how they train is judged all the same
                return
        found.check()

    def _drifts(self, policy: Policy, reference: Sequence[float], losses: Sequence[float]) -> bool:
        """Return whether nothing can be told from a curve: FP32 by other kernels, no further off than chaos."""
        nudged = self._chaos.of(policy) if computes_in_fp32(policy) else None
        return nudged is not None and drifts_as_chaos(reference, losses, nudged)

    def _train(self, policy: Policy, reference: Sequence[float] | None) -> Curve:
        """Train to the horizon, or to where a look at `reference` shows that there is no hope."""
        protocol = self.protocol
        with protocol.train(policy) as run:
            before = evaluated(protocol, run)
            losses: list[float] = []
            while len(losses) < protocol.horizon:
                losses.append(run.step())
                is_due = reference is not None and len(losses) % _LOOK_EVERY == 0
                is_lost = is_due and hopeless(reference or (), losses, protocol.margin, horizon=protocol.horizon)
                if is_lost and not self._drifts(policy, reference or (), losses):
                    return Curve(losses=tuple(losses), evaluate_before=before, evaluate_after=None)
            return Curve(losses=tuple(losses), evaluate_before=before, evaluate_after=evaluated(protocol, run))


def evaluated(protocol: Protocol, run: Training) -> float | None:
    """Return what the workload's `evaluate` says of the model; training goes on as if it had not been called."""
    evaluate = protocol.workload.evaluate
    if evaluate is None:
        return None
    modes = {module: module.training for module in run.model.modules()}
    matmul = set_float32_matmul(run.device.type, run.precision.policy.float32_matmul)
    try:
        with seeded(protocol.seed):
            return float(evaluate(run.model))
    finally:
        restore(matmul)
        for module, mode in modes.items():
            module.training = mode


def evaluate_missed(reference: Curve, candidate: Curve) -> str:
    """Return what is wrong with the candidate's `evaluate`, or an empty text.

    It may be worse than that of FP32 by a tenth of what training improved it.
    """
    fp32, ours, before = reference.evaluate_after, candidate.evaluate_after, reference.evaluate_before
    if fp32 is None or before is None or ours is None:
        return ""
    allowed = fp32 + _EVALUATE_FRAC * max(before - fp32, 0.0)
    if math.isfinite(ours) and ours <= allowed:
        return ""
    return f"evaluate gives {ours:.4g}, and fp32 {fp32:.4g}; up to {allowed:.4g} was allowed"
