"""What is audited: a policy, its workload, and the runs that several gates look at, each made once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autoprec.capture import Recording, record
from autoprec.measure import Training
from autoprec.policy import Policy, ResolvedPolicy, resolve
from autoprec.runtime.device import DeviceInfo
from autoprec.workload import LoadedWorkload, load_batches


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A policy beside its workload on a device.

    `policy_file` is None for a preset, and `rule_lines` are the lines of the file on which its rules stand. `seed` and
    `skip` are chosen so that the search has seen neither the random numbers nor the first `skip` batches.
    `price_per_hour` is what an hour of the device costs; None: nobody said.

    Properties are made on first use and kept for other gates.
    """

    loaded: LoadedWorkload
    policy: Policy
    policy_file: Path | None
    rule_lines: Sequence[int]
    device: DeviceInfo
    seed: int
    skip: int
    price_per_hour: float | None = None
    checkpoints: tuple[Path, ...] = ()

    @cached_property
    def recording(self) -> Recording:
        """Return one step of the workload, recorded in FP32 on the first batch."""
        return record(self.loaded.workload, device=self.device.kind, seed=self.seed)

    @cached_property
    def resolved(self) -> ResolvedPolicy:
        """Return which rule wins each site of the recorded step."""
        return resolve(self.policy, self.recording.op_graph.sites())

    @property
    def evidence(self) -> Mapping[str, Any]:
        """Return what tuning wrote down beside the rules."""
        return self.policy.evidence

    def batches(self, count: int) -> Sequence[Any]:
        """Return `count` batches that the search has not seen, as far as the workload has so many."""
        return load_batches(self.loaded.workload, self.skip + count, self.device.kind)[self.skip :]

    def train(self, policy: Policy, batches: Sequence[Any]) -> Training:
        """Return a fresh run of the workload under `policy`, seeded as every run of this audit is."""
        return Training(self.loaded.workload, policy, device=self.device.kind, seed=self.seed, batches=batches)
