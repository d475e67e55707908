"""`autoprec tune` and `bench`: options, exit codes, what is printed where; the searching itself is tested elsewhere."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

import autoprec.pipeline
from autoprec.cli import main
from autoprec.pipeline import BenchOptions, TuneOptions
from autoprec.records import load_record
from autoprec.records.run import RunRecord
from autoprec.report.console import console
from autoprec.report.text import render_run
from autoprec.report.views import run_view
from autoprec.runtime import matmul_precision
from autoprec.runtime.device import describe
from autoprec.search.objective import Objective
from autoprec.search.observer import Observer
from tests.unit.records.samples import RUN, trial

FINISHED = replace(RUN, interrupted=False)
WORKLOAD = """
import torch
from torch import nn

import autoprec


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(8, 16, generator=generator)
        yield x, (x[:, :4]).argmax(1)


def workload():
    return autoprec.Workload(
        model=lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)),
        batches=batches,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]){loss},
        optimizer=lambda params: torch.optim.SGD(params, lr={lr}),
    )
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_workload(tmp_path)
    (tmp_path / "space.yaml").write_text("autoprec_space: 1\nlow: [bf16]\nhorizon: 16\n")
    return tmp_path


def write_workload(folder: Path, *, loss: str = "", lr: float = 0.01) -> None:
    (folder / "mlp.py").write_text(WORKLOAD.format(loss=loss, lr=lr))


class Pipeline:
    """Stands in for the pipeline: keeps the options it got and returns a record or raises."""

    def __init__(self, outcome: RunRecord | BaseException) -> None:
        self.outcome = outcome
        self.options: list[TuneOptions | BenchOptions] = []

    def __call__(self, options: TuneOptions | BenchOptions, observer: Observer) -> RunRecord:
        self.options.append(options)
        observer.note("a note")
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def stand_in(monkeypatch: pytest.MonkeyPatch, outcome: RunRecord | BaseException, name: str = "tune") -> Pipeline:
    pipeline = Pipeline(outcome)
    monkeypatch.setattr(autoprec.pipeline, name, pipeline)
    return pipeline


def test_options_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = stand_in(monkeypatch, FINISHED)
    assert main(["tune", "w.py"]) == 0
    assert pipeline.options == [TuneOptions(workload="w.py")]


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = stand_in(monkeypatch, FINISHED)
    line = "tune w.py:f --out p.yaml --run-dir r --budget 1m30s --trials 7 --space s.yaml --seed 3 --storage sqlite:///x.db"
    assert main([*line.split(), "--study", "n", "--device", "cpu", "--baselines", "fp32, apex-o1"]) == 0
    assert pipeline.options == [
        TuneOptions(
            workload="w.py:f",
            out=Path("p.yaml"),
            run_dir=Path("r"),
            budget_s=90,
            trials=7,
            space=Path("s.yaml"),
            baselines=("fp32", "apex-o1"),
            seed=3,
            storage="sqlite:///x.db",
            study="n",
            device="cpu",
        )
    ]


def test_json_is_all_that_is_printed_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, FINISHED)
    assert main(["tune", "w.py", "--json"]) == 0
    out, err = capsys.readouterr()
    result: dict[str, Any] = json.loads(out)
    assert result["verdict"] == "improved"
    assert "a note" in err


def test_the_summary_goes_to_stdout_and_progress_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, FINISHED)
    assert main(["tune", "w.py"]) == 0
    out, err = capsys.readouterr()
    assert 'autoprec.apply(model, "policy.yaml")' in out
    assert "\x1b" not in out
    assert "a note" not in out
    assert "a note" in err


