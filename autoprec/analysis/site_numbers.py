"""What happens at a site that breaks in a format: its FP32 numbers beside those of the same call in the format."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoprec.analysis.low_format import LowFormat
from autoprec.analysis.low_step import LowReplay
from autoprec.capture import Recording
from autoprec.capture.facts import tensors_in_tree
from autoprec.graph.opgraph import OpNode
from autoprec.graph.site import Site


@dataclass(kw_only=True, slots=True)
class SiteNumbers:
    """The numbers of all calls of a site, its inputs being those of the FP32 step.

    `max_input`, `max_output`: largest finite magnitudes in FP32. `num_inputs_over`: finite inputs beyond the format.
    `num_nonfinite`: results that are finite in FP32 and not in the format. `num_zeroed`: results that are 0 only in the
    format. `num_flushed`: inputs that are. `error`: the relative error of the result (norms). `cancellation`: the norm
    of the largest input over that of the result. `swamped_frac`: of an addition, the fraction of results that equal the
    larger addend though the smaller is not 0. `is_integer`: every result is a whole number.
    """

    site: Site
    node: OpNode
    num_calls: int = 0
    max_input: float = 0.0
    max_output: float = 0.0
    num_outputs: int = 0
    num_inputs_over: int = 0
    num_flushed: int = 0
    num_nonfinite: int = 0
    num_zeroed: int = 0
    error: float = 0.0
    cancellation: float = 0.0
    swamped_frac: float = 0.0
    is_integer: bool = True
    raised: str = ""


def site_numbers(recording: Recording, fmt: LowFormat, sites: Collection[Site]) -> dict[Site, SiteNumbers]:
    """Return the numbers of each of `sites`. Costs one forward pass, in which their calls run twice."""
    replay = _SideBySide(recording, fmt, sites)
    with torch.no_grad():
        replay.loss()
    return replay.numbers


class _SideBySide(LowReplay):
    """Runs a step in FP32 and each call of the watched sites once more, in the format."""

    def __init__(self, recording: Recording, fmt: LowFormat, sites: Collection[Site]) -> None:
        super().__init__(recording, fmt, frozenset())
        self.numbers: dict[Site, SiteNumbers] = {}
        self._sites = frozenset(sites)
        device = torch.device(recording.device)
        self._cuda = [device.index or 0] if device.type == "cuda" else []

    def run_node(self, n: fx.Node) -> Any:
        """Return what the node computes in FP32."""
        node = self._graph[n.name]
        if node.site is None or node.site not in self._sites or not node.is_castable:
            return super().run_node(n)
        before = self._random_states()
        value = super().run_node(n)
        numbers = self.numbers.setdefault(node.site, SiteNumbers(site=node.site, node=node))
        with torch.no_grad(), torch.random.fork_rng(devices=self._cuda):  # both calls draw the same random numbers
            self._set_random_states(before)
            self._compare(n, node.site, value, numbers)
        return value

    def _random_states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(each) for each in self._cuda)]

    def _set_random_states(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._cuda, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    def _compare(self, n: fx.Node, site: Site, value: Any, numbers: SiteNumbers) -> None:
        numbers.num_calls += 1
        inputs = [t.detach() for t in _floats(self.fetch_args_kwargs_from_env(n))]
        outputs = [t.detach() for t in _floats([value])]
        for tensor in inputs:
            _note_input(tensor, self._format.dtype, numbers)
        self._low = self._forced = frozenset({site})
        try:
            low = [t.detach() for t in _floats([super().run_node(n)])]
        except (RuntimeError, TypeError, ValueError) as error:
            numbers.raised = str(error).splitlines()[0]
            low = []
        self._low = self._forced = frozenset()
        for wide, narrow in zip(outputs, low, strict=False):
            _note_output(wide, narrow.float(), inputs, numbers)
        if site.op in ("add", "sub") and low and len(inputs) == 2:
            _note_swamping(inputs[0], inputs[1], self._format.dtype, numbers)


def _floats(values: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in_tree(values) if t.is_floating_point() and t.layout == torch.strided and t.numel()]


def _note_input(tensor: torch.Tensor, dtype: torch.dtype, numbers: SiteNumbers) -> None:
    finite = tensor.isfinite()
    magnitude = torch.where(finite, tensor, 0).abs()
    numbers.max_input = max(numbers.max_input, float(magnitude.max()))
    numbers.num_inputs_over += int((finite & ~tensor.to(dtype).isfinite()).sum())
    numbers.num_flushed += int(((tensor != 0) & (tensor.to(dtype) == 0)).sum())


def _note_output(wide: torch.Tensor, low: torch.Tensor, inputs: list[torch.Tensor], numbers: SiteNumbers) -> None:
    finite = wide.isfinite()
    there = torch.where(finite, wide, 0)
    numbers.num_outputs += wide.numel()
    numbers.max_output = max(numbers.max_output, float(there.abs().max()))
    numbers.is_integer &= bool((there == there.round()).all())
    numbers.num_nonfinite += int((finite & ~low.isfinite()).sum())
    numbers.num_zeroed += int(((there != 0) & (low == 0)).sum())
    norm = float(there.double().norm())
    both = finite & low.isfinite()
    if norm:
        error = float(torch.where(both, low - wide, 0).double().norm()) / norm
        numbers.error = max(numbers.error, error)
        same = [t for t in inputs if t.shape == wide.shape]
        largest = max((float(torch.where(t.isfinite(), t, 0).double().norm()) for t in same), default=0.0)
        numbers.cancellation = max(numbers.cancellation, largest / norm)


def _note_swamping(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, numbers: SiteNumbers) -> None:
    large, small = (one, other) if float(one.abs().max()) >= float(other.abs().max()) else (other, one)
    large, small = torch.broadcast_tensors(large.to(dtype), small.to(dtype))
    swamped = (small != 0) & ((large.float() + small.float()).to(dtype) == large)
    numbers.swamped_frac = max(numbers.swamped_frac, float(swamped.float().mean()))
