"""Ranges: interval arithmetic over the op graph, without data and without torch."""

from autoprec.analysis.ranges.interval import TOP, Interval
from autoprec.analysis.ranges.propagate import RULES, Known, ranges_of

__all__ = ["RULES", "TOP", "Interval", "Known", "ranges_of"]