def test_an_interrupted_run_prints_its_result_says_how_to_resume_and_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, RUN)
    assert main(["tune", "w.py", "--json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["interrupted"] is True
    assert "the best so far is in policy.yaml; the same command resumes" in err


def test_an_interruption_before_any_result_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, KeyboardInterrupt())
    assert main(["tune", "w.py"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "a note",
        "interrupted before fp32 was measured: no policy is written; run the same command again",
    ]


def test_bench_prints_the_policy_and_the_baselines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = replace(
        FINISHED, command="bench", chosen=None, trials=(*RUN.baselines, trial("mine", 1.1, kind="policy", number=2))
    )
    pipeline = stand_in(monkeypatch, record, "bench")
    assert main(["bench", "w.py", "--policy", "p.yaml", "--steps", "30", "--json", "--baselines", "all"]) == 0
    options = BenchOptions(workload="w.py", policy=Path("p.yaml"), baselines=("all",), horizon=30)
    assert pipeline.options == [options]
    result = json.loads(capsys.readouterr().out)
    assert result["policy"]["name"] == "mine"
    assert [each["name"] for each in result["baselines"]] == ["fp32", "autocast-bf16"]


def tune(*arguments: str) -> int:
    return main(["tune", "mlp.py", "--space", "space.yaml", "--device", "cpu", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "soon"), '"soon" is not a duration'),
        (("--space", "none.yaml"), "No such file"),
        (("--out", "."), "it is a folder"),
        (("--run-dir", "/proc/runs"), "cannot write into /proc/runs"),
        (("--out", "/proc/policy.yaml"), "cannot write into /proc"),
        (("--storage", "sqlite:///mlp.py"), "not a database"),
        (("--storage", "sqlite:////proc/x/study.db"), "cannot write into /proc/x"),
        (("--device", "tpu"), "tpu"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert tune(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "policy.yaml").exists()


@pytest.mark.parametrize("arguments", [("--storage", "foo"), ("--study", "theirs", "--storage", "sqlite:///x.db")])
def test_a_study_that_cannot_be_used_is_refused_before_the_workload_is_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    optuna.create_study(storage="sqlite:///x.db", study_name="theirs")
    monkeypatch.setattr("autoprec.pipeline.record_and_mark", None)
    assert tune(*arguments) == 2
    error = capsys.readouterr().err
    assert 'cannot open study storage "foo"' in error or "not made by autoprec" in error


def test_a_baseline_that_is_none_is_refused_before_the_workload_is_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoprec.search.subject.record", None)
    assert tune("--baselines", "apex-04") == 2
    assert 'baseline "apex-04" is not a preset for cpu; allowed: default, all, fp32' in capsys.readouterr().err


def test_bench_makes_a_preset_for_the_graph_of_the_workload(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "bench mlp.py --policy tf-graph-pass-bf16 --baselines fp32 --device cpu --steps 24 --json"
    assert main(line.split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["policy"]["name"] == "tf-graph-pass-bf16"
    assert [each["name"] for each in result["baselines"]] == ["fp32"]


def test_a_space_without_a_format_of_the_device_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoprec.pipeline.describe", lambda kind: replace(describe(kind), formats=("fp32",)))
    assert tune() == 2
    assert "the search space has the low formats bf16" in capsys.readouterr().err


def test_a_workload_that_is_nan_in_fp32_is_refused_and_the_op_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_workload(folder, loss=" + (batch[0].sum() * 0 - 1).log()")
    assert tune() == 2
    error = capsys.readouterr().err
    assert "the loss is nan at step 1 in plain FP32: op @loss:log#0 gives nan (" in error
    assert f"{folder / 'mlp.py'}:" in error
    assert not (folder / "policy.yaml").exists()


def test_a_workload_that_diverges_in_fp32_is_refused_at_its_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_workload(folder, lr=1e30)
    assert tune() == 2
    error = capsys.readouterr().err
    assert "at step 2 in plain FP32: op" in error


@pytest.mark.long
def test_a_study_of_another_seed_is_refused_and_another_name_is_fine(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--trials", "0") == 0
    assert tune("--trials", "0", "--seed", "1") == 2
    assert "seed: 0 then, 1 now" in capsys.readouterr().err
    assert tune("--trials", "0", "--seed", "1", "--study", "other") == 0


COUNTED = """
import weakref

import torch
from torch import nn

import autoprec

LIVING = weakref.WeakSet()
MOST = [0]


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
        LIVING.add(self)
        MOST[0] = max(MOST[0], len(LIVING))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(8, 16, generator=generator)
        yield x, (x[:, :4]).argmax(1)


def workload():
    return autoprec.Workload(
        model=Model,
        batches=batches,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    )

"""


def test_a_run_holds_two_models_at_most_and_a_resumed_one_goes_on_with_the_plans_of_its_study_or_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "counted.py").write_text(COUNTED)
    command = ["tune", "counted.py", "--space", "space.yaml", "--device", "cpu", "--trials", "1"]
    command += ["--baselines", "fp32,autocast-bf16"]
    assert main(command) == 0
    assert sys.modules["counted"].MOST == [2]
    run = folder / "runs" / "counted"
    before, record = (run / "fronts-counted.json").read_bytes(), load_record(run / "record.json")
    capsys.readouterr()

    assert main(command) == 0
    shown = capsys.readouterr()
    assert "resuming study counted" in shown.err
    assert 'autoprec.apply(model, "policy.yaml")' in shown.out
    assert (run / "fronts-counted.json").read_bytes() == before
    assert [trial.losses for trial in load_record(run / "record.json").trials] == [t.losses for t in record.trials]

    kept = json.loads(before)
    kept["plans"] = {low: [{"saved_s": 1.0, "error": 0.5, "low_sites": ["0:linear#0"]}] for low in kept["plans"]}
    (run / "fronts-counted.json").write_text(json.dumps(kept))
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "it measured something else (" in error
    assert "plans: " in error


def render_text(record: RunRecord) -> str:
    shown = console(stderr=True)
    with shown.capture() as capture:
        shown.print(render_run(run_view(record)))
    return capture.get()


def write_policy(folder: Path, text: str) -> None:
    (folder / "policy.yaml").write_text(f"autoprec: 1\nname: mine\nrules:\n{text}  - {{sites: '*', format: fp32}}\n")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("  - {sites: '*:conv2d', format: bf16}\n", 'policy.yaml:4: rule 1 "*:conv2d" matches no site'),
        ("  - {sites: '*:linear', format: fp8_e4m3}\n", "2:linear#0 cannot run in fp8_e4m3: (8, 16) by (4, 16): 4 not"),
        ("  - {sites: '*:linear', format: tf32}\n", 'policy "mine" uses tf32 inside FP32 matmuls, which changes'),
        ("  - {sites: '*:liner', format: bf16}\n", 'op "liner" is not in the catalog'),
    ],
)
def test_bench_refuses_a_policy_that_does_not_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rule: str, message: str
) -> None:
    monkeypatch.setattr(matmul_precision, "_supported", lambda _: ("ieee",))
    write_policy(folder, rule)
    assert main(["bench", "mlp.py", "--policy", "policy.yaml", "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_bench_measures_the_fidelity_of_an_emulated_policy_and_no_times(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "fp8_e4m3" not in describe("cpu").emulated_formats:
        pytest.skip("this CPU has FP8 kernels")
    write_policy(folder, "  - {sites: '0:linear', format: fp8_e4m3}\n")
    arguments = ["bench", "mlp.py", "--policy", "policy.yaml", "--device", "cpu", "--steps", "24"]
    assert main([*arguments, "--json"]) == 0
    policy = json.loads(capsys.readouterr().out)["policy"]
    assert policy["state"] == "complete"
    assert policy["emulated"] == ["fp8_e4m3"]
    assert policy["fidelity"] is not None
    assert (policy["step_s"], policy["speedup"], policy["interval"]) == (None, None, None)
    record = load_record(folder / "runs/mlp/bench.json")
    trial = next(each for each in record.trials if each.kind == "policy")
    assert (trial.step_times_s, trial.emulated, len(trial.losses)) == ((), ("fp8_e4m3",), 24)
    assert record.device.emulated_formats == ("fp8_e4m3", "fp8_e5m2")
    shown = render_text(record)
    assert "fp8_e4m3 emulated: not timed" in shown


@pytest.mark.long
def test_bench_measures_a_policy_that_has_the_name_of_a_baseline(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    autoprec.save_policy(autoprec.preset("fp32", "cpu"), folder / "policy.yaml")
    assert main(["bench", "mlp.py", "--policy", "policy.yaml", "--device", "cpu", "--steps", "24", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"]["name"] == "fp32-file"
    assert (folder / "runs/mlp/bench.json").exists()


def test_bench_measures_a_policy_that_is_a_baseline_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    measure = Objective.measure

    def counting(self: Objective, asked: Any, *args: Any) -> Any:
        measured.append(asked.name)
        return measure(self, asked, *args)

    monkeypatch.setattr(Objective, "measure", counting)
    few = ("--baselines", "fp32,autocast-bf16")
    assert main(["bench", "mlp.py", "--policy", "fp32", "--device", "cpu", "--steps", "24", "--json", *few]) == 0
    assert measured.count("fp32") == 1
    assert len(measured) == len(set(measured))
    assert "fp32-file" not in measured
    found = json.loads(capsys.readouterr().out)
    baseline = next(each for each in found["baselines"] if each["name"] == "fp32")
    assert found["policy"]["reason"] == "same policy as fp32"
    assert found["policy"]["step_s"] == baseline["step_s"]
    trials = load_record(folder / "runs/mlp/bench.json").trials
    assert [trial.number for trial in trials] == list(range(len(trials)))
