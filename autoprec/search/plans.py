"""Static plans: choices that need no measurement to be worth a trial, from the most to the least promising."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoprec.search.choices import FP32, LOW, Choice, Dimension, Value, defaults


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A named choice."""

    name: str
    choice: Choice


def plans(rows: Sequence[Dimension]) -> tuple[Plan, ...]:
    """Return the plans that the dimensions `rows` can express, each choice once, in the order to try them.

    Each comes in every layout that the space offers, one after the other.
    """
    lows = next(row.values for row in rows if row.name == "low")
    offered = next((row.values for row in rows if row.name == _LAYOUT), (None,))
    layouts: dict[Value | None, str] = {
        layout: "-channels-last" if layout == "channels_last" else "" for layout in offered
    }
    found: dict[tuple[tuple[str, Value], ...], Plan] = {}
    for plan in _fused(rows, layouts):
        found[tuple(sorted(plan.choice.items()))] = plan
    for low in map(str, lows):
        start = defaults(rows, low)
        for name, edit in _EDITS.items():
            choice = start | {key: value for key, value in edit(start).items() if key in start}
            for layout, suffix in layouts.items():
                laid = choice | ({} if layout is None else {_LAYOUT: layout})
                found.setdefault(tuple(sorted(laid.items())), Plan(name=f"{name}-{low}{suffix}", choice=laid))
    return tuple(found.values())


def _fused(rows: Sequence[Dimension], layouts: Mapping[Value | None, str]) -> list[Plan]:
    """Return FP32 with a fused optimizer, where the space offers it: no format has a part in what that gains."""
    choice = defaults(rows, str(next(row.values for row in rows if row.name == "low")[0]))
    if "fused" not in next((row.values for row in rows if row.name == _OPTIMIZER), ()):
        return []
    choice |= {name: FP32 for name in choice if name.startswith("layer:")} | {_OPTIMIZER: "fused"}
    return [
        Plan(name=f"fp32-fused{suffix}", choice=choice | ({} if layout is None else {_LAYOUT: layout}))
        for layout, suffix in layouts.items()
    ]


def _families(choice: Choice) -> list[str]:
    return [name for name in choice if name.startswith("family:")]


def _only(*families: str) -> Callable[[Choice], dict[str, Value]]:
    """Return an edit that leaves these families low and keeps all others in FP32; nothing if none of them is there."""
    wanted = {f"family:{family}" for family in families}

    def edit(choice: Choice) -> dict[str, Value]:
        present = _families(choice)
        return {name: FP32 for name in present if name not in wanted} if wanted & set(present) else {}

    return edit


def _all_but(*families: str) -> Callable[[Choice], dict[str, Value]]:
    return lambda _: {f"family:{family}": FP32 for family in families}


def _lowered(*ops: str) -> Callable[[Choice], dict[str, Value]]:
    return lambda _: {f"op:{op}": LOW for op in ops}


def _everything(choice: Choice) -> dict[str, Value]:
    return {name: LOW for name in choice if name.startswith("op:")}


_LAYOUT, _OPTIMIZER = "memory_format", "optimizer"
_MATMULS = ("matmul", "attention", "linalg")
_NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")

# Each edit changes the choice in which all free ops run low. TensorFlow's graph pass itself, which also leaves in FP32
# what lies between no two matmuls, is a baseline: the preset tf-graph-pass.
_EDITS: Mapping[str, Callable[[Choice], dict[str, Value]]] = {
    "free-ops": lambda _: {},
    "free-ops-fused": lambda _: {_OPTIMIZER: "fused"},
    "free-ops-and-norms": _lowered(*_NORMS),
    "matmul-only": _only(*_MATMULS),
    "matmul-and-convolution": _only(*_MATMULS, "convolution"),
    "all": _everything,
    "all-but-convolution": _all_but("convolution"),
    "all-but-attention": _all_but("attention"),
    "all-but-recurrent": _all_but("recurrent"),
    "all-but-pointwise": _all_but("pointwise", "transcendental"),
    "convolution-only": _only("convolution"),
    "attention-only": _only("attention"),
}
