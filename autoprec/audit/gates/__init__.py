"""The gates, one file each, in the order they run: what is quick and what makes the rest moot comes first."""

from autoprec.audit.gate import Gate
from autoprec.audit.gates.capable import CAPABLE
from autoprec.audit.gates.cost import COST
from autoprec.audit.gates.fidelity import FIDELITY
from autoprec.audit.gates.honoured import HONOURED
from autoprec.audit.gates.match import MATCH
from autoprec.audit.gates.memory import MEMORY
from autoprec.audit.gates.speed import SPEED

GATES: tuple[Gate, ...] = (MATCH, CAPABLE, HONOURED, FIDELITY, SPEED, MEMORY, COST)
