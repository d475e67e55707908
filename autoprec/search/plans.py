"""Static plans: choices that need no measurement to be worth a trial, from the most to the least promising."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoprec.search.choices import BEYOND, CLASSES, CUT, FP32, LOW, Choice, Dimension, Value, defaults


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A named choice; `front` names the front that it lies on, in one layout, if it does."""

    name: str
    choice: dict[str, Value]
    front: str = ""


def plans(rows: Sequence[Dimension]) -> tuple[Plan, ...]:
    """Return the plans that the dimensions `rows` can express, each choice once, in the order to try them.

    Plans of the predicted fronts come first, all of each front, the fastest ones ahead of the more faithful ones. Which
    of them are tried is decided as trials end (`autoprec.search.walk`). Each plan comes in every layout that the space
    offers, one after the other.
    """
    offered = next((row.values for row in rows if row.name == _LAYOUT), (None,))
    found: dict[tuple[tuple[str, Value], ...], Plan] = {}
    for plan in (*_fused(rows), *_compiled(rows), *_cut(rows), *_edited(rows)):
        for layout in offered:
            choice = plan.choice | ({} if layout is None else {_LAYOUT: layout})
            suffix = "-channels-last" if layout == "channels_last" else ""
            front = plan.front + suffix if plan.front else ""
            found.setdefault(tuple(sorted(choice.items())), Plan(name=plan.name + suffix, choice=choice, front=front))
    return tuple(found.values())


def _fused(rows: Sequence[Dimension]) -> Iterator[Plan]:
    """Yield FP32 with a fused optimizer, where the space offers it: no format has a part in what that gains."""
    if "fused" in next((row.values for row in rows if row.name == _OPTIMIZER), ()):
        choice = defaults(rows, _lows(rows)[0])
        layers = {name: FP32 for name in choice if name.startswith("layer:")}
        yield Plan(name="fp32-fused", choice=choice | layers | {_OPTIMIZER: "fused"})


def _compiled(rows: Sequence[Dimension]) -> Iterator[Plan]:
    """Yield, where the space offers torch.compile, FP32 and the fastest plan of each low format under it."""
    offered = {row.name: row.values for row in rows}
    if "inductor" not in offered.get(_COMPILE, ()):
        return
    knobs: dict[str, Value] = {_COMPILE: "inductor"}
    if "fused" in offered.get(_OPTIMIZER, ()):
        knobs[_OPTIMIZER] = "fused"
    lows, cuts = _lows(rows), [value for value in offered.get("plan", ()) if str(value).startswith(CUT)]
    choice = defaults(rows, lows[0])
    layers = {name: FP32 for name in choice if name.startswith("layer:")}
    yield Plan(name="fp32-compiled" + "-fused" * (_OPTIMIZER in knobs), choice=choice | layers | knobs)
    for low in lows:
        start = defaults(rows, low) | knobs | ({"plan": cuts[0]} if cuts else {})
        yield Plan(name=f"{cuts[0] if cuts else 'free-ops'}-{low}-compiled", choice=start)


def _cut(rows: Sequence[Dimension]) -> Iterator[Plan]:
    """Yield plans of the predicted fronts, those beyond them ahead as they are faster."""
    names = [str(value) for value in next((row.values for row in rows if row.name == "plan"), ()) if value != CLASSES]
    beyond = [name for name in names if name.startswith(BEYOND)]
    for name in [*reversed(beyond), *(name for name in names if name not in beyond)]:
        for low in _lows(rows):
            yield Plan(name=f"{name}-{low}", choice=defaults(rows, low) | {"plan": name}, front=low)


def _edited(rows: Sequence[Dimension]) -> Iterator[Plan]:
    """Yield what the classes of ops say, edited by family and op."""
    for low in _lows(rows):
        start = defaults(rows, low)
        for name, edit in _EDITS.items():
            choice = start | {key: value for key, value in edit(start).items() if key in start}
            yield Plan(name=f"{name}-{low}", choice=choice)


def _lows(rows: Sequence[Dimension]) -> list[str]:
    return [str(low) for low in next(row.values for row in rows if row.name == "low")]


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


_LAYOUT, _OPTIMIZER, _COMPILE = "memory_format", "optimizer", "compile"
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
