"""What an inspection shows of storage and of the loss scale."""

from collections.abc import Iterator, Sequence

from autoprec.analysis.loss_scale import LossScaleAdvice
from autoprec.analysis.loss_scale_findings import power
from autoprec.analysis.storage import STORED_PARTS, Storage, StoredPart
from autoprec.analysis.stored_values import percent

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_LABELS = {"gradients": "gradients, summed", "ema": "average of weights"}
_WORDS = {"needs_master": "needs FP32 masters", "needs_fp32": "needs FP32"}


def storage_rows(storage: Storage | None, formats: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield a heading, and a line for each part that a run stores: its size in FP32 and in each format."""
    if storage is None:
        return
    names = ("fp32", *formats)
    yield ("stored in", *names)
    for part in STORED_PARTS:
        label = f"optimizer state ({storage.optimizer})" if part == "optimizer_state" else part
        unknown = part == "optimizer_state" and not storage.measured
        yield (label, *("unknown" if unknown else _size(storage.num_bytes(part, name)) for name in names))


def storage_verdicts(storage: Storage | None, formats: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield a heading, and a line for each part that was measured: whether it may be stored in each format.

    Nothing if nothing was measured.
    """
    parts = storage.parts() if storage is not None else ()
    if storage is None or not parts:
        return
    by_place = {(each.part, each.format): each for each in parts}
    yield (f"measured in {storage.num_steps} steps", *formats)
    for part in dict.fromkeys(each.part for each in parts):
        yield (_LABELS.get(part, part), *(_word(by_place.get((part, name))) for name in formats))


def scale_sentence(advice: LossScaleAdvice) -> str:
    """Return which loss scale a format needs, in one sentence with what it saves."""
    seen = f"{advice.flush_frac:.2%} of the parameter gradients' elements become 0, the largest is {advice.max_abs:.2g}"
    if advice.forward_overflow:
        return f"none helps until {advice.forward_overflow[0]} is in FP32: it overflows in the forward pass"
    if advice.per_tensor:
        return f"not needed: every tensor carries a scale, with which {percent(advice.scaled_flush_frac)} become 0"
    if not advice.needed:
        return f"not needed: {seen}"
    left = f"; with it {advice.scaled_flush_frac:.2%}"
    bounds = f"{power(advice.minimum)} or more keeps them, more than {power(advice.maximum)} overflows"
    return f"needed, from {advice.initial:,.0f}: {seen}{left}; {bounds}"


def _word(part: StoredPart | None) -> str:
    if part is None:
        return "-"
    if part.verdict == "fine":
        return "fine"
    return f"{_WORDS[part.verdict]}: {len(part.names)} of {part.num_tensors}"


def _size(num_bytes: int) -> str:
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
