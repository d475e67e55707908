"""Which reaction comes next: from a warning up, each time a finding comes again, and down again after a calm."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoprec.runtime.guard.events import Reaction


class Ladder:
    """Where each detector stands on its reactions, of which only `allowed` ones are taken."""

    def __init__(self, allowed: Sequence[Reaction], calm_steps: int) -> None:
        self.allowed = tuple(allowed)
        self._calm_steps = calm_steps
        self._rungs: dict[str, tuple[int, int]] = {}

    def climb(
        self,
        detector: str,
        reactions: Sequence[Reaction],
        step: int,
        can: Callable[[Reaction], bool],
        *,
        warned: bool = False,
    ) -> Reaction:
        """Return the reaction to a finding at `step`: the next of `reactions` that is allowed and that `can` be taken.

        Promoting and restoring are repeated as long as they can be. Where nothing is left it is a warning.
        With `warned` the warnings were given already.
        """
        rung, last = self._rungs.get(detector, (-1, step))
        if step - last > self._calm_steps:
            rung = -1
        repeats = 0 <= rung < len(reactions) and reactions[rung] in ("promote", "restore")
        start = rung if repeats else rung + 1
        if warned and reactions[0] == "warn":
            start = max(start, 1)
        for index in range(min(start, len(reactions) - 1), len(reactions)):
            if reactions[index] in self.allowed and can(reactions[index]):
                self._rungs[detector] = (index, step)
                return reactions[index]
        self._rungs[detector] = (len(reactions) - 1, step)
        return "warn"

    def is_calm(self, step: int) -> bool:
        """Return whether nothing was found for a while."""
        return all(step - last > self._calm_steps for _, last in self._rungs.values())

    def state_dict(self) -> dict[str, list[int]]:
        """Return where each detector stands."""
        return {name: list(rung) for name, rung in self._rungs.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._rungs = {name: (int(rung), int(step)) for name, (rung, step) in state.items()}
