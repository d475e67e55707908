import math
from dataclasses import replace

import pytest

from autoprec.analysis import (
    Finding,
    GradientHistograms,
    Inspection,
    LossScaleAdvice,
    Mark,
    Reason,
    ReasonCode,
    Storage,
    StoredParameter,
    static_marks,
)
from autoprec.analysis.diagnosis import Diagnosis
from autoprec.analysis.faults import FormatCheck
from autoprec.analysis.kernel_faults import KernelFault
from autoprec.analysis.low_step import Damage
from autoprec.analysis.repair import Repair
from autoprec.graph.opgraph import OpGraph
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.report.inspect_view import FindingRow, InspectView, KeptOps, inspect_view, short_source
from tests.op_graphs import chain, node

FORMATS = ("fp16", "bf16")
BLOCKS = [
    node(f"{op}{block}", op, module=f"blocks.{block}")
    for block in range(3)
    for op in ("linear", "exp", "mul", "add", "matmul")
]
GRAPH = OpGraph(
    chain(*BLOCKS, node("mean", "mean"), node("loss", "mse_loss", module=LOSS_MODULE)).digraph,
    {f"blocks.{block}": "Block" for block in range(3)},
)


def advice(name: str, *, needed: bool = False) -> LossScaleAdvice:
    return LossScaleAdvice(
        format=name, needed=needed, initial=4096.0, flush_frac=0.0123, subnormal_frac=0.1, scaled_flush_frac=0.0,
        max_abs=0.5,
    )  # fmt: skip


STORAGE = Storage(
    optimizer="AdamW", measured=True, lr=1e-3, eps=1e-8, second_moment_decay=0.999, buffers=(),
    parameters=(
        StoredParameter(
            name="weight", shape=(1024, 768), num_elements=1024 * 768, num_state_elements=2 * 1024 * 768,
            lost_update_frac={},
        ),
    ),
)  # fmt: skip


def view(
    *findings: Finding, marks: tuple[Mark, ...] = (), every_site: bool = False, storage: Storage = STORAGE,
    diagnoses: tuple[Diagnosis, ...] = (),
) -> InspectView:  # fmt: skip
    inspection = Inspection(
        formats=FORMATS, op_graph=GRAPH, num_batches=3, replay_matches=True, fp32_error=0.0, diagnoses=diagnoses,
        marks=marks or static_marks(GRAPH, FORMATS, "cpu"),
        gradients=GradientHistograms(parameters={}, activations={}),
        advice=(advice("fp16", needed=True), advice("bf16")), storage=storage, findings=findings,
    )  # fmt: skip
    return inspect_view(inspection, workload="net", device="cpu (test)", every_site=every_site)


def finding(site: str, severity: str = "error", fmt: str = "fp16") -> Finding:
    return Finding(
        code="guard_vanishes", severity=severity, site=site, message=f"lost in {fmt}", fix=f'sites: "{site}"'
    )  # fmt: skip


def test_layers_of_one_pattern_share_a_row_in_order_of_execution() -> None:
    rows = [(row.name, row.num_layers, row.num_sites) for row in view().layers]
    assert rows == [("blocks.*", 3, 15), ("(root)", 1, 1), ("(loss code)", 1, 1)]


def test_ops_that_are_kept_for_one_reason_share_a_line() -> None:
    exp, after = view().layers[0].kept
    assert (exp.ops, exp.verdict, exp.formats) == ("exp#0", "prefer", "")
    assert exp.why.startswith("exp overflows fp16 above 11.1")
    assert after == KeptOps(
        ops="mul#0, add#0", verdict="prefer", formats="", why="after exp#0, FP32 by default", source="model.py:4"
    )


def test_a_verdict_in_some_formats_only_says_in_which() -> None:
    site = Site("blocks.1", "add", 0)
    reason = Reason(code=ReasonCode.GUARD_VANISHES, detail="1e-08 becomes 0 in fp16; no harm")
    marks = tuple(
        Mark(site=each, format=fmt, verdict="must", reasons=(reason,))
        if (each, fmt) == (site, "fp16")
        else Mark(site=each, format=fmt, verdict="free")
        for each in GRAPH.sites()
        for fmt in FORMATS
    )
    (kept,) = view(marks=marks).layers[0].kept
    assert (kept.ops, kept.verdict, kept.formats, kept.why) == ("add#0", "must", "fp16", "1e-08 becomes 0 in fp16")
    assert view(marks=marks).verdicts == (
        ("", "must", "prefer", "free"),
        ("fp16", "1", "0", "16"),
        ("bf16", "0", "0", "17"),
    )


def test_every_site_can_have_a_line_of_its_own() -> None:
    rows = view(every_site=True).layers
    assert [row.name for row in rows] == [str(site) for site in GRAPH.sites()]


