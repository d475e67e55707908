"""What changed between two locks of a policy, each change by name."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from autoprec.graph.folded_names import unfolded
from autoprec.search.policy_lock import locked_sites

_MOST_NAMES = 4

Aspect: TypeAlias = Literal["architecture", "shapes", "device", "torch", "autocast", "flags"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One thing that is not as it was when the policy was tuned."""

    aspect: Aspect
    where: str
    what: str


def lock_changes(then: Mapping[str, Any], now: Mapping[str, Any], *, torch_parts: int = 3) -> tuple[Change, ...]:
    """Return what changed from `then` to `now`, of what `then` holds; torch versions agree in `torch_parts` numbers."""
    found = [change for key, find in _FINDERS.items() if key in then for change in find(then, now)]
    if "torch" in then:
        found += _torch(str(then["torch"]), str(now["torch"]), torch_parts)
    is_named = any(change.aspect in ("architecture", "shapes") for change in found)
    if not is_named and "graph" in then and then["graph"] != now["graph"]:
        what = f"its hash was {then['graph']} and is {now['graph']}"
        if "sites" in then:
            what += ", with the same sites, parameters and inputs: what reads what, or the shape of a result, changed"
        found.append(Change(aspect="architecture", where="graph", what=what))
    return tuple(found)


def _architecture(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    old, new = _names(then, then), _names(now, then)
    for names, others, what in (
        (old, new, "is gone"),
        (new, old, "is new, and the policy was not tuned for it"),
    ):
        groups: dict[str, list[str]] = {}
        known = _modules(others)
        for name in (name for name in names if name not in others):
            groups.setdefault(_outermost(name, known), []).append(name)
        for where, found in groups.items():
            yield Change(aspect="architecture", where=where, what=what + ("" if found == [where] else _told(found)))


def _names(lock: Mapping[str, Any], told_by: Mapping[str, Any]) -> dict[str, None]:
    """Return the sites and parameters of a lock, as far as another one tells of them."""
    sites = map(str, locked_sites(lock)) if "sites" in told_by else ()
    parameters = unfolded(lock["parameters"]) if "parameters" in told_by else ()
    return dict.fromkeys((*sites, *parameters))


def _modules(names: Iterable[str]) -> set[str]:
    """Return the modules of sites and parameters, and those around them."""
    return {".".join(path[: depth + 1]) for name in names for path in (_path(name),) for depth in range(len(path))}


def _path(name: str) -> list[str]:
    module, has_op, _ = name.partition(":")
    return (module if has_op else name.rpartition(".")[0]).split(".")


def _outermost(name: str, known: set[str]) -> str:
    """Return the outermost module around a name that the other model lacks; the name where it has them all."""
    path = _path(name)
    prefixes = (".".join(path[: depth + 1]) for depth in range(len(path)))
    return next((prefix for prefix in prefixes if prefix not in known), name)


def _told(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return f": {', '.join(names[:_MOST_NAMES])}" + (f" and {rest} more sites and parameters" if rest > 0 else "")


def _parameters(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    old, new = unfolded(then["parameters"]), unfolded(now["parameters"])
    for name in (name for name in old if name in new and old[name] != new[name]):
        yield Change(aspect="shapes", where=name, what=_was(old[name], new[name]))


def _inputs(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    old, new = tuple(then["inputs"]), tuple(now["inputs"])
    if len(old) != len(new):
        yield Change(aspect="shapes", where="batch", what=f"had {len(old)} tensors and has {len(new)}")
        return
    for index, (before, after) in enumerate(zip(old, new, strict=True)):
        if before != after:
            yield Change(aspect="shapes", where=f"batch, tensor {index}", what=_was(before, after))


def _device(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for key in ("kind", "name"):
        old, new = then["device"].get(key), now["device"].get(key)
        if old is not None and old != new:
            yield Change(aspect="device", where=f"device {key}", what=_was(old, new))
            return


def _autocast(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    old, new = then["autocast"], now["autocast"]
    if old.get("lists") == new.get("lists"):
        return
    named = False
    for key, what in (("gone", "torch's autocast lists no longer have it"), ("new", "torch's autocast lists have it")):
        for name in sorted(set(new.get(key, ())) - set(old.get(key, ()))):
            named = True
            yield Change(aspect="autocast", where=name, what=f"{what}, unlike when the policy was tuned")
        for name in sorted(set(old.get(key, ())) - set(new.get(key, ()))):
            named = True
            yield Change(aspect="autocast", where=name, what="torch's autocast treated it otherwise than now")
    if not named:
        yield Change(
            aspect="autocast",
            where="autocast lists",
            what=f"their hash was {old.get('lists')} and is {new.get('lists')}",
        )


def _flags(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for name, old in then["flags"].items():
        new = now["flags"].get(name)
        if new is not None and new != old:
            yield Change(aspect="flags", where=f"torch flag {name}", what=_was(old, new))


def _torch(old: str, new: str, parts: int) -> Iterator[Change]:
    if _leading(old, parts) != _leading(new, parts):
        yield Change(aspect="torch", where="torch", what=_was(old, new))


def _leading(version: str, parts: int) -> tuple[str, ...]:
    return tuple(version.partition("+")[0].split(".")[:parts])


def _was(old: object, new: object) -> str:
    return f"was {old} and is {new}"


_FINDERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[Change]]] = {
    "sites": _architecture,
    "parameters": _parameters,
    "inputs": _inputs,
    "device": _device,
    "autocast": _autocast,
    "flags": _flags,
}
