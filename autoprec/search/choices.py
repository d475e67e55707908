"""Choices: the parameters a trial is made of, and the policy they stand for."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from autoprec.graph.site import Site
from autoprec.policy import LossScale, MatmulPrecision, Policy, Rule
from autoprec.search.layout import Layout, family_of
from autoprec.search.rules import rules_of
from autoprec.search.space import STORAGES, Space

Value: TypeAlias = str | int | float
Choice: TypeAlias = Mapping[str, Value]

FP32, LOW = "fp32", "low"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """One parameter of a choice: its values, the one a static plan starts from, and the low format it exists for.

    `layer:X` keeps a layer in FP32, `family:X` a family of free ops, `op:X` an op that defaults to FP32.
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
        Dimension(name="float32_matmul", values=precisions, default=precisions[0]),
        Dimension(name="storage", values=space.storage, default=space.storage[0]),
        *(Dimension(name=f"layer:{key}", values=(LOW, FP32), default=LOW) for key in layers),
        *(Dimension(name=f"family:{name}", values=(LOW, FP32), default=LOW) for name in _names(map(family_of, free))),
        *(Dimension(name=f"op:{name}", values=(FP32, LOW), default=FP32) for name in _names(s.op for s in searched)),
        Dimension(
            name="loss_scale.initial",
            values=space.loss_scale_initial,
            default=max(space.loss_scale_initial),
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
    return tuple(row for row in offered if len(row.values) > 1 or row.name in stated or row.only_for)


def active(rows: Sequence[Dimension], low: str) -> tuple[Dimension, ...]:
    """Return the dimensions that exist when the low format is `low`."""
    return tuple(row for row in rows if row.only_for in ("", low))


def defaults(rows: Sequence[Dimension], low: str) -> dict[str, Value]:
    """Return the choice every static plan starts from: all free ops low, all others FP32."""
    return {row.name: row.default for row in active(rows, low)} | {"low": low}


def policy_of(choice: Choice, layout: Layout, *, name: str, device: Mapping[str, str]) -> Policy:
    """Return the policy that `choice` stands for, in the fewest readable rules, each of which wins somewhere."""
    low = str(choice["low"])
    targets, why = targets_of(choice, layout)
    rules = rules_of(targets, layout, low, why) if targets else (Rule(sites="*", format=FP32),)
    is_scaled = low == "fp16" and any(target == low for target in targets.values())
    return Policy(
        name=name,
        rules=rules,
        device=dict(device),
        parameters=STORAGES[_storage(choice)],
        float32_matmul=cast("MatmulPrecision", choice["float32_matmul"]),
        loss_scale=_loss_scale(choice) if is_scaled else LossScale(),
    )


def targets_of(choice: Choice, layout: Layout) -> tuple[dict[Site, str], dict[Site, str]]:
    """Return the format of every site under `choice`, and for each that stays FP32 the reason."""
    low = str(choice["low"])
    targets, why = {}, {}
    for site in layout.sites:
        reason = _kept(site, choice, layout, low)
        targets[site] = FP32 if reason is not None else low
        if reason is not None:
            why[site] = reason
    return targets, why


def choice_key(choice: Choice, layout: Layout) -> str:
    """Return a text that two choices share exactly if they run every site and setting alike."""
    low = str(choice["low"])
    targets, _ = targets_of(choice, layout)
    lowered = [str(site) for site, target in targets.items() if target == low]
    scale = [str(choice[name]) for name in sorted(choice) if name.startswith("loss_scale.")] if lowered else []
    storage = [] if _storage(choice) == FP32 else [_storage(choice)]
    shown = [low if lowered else FP32, str(choice["float32_matmul"]), *scale, *storage]
    return "|".join([*shown, hashlib.sha256("|".join(lowered).encode()).hexdigest()[:16]] if lowered else shown)


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
