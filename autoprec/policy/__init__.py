"""Policies: which site runs in which number format, as values, files, presets and differences. No torch.

`Policy` is the value; `SitePattern` names sites; `resolve` says what a policy does to the sites of one model;
`load_policy` and `save_policy` read and write the file; `preset` gives the baselines.
"""

from autoprec.policy.diff import PolicyDiff, RuleDifference, SettingDifference, SiteDifference, diff
from autoprec.policy.file import SCHEMA, dump_policy, load_policy, parse_policy, rule_lines, save_policy, to_plain
from autoprec.policy.given import policy_or_preset
from autoprec.policy.parameters import BatchNorm, Gradients, Master, OptimizerState, Parameters, Rounding, Storage
from autoprec.policy.pattern import SitePattern, anchored, pattern_of
from autoprec.policy.policy import (
    AS_GIVEN,
    COMPANIONS,
    FLOAT8,
    INSIDE_FP32,
    PROMOTE,
    RULE_FORMATS,
    Compilation,
    Float8,
    LossScale,
    LossScaleKind,
    MatmulPrecision,
    MemoryFormat,
    OptimizerKernels,
    Outputs,
    Policy,
    Rule,
    Scaling,
)
from autoprec.policy.presets import PRESETS, Preset, graph_preset_names, preset, preset_names
from autoprec.policy.resolve import ResolvedPolicy, hint_of_op, nearest_patterns, resolve

__all__ = [
    "AS_GIVEN",
    "COMPANIONS",
    "FLOAT8",
    "INSIDE_FP32",
    "PRESETS",
    "PROMOTE",
    "RULE_FORMATS",
    "SCHEMA",
    "BatchNorm",
    "Compilation",
    "Float8",
    "Gradients",
    "LossScale",
    "LossScaleKind",
    "Master",
    "MatmulPrecision",
    "MemoryFormat",
    "OptimizerKernels",
    "OptimizerState",
    "Outputs",
    "Parameters",
    "Policy",
    "PolicyDiff",
    "Preset",
    "ResolvedPolicy",
    "Rounding",
    "Rule",
    "RuleDifference",
    "Scaling",
    "SettingDifference",
    "SiteDifference",
    "SitePattern",
    "Storage",
    "anchored",
    "diff",
    "dump_policy",
    "graph_preset_names",
    "hint_of_op",
    "load_policy",
    "nearest_patterns",
    "parse_policy",
    "pattern_of",
    "policy_or_preset",
    "preset",
    "preset_names",
    "resolve",
    "rule_lines",
    "save_policy",
    "to_plain",
]
