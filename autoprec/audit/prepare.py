"""Before an audit: what the search has seen of batches and seeds, and the record that the audit leaves."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autoprec.audit.audited import Audited
from autoprec.errors import PolicyFileError, WorkloadError
from autoprec.policy import Policy, dump_policy
from autoprec.records.audit import AuditRecord, GateRecord
from autoprec.search.write import device_record, versions
from autoprec.workload.origin import shown


def seeds_seen(evidence: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the seeds that tuning used, as the policy says; older policies name the search's, and the next proved."""
    seeds = evidence.get("seeds")
    if isinstance(seeds, tuple):
        return tuple(seed for seed in seeds if type(seed) is int)
    seed = evidence.get("seed")
    return (seed, seed + 1) if type(seed) is int else ()


def unseen_seed(policy: Policy, asked: int | None) -> int:
    """Return the seed of an audit: the one asked for, or the first after those that tuning used.

    Raises: `PolicyFileError` if the search has used the one asked for, since that would prove nothing new.
    """
    seen = seeds_seen(policy.evidence)
    if asked is None:
        return max(seen, default=-1) + 1
    if asked in seen:
        raise PolicyFileError(
            f'--seed {asked}: policy "{policy.name}" was tuned with the seeds {", ".join(map(str, seen))}, and an '
            f"audit must see others; leave --seed out, or give {max(seen) + 1} or more"
        )
    return asked


def num_seen(policy: Policy) -> int:
    """Return how many batches, from the first, tuning has used; 0 where the policy does not say."""
    found = policy.evidence.get("batches")
    return found if type(found) is int and found > 0 else 0


def check_checkpoints(files: Sequence[Path]) -> None:
    """Return if there are no checkpoints to compare or two of them, and they are files.

    Raises: `WorkloadError` otherwise.
    """
    if len(files) not in (0, 2):
        raise WorkloadError(
            f"--checkpoint was given {'once' if len(files) == 1 else f'{len(files)} times'}; give it twice, an earlier "
            "and a later checkpoint, to see the drift between them"
        )
    for file in files:
        if not file.is_file():
            raise WorkloadError(f"--checkpoint {file}: there is no such file; give one that torch.save wrote")


def audit_record(
    audited: Audited, gates: Sequence[GateRecord], *, policy: str, record_file: Path, started: float
) -> AuditRecord:
    """Return the record of an audit; `policy` is what was asked for, a file or a preset."""
    return AuditRecord(
        name=audited.loaded.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=audited.workload_name,
        policy_file=policy,
        policy_name=audited.policy.name,
        policy=dump_policy(audited.policy),
        gates_file=None if audited.gates_file is None else shown(audited.gates_file),
        seed=audited.seed,
        device=device_record(audited.device),
        versions=versions(),
        gates=tuple(gates),
        record_file=str(record_file),
        wall_s=time.monotonic() - started,
    )
