import json
import math
from dataclasses import replace

from autoprec.analysis import LossScaleAdvice, Storage
from autoprec.analysis.stored_values import StoredFault
from autoprec.report.storage_json import storage_json
from autoprec.report.storage_view import scale_sentence, storage_verdicts

FORMATS = ("fp16", "bf16")
ADVICE = LossScaleAdvice(
    format="fp16", needed=True, initial=1024.0, flush_frac=0.5, subnormal_frac=0.6, scaled_flush_frac=0.25,
    max_abs=0.1, minimum=256.0, maximum=8192.0,
)  # fmt: skip


def fault(name: str, part: str, format_name: str, verdict: str, number: float = 0.5) -> StoredFault:
    return StoredFault(
        part=part,
        name=name,
        format=format_name,
        verdict=verdict,
        reason=f"{name} is off",
        numbers={"step_error": number},
    )


STORAGE = Storage(
    optimizer="Adam", measured=True, lr=1e-3, eps=1e-8, second_moment_decay=0.999, parameters=(), buffers=(),
    num_steps=3,
    faults=(
        fault("a", "gradients", "fp16", "fine"), fault("a", "gradients", "bf16", "needs_fp32"),
        fault("a", "exp_avg_sq", "fp16", "needs_fp32", 0.2), fault("b", "exp_avg_sq", "fp16", "needs_fp32", math.inf),
        fault("c", "exp_avg_sq", "fp16", "fine"), fault("a", "parameters", "bf16", "needs_master"),
    ),
)  # fmt: skip


def test_each_part_that_was_measured_has_a_line() -> None:
    assert tuple(storage_verdicts(STORAGE, FORMATS)) == (
        ("measured in 3 steps", "fp16", "bf16"),
        ("gradients, summed", "fine", "needs FP32: 1 of 1"),
        ("exp_avg_sq", "needs FP32: 2 of 3", "-"),
        ("parameters", "-", "needs FP32 masters: 1 of 1"),
    )


def test_nothing_measured_is_nothing_said() -> None:
    assert tuple(storage_verdicts(replace(STORAGE, faults=()), FORMATS)) == ()


def test_the_worst_tensor_speaks_for_a_part() -> None:
    (part,) = [each for each in STORAGE.parts() if each.part == "exp_avg_sq"]
    assert (part.names, part.reason, part.num_tensors) == (("b", "a"), "b is off", 3)


def test_json_has_no_infinity() -> None:
    found = storage_json(STORAGE, ("fp32", *FORMATS))
    json.dumps(found, allow_nan=False)
    assert [each["numbers"]["step_error"] for each in found["measurements"]][3] is None
    assert found["verdicts"][2] == {
        "part": "exp_avg_sq", "format": "fp16", "verdict": "needs_fp32", "names": ["b", "a"], "num_tensors": 3,
        "reason": "b is off",
    }  # fmt: skip


def test_the_loss_scale_sentence_says_what_it_saves_and_its_bounds() -> None:
    assert scale_sentence(ADVICE) == (
        "needed, from 1,024: 50.00% of the parameter gradients' elements become 0, the largest is 0.1; with it 25.00%; "
        "2**8 or more keeps them, more than 2**13 overflows"
    )


def test_where_no_scale_helps_the_site_is_named() -> None:
    sentence = scale_sentence(replace(ADVICE, forward_overflow=("income.0:linear#0",)))
    assert sentence == "none helps until income.0:linear#0 is in FP32: it overflows in the forward pass"


def test_fp8_needs_none() -> None:
    sentence = scale_sentence(replace(ADVICE, needed=False, per_tensor=True))
    assert sentence == "not needed: every tensor carries a scale, with which 25% become 0"