def test_findings_about_layers_of_one_pattern_and_in_several_formats_are_told_once() -> None:
    sites = [f"blocks.{block}:add#0" for block in range(3)]
    found = [finding(site, fmt=fmt) for site in sites for fmt in FORMATS]
    assert view(*found).findings == (
        FindingRow(
            severity="error", where="blocks.*:add#0 (3 sites)", message="lost in fp16\nlost in bf16",
            fix='sites: "blocks.*:add#0"',
        ),
    )  # fmt: skip


def test_a_finding_at_one_site_of_a_pattern_does_not_ask_for_all_of_them() -> None:
    (row,) = view(finding("blocks.1:add#0")).findings
    assert (row.where, row.fix) == ("blocks.1:add#0", 'sites: "blocks.1:add#0"')


def test_notes_on_storage_stand_with_storage() -> None:
    note = Finding(code="weights_do_not_move", severity="note", site="", message="they stay", fix="keep FP32")
    shown = view(note)
    assert (shown.findings, shown.storage_notes) == ((), ("they stay; keep FP32",))


def test_warnings_on_storage_stand_there_too() -> None:
    warning = Finding(code="statistics_stall", severity="warning", site="", message="they stall", fix="keep FP32")
    assert (view(warning).findings, view(warning).storage_notes) == ((), ("they stall; keep FP32",))


def test_the_headline_says_how_many_sites_each_format_needs_in_fp32() -> None:
    assert view().headline == "net on cpu (test): 17 sites"  # nothing was run
    broken, healthy = diagnosis(0.5, 0.01, faults=2), replace(diagnosis(0.0123), format="fp16")
    assert view(diagnoses=(healthy, broken)).headline == (
        "net on cpu (test): 17 sites; fp16 breaks none; bf16 needs 2 of them in FP32"
    )


def test_the_loss_scale_is_a_sentence() -> None:
    facts = dict(view().facts)
    assert facts["loss scale fp16"] == (
        "needed, from 4,096: 1.23% of the parameter gradients' elements become 0, the largest is 0.5; with it 0.00%; "
        "1 or more keeps them, more than 2**24 overflows"
    )
    assert facts["loss scale bf16"].startswith("not needed: ")


def test_sizes_have_units() -> None:
    assert view().storage == (
        ("stored in", "fp32", "fp16", "bf16"),
        ("parameters", "3 MiB", "1.5 MiB", "1.5 MiB"),
        ("gradients", "3 MiB", "1.5 MiB", "1.5 MiB"),
        ("optimizer state (AdamW)", "6 MiB", "3 MiB", "3 MiB"),
        ("buffers", "0 B", "0 B", "0 B"),
    )


def test_state_that_was_not_measured_is_unknown() -> None:
    storage = Storage(
        optimizer="LBFGS", measured=False, lr=1.0, eps=None, second_moment_decay=None, parameters=(), buffers=()
    )  # fmt: skip
    assert view(storage=storage).storage[3] == ("optimizer state (LBFGS)", "unknown", "unknown", "unknown")


def test_a_source_line_loses_its_folders() -> None:
    assert short_source("/home/me/model.py:12") == "model.py:12"
    assert short_source("C:\\me\\model.py:12") == "model.py:12"
    assert short_source("") == ""


SITE = Site("blocks.1", "exp", 0)
FAULT = KernelFault(
    site=Site("blocks.1", "add", 0), format="bf16", parameter="w", error=0.5, ideal_error=0.01, alone=0.5, numel=9
)  # fmt: skip


def diagnosis(error: float, left: float | None = None, *, is_minimal: bool = True, faults: int = 0) -> Diagnosis:
    """Return the diagnosis of a step that is off by `error`, and by `left` with one site in FP32."""
    repair = None
    if left is not None:
        repair = Repair(format="bf16", sites=(SITE,), error=left, alone={}, num_steps=9, is_minimal=is_minimal)
    check = FormatCheck(format="bf16", damage=Damage(loss_error=0.0, gradient_error=error), batch=0, floor=0.0)
    return Diagnosis(
        format="bf16", num_sites=1017, check=check, repair=repair, causes={}, chains=(), kernel_faults=(FAULT,) * faults
    )


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (diagnosis(0.0123), "does no harm: gradient off by 0.012 with everything low (allowed 0.14)"),
        (
            diagnosis(math.inf, 0.0345),
            "keep 1 of 1,017 sites in FP32: loss or gradient not finite with everything low (allowed 0.14), "
            "gradient off by 0.035 with these in FP32",
        ),
        (
            diagnosis(0.5, 0.2, is_minimal=False),
            "keep 1 of 1,017 sites in FP32: gradient off by 0.5 with everything low (allowed 0.14), gradient off by "
            "0.2 with these in FP32; the search for fewer ended early",
        ),
        (
            diagnosis(0.02, faults=2),
            "keep 1 of 1,017 sites in FP32, whose kernels are wrong here; gradient off by 0.02 with everything low "
            "(allowed 0.14)",
        ),
    ],
)
def test_a_diagnosis_is_a_sentence(found: Diagnosis, sentence: str) -> None:
    assert dict(view(diagnoses=(found,)).facts)["bf16"] == sentence
