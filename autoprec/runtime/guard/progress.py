"""How far a guarded run has come, and reading that back from a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autoprec.errors import GuardError

SCHEMA = 1


@dataclass(kw_only=True)
class Progress:
    """What changes from step to step, in numbers.

    `num_steps` counts calls of `guard.step`, `position` the steps of training: restoring a good state goes back in it.
    `lowest_loss` is the least mean of a sample so far.
    """

    num_steps: int = 0
    position: int = 0
    lowest_loss: float = math.inf
    num_promotions: int = 0
    has_told_rest: bool = False
    last_snapshot: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds; good states are not in it, so the next step keeps one anew."""
        return {name: value for name, value in asdict(self).items() if name != "last_snapshot"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for name in self.state_dict():
            setattr(self, name, state[name])
        self.last_snapshot = None


def check_state(state: object, *, base_hash: str, policy: str) -> None:
    """Refuse what is no state of a guard, or that of a run that began under another policy.

    Raises: `GuardError`.
    """
    if not isinstance(state, Mapping) or "schema" not in state or "ladder" not in state:
        raise GuardError("guard.load_state_dict: this is not what Guard.state_dict() returned; save and load that")
    if state["schema"] != SCHEMA:
        raise GuardError(
            f"guard.load_state_dict: the state has schema {state['schema']} and this autoprec reads {SCHEMA}; "
            "load it with the autoprec that wrote it"
        )
    if state["policy_hash"] != base_hash:
        raise GuardError(
            f"guard.load_state_dict: the checkpoint is of a run that began under another policy "
            f'({state["policy_hash"]}) than "{policy}" ({base_hash}); apply that one, or leave the guard\'s state out '
            "to begin anew"
        )
