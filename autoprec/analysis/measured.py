"""The numbers of a training run: recorded steps run once more, forward, backward and optimizer, and every tensor read.

What is kept of a tensor are a few hundred bytes. Nothing here holds a tensor longer than the step itself does: values
are dropped after their last reader, and gradients are read in hooks as they flow by.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn

from autoprec.analysis.histogram import ExponentHistogram
from autoprec.analysis.loss_scale import GradientHistograms
from autoprec.analysis.pieces import pieces_of
from autoprec.analysis.seen import Seen
from autoprec.analysis.tensor_numerics import TensorNumerics, numerics_of_pieces
from autoprec.capture import Recording, Replay, attribute_name
from autoprec.capture.facts import tensors_in_tree
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.workload.parts import build_optimizer

Role: TypeAlias = Literal["input", "output", "gradient"]
"""`gradient` is that of an output, as it arrives in the backward pass of the loss."""

ROLES: tuple[Role, ...] = ("input", "output", "gradient")

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteTensor:
    """The numbers of the `index`-th tensor in a role at one site, over all calls and batches.

    `sources` names the nodes of the op graph that an input comes from: one, unless the site is called several times.
    """

    role: Role
    index: int
    numerics: TensorNumerics
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterNumerics:
    """The numbers of one parameter: itself, its gradient, and what the optimizer added to it.

    `gradient` is None if no gradient reached it, `update` if no step was taken or it was no part of the optimizer.
    """

    value: TensorNumerics
    gradient: TensorNumerics | None = None
    update: TensorNumerics | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredNumerics:
    """The numbers of all tensors of some training steps, and what each of `formats` would do to them.

    `sites` has every site that ran, with its tensors in the order of `ROLES` and of their indices; integers have none.
    """

    formats: tuple[str, ...] = ()
    num_batches: int = 0
    sites: Mapping[Site, tuple[SiteTensor, ...]] = field(default_factory=lambda: MappingProxyType({}))
    parameters: Mapping[str, ParameterNumerics] = field(default_factory=lambda: MappingProxyType({}))

    def gradients(self) -> GradientHistograms:
        """Return the exponents of all gradients; those of the loss code are left out: it is scaled with the loss."""
        named = {name: each.gradient for name, each in self.parameters.items()}
        return GradientHistograms(
            parameters={name: each.histogram for name, each in named.items() if each is not None},
            activations={
                str(site): sum((each.numerics.histogram for each in found), ExponentHistogram())
                for site, tensors in self.sites.items()
                if site.module != LOSS_MODULE and (found := [each for each in tensors if each.role == "gradient"])
            },
        )


def measured_numerics(
    recordings: Sequence[Recording], make_optimizer: MakeOptimizer, formats: Sequence[str]
) -> MeasuredNumerics:
    """Return the numbers of one training step for each of `recordings`, which share one model, taken one by one.

    Weights and optimizer state move on from step to step; afterwards the weights are as they were. The gradients of the
    last step stay in the model. Optimizers that want a closure take no step. Costs a few times as much time as the
    steps themselves, and memory for one more copy of the parameters (for two, with several recordings).
    """
    model = recordings[0].model
    tally = _Tally(Seen(tuple(formats)))
    optimizer = build_optimizer(make_optimizer, model)
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    initial = _copies(named)
    try:
        for number, recording in enumerate(recordings):
            model.zero_grad(set_to_none=True)
            _InstrumentedStep(recording, tally).run_backward()
            for name, parameter in model.named_parameters():
                tally.note_parameter(name, parameter)
            _step(optimizer, named, initial if number == 0 else _copies(named), tally)
    finally:
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(initial[name])
    return tally.result(tuple(formats), len(recordings))


def _copies(named: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def _step(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], before: Mapping[str, torch.Tensor],
    tally: "_Tally",
) -> None:  # fmt: skip
    """Take an optimizer step and note what it added to each parameter."""
    try:
        optimizer.step()
    except TypeError:  # L-BFGS and its kind want a closure
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in named.items():
        if id(parameter) in stepped and parameter.grad is not None:
            tally.note_update(name, parameter, before[name])


class _Tally:
    """What was measured so far, by site, role and index, and by parameter."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self._sites: dict[Site, dict[tuple[Role, int], TensorNumerics]] = {}
        self._sources: dict[tuple[Site, int], dict[str, None]] = {}
        self._parameters: dict[str, dict[str, TensorNumerics]] = {}

    def note(self, site: Site, role: Role, index: int, tensor: torch.Tensor, source: str = "") -> None:
        found = self.seen.numerics(tensor)
        tensors = self._sites.setdefault(site, {})
        if found is not None:
            _add(tensors, (role, index), found)
            if source:
                self._sources.setdefault((site, index), {})[source] = None

    def note_parameter(self, name: str, parameter: nn.Parameter) -> None:
        parts = self._parameters.setdefault(name, {})
        for part, tensor in (("value", parameter), ("gradient", parameter.grad)):
            found = None if tensor is None else self.seen.numerics(tensor)
            if found is not None:
                _add(parts, part, found)

    def note_update(self, name: str, parameter: nn.Parameter, before: torch.Tensor) -> None:
        _add(self._parameters[name], "update", numerics_of_pieces(_differences(parameter, before), self.seen.formats))

    def result(self, formats: tuple[str, ...], num_batches: int) -> MeasuredNumerics:
        sites = {
            site: tuple(
                SiteTensor(
                    role=role, index=index, numerics=found,
                    sources=tuple(self._sources.get((site, index), ())) if role == "input" else (),
                )
                for (role, index), found in sorted(tensors.items(), key=lambda item: (ROLES.index(item[0][0]), item[0]))
            )
            for site, tensors in self._sites.items()
        }  # fmt: skip
        return MeasuredNumerics(
            formats=formats,
            num_batches=num_batches,
            sites=sites,
            parameters={name: ParameterNumerics(**parts) for name, parts in self._parameters.items() if parts},
        )


