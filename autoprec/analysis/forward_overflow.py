"""Whether a forward pass overflows a format by its values alone, where no loss scale can help."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoprec.analysis.stored_values import is_scaled
from autoprec.capture import Recording, Replay
from autoprec.graph.site import Site
from autoprec.numerics import FORMATS, Format, format_named, ulp
from autoprec.ops import lookup

_LARGEST = FORMATS["fp32"].max


def forward_overflows(recordings: Sequence[Recording], formats: Sequence[str]) -> Mapping[str, tuple[Site, ...]]:
    """Return for each format the sites at which the loss becomes inf or nan for lack of range, in order.

    The recorded steps are replayed in FP32 with everything that a site reads or returns beyond the format's largest
    number made infinite; ops that stay FP32 by default are left as they are. FP32's largest number becomes
    the format's: a script writes `torch.finfo(x.dtype).min`. Overflow that does not reach the loss (a mask before a
    softmax) counts as none. Formats with FP32's range, and FP8, whose tensors carry scales, overflow nowhere.
    Costs one forward pass for each recording and other format.
    """
    return {name: _sites(recordings, name) for name in formats}


def _sites(recordings: Sequence[Recording], format_name: str) -> tuple[Site, ...]:
    low = format_named(format_name)
    if is_scaled(low) or low.max_exponent == FORMATS["fp32"].max_exponent:
        return ()
    found = [site for recording in recordings for site in _Limited(recording, low).origins()]
    return tuple(dict.fromkeys(found))


class _Limited(Replay):
    """Runs a recorded step with the values of sites limited to a range: what lies beyond is infinite."""

    def __init__(self, recording: Recording, low: Format) -> None:
        super().__init__(recording)
        self.extra_traceback = False
        self._nodes = tuple(recording.graph_module.graph.nodes)
        self._max = low.max
        self._overflow = low.max + ulp(low.max, low) / 2  # from here on, rounding gives infinity
        self._bad: set[str] = set()  # nodes whose results are not finite
        self._made: dict[str, Site] = {}  # nodes that made finite values infinite

    def origins(self) -> list[Site]:
        """Return the sites at which the loss of the step becomes infinite or nan; none if it stays finite."""
        try:
            is_finite = bool(self.loss().isfinite())
        except RuntimeError:  # an op that refuses inf
            is_finite = False
        output = next(node for node in self._nodes if node.op == "output")
        behind, reached = [output], {output.name}
        while behind and not is_finite:
            for node in behind.pop().all_input_nodes:
                if node.name in self._bad and node.name not in reached:
                    reached.add(node.name)
                    behind.append(node)
        return [site for name, site in self._made.items() if name in reached]

    def run_node(self, n: fx.Node) -> Any:
        site = n.meta.get("site")
        if site is None or n.meta.get("left_alone") or n.meta.get("writes") or lookup(site.op).numerics == "deny":
            result = super().run_node(n)
        else:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            args, kwargs = pytree.tree_map(self._limited, (args, kwargs))
            raw = self.call_function(n.target, args, kwargs)
            result = pytree.tree_map(self._limited, raw)
            reads = [self.env.get(each) for each in n.all_input_nodes]
            if not _is_finite(result) and (_is_finite(raw) or _is_finite(reads)):
                self._made[n.name] = site
        if not _is_finite(result):
            self._bad.add(n.name)
        return result

    def _limited(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.layout != torch.strided:
            return value
        if value.numel() == 0 or not bool((value.detach().abs() >= self._overflow).any()):
            return value
        size = value.detach().abs()
        largest = value.detach().sign() * self._max
        value = torch.where(size == _LARGEST, largest, value)
        return torch.where((size >= self._overflow) & (size != _LARGEST), value * torch.inf, value)


def _is_finite(value: Any) -> bool:
    """Return whether all floating-point tensors in `value` are finite."""
    tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
    return all(bool(each.isfinite().all()) for each in tensors if each.is_floating_point())
