import json
from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec.capture import record
from autoprec.errors import PolicyError
from autoprec.graph.site import Site
from autoprec.runtime import apply
from autoprec.workload import Workload
from autoprec.workload.origin import is_users, origin

HERE = Path(__file__)


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_users_line_is_found_below_library_frames():
    error = raised(lambda: torch.ones(2) @ torch.ones(3))
    assert is_users(error)
    assert origin(error).split(":")[0].endswith("test_origin.py")


def test_a_library_called_by_the_user_is_the_users():
    assert is_users(raised(lambda: json.loads("{")))


class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 4)

    def forward(self, x):
        return self.linear(x)


def test_an_op_that_fails_while_autoprec_runs_it_for_the_user_is_the_users():
    task = Workload(model=Broken, batches=lambda: [torch.ones(2, 8)], loss=lambda m, x: m(x).sum())
    error = raised(lambda: record(task))
    assert is_users(error)
    assert origin(error).split(":")[0].endswith("test_origin.py")
    for model in (Broken(), nn.Sequential(nn.Conv1d(2, 2, 1)), nn.Sequential(nn.LayerNorm(2))):
        apply(model, "autocast-bf16")
        assert is_users(raised(lambda model=model: model(torch.ones(2, 8, 8, 8))))


def test_what_autoprec_raises_is_not_the_users():
    assert not is_users(raised(lambda: Site.parse("nonsense")))


def test_a_frame_in_the_named_file_is_preferred(tmp_path):
    other = tmp_path / "other.py"
    other.write_text("def fail():\n    raise ValueError('x')\n")
    namespace = {}
    exec(compile(other.read_text(), str(other), "exec"), namespace)
    error = raised(namespace["fail"])
    assert origin(error).endswith("other.py:2")
    assert Path(origin(error, HERE).rpartition(":")[0]).name == HERE.name


def test_a_syntax_error_comes_from_its_own_line():
    error = raised(lambda: compile("x = 1\ny = (", "some.py", "exec"))
    assert origin(error).endswith("some.py:2")


def test_an_exception_without_a_traceback_comes_from_nowhere():
    assert origin(PolicyError("x")) == ""
    assert not is_users(PolicyError("x"))


def test_a_path_below_the_current_folder_is_shown_relative(monkeypatch, tmp_path):
    error = raised(lambda: 1 / 0)
    monkeypatch.chdir(HERE.parent)
    assert origin(error).startswith("test_origin.py:")
    monkeypatch.chdir(tmp_path)
    assert origin(error).startswith(str(HERE.parent))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2)])
def test_exceptions_of_every_kind_are_taken(error):
    assert origin(error) == ""
