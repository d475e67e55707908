"""The recorded step with some of its parameters and buffers rounded to a format."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoprec.analysis.short_run import Sampler
from autoprec.analysis.stored_values import StoredFault, percent, relative_error, stored
from autoprec.capture import Recording, Replay
from autoprec.capture.memory import named_tensors

# A gradient that is more off than this is another gradient; rounding everything to 8 bits costs a healthy step less.
GRADIENT_ERROR = 0.1
# Each try costs a step; so many look for the culprits among the names of one part.
_MAX_TRIES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedStep:
    """By how much loss and gradients differ from FP32's, as fractions of them."""

    loss_error: float
    gradient_error: float

    @property
    def is_harmful(self) -> bool:
        """Return whether this is another step than FP32's."""
        return not max(self.loss_error, self.gradient_error) <= GRADIENT_ERROR

    @property
    def numbers(self) -> dict[str, float]:
        """Return both errors by name."""
        return {"gradient_error": self.gradient_error, "loss_error": self.loss_error}


class RoundingProbe:
    """Replays of one recorded step with tensors of the model rounded; made with the replay that is compared with."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._sample = Sampler()
        self._named = named_tensors(recording.model)
        self._loss, self._gradients = self._step((), "fp32")

    def names(self, part: str) -> tuple[str, ...]:
        """Return the `parameters`, or the `buffers`, that the step reads and does not write to."""
        read = [str(node.target) for node in self._recording.graph_module.graph.nodes if node.op == "get_attr"]
        return tuple(
            name
            for name in dict.fromkeys(read)
            if name in self._named
            and name not in self._recording.written
            and self._named[name].dtype == torch.float32
            and self._named[name].layout == torch.strided
            and (part == "parameters") == isinstance(self._named[name], torch.nn.Parameter)
        )

    def rounded(self, names: Collection[str], format_name: str) -> RoundedStep:
        """Return how the step differs with the tensors called `names` rounded to the format."""
        loss, gradients = self._step(names, format_name)
        found = torch.cat([gradients[name] for name in self._gradients])
        wanted = torch.cat(list(self._gradients.values()))
        return RoundedStep(
            loss_error=abs(loss - self._loss) / max(abs(self._loss), 1e-12) if math.isfinite(loss) else math.inf,
            gradient_error=relative_error(found, wanted),
        )

    def _step(self, names: Collection[str], format_name: str) -> tuple[float, dict[str, torch.Tensor]]:
        replay = _RoundedReplay(self._recording, frozenset(names), format_name)
        loss = replay.loss()
        trained = {name: each for name, each in self._named.items() if each.requires_grad}
        leaves = [replay.leaves.get(name, each) for name, each in trained.items()]
        gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(loss, leaves, allow_unused=True)
        found = zip(trained, gradients, strict=True)
        return loss.item(), {name: self._sample(name, each) for name, each in found if each is not None}


class _RoundedReplay(Replay):
    """Gives the graph rounded values of the tensors called `names`; `leaves` are those that gradients belong to."""

    def __init__(self, recording: Recording, names: frozenset[str], format_name: str) -> None:
        super().__init__(recording)
        self.leaves: dict[str, torch.Tensor] = {}
        self._names, self._format = names, format_name
        self._rounded: dict[str, torch.Tensor] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if target not in self._names:
            return value
        if target not in self._rounded:
            rounded = stored(value.detach(), self._format).requires_grad_(value.requires_grad)
            self._rounded[target] = rounded
            if value.requires_grad:
                self.leaves[target] = rounded
        return self._rounded[target]


def rounding_faults(probe: RoundingProbe, formats: Sequence[str]) -> Iterator[StoredFault]:
    """Yield what rounding the parameters and the buffers that the step reads does to it, once a format.

    All are rounded together first, which tells of a healthy step that none does harm. Otherwise parameters and buffers
    are told apart, and those that do harm alone are looked for by halving. What is innocent gets the error of the
    group it was cleared with.
    """
    for name in formats:
        together = (*probe.names("parameters"), *probe.names("buffers"))
        if not together:
            continue
        effect = probe.rounded(together, name)
        for part in ("parameters", "buffers"):
            group = probe.names(part)
            found = dict.fromkeys(group, effect)
            if effect.is_harmful and group:
                found = _culprits(probe, group, name)
            for each, alone in found.items():
                yield _fault(part, each, name, alone)


def _culprits(probe: RoundingProbe, names: Sequence[str], format_name: str) -> dict[str, RoundedStep]:
    """Return the effect of each name, or of the smallest group with it that was tried."""
    effects: dict[str, RoundedStep] = {}
    groups, tries = [tuple(names)], 0
    while groups and tries < _MAX_TRIES:
        group = groups.pop(0)
        effect = probe.rounded(group, format_name)
        tries += 1
        if effect.is_harmful and len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        effects |= dict.fromkeys(group, effect)
    untried = {name for group in groups for name in group}
    return {name: effect for name, effect in effects.items() if name not in untried}


def _fault(part: str, name: str, format_name: str, effect: RoundedStep) -> StoredFault:
    return StoredFault(
        part=part, name=name, format=format_name, verdict="needs_fp32" if effect.is_harmful else "fine",
        reason=f"rounded to {format_name} it changes the gradient by {percent(effect.gradient_error)} and the "
        f"loss by {percent(effect.loss_error)}",
        numbers=effect.numbers,
    )  # fmt: skip
