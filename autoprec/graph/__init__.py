"""The op graph and what can be read off it without torch: sites, layers and the spread of numerics classes.

Only `site` may be imported by the production door; everything else needs networkx, so names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoprec.graph.layers import Layer, layers_of
    from autoprec.graph.opgraph import NodeKind, OpGraph, OpNode, TensorMeta
    from autoprec.graph.propagate import NumericsClass, Paint, paint
    from autoprec.graph.site import LOSS_MODULE, Site

__all__ = [
    "LOSS_MODULE",
    "Layer",
    "NodeKind",
    "NumericsClass",
    "OpGraph",
    "OpNode",
    "Paint",
    "Site",
    "TensorMeta",
    "layers_of",
    "paint",
]

_HOME = {
    "LOSS_MODULE": "site",
    "Layer": "layers",
    "NodeKind": "opgraph",
    "NumericsClass": "propagate",
    "OpGraph": "opgraph",
    "OpNode": "opgraph",
    "Paint": "propagate",
    "Site": "site",
    "TensorMeta": "opgraph",
    "layers_of": "layers",
    "paint": "propagate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"autoprec.graph.{_HOME[name]}"), name)
