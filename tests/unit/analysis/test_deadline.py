"""Deadlines, and what analyses leave out at them."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.analysis import run_backward
from autoprec.analysis.deadline import NEVER, Deadline, after
from autoprec.analysis.marking import mark_recordings
from autoprec.capture import record
from autoprec.runtime.device import describe
from tests.unit.search import mlp


class Clock:
    """A clock that goes on by a second each time that it is read."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        self.s += 1
        return self.s


def test_a_deadline_is_over_when_its_time_has_come() -> None:
    now = [5.0]
    deadline = after(2.0, lambda: now[0])
    assert not deadline.is_over
    now[0] = 7.0
    assert deadline.is_over
    assert not NEVER.is_over


def marked(deadline: Deadline) -> Any:
    recording = record(mlp.workload(), device="cpu", seed=0)
    gradients = run_backward((recording,))
    recording.model.zero_grad(set_to_none=True)
    return mark_recordings((recording,), ("bf16", "fp16"), describe("cpu"), gradients, deadline=deadline)


def test_without_time_the_classes_of_ops_speak_and_what_was_left_out_is_said() -> None:
    none, whole = marked(Deadline(at=-math.inf)), marked(NEVER)
    assert none.diagnoses == ()
    assert none.left_out == tuple(
        f"{name}: what it breaks; the classes of ops say what stays in fp32" for name in ("bf16", "fp16")
    )
    assert {mark.verdict for mark in none.marks} <= {"free", "prefer"}
    assert (len(whole.diagnoses), whole.left_out) == (2, ())


def test_a_format_that_is_begun_is_checked_and_the_next_is_not() -> None:
    found = marked(Deadline(at=2.0, now=Clock()))
    assert [each.format for each in found.diagnoses] == ["bf16"]
    assert found.left_out == (
        "bf16: whether all kernels of this device are right",
        "fp16: what it breaks; the classes of ops say what stays in fp32",
    )


def test_a_repair_that_is_not_narrowed_down_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec.analysis import diagnosis

    repair = SimpleNamespace(sites=(), is_minimal=False, alone={})
    check = SimpleNamespace(is_broken=True, batch=0, damage=SimpleNamespace(loss_scale=1.0))
    monkeypatch.setattr(diagnosis, "check_format", lambda *_: check)
    monkeypatch.setattr(diagnosis, "find_repair", lambda *arguments: repair if arguments[-1].is_over else None)
    monkeypatch.setattr(diagnosis, "_causes", lambda *_: {})
    reference = SimpleNamespace(recording=SimpleNamespace(op_graph=SimpleNamespace(calls=lambda: ())))
    fmt: Any = SimpleNamespace(name="fp16")
    found = diagnosis.diagnose([reference], fmt, deadline=Deadline(at=-math.inf))  # type: ignore[list-item]
    assert found.left_out[0] == "fp16: which of 0 sites break the step; all of them stay in fp32"
