"""What a gate is: one proof about a policy, its thresholds, and the function that measures it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from autoprec.records.audit import EvidenceRecord, GateVerdict

if TYPE_CHECKING:
    from autoprec.audit.audited import Audited

Thresholds: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """A number that a gates file can set: its default, the unit it has, what it means, and what is allowed.

    `minimum` and `maximum` are allowed themselves. `whole` numbers are counts, of steps for instance.
    """

    default: float
    unit: str
    means: str
    minimum: float = 0.0
    maximum: float = float("inf")
    whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a gate found; the fields are those of `GateRecord`."""

    verdict: GateVerdict
    measured: str
    value: float | None = None
    threshold: float | None = None
    unit: str = ""
    evidence: tuple[EvidenceRecord, ...] = ()
    advice: str = ""
    notes: tuple[str, ...] = ()


Check: TypeAlias = "Callable[[Audited, Thresholds], Finding]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One row of the table of gates: `check` measures what is audited and holds it against the thresholds.

    `proves` completes the sentence "a pass proves that ...".
    """

    name: str
    proves: str
    check: Check
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, float]:
        """Return the thresholds of a gate that no gates file sets."""
        return {name: threshold.default for name, threshold in self.thresholds.items()}
