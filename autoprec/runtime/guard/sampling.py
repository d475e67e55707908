"""From what one rank saw to the sample that all ranks judge."""

import math
from collections.abc import Mapping, Sequence

from autoprec.policy import Policy
from autoprec.runtime.checkpoint import policy_hash
from autoprec.runtime.guard.looks import GradientLook, Movement, broken_parameter, checksum
from autoprec.runtime.guard.ranks import odd_one
from autoprec.runtime.guard.sample import Sample
from autoprec.runtime.guard.window import Window
from autoprec.runtime.precision import Precision

_AGREED = {"policy": "the policy", "step": "the number of steps", "weights": "the weights"}


def local_numbers(
    precision: Precision, window: Window, look: GradientLook, movement: Movement | None, *, replicated: bool
) -> tuple[Mapping[str, float], Mapping[str, str]]:
    """Return what this rank saw as numbers, the same names on every rank, and where it saw the worst."""
    frozen_parameter, frozen_frac = movement.frozen() if movement is not None else ("", 0.0)
    broken = broken_parameter(precision.model)
    flush_layer, layer_flush_frac = _worst(look.layers, look.flush)
    overflow_layer, _ = _worst(look.layers, look.overflow)
    scaler = precision.scaler
    scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    numbers = {
        "policy": float(int(policy_hash(precision.policy)[:12], 16)),
        "weights": checksum(precision.model) if replicated else 0.0,
        "loss_sum": window.loss_sum,
        "num_losses": float(len(window.losses) - window.num_bad_losses),
        "num_bad_losses": float(window.num_bad_losses),
        "num_bad_steps": float(window.num_untold),
        "skipped_frac": window.skipped_frac,
        "num_counted": float(window.num_counted),
        "in_row": float(window.in_row),
        "scale": scale,
        "flush_frac": _or_nan(look.flush_frac),
        "layer_flush_frac": layer_flush_frac,
        "overflow_frac": _or_nan(look.overflow_frac),
        "frozen_frac": frozen_frac,
        "broken": float(bool(broken)),
    }
    names = {"flush": flush_layer, "overflow": overflow_layer, "frozen": frozen_parameter, "broken": broken}
    return numbers, names


def merged(
    rows: Sequence[Mapping[str, float]],
    names: Mapping[str, str],
    policy: Policy,
    *,
    position: int,
    lowest_loss: float,
) -> Sample:
    """Return one sample of all ranks' numbers: sums and worst cases, so that it is the same everywhere."""
    num_losses = int(_sum(rows, "num_losses"))
    scaling = policy.loss_scale
    odd = odd_one(rows, _AGREED)
    scale = rows[0]["scale"]
    in_row = int(_max(rows, "in_row"))
    return Sample(
        position=position,
        loss_mean=_sum(rows, "loss_sum") / num_losses if num_losses else math.nan,
        num_losses=num_losses,
        lowest_loss=lowest_loss,
        num_bad_losses=int(_sum(rows, "num_bad_losses")),
        num_bad_steps=int(_max(rows, "num_bad_steps")),
        skipped_frac=_max(rows, "skipped_frac"),
        num_counted=int(_max(rows, "num_counted")),
        skipped_in_row=in_row,
        is_scaled=scaling.kind != "none",
        loss_scale=scale,
        minimum_scale=minimum_scale(policy),
        growth_interval=scaling.growth_interval,
        is_dynamic=scaling.kind == "dynamic",
        flush_frac=_or_none(_max(rows, "flush_frac")),
        layer_flush_frac=_or_none(_max(rows, "layer_flush_frac")),
        flush_layer=names["flush"],
        overflow_frac=_or_none(_max(rows, "overflow_frac")),
        overflow_layer=names["overflow"],
        frozen_frac=_max(rows, "frozen_frac"),
        frozen_parameter=names["frozen"],
        broken_parameter=names["broken"] or ("a parameter of another rank" if _max(rows, "broken") else ""),
        odd_rank=None if odd is None else odd[0],
        odd_what="" if odd is None else odd[1],
    )


def minimum_scale(policy: Policy) -> float:
    """Return the smallest loss scale that a policy allows; 0 where it scales no loss."""
    scaling = policy.loss_scale
    return {"none": 0.0, "static": scaling.initial, "dynamic": scaling.minimum}[scaling.kind]


def _worst(layers: Sequence[str], fractions: Sequence[float]) -> tuple[str, float]:
    if not fractions:
        return "", math.nan
    worst = max(range(len(fractions)), key=fractions.__getitem__)
    return layers[worst], fractions[worst]


def _sum(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return math.fsum(row[name] for row in rows)


def _max(rows: Sequence[Mapping[str, float]], name: str) -> float:
    known = [row[name] for row in rows if not math.isnan(row[name])]
    return max(known, default=math.nan)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
