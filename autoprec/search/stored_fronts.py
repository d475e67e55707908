"""The plans of a study, kept beside it: a resumed run goes on with them, whatever times measured anew would give."""

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from autoprec.files import write_text
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import Site
from autoprec.search.fronts import FrontPlan, Fronts

SCHEMA_VERSION = 1


def keep_fronts(fronts: Fronts, op_graph: OpGraph, path: Path) -> None:
    """Write the plans to `path`. Raises `OutputError` if that fails."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "graph": op_graph.fingerprint(),
        "plans": {low: [_plain(plan) for plan in front.plans] for low, front in fronts.by_format.items()},
        "beyond": {low: [_plain(plan) for plan in front.beyond] for low, front in fronts.by_format.items()},
    }
    write_text(path, json.dumps(data, indent=1) + "\n")


def kept_fronts(fronts: Fronts, op_graph: OpGraph, path: Path) -> Fronts:
    """Return `fronts` with the plans that `path` holds for this graph; as they are if it holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return fronts
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        return fronts
    if data.get("graph") != op_graph.fingerprint() or set(data["plans"]) != set(fronts.by_format):
        return fronts
    found = {
        low: replace(
            front,
            plans=tuple(_plan(each) for each in data["plans"][low]),
            beyond=tuple(_plan(each) for each in data.get("beyond", {}).get(low, ())),
        )
        for low, front in fronts.by_format.items()
    }
    return replace(fronts, by_format=MappingProxyType(found))


def _plain(plan: FrontPlan) -> dict[str, object]:
    return {"saved_s": plan.saved_s, "error": plan.error, "low_sites": sorted(map(str, plan.low_sites))}


def _plan(data: dict[str, object]) -> FrontPlan:
    sites = data["low_sites"]
    assert isinstance(sites, list)
    return FrontPlan(
        low_sites=frozenset(Site.parse(str(each)) for each in sites),
        saved_s=float(str(data["saved_s"])),
        error=float(str(data["error"])),
    )
