"""The `storage` and `loss_scale` sections of an inspection's JSON. Numbers that are not finite are null."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autoprec.analysis.inspection import Inspection
from autoprec.analysis.loss_scale import HEADROOM, GradientHistograms, LossScaleAdvice
from autoprec.analysis.short_run import NUM_MICRO_BATCHES, NUM_SAMPLED
from autoprec.analysis.storage import STORED_PARTS, Storage
from autoprec.numerics import format_named


def storage_json(storage: Storage, formats: Sequence[str]) -> dict[str, Any]:
    """Return what a run stores, the verdict on each part, and what was measured of each tensor."""
    return {
        "measured": storage.measured,
        "optimizer": storage.optimizer,
        "lr": storage.lr,
        "bytes": {part: {name: storage.num_bytes(part, name) for name in formats} for part in STORED_PARTS},
        "parameters": [
            {
                "name": each.name,
                "shape": list(each.shape),
                "bytes": _sizes(each.num_elements, formats),
                "gradient_bytes": _sizes(each.num_elements, formats),
                "optimizer_state_bytes": _sizes(each.num_state_elements, formats),
                "lost_update_frac": dict(each.lost_update_frac),
            }
            for each in storage.parameters
        ],
        "buffers": [
            {
                "name": each.name,
                "shape": list(each.shape),
                "bytes": _sizes(each.num_elements, formats),
                "momentum": each.momentum,
            }
            for each in storage.buffers
        ],
        "num_steps": storage.num_steps,
        "num_micro_batches": NUM_MICRO_BATCHES,
        "num_sampled": NUM_SAMPLED,
        "verdicts": [{**asdict(each), "names": list(each.names)} for each in storage.parts()],
        "measurements": [{**asdict(each), "numbers": _finite(each.numbers)} for each in storage.faults],
        "cast_optimizer": [_finite({**asdict(each), "eps_vanishes": each.eps_vanishes}) for each in storage.cast],
        "averages": [asdict(each) for each in storage.averages],
        "average_moves": [asdict(each) for each in storage.average_moves],
        "not_followed": list(storage.not_followed),
    }


def loss_scale_json(inspection: Inspection, gradients: GradientHistograms) -> dict[str, Any]:
    """Return the advice for each format, and the histogram of all parameter gradients."""
    counts: Counter[int] = Counter()
    for histogram in gradients.parameters.values():
        counts.update(dict(histogram.counts))
    return {
        "measured": True,
        "headroom": HEADROOM,
        "formats": {each.format: _advice_json(each) for each in inspection.advice},
        "histogram": [{"exponent": exponent, "count": counts[exponent]} for exponent in sorted(counts)],
        "num_zero": sum(each.num_zero for each in gradients.parameters.values()),
        "num_nonfinite": sum(each.num_nonfinite for each in gradients.parameters.values()),
    }


def _advice_json(advice: LossScaleAdvice) -> dict[str, Any]:
    fields = asdict(advice)
    fields["lost"] = [{"site": site, "norm_frac": frac} for site, frac in advice.lost]
    fields["overflowing"] = list(advice.overflowing)
    fields["forward_overflow"] = list(advice.forward_overflow)
    fields["saved_frac"] = advice.saved_frac
    fields["fits"] = advice.fits
    del fields["format"]
    return fields


def _sizes(num_elements: int, formats: Sequence[str]) -> dict[str, int]:
    return {name: num_elements * format_named(name).storage_bits // 8 for name in formats}


def _finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(n, float) and not math.isfinite(n) else n for key, n in numbers.items()}
