"""The gates, one file each, in the order they run: what is quick and what makes the rest moot comes first."""

from autoprec.audit.gate import Gate
from autoprec.audit.gates.capable import CAPABLE
from autoprec.audit.gates.cost import COST
from autoprec.audit.gates.fidelity import FIDELITY
from autoprec.audit.gates.headroom import HEADROOM
from autoprec.audit.gates.honoured import HONOURED
from autoprec.audit.gates.match import MATCH
from autoprec.audit.gates.memory import MEMORY
from autoprec.audit.gates.repeat import REPEAT
from autoprec.audit.gates.resume import RESUME
from autoprec.audit.gates.rollback import ROLLBACK
from autoprec.audit.gates.scaler import SCALER
from autoprec.audit.gates.speed import SPEED
from autoprec.audit.gates.stress import STRESS

GATES: tuple[Gate, ...] = (
    MATCH, CAPABLE, HONOURED, FIDELITY, HEADROOM, STRESS, SCALER, RESUME, ROLLBACK, SPEED, MEMORY, COST, REPEAT,
)  # fmt: skip
"""`repeat` comes last: it holds what the others say against a former audit."""
