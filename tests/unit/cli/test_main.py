import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import autoprec
from autoprec import cli
from autoprec.errors import PolicyError


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an app that has one command `go`, which does what the test says, through autoprec's `main`."""

    def run_main(action, *arguments):
        app = typer.Typer()
        app.callback()(cli._options)
        app.command("go")(action)
        monkeypatch.setattr(cli, "app", app)
        code = cli.main(["go"] if not arguments else list(arguments))
        return code, *capsys.readouterr()

    return run_main


def test_a_command_that_returns_exits_with_0(run):
    assert run(lambda: typer.echo("result")) == (0, "result\n", "")


def test_findings_exit_with_1(run):
    def findings():
        raise typer.Exit(1)

    assert run(findings)[0] == 1


def test_an_error_is_told_on_stderr_and_exits_with_2(run):
    def fail():
        raise PolicyError("policy.yaml:3: no such key")

    assert run(fail) == (2, "", "error: policy.yaml:3: no such key\n")


def test_debug_shows_the_traceback_of_an_error(run):
    def fail():
        raise PolicyError("no such key")

    code, out, err = run(fail, "--debug", "go")
    assert (code, out) == (2, "")
    assert "Traceback" in err
    assert err.endswith("error: no such key\n")


@pytest.mark.parametrize(("value", "is_shown"), [("1", True), ("0", False), ("", False)])
def test_debug_may_come_from_the_environment(run, monkeypatch, value, is_shown):
    def fail():
        raise PolicyError("no such key")

    monkeypatch.setenv("AUTOPREC_DEBUG", value)
    code, _, err = run(fail)
    assert code == 2
    assert ("Traceback" in err) is is_shown


def test_ctrl_c_exits_with_130_and_one_calm_line(run):
    def interrupted():
        raise KeyboardInterrupt

    assert run(interrupted) == (130, "", "interrupted\n")


def test_a_bug_exits_with_3_and_keeps_its_traceback(run, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("autoprec.workload.origin.is_users", lambda error: False)

    def bug():
        raise KeyError("conv")

    code, out, err = run(bug)
    assert (code, out) == (3, "")
    assert err.startswith(
        "internal error: KeyError: 'conv'\nthis is a bug in autoprec: please report it with the file "
    )
    kept = Path(err.split()[-1]).read_text()
    assert f"autoprec {autoprec.__version__}" in kept
    assert "Traceback" in kept
    assert "in bug" in kept


def test_a_bug_shows_its_traceback_where_no_file_can_be_written(run, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr("autoprec.workload.origin.is_users", lambda error: False)

    def bug():
        raise KeyError("conv")

    code, _, err = run(bug)
    assert code == 3
    assert "Traceback" in err


def test_the_users_exception_is_told_with_the_users_line(run):
    def users_model_raises():
        raise RuntimeError("shapes differ")

    code, _, err = run(users_model_raises)
    assert code == 2
    assert re.match(r"error: .*test_main\.py:\d+: RuntimeError: shapes differ\n", err)
    assert "autoprec --debug ... shows the traceback" in err


def test_wrong_usage_exits_with_2(run):
    code, out, err = run(lambda: None, "go", "--no-such-option")
    assert (code, out) == (2, "")
    assert "--no-such-option" in err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"autoprec {autoprec.__version__}\n"


def test_without_a_command_help_is_shown(capsys):
    assert cli.main([]) == 2
    assert "tune" in "".join(capsys.readouterr())


def test_a_reader_that_goes_away_is_no_finding():
    command = f"{sys.executable} -m autoprec --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in {"0", "141"}
    assert done.stderr == ""


def test_python_m_autoprec_passes_the_exit_code_on():
    done = subprocess.run([sys.executable, "-m", "autoprec", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
