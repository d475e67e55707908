"""The gates, one file each, in the order they run: what is quick and what makes the rest moot comes first."""

from autoprec.audit.gate import Gate
from autoprec.audit.gates.match import MATCH

GATES: tuple[Gate, ...] = (MATCH,)
