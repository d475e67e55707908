"""The cases and controls: models with a known fault or none, and whether `inspect` tells the truth about them.

Each file has a `CASE`: `formats` says which formats are unsafe, `flag_sites` are the culprits (naming any one locates
the fault), and `fix_sites` in FP32 repair the run. `tests/groundtruth/check_case.py` checks the claims of a file by
running it, without any analysis.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from autoprec.analysis import Inspection, inspect_recordings
from autoprec.capture import record_batches
from autoprec.graph.site import Site
from autoprec.runtime.device import describe

TESTS = Path(__file__).parent
CASES = tuple(sorted((TESTS / "cases").glob("*.py")))
CONTROLS = tuple(sorted((TESTS / "controls").glob("*.py")))
FORMATS = ("fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class FormatResult:
    """What was found of one case in one format it makes a claim about.

    `located`: a culprit is named `must`. `num_must`: sites named. `beside`: those named that the case names neither as
    a culprit nor as part of its repair. `num_repair`, `num_fix`: sites of the computed repair and of the case's own.
    `repaired`: whether the ground truth's own executor finds a run healthy with the computed repair in FP32.
    """

    case: str
    format: str
    said: str
    located: bool
    num_must: int
    beside: tuple[str, ...]
    num_repair: int
    num_fix: int
    repaired: bool
    repaired_how: str

    @property
    def is_right(self) -> bool:
        """Return whether an unsafe format was located, or a safe one left in peace."""
        return self.located if self.said == "unsafe" else self.num_must == 0


def load_file(path: Path) -> ModuleType:
    """Return the module of a case, executed."""
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inspect_file(module: ModuleType, num_batches: int = 3, formats: Sequence[str] = FORMATS) -> Inspection:
    """Return what `autoprec inspect` finds in a case."""
    workload = module.workload()
    return inspect_recordings(record_batches(workload, num_batches), workload, formats, describe("cpu"))


def results_of(module: ModuleType, inspection: Inspection) -> list[FormatResult]:
    """Return how the findings compare with the case's claims, format by format."""
    case = module.CASE
    musts = {name: [m.site for m in inspection.marks if m.format == name and m.verdict == "must"] for name in FORMATS}
    claims = dict(case["formats"])
    if not claims and case["flag_sites"]:  # about gradients: the sites are claimed, in whichever format
        claims = dict.fromkeys((name for name in FORMATS if musts[name]), "unsafe")
    return [_result(module, inspection, name, said, musts[name]) for name, said in claims.items()]


def _result(module: ModuleType, inspection: Inspection, name: str, said: str, musts: Sequence[Site]) -> FormatResult:
    case = module.CASE
    named = [*case["flag_sites"], *case["fix_sites"]]
    musts = [site for site in musts if not is_wrong_norm(inspection, site, name)] if said == "safe" else musts
    diagnosis = next((each for each in inspection.diagnoses if each.format == name), None)
    sites = diagnosis.repair.sites if diagnosis and diagnosis.repair else ()
    kept = diagnosis.kept if diagnosis else ()
    repaired, how = (True, "") if said == "safe" else judged(module, name, kept)
    return FormatResult(
        case=case["id"], format=name, said=said,
        located=any(matches(site, each) for site in musts for each in case["flag_sites"]),
        num_must=len(musts),
        beside=tuple(str(site) for site in musts if not any(matches(site, each) for each in named)),
        num_repair=len(sites),
        num_fix=sum(any(matches(site, each) for each in case["fix_sites"]) for site in inspection.op_graph.sites()),
        repaired=repaired,
        repaired_how=how,
    )  # fmt: skip


def is_wrong_norm(inspection: Inspection, site: Site, format_name: str) -> bool:
    """Return whether a site is a norm whose parameter gradients were measured wrong on this device."""
    diagnosis = next(each for each in inspection.diagnoses if each.format == format_name)
    return site.op == "layer_norm" and any(fault.site == site for fault in diagnosis.kernel_faults)


def matches(site: Site, given: Sequence[Any]) -> bool:
    """Return whether a case's (module glob, op glob[, index]) names the site."""
    return bool(ground_truth("caster").site_matches(tuple(given), site.module, site.op, site.index))


def ground_truth(name: str) -> ModuleType:
    """Return a module of the ground truth's executor."""
    folder = str(TESTS / "groundtruth")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def judged(
    module: ModuleType, name: str, sites: Iterable[Site], loss_scale: float | None = None
) -> tuple[bool, str]:  # fmt: skip
    """Return whether the ground truth's executor finds a run healthy with `sites` in FP32, and what it saw.

    Its static loss scale is 1024 in fp16 and 1 in bf16, if none is given.
    """
    check = ground_truth("check_case")
    workload = module.workload()
    loss, gradient, _ = check.step(workload, lambda *_: None, 1.0)
    keep = [(site.module, site.op, site.index) for site in sites]
    case = module.CASE if loss_scale is None else {**module.CASE, "loss_scale": {name: loss_scale}}
    passed, how = check.judge(case, workload, name, keep, (loss, gradient))
    return bool(passed), how
