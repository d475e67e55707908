from dataclasses import replace

from autoprec.analysis.classes import static_marks
from autoprec.analysis.constants import constant_marks, lost_constants
from autoprec.analysis.findings import Finding, findings_of
from autoprec.analysis.loss_scale import LossScaleAdvice
from autoprec.analysis.marks import Mark, merge
from autoprec.analysis.storage import Storage, StoredParameter
from autoprec.analysis.stored_values import StoredFault
from tests.op_graphs import chain, node

GRAPH = chain(
    node("a", "frobnicate"), node("b", "add", constants=(1e-8,)), node("c", "masked_fill", constants=(-1e9,)),
    node("d", "exp"),
)  # fmt: skip
QUIET = Storage(
    optimizer="SGD", measured=True, lr=0.1, eps=None, second_moment_decay=None, parameters=(), buffers=()
)  # fmt: skip


def marks() -> tuple[Mark, ...]:
    return merge((*static_marks(GRAPH, ("fp16",), "cpu"), *constant_marks(lost_constants(GRAPH, ("fp16",)))))


def advice(*, needed: bool) -> LossScaleAdvice:
    return LossScaleAdvice(
        format="fp16", needed=needed, initial=2.0**21, flush_frac=0.1, subnormal_frac=0.2, scaled_flush_frac=0.0,
        max_abs=1e-3, lost=(("stem:conv2d#0", 1.0), ("mid:conv2d#0", 0.5)),
    )  # fmt: skip


def find(storage: Storage = QUIET, *, needed: bool = False, matches: bool = True) -> tuple[Finding, ...]:
    return findings_of(marks(), (advice(needed=needed),), storage, replay_matches=matches)


def test_the_most_harmful_comes_first() -> None:
    found = find(needed=True, matches=False)
    assert [(each.severity, each.code) for each in found] == [
        ("error", "constant_overflows"),
        ("warning", "replay_differs"),
        ("warning", "gradients_underflow"),
        ("note", "unknown_op"),
        ("note", "guard_vanishes"),
    ]


def test_ops_that_are_fp32_by_default_are_no_finding() -> None:
    assert all(each.site != ":exp#0" for each in find())


def test_a_finding_says_what_to_write_into_the_policy() -> None:
    (error,) = [each for each in find() if each.severity == "error"]
    assert error.site == ":masked_fill#0"
    assert error.fix.startswith('keep it in FP32: {sites: ":masked_fill#0", format: fp32}; or write torch.finfo')


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
    assert findings_of((), (advice(needed=False),), QUIET, replay_matches=True) == ()
