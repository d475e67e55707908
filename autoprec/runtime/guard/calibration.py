"""What a healthy run looks like: the numbers that `autoprec tune` leaves in a policy for the guard to compare with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from autoprec.errors import GuardError
from autoprec.policy import Policy

SCHEMA = 1
KEY = "calibration"
_KNOTS = 8
_DIGITS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LossBand:
    """A loss curve in a few knots: at step `steps[i]` its mean was `means[i]`; single steps scattered by `scatter`."""

    steps: tuple[float, ...]
    means: tuple[float, ...]
    scatter: float

    @property
    def fall(self) -> float:
        """Return by how much the curve fell from its first to its last knot; 0 if it rose."""
        return max(self.means[0] - self.means[-1], 0.0)

    def at(self, step: float) -> float:
        """Return the mean at `step`: between knots a straight line, beyond them the nearest."""
        points = list(zip(self.steps, self.means, strict=True))
        if step <= self.steps[0]:
            return self.means[0]
        for (left, low), (right, high) in pairwise(points):
            if step <= right:
                return low + (high - low) * (step - left) / (right - left)
        return self.means[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was measured of a run under the policy. None, or absent, is what there was nothing to measure of.

    `flush_frac` and `overflow_frac` are of the gradients that sites in a low format compute, as they come out of the
    backward pass, loss scale included; `layer_flush_frac` is that of the worst layer. `loss_scale` is where it settled.
    """

    losses: LossBand | None = None
    skipped_frac: float | None = None
    loss_scale: float | None = None
    flush_frac: float | None = None
    layer_flush_frac: float | None = None
    overflow_frac: float | None = None


def calibration_of(policy: Policy) -> Calibration | None:
    """Return the calibration in a policy's evidence; None if it has none.

    Raises: `GuardError` if there is one that cannot be read.
    """
    plain = policy.evidence.get(KEY)
    if plain is None:
        return None
    if not isinstance(plain, Mapping) or not isinstance(plain.get("schema"), int):
        raise _unreadable(policy, f"it is {plain!r}")
    if plain["schema"] > SCHEMA:
        raise _unreadable(policy, f"it has schema {plain['schema']}, and this autoprec reads up to {SCHEMA}")
    try:
        numbers = {name: _number(plain[name]) for name in _numbers() if plain.get(name) is not None}
        return Calibration(losses=_band(plain.get("losses")), **numbers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(policy, f"{type(error).__name__}: {error}") from error


def to_plain(calibration: Calibration) -> Mapping[str, Any]:
    """Return what a policy's evidence holds of a calibration: few digits, so that files stay small."""
    found = {key: value for key, value in asdict(calibration).items() if value is not None}
    return {"schema": SCHEMA, **_rounded(found)}


def loss_band(losses: Sequence[float]) -> LossBand | None:
    """Return the band of a loss curve; None for one that is not finite or has too few steps to say."""
    if len(losses) < 2 * _KNOTS or not all(map(math.isfinite, losses)):
        return None
    edges = [round(k * len(losses) / _KNOTS) for k in range(_KNOTS + 1)]
    pieces = [losses[left:right] for left, right in pairwise(edges)]
    steps = tuple((left + right - 1) / 2 for left, right in pairwise(edges))
    smooth = LossBand(steps=steps, means=tuple(sum(piece) / len(piece) for piece in pieces), scatter=0.0)
    squares = sum((loss - smooth.at(step)) ** 2 for step, loss in enumerate(losses))
    return LossBand(steps=steps, means=smooth.means, scatter=math.sqrt(squares / len(losses)))


def _numbers() -> tuple[str, ...]:
    return tuple(name for name in Calibration.__dataclass_fields__ if name != "losses")


def _band(plain: Any) -> LossBand | None:
    if plain is None:
        return None
    steps, means = (tuple(_number(each) for each in plain[name]) for name in ("steps", "means"))
    if not steps or len(steps) != len(means) or any(left >= right for left, right in pairwise(steps)):
        raise ValueError("losses need as many means as steps, and steps that rise")
    return LossBand(steps=steps, means=means, scatter=_number(plain["scatter"]))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_rounded(each) for each in value)
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _unreadable(policy: Policy, what: str) -> GuardError:
    return GuardError(
        f'guard: evidence.{KEY} of policy "{policy.name}" cannot be read: {what}; tune again, or delete the key, and '
        "the detectors that need it rest"
    )
