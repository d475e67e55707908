"""The JSON of measured numbers: what a site's tensors hold, and what each format would do to them."""

from collections.abc import Sequence
from typing import Any

from autoprec.analysis.measured import ROLES, SiteTensor
from autoprec.analysis.tensor_numerics import Rounding, TensorNumerics
from autoprec.numerics import format_named


def numerics_json(tensors: Sequence[SiteTensor]) -> dict[str, Any]:
    """Return the tensors of a site by role, as values that `json` can write."""
    return {f"{role}s": [_tensor_json(each) for each in tensors if each.role == role] for role in ROLES}


def _tensor_json(tensor: SiteTensor) -> dict[str, Any]:
    found = tensor.numerics
    return {
        "index": tensor.index,
        "num_tensors": found.num_tensors,
        "num_elements": found.num_elements,
        "num_zero": found.histogram.num_zero,
        "num_nan": found.num_nan,
        "num_inf": found.num_inf,
        "minimum": found.minimum,
        "maximum": found.maximum,
        "max_abs": found.histogram.max_abs,
        "histogram": [{"exponent": exponent, "count": count} for exponent, count in found.histogram.counts],
        "formats": {name: _format_json(found, name, rounding) for name, rounding in found.rounding.items()},
    }


def _format_json(found: TensorNumerics, name: str, rounding: Rounding) -> dict[str, Any]:
    low = format_named(name)
    return {
        "headroom": found.histogram.headroom(low),
        "num_overflow": rounding.num_overflow,
        "overflow_frac": rounding.num_overflow / max(found.histogram.num_nonzero, 1),
        "subnormal_frac": found.histogram.subnormal_frac(low),
        "flush_frac": found.histogram.flush_frac(low),
        "rounding_error": rounding.relative_error,
    }
