"""What is known of a workload, as values that JSON can hold."""

import json
import math
from dataclasses import replace

import pytest

from autoprec.analysis import GradientHistograms, Inspection, LossScaleAdvice, Storage, static_marks
from autoprec.analysis.build_up import SiteError
from autoprec.analysis.diagnosis import Diagnosis, diagnosis_marks
from autoprec.analysis.faults import FormatCheck
from autoprec.analysis.findings import findings_of
from autoprec.analysis.kernel_faults import KernelFault
from autoprec.analysis.low_step import Damage
from autoprec.analysis.marks import Reason, ReasonCode, merge
from autoprec.analysis.repair import Repair
from autoprec.graph.site import Site
from autoprec.report.inspect_json import inspect_json
from tests.op_graphs import chain, node

GRAPH = chain(node("a", "linear"), node("b", "exp"), node("c", "sum"))
EXP = Site("", "exp", 0)
ADVICE = LossScaleAdvice(
    format="fp16", needed=False, initial=1.0, flush_frac=0.0, subnormal_frac=0.0, scaled_flush_frac=0.0, max_abs=0.5,
    lost=(), overflowing=(":exp#0",),
)  # fmt: skip
BROKEN = Diagnosis(
    format="fp16", num_sites=3, chains=((EXP,),),
    check=FormatCheck(
        format="fp16", batch=1, floor=0.01,
        damage=Damage(loss_error=math.inf, gradient_error=math.inf, loss_scale=64.0, raised="no kernel"),
    ),
    repair=Repair(format="fp16", sites=(EXP,), error=0.02, alone={EXP: math.nan}, num_steps=7, is_minimal=True),
    causes={EXP: Reason(code=ReasonCode.OVERFLOW, detail="exp gives 1e6", evidence={"max_output": 1e6})},
    kernel_faults=(
        KernelFault(
            site=Site("", "sum", 0), format="fp16", parameter="w", error=0.5, ideal_error=0.01, alone=0.4, numel=8
        ),
    ),
    errors=(
        SiteError(site=Site("", "linear", 0), first=0.001, last=0.25),
        SiteError(site=EXP, first=math.inf, last=math.inf),
    ),
)  # fmt: skip


def inspection(diagnosis: Diagnosis) -> Inspection:
    storage = Storage(
        optimizer="SGD", measured=True, lr=0.1, eps=None, second_moment_decay=None, parameters=(), buffers=()
    )  # fmt: skip
    marks = merge((*static_marks(GRAPH, ("fp16",), "cpu"), *diagnosis_marks(diagnosis)))
    return Inspection(
        formats=("fp16",), op_graph=GRAPH, num_batches=2, replay_matches=True, fp32_error=math.nan, marks=marks,
        diagnoses=(diagnosis,),
        gradients=GradientHistograms(parameters={}, activations={}), advice=(ADVICE,), storage=storage,
        findings=findings_of(marks, (diagnosis,), (ADVICE,), storage, replay_matches=True),
    )  # fmt: skip


def test_a_diagnosis_is_written_with_its_repair_and_its_wrong_kernels() -> None:
    found = inspect_json(inspection(BROKEN), workload="net", device={"kind": "cpu"})
    assert found["diagnoses"] == [
        {
            "format": "fp16", "num_sites": 3, "is_broken": True, "gradient_error": "inf", "loss_error": "inf",
            "raised": "no kernel", "loss_scale": 64.0, "allowed_error": BROKEN.check.limit, "floor": 0.01,
            "repair": {
                "sites": [":exp#0"], "chains": [[":exp#0"]], "gradient_error": 0.02, "num_steps": 7, "is_minimal": True,
            },
            "errors": [
                {"site": ":linear#0", "first": 0.001, "last": 0.25},
                {"site": ":exp#0", "first": "inf", "last": "inf"},
            ],
            "kernel_faults": [
                {
                    "site": ":sum#0", "format": "fp16", "parameter": "w", "error": 0.5, "ideal_error": 0.01,
                    "alone": 0.4, "numel": 8,
                }
            ],
        }
    ]  # fmt: skip


def test_must_sites_carry_the_reason() -> None:
    found = inspect_json(inspection(BROKEN), workload="net", device={})
    verdicts = {each["site"]: each["verdicts"]["fp16"] for each in found["sites"]}
    assert verdicts[":exp#0"]["verdict"] == verdicts[":sum#0"]["verdict"] == "must"
    assert verdicts[":exp#0"]["reasons"][0] == {
        "code": "overflow", "detail": "exp gives 1e6", "evidence": {"max_output": 1e6},
    }  # fmt: skip
    assert verdicts[":linear#0"]["verdict"] == "free"


def test_a_healthy_format_has_no_repair() -> None:
    check = replace(BROKEN.check, damage=Damage(loss_error=0.0, gradient_error=0.001))
    healthy = replace(BROKEN, repair=None, causes={}, chains=(), kernel_faults=(), check=check)
    (found,) = inspect_json(inspection(healthy), workload="net", device={})["diagnoses"]
    assert (found["is_broken"], found["repair"], found["kernel_faults"]) == (False, None, [])
    assert (found["gradient_error"], found["loss_error"]) == (0.001, 0.0)


@pytest.mark.parametrize("error", [math.inf, math.nan, 0.5])
def test_what_json_has_no_number_for_is_written_as_text(error: float) -> None:
    assert BROKEN.repair is not None
    found = replace(BROKEN, repair=replace(BROKEN.repair, error=error))
    text = json.dumps(inspect_json(inspection(found), workload="net", device={}), allow_nan=False)
    (diagnosis,) = json.loads(text)["diagnoses"]
    assert diagnosis["repair"]["gradient_error"] == (error if math.isfinite(error) else str(error))
