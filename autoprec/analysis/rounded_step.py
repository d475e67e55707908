"""The recorded step with some of its parameters and buffers rounded to a format."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from autoprec.analysis.short_run import Sampler
from autoprec.analysis.stored_values import StoredFault, percent, relative_error, stored
from autoprec.capture import Recording, Replay, attribute_name
from autoprec.capture.memory import named_tensors

# A gradient that is more off than this is another gradient; rounding everything to 8 bits costs a healthy step less.
GRADIENT_ERROR = 0.1
# Each try costs a step: so many look for culprits among buffers, so many parameters are tried alone.
_MAX_TRIES = 8
_MAX_SUSPECTS = 2


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


_Tried: TypeAlias = tuple[tuple[str, ...], RoundedStep]


class RoundingProbe:
    """Replays of one recorded step with tensors of the model rounded; made with the replay that is compared with."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._sample = Sampler()
        self._named = named_tensors(recording.model)
        self._loss, self._gradients = self._step((), "fp32")

    def names(self, part: str) -> tuple[str, ...]:
        """Return the `parameters`, or the `buffers`, that the step reads and does not write to."""
        read = [node.target for node in self._recording.op_graph if node.kind in ("parameter", "buffer")]
        return tuple(
            name
            for name in dict.fromkeys(read)
            if name in self._named
            and name not in self._recording.written
            and self._named[name].dtype == torch.float32
            and self._named[name].layout == torch.strided
            and (part == "parameters") == isinstance(self._named[name], torch.nn.Parameter)
        )

    def suspects(self, names: Collection[str], format_name: str) -> tuple[str, ...]:
        """Return the names of a few trained parameters: those with the largest gradient times rounding error."""
        sizes = {}
        for name in names:
            if name in self._gradients:
                value = self._sample(name, self._named[name])
                error = stored(value, format_name) - value
                scale = self._named[name].numel() / max(value.numel(), 1)
                sizes[name] = float((error * self._gradients[name]).abs().sum()) * scale
        return tuple(sorted(sizes, key=lambda name: -sizes[name])[:_MAX_SUSPECTS])

    def rounded(self, names: Collection[str], format_name: str) -> RoundedStep:
        """Return how the step differs with the tensors called `names` rounded to the format."""
        loss, gradients = self._step(names, format_name)
        found = torch.cat([gradients.get(name, torch.zeros_like(each)) for name, each in self._gradients.items()])
        wanted = torch.cat(list(self._gradients.values()))
        return RoundedStep(
            loss_error=abs(loss - self._loss) / max(abs(self._loss), 1e-12) if math.isfinite(loss) else math.inf,
            gradient_error=relative_error(found, wanted),
        )

    def _step(self, names: Collection[str], format_name: str) -> tuple[float, dict[str, torch.Tensor]]:
        replay = _RoundedReplay(self._recording, frozenset(names), format_name)
        loss = replay.loss()
        trained = {name: each for name, each in self._recording.model.named_parameters() if each.requires_grad}
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
        name = attribute_name(target)
        if name not in self._names:
            return value
        if name not in self._rounded:
            rounded = stored(value.detach(), self._format).requires_grad_(value.requires_grad)
            self._rounded[name] = rounded
            if value.requires_grad:
                self.leaves[name] = rounded
        return self._rounded[name]


def rounding_faults(probe: RoundingProbe, formats: Sequence[str]) -> Iterator[StoredFault]:
    """Yield what rounding the parameters and the buffers that the step reads does to it.

    All are rounded together first, which tells of a healthy step that none does harm. Otherwise buffers that do harm
    alone are looked for by halving, and of the parameters those are tried alone whose rounding moves the loss most by
    first order. What was only rounded with others does no harm that can be laid on it.
    Costs one pass a format, and up to 12 more for one in which all together do harm.
    """
    for name in formats:
        parameters, buffers = probe.names("parameters"), probe.names("buffers")
        if not parameters and not buffers:
            continue
        together = (*parameters, *buffers)
        effect = probe.rounded(together, name)
        tried: list[_Tried] = [(together, effect)]
        guilty: set[str] = set()
        if effect.is_harmful:
            noise = probe.rounded(parameters, name)
            tried += [(parameters, noise), *_alone(probe, parameters, name, noise)]
            tried += _halved(probe, buffers, name)
            guilty = _guilty(probe, tried, parameters, name, noise)
        smallest = {each: (group, found) for group, found in tried for each in group}  # groups get smaller
        for part, names in (("parameters", parameters), ("buffers", buffers)):
            for each in names:
                yield _fault(part, each, name, *smallest[each], is_culprit=each in guilty)


def _alone(probe: RoundingProbe, parameters: tuple[str, ...], format_name: str, noise: RoundedStep) -> list[_Tried]:
    if not noise.is_harmful:
        return []
    return [((each,), probe.rounded((each,), format_name)) for each in probe.suspects(parameters, format_name)]


def _guilty(
    probe: RoundingProbe, tried: Sequence[_Tried], parameters: tuple[str, ...], format_name: str, noise: RoundedStep
) -> set[str]:
    """Return who does harm alone and stands out.

    A gradient that any rounding changes (few samples, many kinks) says nothing of one tensor: without the culprits
    the parameters must be harmless, and a buffer must do twice the harm of all parameters.
    """
    harmful = {group[0]: effect for group, effect in tried if len(group) == 1 and effect.is_harmful}
    ours = set(harmful) & set(parameters)
    if ours and probe.rounded([each for each in parameters if each not in ours], format_name).is_harmful:
        harmful = {name: effect for name, effect in harmful.items() if name not in ours}
        ours = set()
    floor = 0.0 if ours else 2 * noise.gradient_error
    return ours | {name for name, effect in harmful.items() if not effect.gradient_error <= floor}


def _halved(probe: RoundingProbe, names: tuple[str, ...], format_name: str) -> list[_Tried]:
    """Return the effect of the names together, and of the halves of every group that does harm."""
    tried: list[_Tried] = []
    groups = [names] if names else []
    while groups and len(tried) < _MAX_TRIES:
        group = groups.pop(0)
        effect = probe.rounded(group, format_name)
        tried.append((group, effect))
        if effect.is_harmful and len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return tried


def _fault(
    part: str, name: str, format_name: str, group: tuple[str, ...], effect: RoundedStep, *, is_culprit: bool
) -> StoredFault:
    others = f" with {len(group) - 1} others" if len(group) > 1 else ""
    return StoredFault(
        part=part, name=name, format=format_name, verdict="needs_fp32" if is_culprit else "fine",
        reason=f"rounded to {format_name}{others} it changes the gradient by {percent(effect.gradient_error)} and the "
        f"loss by {percent(effect.loss_error)}",
        numbers={**effect.numbers, "num_rounded": float(len(group))},
    )  # fmt: skip
