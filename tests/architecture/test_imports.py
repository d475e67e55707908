"""Imports point down, and each door loads what it needs and nothing else."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TUNING_DOOR = {"optuna", "networkx", "rich", "typer", "scipy", "plotly", "transformers"}


def loaded_by(code: str, after: str = "pass") -> set[str]:
    """Return the modules that a fresh Python loads while it runs `code`, and had not loaded `after` that."""
    script = f"import sys\n{after}\nbefore = set(sys.modules)\n{code}\nprint(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.splitlines()[-1].split())


def test_the_contracts_of_import_linter_hold():
    # In a Python of its own: it sets logging up anew, and disables the loggers that are there.
    code = "from importlinter import cli; raise SystemExit(cli.lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_autoprec_loads_nothing_heavy():
    loaded = loaded_by("import autoprec")
    assert not loaded & (TUNING_DOOR | {"torch", "numpy", "yaml"})


# torch brings networkx and its kind along only when it compiles; whatever a bare `import torch` loads is not ours
def test_applying_a_policy_loads_yaml_and_neither_the_tuner_nor_the_compiler():
    code = (
        "import autoprec; m = torch.nn.Linear(2, 2); p = autoprec.apply(m, 'low-bf16'); m(torch.ones(1, 2))"
        ".sum().backward(); p.remove()"
    )
    loaded = loaded_by(code, after="import torch")
    assert not loaded & (TUNING_DOOR | {"torch._dynamo"})  # either takes as long to load as torch itself
    assert {"autoprec", "yaml"} <= loaded


def test_plain_values_load_no_torch():
    names = ("Workload", "Policy", "load_policy", "preset", "resolve", "Site", "AutoprecError")
    code = "import autoprec; " + "; ".join(f"autoprec.{name}" for name in names)
    assert not loaded_by(code) & (TUNING_DOOR | {"torch"})


def test_help_loads_no_torch_and_no_optuna():
    calls = (["--help"], ["--version"], *([name, "--help"] for name in ("inspect", "tune", "bench", "policy", "env")))
    code = "from autoprec.cli import main; " + "; ".join(f"main({arguments})" for arguments in calls)
    assert not loaded_by(code) & {"torch", "optuna", "networkx", "scipy", "numpy"}
