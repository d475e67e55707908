"""Choices: the parameters a trial is made of, and the policy they stand for."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

from autoprec.graph.site import Site
from autoprec.policy import (
    AS_GIVEN,
    COMPANIONS,
    Compilation,
    Float8,
    LossScale,
    MatmulPrecision,
    MemoryFormat,
    OptimizerKernels,
    Parameters,
    Policy,
    Rule,
)
from autoprec.search.layout import Layout, family_of
from autoprec.search.rules import rules_of
from autoprec.search.space import STORAGES, Space

Value: TypeAlias = str | int | float
Choice: TypeAlias = Mapping[str, Value]

FP32, LOW = "fp32", "low"
# Where a choice starts from: the classes of ops, or a plan of the front of its low format, by its place there, or one
# beyond the front.
CLASSES, CUT, BEYOND = "classes", "cut", "beyond"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """One parameter of a choice: its values, the one a static plan starts from, and the low format it exists for.

    `plan` is what the others edit: what the classes of ops say, or a plan of the predicted front. `layer:X` keeps a
    layer in FP32; `family:X` a family of free ops and `op:X` an op that defaults to FP32, both of the classes alone.
    """

    name: str
    values: tuple[Value, ...]
    default: Value
    only_for: str = ""


def dimensions(space: Space, layout: Layout) -> tuple[Dimension, ...]:
    """Return the parameters the space offers for the sites of `layout`; those without an alternative are left out.

    `low` is always there: the search may also be about FP32 matmul precision alone, with every layer in FP32.
    """
    precisions = space.float32_matmul
    free = [site for site in layout.sites if any(layout.verdict(site, low) == "free" for low in space.low)]
    searched = [site for site in layout.sites if site in layout.searched and _is_preferred(site, layout, space)]
    layers = dict.fromkeys(layout.layer[site] for site in layout.sites if site in {*free, *searched})
    offered = (
        Dimension(name="low", values=space.low, default=space.low[0]),
        Dimension(name="plan", values=plan_names(layout), default=CLASSES),
        Dimension(name="float32_matmul", values=precisions, default=precisions[0]),
        Dimension(name="storage", values=space.storage, default=space.storage[0]),
        Dimension(name="memory_format", values=space.memory_format, default=space.memory_format[0]),
        Dimension(name="optimizer", values=space.optimizer, default=space.optimizer[0]),
        Dimension(name="compile", values=space.compile, default=space.compile[0]),
        *(Dimension(name=f"layer:{key}", values=(LOW, FP32), default=LOW) for key in layers),
        *(Dimension(name=f"family:{name}", values=(LOW, FP32), default=LOW) for name in _names(map(family_of, free))),
        *(Dimension(name=f"op:{name}", values=(FP32, LOW), default=FP32) for name in _names(s.op for s in searched)),
        Dimension(
            name="loss_scale.initial",
            values=space.loss_scale_initial,
            default=space.loss_scale_initial[0],
            only_for="fp16",
        ),
        Dimension(
            name="loss_scale.growth_interval",
            values=space.loss_scale_growth_interval,
            default=space.loss_scale_growth_interval[0],
            only_for="fp16",
        ),
    )
    stated = {"low", "float32_matmul"} | ({"storage"} if space.storage != (FP32,) else set())
    stated |= {name for name in COMPANIONS if getattr(space, name) != (AS_GIVEN,)}
    return tuple(row for row in offered if len(row.values) > 1 or row.name in stated or row.only_for)


def plan_names(layout: Layout) -> tuple[str, ...]:
    """Return the values of the dimension `plan`: as many as the longest front has plans, and the classes of ops."""
    names = [CLASSES]
    for word, fronts in ((CUT, layout.fronts), (BEYOND, layout.beyond)):
        longest = max((len(front) for front in fronts.values()), default=0)
        names += [f"{word}-{place}" for place in range(longest)]
    return tuple(names)


def goes_beyond(choice: Choice) -> bool:
    """Return whether a choice starts from a plan that lowers sites in spite of their marks."""
    return str(choice.get("plan", CLASSES)).startswith(f"{BEYOND}-")


def active(rows: Sequence[Dimension], low: str) -> tuple[Dimension, ...]:
    """Return the dimensions that exist when the low format is `low`."""
    return tuple(row for row in rows if row.only_for in ("", low))


def defaults(rows: Sequence[Dimension], low: str) -> dict[str, Value]:
    """Return the choice every static plan starts from: all free ops low, all others FP32."""
    return {row.name: row.default for row in active(rows, low)} | {"low": low}


def policy_of(choice: Choice, layout: Layout, *, name: str, device: Mapping[str, str]) -> Policy:
    """Return the policy that `choice` stands for, in the fewest readable rules, each of which wins somewhere."""
    targets, why = targets_of(choice, layout)
    rules = rules_of(targets, layout, str(choice["low"]), why) if targets else (Rule(sites="*", format=FP32),)
    return replace(_settings(choice, targets), name=name, rules=rules, device=dict(device))


def targets_of(choice: Choice, layout: Layout) -> tuple[dict[Site, str], dict[Site, str]]:
    """Return the format of every site under `choice`, and for each that stays FP32 the reason."""
    low = str(choice["low"])
    planned = _planned(choice, layout, low)
    targets, why = {}, {}
    for site in layout.sites:
        reason = _kept(site, choice, layout, low) if planned is None else _kept_by(planned, site, choice, layout, low)
        targets[site] = FP32 if reason is not None else low
        if reason is not None:
            why[site] = reason
    return targets, why


def choice_key(choice: Choice, layout: Layout) -> str:
    """Return a text that two choices share exactly if they run every site and setting alike."""
    targets, _ = targets_of(choice, layout)
    return run_key(_settings(choice, targets), targets)


def run_key(settings: Policy, formats: Mapping[Site, str]) -> str:
    """Return a text that two policies share exactly if they run every site of `formats` and every setting alike.

    The rules of `settings` do not count: `formats` says what they come to.
    """
    lowered = [f"{site}={fmt}" for site, fmt in formats.items() if fmt != FP32]
    names = "+".join(sorted({fmt for fmt in formats.values() if fmt != FP32})) or FP32
    beside = (settings.parameters, settings.loss_scale, settings.float8)
    companions = "".join(f"|{each}" for each in map(partial(getattr, settings), COMPANIONS) if each != AS_GIVEN)
    is_plain = not lowered and beside == (Parameters(), LossScale(), Float8())
    if is_plain:
        return f"{names}|{settings.float32_matmul}{companions}"
    digest = hashlib.sha256(repr((beside, settings.outputs, lowered)).encode()).hexdigest()[:16]
    return f"{names}|{settings.float32_matmul}|{digest}{companions}"


def _settings(choice: Choice, targets: Mapping[Site, str]) -> Policy:
    """Return a policy with all that `choice` says beside the rules, which are left to be filled in."""
    low = str(choice["low"])
    is_scaled = low == "fp16" and low in targets.values()
    return Policy(
        name="",
        rules=(Rule(sites="*", format=FP32),),
        parameters=STORAGES[_storage(choice)],
        float32_matmul=cast("MatmulPrecision", choice["float32_matmul"]),
        loss_scale=_loss_scale(choice) if is_scaled else LossScale(),
        memory_format=cast("MemoryFormat", choice.get("memory_format", AS_GIVEN)),
        optimizer=cast("OptimizerKernels", choice.get("optimizer", AS_GIVEN)),
        compile=cast("Compilation", choice.get("compile", AS_GIVEN)),
    )


def _kept(site: Site, choice: Choice, layout: Layout, low: str) -> str | None:
    """Return why `site` stays FP32 under `choice`, or None if it runs low."""
    verdict = layout.verdict(site, low)
    if verdict == "must":
        return layout.detail(site, low)
    origin = layout.origin.get(site, site)
    if verdict == "prefer" and not (origin in layout.searched and choice.get(f"op:{origin.op}") == LOW):
        return layout.detail(site, low)
    if choice.get(f"layer:{layout.layer[site]}") == FP32:
        return "the layer was tried low and in fp32; fp32 was kept"
    if verdict == "free" and choice.get(f"family:{family_of(site)}") == FP32:
        return f"{family_of(site)} ops were tried low and in fp32; fp32 was kept"
    return None


def _planned(choice: Choice, layout: Layout, low: str) -> frozenset[Site] | None:
    """Return the sites that run low in the plan a choice starts from; None for the classes of ops.

    A front that is shorter than others ends with its most faithful plan; where nothing lies beyond it, what would be
    there is its fastest one.
    """
    name, front, beyond = str(choice.get("plan", CLASSES)), layout.fronts.get(low, ()), layout.beyond.get(low, ())
    if name == CLASSES or not (front or beyond):
        return None
    word, _, place = name.partition("-")
    if word == BEYOND:
        return beyond[min(int(place), len(beyond) - 1)] if beyond else front[0]
    return front[min(int(place), len(front) - 1)] if front else None


def _kept_by(planned: frozenset[Site], site: Site, choice: Choice, layout: Layout, low: str) -> str | None:
    """Return why `site` stays FP32 in a choice that starts from a plan, or None if it runs low."""
    is_beyond = goes_beyond(choice) and bool(layout.beyond.get(low)) and site in planned
    if layout.verdict(site, low) == "must" and not is_beyond:
        return layout.detail(site, low)
    if site not in planned:
        return f"planned: {low} here would cost more, in time or in gradient error, than it gains"
    if choice.get(f"layer:{layout.layer[site]}") == FP32:
        return "the layer was tried low and in fp32; fp32 was kept"
    return None


def _storage(choice: Choice) -> str:
    return str(choice.get("storage", FP32))


def _loss_scale(choice: Choice) -> LossScale:
    return LossScale(
        kind="dynamic",
        initial=float(choice["loss_scale.initial"]),
        growth_interval=int(choice["loss_scale.growth_interval"]),
    )


def _is_preferred(site: Site, layout: Layout, space: Space) -> bool:
    return any(layout.verdict(site, low) == "prefer" for low in space.low)


def _names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
