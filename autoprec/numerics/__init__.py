"""Number formats as rows, with what follows from them: rounding, ulp, swamping, error bounds. No torch.

Everything here is scalar, exact (integers and fractions) and slow: it is the definition that the tensor code of
`autoprec.runtime.rounding` is tested against, and the arithmetic behind the analyses' statements.
"""

from autoprec.numerics.bounds import gamma, gamma_confidence, gamma_probable, stall_sum, sum_bound
from autoprec.numerics.formats import FORMATS, Format, format_named, value_of_code
from autoprec.numerics.rounding import RoundingMode, round_scalar
from autoprec.numerics.ulp import is_swamped, next_down, next_up, ulp

__all__ = [
    "FORMATS",
    "Format",
    "RoundingMode",
    "format_named",
    "gamma",
    "gamma_confidence",
    "gamma_probable",
    "is_swamped",
    "next_down",
    "next_up",
    "round_scalar",
    "stall_sum",
    "sum_bound",
    "ulp",
    "value_of_code",
]