def _add(total: dict[Any, TensorNumerics], key: Any, found: TensorNumerics) -> None:
    before = total.get(key)
    total[key] = found if before is None else before + found


def _differences(new: torch.Tensor, old: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    for (left, times), (right, _) in zip(pieces_of(new), pieces_of(old), strict=True):
        yield left - right, times


class _InstrumentedStep(Replay):
    """Runs a recorded step and its backward pass, and notes the tensors of every site."""

    def __init__(self, recording: Recording, tally: _Tally) -> None:
        super().__init__(recording)
        self.extra_traceback = False
        self._written = recording.written
        self._tally = tally
        self._is_backward = False

    def run_backward(self) -> None:
        """Run the step, forward and backward."""
        loss = self.loss()
        self._is_backward = True
        loss.backward()
        self.env.clear()  # what is left holds hooks that hold this, a cycle that no garbage collector sees

    def run_node(self, n: fx.Node) -> Any:
        """Run a call, reading what it reads before, and what it returns after."""
        site: Site | None = n.meta.get("site")
        if not n.prev.users:  # fx keeps a value that nobody reads to the end
            self.env.pop(n.prev, None)
        if site is not None:
            self._note_inputs(site, n)
        value = super().run_node(n)
        self._forget_written(n)
        if site is not None:
            for index, tensor in enumerate(tensors_in_tree(value)):
                self._tally.note(site, "output", index, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._noting(site, index))
        return value

    def _note_inputs(self, site: Site, n: fx.Node) -> None:
        """Note each tensor that the call reads, once, however many of its arguments it is."""
        index = 0
        for source in n.all_input_nodes:
            for tensor in tensors_in_tree(self.env[source]):
                self._tally.note(site, "input", index, tensor, source.name)
                index += 1

    def _forget_written(self, n: fx.Node) -> None:
        """Forget memory that the call may have written to where no version counter tells.

        Those are writes to `x.data`, and the running statistics that fused kernels keep.
        """
        for source in n.all_input_nodes:
            if n.meta.get("writes") or attribute_name(str(source.target)) in self._written:
                for tensor in tensors_in_tree(self.env[source]):
                    self._tally.seen.forget(tensor)

    def _noting(self, site: Site, index: int) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            if self._is_backward:  # a loss with gradients in it runs backward passes of its own before
                self._tally.note(site, "gradient", index, gradient)

        return note
