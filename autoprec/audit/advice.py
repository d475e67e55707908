"""What to do about a failed gate: words that end in the next command to run."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoprec.audit.audited import Audited


def audit_again(audited: "Audited") -> str:
    """Return the command that audits once more."""
    return f"autoprec audit {audited.workload_name} --policy {audited.policy_text}"


def keep_wide(audited: "Audited", site: str) -> str:
    """Return how to run one site in FP32, and the command that audits that."""
    return mend_file(audited, f'add {{sites: "{site}", format: fp32}} before the other rules')


def mend_file(audited: "Audited", change: str) -> str:
    """Return a change to the policy's file, and the command that audits that; a preset becomes a file first."""
    if audited.policy_file is not None:
        return f"{change} in {audited.policy_file}, then: {audit_again(audited)}"
    show = f"autoprec policy show {audited.policy.name} --out policy.yaml"
    return f"{show}, {change} there, then: autoprec audit {audited.workload_name} --policy policy.yaml"


def mend_workload(audited: "Audited", change: str) -> str:
    """Return a change to the workload's file, and the command that audits that."""
    return f"{change} in {audited.workload_name}, then: {audit_again(audited)}"
