"""Patterns: shapes of code that a low format breaks, told from the graph alone, one row a pattern."""

from autoprec.analysis.patterns.row import Match, Pattern
from autoprec.analysis.patterns.table import PATTERNS, cure_of, explanations, pattern_marks
from autoprec.analysis.patterns.walk import Walk

__all__ = ["PATTERNS", "Match", "Pattern", "Walk", "cure_of", "explanations", "pattern_marks"]
