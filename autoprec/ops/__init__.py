"""What is known of ops, without torch: canonical names and a catalog with one row an op.

Names fold every spelling of an op into one; a row says its family, its numerics class, which arguments a policy
casts, what it costs and what `torch.autocast` does with it on each kind of device.
"""

from autoprec.ops.catalog import CATALOG, ENTERED, AutocastList, Cast, Cost, Family, Numerics, Op, lookup
from autoprec.ops.float8 import FLOAT8_OPS, float8_fault
from autoprec.ops.names import canonical_name, is_reflected

__all__ = [
    "CATALOG",
    "ENTERED",
    "FLOAT8_OPS",
    "AutocastList",
    "Cast",
    "Cost",
    "Family",
    "Numerics",
    "Op",
    "canonical_name",
    "float8_fault",
    "is_reflected",
    "lookup",
]
