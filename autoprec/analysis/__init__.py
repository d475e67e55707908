"""Analyses: what must stay FP32, and why.

One file an analysis. Those of sites yield marks, which `merge` unites; `inspect_recordings` runs them all.
"""

from autoprec.analysis.classes import static_marks
from autoprec.analysis.constants import LostConstant, constant_marks, lost_constants
from autoprec.analysis.diagnosis import Diagnosis, diagnose, diagnosis_marks
from autoprec.analysis.findings import SEVERITIES, Finding, Severity, findings_of
from autoprec.analysis.histogram import ExponentHistogram, exponent_histogram
from autoprec.analysis.inspection import Inspection, inspect_recordings, inspect_static
from autoprec.analysis.loss_scale import GradientHistograms, LossScaleAdvice, loss_scale_advice, run_backward
from autoprec.analysis.marking import Marking, mark_recordings
from autoprec.analysis.marks import VERDICTS, Mark, Reason, ReasonCode, Verdict, merge
from autoprec.analysis.measured import MeasuredNumerics, ParameterNumerics, SiteTensor, measured_numerics
from autoprec.analysis.patterns import explanations, pattern_marks
from autoprec.analysis.ranges import Interval, ranges_of
from autoprec.analysis.static import StaticAnalysis, static_analysis
from autoprec.analysis.storage import Storage, StoredBuffer, StoredParameter, storage_of
from autoprec.analysis.tensor_numerics import Rounding, TensorNumerics, tensor_numerics

__all__ = [
    "SEVERITIES",
    "VERDICTS",
    "Diagnosis",
    "ExponentHistogram",
    "Finding",
    "GradientHistograms",
    "Inspection",
    "Interval",
    "LossScaleAdvice",
    "LostConstant",
    "Mark",
    "Marking",
    "MeasuredNumerics",
    "ParameterNumerics",
    "Reason",
    "ReasonCode",
    "Rounding",
    "Severity",
    "SiteTensor",
    "StaticAnalysis",
    "Storage",
    "StoredBuffer",
    "StoredParameter",
    "TensorNumerics",
    "Verdict",
    "constant_marks",
    "diagnose",
    "diagnosis_marks",
    "explanations",
    "exponent_histogram",
    "findings_of",
    "inspect_recordings",
    "inspect_static",
    "loss_scale_advice",
    "lost_constants",
    "mark_recordings",
    "measured_numerics",
    "merge",
    "pattern_marks",
    "ranges_of",
    "run_backward",
    "static_analysis",
    "static_marks",
    "storage_of",
    "tensor_numerics",
]
