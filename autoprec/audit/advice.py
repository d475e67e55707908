"""What to do about a failed gate: words that end in the next command to run."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoprec.audit.audited import Audited


def audit_again(audited: "Audited") -> str:
    """Return the command that audits once more."""
    policy = audited.policy_file or audited.policy.name
    return f"autoprec audit {audited.loaded.path} --policy {policy}"


def keep_wide(audited: "Audited", site: str) -> str:
    """Return how to run one site in FP32, and the command that audits that."""
    return f'add {{sites: "{site}", format: fp32}} before the rules of {_file(audited)}, then {audit_again(audited)}'


def mend_file(audited: "Audited", change: str) -> str:
    """Return a change to the policy's file, and the command that audits that."""
    return f"{change} in {_file(audited)}, then {audit_again(audited)}"


def mend_workload(audited: "Audited", change: str) -> str:
    """Return a change to the workload's file, and the command that audits that."""
    return f"{change} in {audited.loaded.path}, then {audit_again(audited)}"


def _file(audited: "Audited") -> str:
    if audited.policy_file is not None:
        return str(audited.policy_file)
    return f"policy.yaml (autoprec policy show {audited.policy.name} --out policy.yaml writes it)"
