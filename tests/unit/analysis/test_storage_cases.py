"""The models in tests/cases whose fault lies in storage or in the loss scale, and what must be said of them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from autoprec.analysis import Finding, Inspection, inspect_recordings
from autoprec.capture import record
from autoprec.graph.site import Site
from autoprec.runtime.device import describe
from autoprec.workload import load

CASES = Path(__file__).parents[2] / "cases"


@cache
def inspected(name: str) -> Inspection:
    workload = load(str(CASES / f"{name}.py")).workload
    return inspect_recordings((record(workload),), workload, ("fp16", "bf16"), describe("cpu"))


def gradient_of(name: str, site: Site) -> torch.Tensor:
    """Return the gradient of a site's result in FP32."""
    found: list[torch.Tensor] = []

    def watch(node: fx.Node, value: Any) -> None:
        if node.meta.get("site") == site:
            value.register_hook(found.append)

    record(load(str(CASES / f"{name}.py")).workload).replay(watch).backward()
    (gradient,) = found
    return gradient


def rounding(tensor: torch.Tensor) -> float:
    """Return by how much fp16 is off, as a fraction of the norm."""
    return float((tensor.half().float() - tensor).norm() / tensor.norm())


def finding(name: str, code: str, format_name: str) -> Finding | None:
    said = [each for each in inspected(name).findings if each.code == code and format_name in each.message]
    return said[0] if said else None


@pytest.mark.parametrize(
    ("case", "code", "names"),
    [
        ("bf16-weights-never-move", "weights_do_not_move", {"norm.weight", "out_norm.weight", "logit_scale"}),
        ("invfreq-buffer-cast", "buffer_rounding_harms", {"rotary.inv_freq"}),
        ("bn-stats-bf16-stall", "statistics_stall", {"norm.running_mean", "norm.running_var"}),
    ],
)
def test_the_culprits_are_named_and_nobody_else(case: str, code: str, names: set[str]) -> None:
    found = finding(case, code, "bf16")
    assert found is not None
    assert (found.severity, set(found.names)) == ("warning", names)
    assert all(name in found.message for name in names)


@pytest.mark.parametrize("case", ["invfreq-buffer-cast", "bn-stats-bf16-stall"])
def test_buffers_that_fp16_can_hold_are_not_named(case: str) -> None:
    assert finding(case, "buffer_rounding_harms", "fp16") is None
    assert finding(case, "statistics_stall", "fp16") is None


def test_a_frozen_second_moment_is_told_from_a_first_one_that_is_fine() -> None:
    found = finding("adam-v-frozen-bf16", "second_moment_freezes", "bf16")
    assert found is not None
    assert len(found.names) == 10
    assert "exp_avg_sq" in found.message
    parts = {(each.part, each.format): each.verdict for each in inspected("adam-v-frozen-bf16").storage.parts()}
    assert parts["exp_avg", "bf16"] == "fine"


def test_an_eps_that_vanishes_breaks_the_rows_without_gradient() -> None:
    found = finding("adam-eps-half", "optimizer_eps_vanishes", "fp16")
    assert found is not None
    assert "embed.weight" in found.names
    assert "0 / 0" in found.message
    assert "eps to 0.001 or more" in found.fix
    assert finding("adam-eps-half", "optimizer_eps_vanishes", "bf16") is None


def test_micro_batches_that_get_lost_are_seen_in_bf16_only() -> None:
    found = finding("grad-accumulation-bf16", "accumulation_swamped", "bf16")
    assert found is not None
    assert len(found.names) == 10
    assert finding("grad-accumulation-bf16", "accumulation_swamped", "fp16") is None


def test_gradients_that_underflow_need_a_scale_in_fp16_and_none_in_bf16() -> None:
    fp16, bf16 = inspected("fp16-grad-underflow").advice
    assert (fp16.needed, bf16.needed) == (True, False)
    # of the gradient that needs most, the scale leaves a twentieth off or so, half the scale twice that
    gradient = gradient_of("fp16-grad-underflow", Site("mid", "conv2d", 0))
    half, full = (rounding(gradient * scale) for scale in (fp16.minimum / 2, fp16.minimum))
    assert full < 0.06
    assert half > 0.09
    assert 1 < fp16.minimum <= fp16.initial <= fp16.maximum
    assert fp16.scaled_flush_frac == 0
    assert fp16.saved_frac == fp16.flush_frac > 0.02


def test_a_collapse_that_no_scale_helps_is_told_apart() -> None:
    fp16, bf16 = inspected("scale-collapse-forward-inf").advice
    assert (fp16.forward_overflow, bf16.forward_overflow) == (("income.0:linear#0",), ())
    said = [each for each in inspected("scale-collapse-forward-inf").findings if each.site == "income.0:linear#0"]
    assert ("reads_overflow", "error") in [(each.code, each.severity) for each in said]
    assert "forward_overflow" not in [each.code for each in said]  # which would say the same again


def test_gradients_that_the_loss_takes_itself_are_known() -> None:
    advice = inspected("gradient-penalty-double-backward").advice[0]
    seen: list[torch.Tensor] = []
    recording = record(load(str(CASES / "gradient-penalty-double-backward.py")).workload)
    recording.replay(lambda node, value: seen.append(value[0]) if node.meta.get("op") == "grad" else None)
    (taken,) = seen
    assert advice.inner_max_abs == pytest.approx(taken.abs().max().item())
    assert inspected("fp16-grad-underflow").advice[0].inner_max_abs is None
