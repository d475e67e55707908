"""What is audited: a policy, its workload, and the runs that several gates look at, each made once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from autoprec.audit.paired import MARGIN, Paired, train_paired
from autoprec.audit.runs import Runs
from autoprec.capture import Recording, record
from autoprec.errors import AutoprecError, WorkloadError
from autoprec.measure import Training
from autoprec.policy import Policy, ResolvedPolicy, resolve
from autoprec.runtime.device import DeviceInfo
from autoprec.workload import LoadedWorkload, batches_after, fitting_batches
from autoprec.workload.origin import shown

DEFAULT_HORIZON = 100


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A policy beside its workload on a device.

    `policy_file` is None for a preset, and `rule_lines` are the lines of the file on which its rules stand. `seed` and
    `skip` are chosen so that the search has seen neither the random numbers nor the first `skip` batches.
    `price_per_hour` is what an hour of the device costs; None: nobody said. `horizon` are the steps of the paired run,
    which goes on to `longest` times as many if it cannot tell at `margin`; `gates_file` is None where every threshold
    has its default.

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
    horizon: int = DEFAULT_HORIZON
    margin: float = MARGIN
    longest: int = 1
    gates_file: Path | None = None
    _loaded_batches: dict[int, tuple[tuple[Any, ...], int]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def recording(self) -> Recording:
        """Return one step of the workload, recorded in FP32 on the first batch under the seed of the tuning.

        Where routing depends on weights, another seed has other shapes, and no architecture would equal itself.
        """
        seed = self.evidence.get("seed")
        return record(self.loaded.workload, device=self.device.kind, seed=seed if type(seed) is int else self.seed)

    @cached_property
    def runs(self) -> Runs:
        """Return the runs that gates share."""
        return Runs(self)

    @cached_property
    def resolved(self) -> ResolvedPolicy:
        """Return which rule wins each site of the recorded step."""
        return resolve(self.policy, self.recording.op_graph.sites())

    @cached_property
    def obstacle(self) -> str:
        """Return why the policy cannot be installed in the model on this device; an empty text where it can."""
        try:
            self.device.require(self.policy)
            self.train(self.policy, self.batches(1)).close()
        except WorkloadError:
            raise
        except AutoprecError as error:
            return str(error)
        return ""

    @cached_property
    def paired(self) -> Paired:
        """Return FP32 and the policy trained side by side over the horizon or longer, in interleaved rounds."""
        workload, kind = self.loaded.workload, self.device.kind
        return train_paired(
            workload,
            self.policy,
            kind,
            self.seed,
            self.batches(fitting_batches(workload, self.horizon, kind)),
            self.horizon,
            margin=self.margin,
            longest=self.longest,
        )

    @property
    def evidence(self) -> Mapping[str, Any]:
        """Return what tuning wrote down beside the rules."""
        return self.policy.evidence

    @property
    def workload_name(self) -> str:
        """Return the workload as the command line takes it, for the next command of an advice."""
        asked = self.loaded.name.removeprefix(self.loaded.path.stem).removeprefix("-")
        return f"{shown(self.loaded.path)}{f':{asked}' if asked else ''}"

    @property
    def policy_text(self) -> str:
        """Return the policy as the command line takes it."""
        return str(self.policy_file or self.policy.name)

    @property
    def gates_name(self) -> str:
        """Return the gates file, or the name that a new one would have, for an advice."""
        return str(self.gates_file or "gates.yaml")

    def batches(self, count: int) -> Sequence[Any]:
        """Return `count` batches that the search has not seen, as far as the workload has so many."""
        return self._after_skip(count)[0]

    def num_unseen(self, count: int) -> int:
        """Return how many of `batches(count)` the search has not seen: the rest are of a next epoch."""
        return self._after_skip(count)[1]

    def train(self, policy: Policy, batches: Sequence[Any]) -> Training:
        """Return a fresh run of the workload under `policy`, seeded as every run of this audit is."""
        return Training(self.loaded.workload, policy, device=self.device.kind, seed=self.seed, batches=batches)

    def _after_skip(self, count: int) -> tuple[tuple[Any, ...], int]:
        if count not in self._loaded_batches:
            self._loaded_batches[count] = batches_after(self.loaded.workload, self.skip, count, self.device.kind)
        return self._loaded_batches[count]
