from dataclasses import replace

from autoprec.analysis.classes import static_marks
from autoprec.analysis.constants import constant_marks, lost_constants
from autoprec.analysis.diagnosis import Diagnosis, diagnosis_marks
from autoprec.analysis.faults import FormatCheck
from autoprec.analysis.findings import Finding, findings_of
from autoprec.analysis.kernel_faults import KernelFault
from autoprec.analysis.loss_scale import LossScaleAdvice
from autoprec.analysis.low_step import Damage
from autoprec.analysis.marks import Mark, Reason, ReasonCode, merge
from autoprec.analysis.repair import Repair
from autoprec.analysis.storage import Storage, StoredParameter
from autoprec.analysis.stored_values import StoredFault
from autoprec.graph.site import Site
from autoprec.numerics import FORMATS
from tests.op_graphs import chain, node

GRAPH = chain(
    node("a", "frobnicate"), node("b", "add", constants=(1e-8,)), node("c", "masked_fill", constants=(-1e9,)),
    node("d", "exp"),
)  # fmt: skip
QUIET = Storage(
    optimizer="SGD", measured=True, lr=0.1, eps=None, second_moment_decay=None, parameters=(), buffers=()
)  # fmt: skip


FILL, EXP, ADD = Site("", "masked_fill", 0), Site("", "exp", 0), Site("", "add", 0)


def diagnosis(*chains: tuple[Site, ...], faults: tuple[KernelFault, ...] = ()) -> Diagnosis:
    """Return the diagnosis of a step that is broken in fp16 unless the sites of `chains` are FP32."""
    sites = tuple(site for each in chains for site in each)
    causes = {
        site: Reason(code=code, detail=f"{site.op} breaks; the gradient is off")
        for site, code in zip(
            sites, (ReasonCode.OVERFLOW_INSIDE, ReasonCode.READS_OVERFLOW, ReasonCode.OVERFLOW), strict=False
        )
    }
    repair = Repair(format="fp16", sites=sites, error=0.0, alone={}, num_steps=9, is_minimal=True)
    return Diagnosis(
        format="fp16", num_sites=4, repair=repair if sites else None, causes=causes, chains=chains,
        kernel_faults=faults,
        check=FormatCheck(format="fp16", damage=Damage(loss_error=1.0, gradient_error=1.0), batch=0, floor=0.0),
    )  # fmt: skip


FAULT = KernelFault(
    site=ADD, format="fp16", parameter="shift", error=0.5, ideal_error=0.01, alone=0.5, numel=4096
)  # fmt: skip


def marks(*diagnoses: Diagnosis) -> tuple[Mark, ...]:
    static = (*static_marks(GRAPH, ("fp16",), "cpu"), *constant_marks(lost_constants(GRAPH, ("fp16",))))
    return merge((*static, *(mark for each in diagnoses for mark in diagnosis_marks(each))))


def advice(*, needed: bool) -> LossScaleAdvice:
    return LossScaleAdvice(
        format="fp16", needed=needed, initial=2.0**21, flush_frac=0.1, subnormal_frac=0.2, scaled_flush_frac=0.0,
        max_abs=1e-3, lost=(("stem:conv2d#0", 1.0), ("mid:conv2d#0", 0.5)),
    )  # fmt: skip


def find(
    storage: Storage = QUIET, *diagnoses: Diagnosis, needed: bool = False, matches: bool = True
) -> tuple[Finding, ...]:
    return findings_of(marks(*diagnoses), diagnoses, (advice(needed=needed),), storage, replay_matches=matches)


def test_the_most_harmful_comes_first() -> None:
    found = find(QUIET, diagnosis((FILL, EXP)), needed=True, matches=False)
    assert [(each.severity, each.code) for each in found] == [
        ("error", "overflow_inside"),
        ("warning", "replay_differs"),
        ("warning", "gradients_underflow"),
        ("note", "unknown_op"),
        ("note", "guard_vanishes"),
    ]


def test_ops_that_are_fp32_by_default_are_no_finding() -> None:
    assert all(each.site != ":exp#0" for each in find())


def test_a_finding_says_what_to_write_into_the_policy() -> None:
    (error,) = errors(diagnosis((FILL,)))
    assert (error.site, error.message) == (":masked_fill#0", "fp16: masked_fill breaks; the gradient is off")
    assert error.fix.startswith('keep it in FP32: {sites: ":masked_fill#0", format: fp32}; or write torch.finfo')


