"""What `autoprec plan` shows: every number of a modeled plan, labeled as modeled, and the rows of the devices."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoprec.measure.device_profiles import DeviceProfile
from autoprec.records.quantities import bytes_text, seconds_text
from autoprec.search.modeled import ModeledPlan
from autoprec.search.modeled_step import ModeledPolicy

_MOST_ROWS = 8
_HEADINGS = ("speed-up (modeled)", "step (modeled)", "saved (modeled)", "low sites", "gradient error")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanView:
    """What an engineer needs to judge a modeled plan, in reading order; each table starts with its headings."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    baselines: tuple[tuple[str, ...], ...]
    front: tuple[tuple[str, ...], ...]
    kept: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def plan_view(plan: ModeledPlan, *, workload: str, policy_file: str | None) -> PlanView:
    """Return the view of a modeled plan."""
    return PlanView(
        headline=_headline(plan),
        facts=tuple(_facts(plan, workload, policy_file)),
        baselines=(("baseline", *_HEADINGS), *(_row(each, plan) for each in plan.baselines)),
        front=(("plan", *_HEADINGS), *(_row(each, plan) for each in _shown(plan.front))) if plan.front else (),
        kept=tuple((str(count), reason) for reason, count in plan.kept.items()) if plan.best.num_low else (),
        notes=tuple(_notes(plan)),
    )


def profile_rows(profiles: Iterable[DeviceProfile]) -> tuple[tuple[str, ...], ...]:
    """Return headings, and one line for each profile: peak rates by format, bandwidth, launch."""
    names = ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3")
    rows: list[tuple[str, ...]] = [("profile", *names, "TFLOP/s; GB/s", "launch", "device")]
    for each in profiles:
        peaks = [f"{each.peaks[name].value / 1e12:.5g}" if name in each.peaks else "-" for name in names]
        launch = f"{each.launch.value / 1e-6:.3g} us"
        rows.append((each.name, *peaks, f"{each.bandwidth.value / 1e9:.5g}", launch, each.title))
    return tuple(rows)


def source_lines(profiles: Iterable[DeviceProfile]) -> tuple[str, ...]:
    """Return where the figures of each profile come from, each source once."""
    lines = []
    for profile in profiles:
        named: dict[tuple[str, str], list[str]] = {}
        for name, figure in profile.figures().items():
            named.setdefault((figure.source, figure.date), []).append(name)
        lines += [f"{profile.name}: {', '.join(names)}: {source}, {date}" for (source, date), names in named.items()]
    return tuple(lines)


def _headline(plan: ModeledPlan) -> str:
    best, fp32 = plan.best, plan.fp32
    if best is fp32:
        return f"nothing is predicted to beat fp32 on {plan.profile.title} (modeled)"
    text = f"{best.name}: {fp32.step_s / best.step_s:.2f}x fp32 on {plan.profile.title} (modeled)"
    if best is plan.plan:
        rival = min((each for each in plan.baselines if each.is_healthy), key=lambda each: each.step_s)
        return f"{text}, {rival.step_s / best.step_s:.2f}x {rival.name}, the best baseline"
    return f"{text}; no plan is predicted to beat this baseline"


def _facts(plan: ModeledPlan, workload: str, policy_file: str | None) -> Iterable[tuple[str, str]]:
    best, fp32 = plan.best, plan.fp32
    yield "workload", f"{workload}: {plan.num_sites} sites"
    formats = ", ".join(plan.formats) or "no low format: the device has units for none"
    yield "device", f"{plan.profile.title} ({plan.profile.name}), not at hand; {formats}"
    yield "step", f"{seconds_text(best.step_s)} (modeled), {seconds_text(fp32.step_s)} in fp32 (modeled){_inside(plan)}"
    saved = fp32.saved_bytes - best.saved_bytes
    yield "memory", f"{bytes_text(best.saved_bytes)} kept for the backward pass (modeled), {bytes_text(saved)} less"
    yield "fidelity", _fidelity(best, plan.emulated_on)
    kept = plan.num_sites - best.num_low
    float8 = f", {best.num_float8} of them multiply in fp8" if best.num_float8 else ""
    yield "sites", f"{best.num_low} low{float8}; {kept} kept"
    if policy_file is not None:
        yield "policy", policy_file


def _inside(plan: ModeledPlan) -> str:
    inside = [each for each in plan.baselines if each.policy.float32_matmul != "ieee"]
    return "".join(f", {seconds_text(e.step_s)} with {e.policy.float32_matmul} inside (modeled)" for e in inside)


def _fidelity(best: ModeledPolicy, emulated_on: str) -> str:
    if math.isnan(best.error):
        return "that of fp32"
    return (
        f"gradient error {best.error:.2g}, emulated on {emulated_on}; a healthy step may show {best.limit:.2g}; "
        "no training was run"
    )


def _shown(front: Sequence[ModeledPolicy]) -> Sequence[ModeledPolicy]:
    """Return up to `_MOST_ROWS` plans, evenly spread, both ends among them."""
    if len(front) <= _MOST_ROWS:
        return front
    return [front[round(place * (len(front) - 1) / (_MOST_ROWS - 1))] for place in range(_MOST_ROWS)]


def _row(each: ModeledPolicy, plan: ModeledPlan) -> tuple[str, ...]:
    return (
        each.name,
        f"{plan.fp32.step_s / each.step_s:.2f}x",
        seconds_text(each.step_s),
        bytes_text(each.saved_bytes),
        str(each.num_low),
        _error(each),
    )


def _error(each: ModeledPolicy) -> str:
    if each.num_low == 0 and each.policy.float32_matmul == "ieee":
        return "0"
    if not math.isnan(each.error):
        return f"{each.error:.2g} emulated" + ("" if each.is_healthy else ", too much")
    if not math.isnan(each.predicted_error):
        return f"{each.predicted_error:.2g} predicted" + ("" if each.predicted_error <= each.limit else ", too much")
    return "not emulated"


def _notes(plan: ModeledPlan) -> Iterable[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in plan.left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        yield f"no prediction for {', '.join(names)}: {reason}"
    yield (
        "times are a roofline over the figures of the profile (autoprec plan --list), each op by itself, nothing "
        "fused, and a fused AdamW step; only autoprec tune on the device measures"
    )
