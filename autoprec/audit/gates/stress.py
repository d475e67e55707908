"""`stress`: batches out of the ordinary stay finite under the policy where they stay finite in FP32."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoprec.audit.advice import keep_wide, mend_workload
from autoprec.audit.audited import Audited
from autoprec.audit.gate import Finding, Gate, Threshold, Thresholds
from autoprec.audit.probe import Probe, load_weights, probe
from autoprec.audit.runs import LEGS, legs_of
from autoprec.audit.stress_batches import StressBatch, stress_batches
from autoprec.errors import AutoprecError
from autoprec.measure import Training
from autoprec.policy import LossScale, preset
from autoprec.records.audit import EvidenceRecord
from autoprec.workload import to_device
from autoprec.workload.parts import build_model
from autoprec.workload.seeding import MODEL_STREAM, seeded

_SEEN = 8  # batches among which the longest is looked for


@dataclass(frozen=True, kw_only=True)
class Stressed:
    """What an outlier batch did under the policy; `refused` says why FP32 does not take it, which then counts for all.

    `place` is where the first non-finite value comes from, and `site` its site, if it has one.
    """

    stress: StressBatch
    refused: str = ""
    under_policy: Probe = field(default_factory=Probe)
    place: str = ""
    site: str = ""


def _check(audited: Audited, thresholds: Thresholds) -> Finding:
    outcomes = stressed(audited, thresholds)
    refused = [each for each in outcomes if each.refused]
    broken = [each for each in outcomes if not each.refused and not each.under_policy.is_finite]
    limit = thresholds["input_factor"] if _is_narrow(audited) else math.inf
    failed = [each for each in broken if each.stress.factor <= limit]
    beyond = [each.stress.name for each in broken if each.stress.factor > limit]
    stayed = len(outcomes) - len(refused) - len(broken)
    if stayed + len(failed) == 0:
        measured = f"no outlier batch is taken in FP32 ({_listed([each.stress.name for each in refused])})"
        return Finding(verdict="not-applicable", measured=measured)
    measured = f"{stayed} of {stayed + len(failed)} outlier batches that FP32 takes stay finite"
    if refused:
        measured += f"; not counted, as FP32 does not take them: {_listed([each.stress.name for each in refused])}"
    if beyond:
        measured += f"; not finite beyond the factor {limit:g} that is asked for: {_listed(beyond)}"
    return Finding(
        verdict="fail" if failed else "pass",
        measured=measured,
        value=float(len(failed)),
        threshold=0.0,
        unit="batches",
        evidence=tuple(_row(each) for each in failed),
        advice=_advice(audited, failed),
    )


def _is_narrow(audited: Audited) -> bool:
    """Return whether the policy has numbers of less range than FP32."""
    return "fp16" in {*audited.runs.ran_as().values(), *audited.policy.formats, audited.policy.parameters.storage}


def stressed(audited: Audited, thresholds: Thresholds) -> tuple[Stressed, ...]:
    """Return what each outlier batch does, in FP32 and under the policy, with the weights of a trained model."""
    legs, workload, kind = legs_of(thresholds), audited.loaded.workload, audited.device.kind
    real = audited.runs.batches(_SEEN)
    weights = audited.runs.weights(None, legs) or _initial(audited)
    with (
        warnings.catch_warnings(),
        Training(workload, preset("fp32", kind), device=kind, seed=audited.seed, batches=real) as fp32,
        audited.train(audited.policy, real) as run,
    ):
        warnings.simplefilter("ignore")  # of code that meets a batch it was not written for
        return tuple(_outcomes(audited, fp32, run, weights, stress_batches(real)))


def _initial(audited: Audited) -> Mapping[str, Any]:
    """Return the weights that every run begins with, for a workload that does not train in FP32."""
    with seeded(audited.seed, MODEL_STREAM, audited.device.kind):
        return build_model(audited.loaded.workload, audited.device.kind).state_dict()


def _outcomes(
    audited: Audited, fp32: Training, run: Training, weights: Mapping[str, Any], batches: Iterator[StressBatch]
) -> Iterator[Stressed]:
    workload, seed = audited.loaded.workload, audited.seed
    for stress in batches:
        refused = _refused_on_cpu(audited, weights, stress) if stress.is_risky else ""
        if not refused:
            reference = probe(fp32, workload, weights, stress.batch, seed=seed)
            refused = "" if reference.is_finite else str(reference)
        if refused:
            yield Stressed(stress=stress, refused=refused)
            continue
        found = _under_policy(audited, run, weights, stress)
        place, site = ("", "") if found.is_finite or found.raised else _origin(audited, run, weights, stress)
        yield Stressed(stress=stress, under_policy=found, place=place, site=site)


def _refused_on_cpu(audited: Audited, weights: Mapping[str, Any], stress: StressBatch) -> str:
    """Return why the batch raises on a CPU, where an index past the end is an error and not the end of the process."""
    if audited.device.kind == "cpu":
        return ""
    batch = to_device(stress.batch, "cpu")
    workload = audited.loaded.workload
    with Training(workload, preset("fp32", "cpu"), device="cpu", seed=audited.seed, batches=[batch]) as twin:
        return probe(twin, workload, to_device(dict(weights), "cpu"), batch, seed=audited.seed).raised


def _under_policy(audited: Audited, run: Training, weights: Mapping[str, Any], stress: StressBatch) -> Probe:
    """Return what the batch does at the initial loss scale or, where a dynamic one would back off, at the smallest."""
    given, last = audited.policy.loss_scale, Probe()
    for scale in scales_to_try(given):
        last = probe(run, audited.loaded.workload, weights, stress.batch, seed=audited.seed, scale=scale)
        if last.is_finite or not last.loss_is_finite:
            break
    return last


def scales_to_try(given: LossScale) -> tuple[float, ...]:
    """Return the loss scales of which one must do: what a scaler starts with, and what it can back off to."""
    if given.kind == "none":
        return (1.0,)
    return (given.initial,) if given.kind == "static" else (given.initial, max(given.minimum, 1.0))


def _origin(audited: Audited, run: Training, weights: Mapping[str, Any], stress: StressBatch) -> tuple[str, str]:
    """Return where the first non-finite value comes from, and its site."""
    load_weights(run, weights)
    scaler = run.precision.scaler
    if scaler.is_enabled():
        scaler.load_state_dict({**scaler.state_dict(), "scale": scales_to_try(audited.policy.loss_scale)[-1]})
    try:
        with seeded(audited.seed, device=run.device):
            found = run.precision.find_overflow(stress.batch, audited.loaded.workload.loss)
    except (AutoprecError, RuntimeError) as error:
        return f"the place could not be found: {str(error).splitlines()[0]}", ""
    if found is None:
        return "the place could not be found: the step is finite under observation", ""
    return str(found), str(found.site) if found.site is not None else ""


def _row(each: Stressed) -> EvidenceRecord:
    what = f"{each.stress.name}: {each.under_policy}, and FP32 is finite"
    return EvidenceRecord(where=each.site or "batch", what=f"{what}; {each.place}" if each.place else what)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _advice(audited: Audited, failed: Sequence[Stressed]) -> str:
    if not failed:
        return ""
    site = next((each.site for each in failed if each.site), "")
    return keep_wide(audited, site) if site else mend_workload(audited, "mend what breaks on such batches")


STRESS = Gate(
    name="stress",
    proves="batches out of the ordinary stay finite wherever FP32 stays finite",
    check=_check,
    thresholds={
        **LEGS,
        "input_factor": Threshold(
            default=4.0,
            unit="times",
            means="inputs up to this many times the real ones must stay finite in fp16; bf16 has the range of FP32",
            minimum=1.0,
        ),
    },
)
