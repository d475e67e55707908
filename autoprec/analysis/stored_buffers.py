"""Buffers stored in a low format: statistics that stall, and tables whose rounding changes the step."""

import math
from collections.abc import Collection, Iterator, Sequence

import torch

from autoprec.analysis.short_run import BufferRun, ShortRun
from autoprec.analysis.stored_values import StoredFault, StoredVerdict, frac, percent, relative_error, stored

# A statistic is followed until FP32 has made this many time constants of its way, and no longer than the limit.
_TIME_CONSTANTS = 2.0
_MAX_PASSES = 2000
# It stalls if it misses more than this fraction of its way, and that is more than this fraction of its value.
MISSED_WAY = 0.2
MISSED_VALUE = 0.05
SWAMPED_FRAC = 0.9


def statistic_faults(run: ShortRun, formats: Sequence[str], *, averaged: Collection[str] = ()) -> Iterator[StoredFault]:
    """Yield what storing each tensor low does that forward passes write to.

    Of a running mean d * b + (1 - d) * s, whose d was measured, the pass is repeated with the s that the batches gave,
    for a few time constants 1 / (1 - d), stored in FP32 and low. Of anything else the passes of the run are all that is
    known. Averages of weights, `averaged`, are left out: they follow what moves.
    """
    for each in (each for each in run.buffers if each.name not in averaged):
        for name in formats:
            yield _followed(each, name) if each.decay is not None else _passes(each, name)


def _followed(run: BufferRun, format_name: str) -> StoredFault:
    decay = run.decay or 0.0
    start = run.steps[0][0].double()
    news = [after.double() - decay * before.double() for before, after in run.steps]
    num_passes = min(math.ceil(_TIME_CONSTANTS / (1 - decay)), _MAX_PASSES)
    exact, low = start, stored(start.float(), format_name)
    for index in range(num_passes):
        new = news[index % len(news)]
        exact = decay * exact + new
        low = stored((decay * low.double() + new).float(), format_name)
    way, value = relative_error(low, exact, exact - start), relative_error(low, exact)
    numbers = {
        "missed_way_frac": way,
        "error": value,
        "momentum": 1 - decay,
        "num_passes": float(num_passes),
        "stays_frac": frac(low == stored(start.float(), format_name), exact.float() != start.float()),
    }
    is_stalled = (way > MISSED_WAY or math.isnan(way)) and value > MISSED_VALUE
    return StoredFault(
        part="buffers", name=run.name, format=format_name, verdict="needs_fp32" if is_stalled else "fine",
        reason=f"with momentum {1 - decay:.2g} it misses {percent(way)} of its way in {num_passes} passes and is "
        f"{percent(value)} off" + (": updates are below half a spacing" if is_stalled else ""),
        numbers=numbers,
    )  # fmt: skip


def _passes(run: BufferRun, format_name: str) -> StoredFault:
    value = stored(run.steps[0][0], format_name)
    stays, moved = [], []
    for before, after in run.steps:
        update = after - before
        new = stored(value + update, format_name)
        stays.append(new == value)
        moved.append(update != 0)
        value = new
    lost = frac(torch.stack(stays), torch.stack(moved))
    verdict: StoredVerdict = "needs_fp32" if lost > SWAMPED_FRAC else "fine"
    return StoredFault(
        part="buffers", name=run.name, format=format_name, verdict=verdict,
        reason=f"{percent(lost)} of what {len(run.steps)} passes add to it is below half a spacing of {format_name}",
        numbers={"lost_update_frac": lost},
    )  # fmt: skip
