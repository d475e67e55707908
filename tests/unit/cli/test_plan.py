"""`autoprec plan` and its list of devices."""

import json
from pathlib import Path

import pytest

from autoprec import cli
from autoprec.measure.device_profiles import PROFILES
from autoprec.policy import load_policy

WORKLOAD = """
import torch
from torch import nn
import autoprec

print("loading")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x


def workload():
    batch = torch.linspace(-1, 1, 4096 * 64).reshape(4096, 64)
    return autoprec.Workload(
        model=Net,
        batches=lambda: [batch],
        loss=lambda model, x: model(x).square().mean(),
    )
"""


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "net.py"
    path.write_text(WORKLOAD)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_plan_is_shown_and_every_figure_is_labeled_modeled(capsys, workload):
    code, out, err = run(capsys, workload, "--device-profile", "cpu-amx")
    assert code == 0
    assert "loading" in err
    assert "loading" not in out
    assert "Intel Xeon Platinum 8480+ (AMX)" in out
    assert "gradient error" in out
    figures = [line for line in out.splitlines() if line.lstrip().startswith(("step", "memory"))]
    assert len(figures) == 2
    assert all("(modeled)" in line for line in figures)
    headline = " ".join(out.split()).partition("workload")[0]  # which the width of a terminal may break
    assert "(modeled)" in headline
    assert "Baselines, modeled" in out
    assert "autocast-bf16" in out
    assert "no prediction for low-bf16, bf16-master, bf16-stochastic: it stores parameters" in " ".join(out.split())


def test_json_and_the_policy_file_say_modeled(capsys, workload, tmp_path: Path):
    out = tmp_path / "policy.yaml"
    code, text, _ = run(capsys, workload, "--device-profile", "tpu-v5e", "--out", str(out), "--json")
    found = json.loads(text)
    assert code == 0
    assert found["modeled"] is True
    assert all(each["modeled"] for each in (found["best"], *found["baselines"], *found["front"]))
    assert found["best"]["speedup_vs_fp32"] > 1
    assert found["best"]["healthy"] is True
    assert found["device_profile"]["figures"]["bandwidth"]["source"]
    policy = load_policy(out)
    assert policy.device["kind"] == "xla"
    assert policy.evidence["modeled"] is True
    assert policy.evidence["modeled_speedup_vs_fp32"] == found["best"]["speedup_vs_fp32"]


def test_the_same_seed_gives_the_same_plan(capsys, workload):
    texts = {run(capsys, workload, "--device-profile", "a100", "--formats", "bf16", "--json")[1] for _ in range(2)}
    assert len(texts) == 1
    assert json.loads(texts.pop())["formats"] == ["bf16"]


def test_a_device_without_low_formats_is_told_so(capsys, workload):
    code, out, _ = run(capsys, workload, "--device-profile", "cpu-avx2")
    assert code == 0
    assert out.startswith("nothing is predicted to beat fp32 on AMD EPYC 7763")
    assert "no low format: the device has units for none" in " ".join(out.split())


def test_the_list_has_every_device_with_its_sources(capsys):
    code, out, _ = run(capsys, "--list")
    assert code == 0
    assert all(f"  {name}" in out for name in PROFILES)
    assert "from memory" in out
    _, text, _ = run(capsys, "--list", "--json")
    rows = json.loads(text)["profiles"]
    assert [row["name"] for row in rows] == list(PROFILES)
    assert rows[-1]["figures"]["peak bf16"] == {
        "value": 197e12,
        "source": "Google Cloud TPU documentation, TPU v5e (checked)",
        "date": "2023-11",
    }
    by_name = {row["name"]: row for row in rows}
    assert (by_name["h100"]["has_fp8"], by_name["a100"]["has_fp8"], by_name["a100"]["has_tf32"]) == (True, False, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "plan for what? give a workload"),
        (("net.py",), "plan for which device? give --device-profile NAME, one of cpu-amx, "),
        (("net.py", "--device-profile", "h1000"), 'no device profile is called "h1000"'),
        (("net.py", "--device-profile", "a100", "--formats", "fp8_e4m3"), 'has no units for "fp8_e4m3"'),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
