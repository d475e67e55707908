"""What to do about what a run stores and how it scales its loss: one finding for each fault and format."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autoprec.analysis.cast_optimizer import CastOptimizer
from autoprec.analysis.storage import Storage, frozen_parameters
from autoprec.analysis.stored_moments import STEP_ERROR
from autoprec.analysis.stored_parameters import STOCHASTIC
from autoprec.analysis.stored_values import StoredFault, percent
from autoprec.numerics import format_named

_NUM_NAMES = 6
# Below this fraction of lost updates nothing is said of weights without masters.
_WORTH_A_NOTE = 0.1
# What the policy can store parameters in.
_STORABLE = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageFinding:
    """A finding about storage in one format: what it says, what to do, and all names it is about, worst first.

    `warning`: a fault that was measured; `note`: worth knowing before the format is chosen.
    """

    code: str
    severity: Literal["warning", "note"]
    format: str
    message: str
    fix: str
    names: tuple[str, ...]


STORAGE_CODES = frozenset(
    {
        "weights_do_not_move",
        "updates_swamped",
        "weight_decay_vanishes",
        "parameter_rounding_harms",
        "accumulation_swamped",
        "second_moment_freezes",
        "moment_freezes",
        "moment_flushes",
        "optimizer_eps_vanishes",
        "statistics_stall",
        "buffer_rounding_harms",
        "average_stalls",
    }
)


def storage_findings(storage: Storage, format_name: str) -> tuple[StorageFinding, ...]:
    """Return what storing in the format was measured to break, part by part."""
    kinds: tuple[Callable[[Storage, str], Iterator[StorageFinding]], ...] = (
        _weights, _weight_decay, _optimizer, _moments, _gradients, _statistics, _rounding, _averages,
    )  # fmt: skip
    return tuple(finding for kind in kinds for finding in kind(storage, format_name))


def _weights(storage: Storage, format_name: str) -> Iterator[StorageFinding]:
    faults = _of(storage, "parameters", format_name, "lost_update_frac")
    if not faults:
        return
    sizes = {each.name: each.num_elements for each in storage.parameters}
    total = sum(sizes[each.name] for each in faults)
    lost = sum(sizes[each.name] * each.numbers["lost_update_frac"] for each in faults) / max(total, 1)
    frozen = frozen_parameters(storage, format_name)
    swamped = [each.name for each in _worst_first(faults, "lost_update_frac") if each.verdict != "fine"]
    where = f"stored in {format_name} without FP32 masters, "
    kept = sum(sizes[each.name] * each.numbers.get("with_stochastic_rounding", 1.0) for each in faults) / max(total, 1)
    if frozen:
        yield StorageFinding(
            code="weights_do_not_move", severity="warning", format=format_name, names=frozen,
            message=f"{where}{len(frozen)} of {len(storage.parameters)} parameters do not move in "
            f"{storage.num_steps} steps, since every update is below half a spacing: {_some(frozen)}; of all updates "
            f"{percent(lost)} are lost",
            fix=_master_fix(format_name, kept),
        )  # fmt: skip
    elif lost >= _WORTH_A_NOTE or swamped:
        yield StorageFinding(
            code="updates_swamped", severity="note", format=format_name, names=tuple(swamped),
            message=f"{where}{percent(lost)} of all updates are below half a spacing and lost"
            + (f", most of those of {_some(swamped)}" if swamped else ""),
            fix=_master_fix(format_name, kept),
        )  # fmt: skip


def _master_fix(format_name: str, kept: float) -> str:
    if format_name not in _STORABLE:
        return f"keep FP32 weights, and cast them to {format_name} for each matmul"
    fix = f"keep FP32 masters: parameters: {{storage: {format_name}, master: fp32}}"
    if format_name not in STOCHASTIC:
        return fix
    return f"{fix}, or rounding: stochastic, which went {percent(kept)} of the way of FP32"


def _weight_decay(storage: Storage, format_name: str) -> Iterator[StorageFinding]:
    faults = _of(storage, "parameters", format_name, "lost_weight_decay_frac")
    lost = [each for each in faults if each.numbers["lost_weight_decay_frac"] > 0.5]
    if lost:
        size = max(each.numbers["weight_decay"] for each in lost)
        yield StorageFinding(
            code="weight_decay_vanishes", severity="note", format=format_name,
            names=tuple(each.name for each in lost),
            message=f"stored in {format_name} without FP32 masters, weight decay alone changes nothing in {len(lost)} "
            f"of {len(faults)} parameters: it takes {size:.2g} off a weight, and half a spacing is at least "
            f"{format_named(format_name).unit_roundoff / 2:.2g} of it",
            fix=_master_fix(format_name, 1.0).partition(", or rounding")[0],
        )  # fmt: skip


def _optimizer(storage: Storage, format_name: str) -> Iterator[StorageFinding]:
    for each in storage.cast:
        if each.format != format_name or not (each.nonfinite_frac or each.eps_vanishes):
            continue
        names = tuple(sorted(each.nonfinite_frac, key=lambda name: -each.nonfinite_frac[name]))
        eps = f"{storage.optimizer}'s eps of {each.eps:g} is 0 in {format_name}" if each.eps_vanishes else ""
        if names:
            worst = each.nonfinite_frac[names[0]]
            happened = (
                f"cast to {format_name}, {storage.num_steps} steps leave {percent(worst)} of {names[0]} at inf or nan"
                + (f", and some of {_some(names[1:])}" if names[1:] else "")
                + (f": {eps}, and a weight without gradient becomes 0 / 0" if eps else "")
            )
        else:
            happened = (
                f"cast to {format_name}, {eps}: a weight without gradient becomes 0 / 0, which none did in "
                f"{storage.num_steps} steps" + (f"; steps grow {each.step_growth:.3g} times" if _grows(each) else "")
            )
        larger = (
            f"; or set eps to {each.larger_eps:g} or more, with which all stays finite and no step is 10 times FP32's"
            if each.larger_eps
            else ""
        )
        yield StorageFinding(
            code="optimizer_eps_vanishes", severity="warning" if names else "note", format=format_name, names=names,
            message=happened,
            fix=f"keep FP32 masters and optimizer state: parameters: {{storage: {format_name}, master: fp32}}{larger}",
        )  # fmt: skip


def _grows(each: CastOptimizer) -> bool:
    return each.step_growth > 2


def _moments(storage: Storage, format_name: str) -> Iterator[StorageFinding]:
    keys = dict.fromkeys(each.part for each in storage.faults if "frozen_frac" in each.numbers)
    for key in keys:
        bad = [each for each in _of(storage, key, format_name, "frozen_frac") if each.verdict != "fine"]
        wrong = [each for each in bad if each.numbers["step_error"] > STEP_ERROR]
        bad = _worst_first(bad, "step_error" if wrong else "frozen_frac")
        fix = f"keep {key} in FP32: parameters: {{optimizer_state: fp32}}"
        if wrong:
            yield StorageFinding(
                code="moment_flushes", severity="warning", format=format_name, names=_names(bad),
                message=f"{storage.optimizer}'s {key} stored in {format_name} makes other steps than FP32: of "
                f"{bad[0].name}, {bad[0].reason}; it is wrong for {len(bad)} parameters: {_some(_names(bad))}",
                fix=fix,
            )  # fmt: skip
        elif bad:
            yield StorageFinding(
                code="second_moment_freezes" if "sq" in key else "moment_freezes",
                severity="warning", format=format_name, names=_names(bad),
                message=f"{storage.optimizer}'s {key} stored in {format_name} freezes for {len(bad)} parameters: of "
                f"{bad[0].name}, {bad[0].reason}",
                fix=fix,
            )  # fmt: skip


def _gradients(storage: Storage, format_name: str) -> Iterator[StorageFinding]:
    bad = [each for each in _of(storage, "gradients", format_name, "swamped_frac") if each.verdict != "fine"]
    if bad:
        bad = _worst_first(bad, "swamped_frac")
        yield StorageFinding(
            code="accumulation_swamped", severity="warning", format=format_name, names=_names(bad),
            message=f"gradients of micro-batches summed in {format_name} get lost for {len(bad)} parameters: of "
            f"{bad[0].name}, {bad[0].reason}; so it is for {_some(_names(bad))}",
            fix="sum gradients in an FP32 buffer: parameters: {gradients: fp32} with masters, or parameters in FP32",
        )  # fmt: skip


def _statistics(storage: Storage, format_name: str) -> Iterator[StorageFinding]:
    faults = [each for each in storage.faults if each.part == "buffers" and each.format == format_name]
    bad = [each for each in faults if each.verdict != "fine" and "gradient_error" not in each.numbers]
    if bad:
        yield StorageFinding(
            code="statistics_stall", severity="warning", format=format_name, names=_names(bad),
            message=f"stored in {format_name}, {len(bad)} running statistics stall: {_some(_names(bad))}; of "
            f"{bad[0].name}: {bad[0].reason}",
            fix=f"keep these buffers in FP32: {_some(_names(bad))}",
        )  # fmt: skip


def _rounding(storage: Storage, format_name: str) -> Iterator[StorageFinding]:
    for part, code in (("buffers", "buffer_rounding_harms"), ("parameters", "parameter_rounding_harms")):
        bad = [each for each in _of(storage, part, format_name, "gradient_error") if each.verdict != "fine"]
        if bad:
            bad = _worst_first(bad, "gradient_error")
            yield StorageFinding(
                code=code, severity="warning", format=format_name, names=_names(bad),
                message=f"{bad[0].name}: {bad[0].reason}"
                + (f"; so it is for {_some(_names(bad[1:]))}" if bad[1:] else ""),
                fix=f"keep in FP32: {_some(_names(bad))}",
            )  # fmt: skip


def _averages(storage: Storage, format_name: str) -> Iterator[StorageFinding]:
    bad = [each for each in _of(storage, "ema", format_name, "decay") if each.verdict != "fine"]
    if bad:
        bad = _worst_first(bad, "lost_update_frac")
        yield StorageFinding(
            code="average_stalls", severity="warning", format=format_name, names=_names(bad),
            message=f"the moving average of weights stored in {format_name} stalls for {len(bad)} tensors: of "
            f"{bad[0].name}, {bad[0].reason}",
            fix="keep the averaged copy in FP32",
        )  # fmt: skip


def _of(storage: Storage, part: str, format_name: str, number: str) -> list[StoredFault]:
    return [
        each for each in storage.faults if each.part == part and each.format == format_name and number in each.numbers
    ]


def _worst_first(faults: Sequence[StoredFault], number: str) -> list[StoredFault]:
    return sorted(faults, key=lambda each: -each.numbers[number])


def _names(faults: Sequence[StoredFault]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.name for each in faults))


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NUM_NAMES
    return ", ".join(names[:_NUM_NAMES]) + (f" and {rest} more" if rest > 0 else "")
