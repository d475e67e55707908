import pickle
import sys
from textwrap import dedent

import pytest

from autoprec.errors import WorkloadError
from autoprec.workload import Workload, load

MINIMAL = """
import torch
import autoprec

def workload():
    return autoprec.Workload(model=lambda: torch.nn.Linear(2, 2), batches=lambda: [torch.ones(1, 2)])
"""


@pytest.fixture(autouse=True)
def _python_as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["autoprec", "tune", "--seed", "3"])
    modules = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(modules):
        if getattr(sys.modules[name], "__file__", None) is None or "pytest" in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.write_text(dedent(text))
        return path

    return write_file


def test_a_file_with_a_function_workload(write):
    path = write("tiny_net.py", MINIMAL)
    loaded = load(str(path))
    assert isinstance(loaded.workload, Workload)
    assert (loaded.name, loaded.path) == ("tiny_net", path)
    assert loaded.workload.model().weight.shape == (2, 2)


def test_a_named_function_and_a_named_value(write):
    path = write("tiny_net.py", MINIMAL + "\nsmall = workload\nvalue = workload()\n")
    assert load(f"{path}:small").name == "tiny_net-small"
    assert load(f"{path}:value").workload is sys.modules["tiny_net"].value


def test_workload_may_be_a_value(write):
    path = write("tiny_net.py", MINIMAL + "\nworkload = workload()\n")
    assert load(str(path)).workload is sys.modules["tiny_net"].workload


def test_a_relative_path_is_found_from_the_current_folder(write, tmp_path, monkeypatch):
    write("tiny_net.py", MINIMAL)
    monkeypatch.chdir(tmp_path)
    assert load("tiny_net.py").path == tmp_path / "tiny_net.py"


def test_a_training_script_behind_a_main_guard_is_not_run(write):
    path = write(
        "train_me.py",
        """
        import torch
        model = torch.nn.Linear(3, 1)
        train_loader = [(torch.ones(2, 3), torch.zeros(2, 1))]
        criterion = torch.nn.MSELoss()
        if __name__ == "__main__":
            raise RuntimeError("trained")
        """,
    )
    workload = load(str(path)).workload
    batch = next(iter(workload.batches()))
    assert workload.loss(workload.model(), batch).shape == ()


def test_siblings_import_while_the_file_runs_and_later(write):
    write("my_layers.py", "import torch\nNet = torch.nn.Identity\n")
    write("my_late_layers.py", "import torch\nNet = torch.nn.Tanh\n")
    path = write(
        "with_siblings.py",
        """
        import my_layers
        import autoprec
        def build():
            import my_late_layers
            return my_late_layers.Net()
        def workload():
            return autoprec.Workload(model=build, batches=list)
        """,
    )
    assert type(load(str(path)).workload.model()).__name__ == "Tanh"


def test_siblings_hide_no_module_that_is_imported_later(write, tmp_path):
    path = write("tiny_net.py", MINIMAL)
    load(str(path))
    assert sys.path[-1] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


def test_the_file_sees_no_arguments_of_autoprec(write):
    path = write("parses.py", MINIMAL + "\nimport sys\nseen = list(sys.argv)\n")
    load(str(path))
    assert sys.modules["parses"].seen == [str(path)]
    assert sys.argv == ["autoprec", "tune", "--seed", "3"]


@pytest.mark.parametrize("name", ["json.py", "networkx.py", "sys.py", "xxsubtype.py", "my-net.py"])
def test_a_file_named_like_a_module_hides_it_from_nobody(write, name):
    before = sys.modules.get(name.removesuffix(".py"))
    assert isinstance(load(str(write(name, MINIMAL))).workload, Workload)
    assert sys.modules.get(name.removesuffix(".py")) is before


def test_a_changed_file_is_run_again_and_its_classes_pickle(write):
    path = write("changing.py", MINIMAL)
    load(str(path))
    write("changing.py", MINIMAL + "\nclass New: pass\n")
    load(str(path))
    new = sys.modules["changing"].New()
    assert type(pickle.loads(pickle.dumps(new))) is type(new)


def test_a_file_that_offers_nothing_is_shown_ten_lines(write):
    path = write("empty.py", "batches = [1]\n")
    with pytest.raises(WorkloadError, match=r"lacks model or build_model\. Add these ten lines") as caught:
        load(str(path))
    lines = str(caught.value).split(":\n", 1)[1].strip("\n").splitlines()
    assert len(lines) == 10
    namespace: dict[str, object] = {}
    exec("\n".join(line[4:] for line in lines), namespace)
    assert callable(namespace["workload"])


