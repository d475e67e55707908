"""Analyses: what must stay FP32, and why.

One file an analysis. Those of sites yield marks, which `merge` unites; `inspect_recording` runs them all.
"""

from autoprec.analysis.classes import static_marks
from autoprec.analysis.constants import LostConstant, constant_marks, lost_constants
from autoprec.analysis.findings import SEVERITIES, Finding, Severity, findings_of
from autoprec.analysis.histogram import ExponentHistogram, exponent_histogram
from autoprec.analysis.inspection import Inspection, inspect_recording
from autoprec.analysis.loss_scale import GradientHistograms, LossScaleAdvice, loss_scale_advice, run_backward
from autoprec.analysis.marks import VERDICTS, Mark, Reason, ReasonCode, Verdict, merge
from autoprec.analysis.measured import MeasuredNumerics, ParameterNumerics, SiteTensor, measured_numerics
from autoprec.analysis.single_site import broken_calls
from autoprec.analysis.storage import Storage, StoredBuffer, StoredParameter, storage_of
from autoprec.analysis.tensor_numerics import Rounding, TensorNumerics, tensor_numerics

__all__ = [
    "SEVERITIES",
    "VERDICTS",
    "ExponentHistogram",
    "Finding",
    "GradientHistograms",
    "Inspection",
    "LossScaleAdvice",
    "LostConstant",
    "Mark",
    "MeasuredNumerics",
    "ParameterNumerics",
    "Reason",
    "ReasonCode",
    "Rounding",
    "Severity",
    "SiteTensor",
    "Storage",
    "StoredBuffer",
    "StoredParameter",
    "TensorNumerics",
    "Verdict",
    "broken_calls",
    "constant_marks",
    "exponent_histogram",
    "findings_of",
    "inspect_recording",
    "loss_scale_advice",
    "lost_constants",
    "measured_numerics",
    "merge",
    "run_backward",
    "static_marks",
    "storage_of",
    "tensor_numerics",
]
