"""The examples load as the README says, learn, and stop and resume without a trace."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from autoprec.workload import load, load_batches

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


@pytest.mark.parametrize("name", ["char_gpt", "digits_vit"])
def test_an_example_is_a_workload_that_learns(name):
    loaded = load(str(EXAMPLES / f"{name}.py"))
    workload = loaded.workload
    assert loaded.name == name
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    losses = []
    for batch in load_batches(workload, 8, "cpu"):
        loss = workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_digits_are_evaluated_as_a_fraction_of_errors():
    workload = load(str(EXAMPLES / "digits_vit.py")).workload
    assert workload.evaluate is not None
    assert 0.5 < workload.evaluate(workload.model()) <= 1.0


@pytest.fixture
def train(monkeypatch, capsys):
    """Run examples/train_with_policy.py and return the step and loss of its last line."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["train_with_policy.py", *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / "train_with_policy.py"), run_name="__main__")
        found = re.findall(r"step +(\d+)  loss (\S+)", capsys.readouterr().out)
        return found[-1]

    return run


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(train, tmp_path):
    whole = train("--policy", "none", "--steps", 4)
    assert train("--policy", "none", "--steps", 2, "--checkpoint", tmp_path / "run.pt")[0] == "2"
    assert train("--policy", "none", "--steps", 4, "--checkpoint", tmp_path / "run.pt") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_a_policy_of_fp32_alone_changes_nothing(train):
    assert train("--policy", "fp32", "--steps", 3) == train("--policy", "none", "--steps", 3)


def test_a_policy_file_that_is_missing_is_told_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train_with_policy.py", "--policy", str(tmp_path / "none.yaml")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / "train_with_policy.py"), run_name="__main__")
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {tmp_path / 'none.yaml'}: ")


def test_a_loss_scale_survives_the_checkpoint(train, tmp_path, monkeypatch):
    import autoprec

    policy = autoprec.Policy(
        name="scaled",
        rules=(autoprec.Rule(sites="*", format="fp32"),),
        loss_scale=autoprec.LossScale(kind="dynamic", initial=64.0, growth_interval=3),
    )
    autoprec.save_policy(policy, tmp_path / "policy.yaml")
    arguments = ("--policy", tmp_path / "policy.yaml", "--checkpoint", tmp_path / "run.pt")
    train(*arguments, "--steps", 2)
    train(*arguments, "--steps", 4)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert saved["precision"]["scaler"]["scale"] == 128.0
    assert saved["step"] == 4