def test_a_file_that_raises_is_blamed_at_its_line(write):
    path = write("raises.py", "import torch\n\ntorch.ones(2) @ torch.ones(3)\n")
    with pytest.raises(WorkloadError, match=r"raises\.py:3: running the file raised RuntimeError: .*size") as caught:
        load(str(path))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.__cause__.__traceback__ is not None
    assert "raises" not in sys.modules


def test_a_failed_import_of_a_sibling_is_blamed_at_the_file(write):
    write("broken_sibling.py", "1 / 0\n")
    path = write("innocent.py", "\nimport broken_sibling\n")
    with pytest.raises(WorkloadError, match=r"innocent\.py:2: .*ZeroDivisionError"):
        load(str(path))


def test_a_missing_package_is_told_with_the_python_that_lacks_it(write):
    path = write("needs.py", "import surely_not_installed_anywhere\n")
    with pytest.raises(
        WorkloadError, match=r"needs\.py:1: .*surely_not_installed_anywhere.*install it beside this Python"
    ):
        load(str(path))


def test_a_syntax_error_is_blamed_at_its_line(write):
    path = write("typo.py", "x = 1\ndef f(:\n")
    with pytest.raises(WorkloadError, match=r"typo\.py:2: .*SyntaxError"):
        load(str(path))


def test_a_file_that_exits_is_told_to_guard_it(write):
    path = write("exits.py", "import argparse\np = argparse.ArgumentParser()\np.error('no')\n")
    with pytest.raises(WorkloadError, match=r"exits\.py:3: .*ended the program.*__main__"):
        load(str(path))


def test_ctrl_c_while_the_file_runs_stays_ctrl_c(write):
    path = write("slow_import.py", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load(str(path))


def test_a_workload_function_that_raises_is_blamed_at_its_line(write):
    path = write("wrong.py", "def workload():\n    return [][0]\n")
    with pytest.raises(WorkloadError, match=r"wrong\.py:2: workload\(\) raised IndexError"):
        load(str(path))


def test_a_wrong_workload_keeps_autoprecs_message_and_gets_the_line(write):
    path = write(
        "wrong.py", "import autoprec\n\ndef workload():\n    return autoprec.Workload(model=1, batches=list)\n"
    )
    with pytest.raises(WorkloadError, match=r"^\S*wrong\.py:4: Workload\(model=\.\.\.\) is an int") as caught:
        load(str(path))
    assert isinstance(caught.value.__cause__, WorkloadError)


def test_a_wrong_plain_name_is_told_with_the_file(write):
    path = write("wrong.py", "model = 3\nbatches = [1]\n")
    with pytest.raises(WorkloadError, match=r"wrong\.py: model is an int; it must be a torch\.nn\.Module"):
        load(str(path))


def test_a_function_that_returns_something_else(write):
    path = write("wrong.py", "def workload():\n    return {}\n")
    with pytest.raises(WorkloadError, match=r"workload\(\) returned a dict; it must return an autoprec\.Workload"):
        load(str(path))


def test_a_missing_name_gets_the_nearest(write):
    path = write("tiny_net.py", MINIMAL + "\ndef larger():\n    return workload()\n")
    with pytest.raises(WorkloadError, match=r'has no "large"; nearest: larger'):
        load(f"{path}:large")


def test_a_name_that_is_no_workload(write):
    path = write("tiny_net.py", MINIMAL + "\nwidth = 3\n")
    with pytest.raises(WorkloadError, match=r"tiny_net\.py:width is an int; it must be a Workload or return one"):
        load(f"{path}:width")


def test_a_missing_file_gets_the_nearest(write, tmp_path):
    write("char_gpt.py", MINIMAL)
    for wrong in ("chargpt.py", "char_gtp.py", "char_gpt"):
        with pytest.raises(WorkloadError, match=r"has no such file; nearest: .*char_gpt\.py"):
            load(str(tmp_path / wrong))


def test_a_missing_folder_a_folder_and_another_kind_of_file(write, tmp_path):
    write("char_gpt.py", MINIMAL)
    with pytest.raises(WorkloadError, match="there is no folder"):
        load(str(tmp_path / "nowhere" / "char_gpt.py"))
    with pytest.raises(WorkloadError, match=r"it is a folder, not a file; nearest: .*char_gpt\.py"):
        load(str(tmp_path))
    with pytest.raises(WorkloadError, match="is not a Python file"):
        load(str(write("policy.yaml", "autoprec: 1")))


def test_a_name_that_is_no_name(write):
    with pytest.raises(WorkloadError, match=r'"two words" is not a Python name; write file\.py or file\.py:name'):
        load(f"{write('tiny_net.py', MINIMAL)}:two words")