def errors(*diagnoses: Diagnosis) -> list[Finding]:
    return [each for each in find(QUIET, *diagnoses) if each.severity == "error"]


def test_an_error_offers_what_to_write_instead_of_the_lost_constants_of_its_chain() -> None:
    (error,) = errors(diagnosis((EXP, ADD)))
    assert error.fix.endswith("; or use an eps that the format holds, or add it outside of the low region")
    (other,) = errors(diagnosis((EXP,)))
    assert other.fix == 'keep it in FP32: {sites: ":exp#0", format: fp32}'


def test_the_limit_of_fp32_is_not_to_be_written_as_what_it_may_be_written_as() -> None:
    graph = chain(node("c", "masked_fill", constants=(-FORMATS["fp32"].max,)))
    found = constant_marks(lost_constants(graph, ("fp16",)))
    broken = diagnosis((FILL,))
    said = findings_of(found, (broken,), (advice(needed=False),), QUIET, replay_matches=True)
    assert [each.fix for each in said if each.severity == "error"] == [
        'keep it in FP32: {sites: ":masked_fill#0", format: fp32}'
    ]


def test_a_chain_is_one_finding_where_it_begins_that_names_the_readers() -> None:
    first, second = errors(diagnosis((FILL, EXP), (ADD,)))
    assert (first.site, first.code, second.site) == (":masked_fill#0", "overflow_inside", ":add#0")
    assert ", and with it :exp#0, which read what it makes" in first.fix
    assert second.fix == (
        'keep it in FP32: {sites: ":add#0", format: fp32}; '
        "or use an eps that the format holds, or add it outside of the low region"
    )


def test_a_wrong_kernel_is_an_error_of_its_own() -> None:
    (error,) = errors(diagnosis(faults=(FAULT,)))
    assert (error.code, error.site) == ("kernel_wrong", ":add#0")
    assert error.message.startswith("on this device its fp16 kernel gets the gradient of shift wrong by 50%")
    assert error.fix == 'keep it in FP32: {sites: ":add#0", format: fp32}'


def test_a_constant_that_does_harm_is_no_note_beside_its_error() -> None:
    found = [each for each in find(QUIET, diagnosis((ADD,))) if each.site == ":add#0"]
    assert [each.severity for each in found] == ["error"]
    (note,) = [each for each in find() if each.site == ":add#0"]
    assert (note.severity, note.message) == ("note", "1e-08 becomes 0 in fp16; no harm on the recorded batches")
    assert all("no harm" not in each.message for each in found)


def test_an_overflow_that_no_scale_helps_is_told_once() -> None:
    overflows = replace(advice(needed=False), forward_overflow=(str(EXP),))

    def said(*diagnoses: Diagnosis) -> list[tuple[str, str]]:
        found = findings_of(marks(*diagnoses), diagnoses, (overflows,), QUIET, replay_matches=True)
        return [(each.severity, each.code) for each in found if each.site == str(EXP)]

    assert said() == [("warning", "forward_overflow")]
    assert said(diagnosis((EXP,))) == [("error", "overflow_inside")]


def test_an_underflow_names_the_worst_site_and_the_scale() -> None:
    (warning,) = [each for each in find(needed=True) if each.severity == "warning"]
    assert warning.site == "stem:conv2d#0"
    assert warning.message == "without a loss scale its gradient loses 100% of its norm in fp16; so do 1 others"
    assert warning.fix == "loss_scale: {kind: dynamic, initial: 2097152}"


def test_storage_findings_carry_the_names_they_are_about() -> None:
    names = tuple(f"norm{index}.weight" for index in range(8))
    storage = replace(
        QUIET,
        parameters=tuple(
            StoredParameter(name=name, shape=(4,), num_elements=4, num_state_elements=8, lost_update_frac={"fp16": 1.0})
            for name in names
        ),
        faults=tuple(
            StoredFault(
                part="parameters", name=name, format="fp16", verdict="needs_master", reason="it stays",
                numbers={"lost_update_frac": 1.0},
            )
            for name in names
        ),
    )  # fmt: skip
    (found,) = [each for each in find(storage) if each.names]
    assert (found.code, found.severity, found.names) == ("weights_do_not_move", "warning", names)
    assert "norm5.weight and 2 more" in found.message


def test_quiet_means_quiet() -> None:
    assert findings_of((), (), (advice(needed=False),), QUIET, replay_matches=True) == ()
