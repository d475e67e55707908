"""`autoprec policy check|show|diff`: what they print and how they exit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoprec import cli
from autoprec.policy import Policy, load_policy, preset, preset_names, save_policy

WORKLOAD = """
import torch
from torch import nn
import autoprec

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.inner(x).softmax(-1))

def workload():
    return autoprec.Workload(
        model=Net,
        batches=lambda: [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))],
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
"""

GOOD = """\
autoprec: 1
name: good
rules:
  - {sites: "inner", format: bf16, why: "wide [enough]"}
  - {sites: "*", format: fp32}
"""
DEAD = GOOD.replace('"inner"', '"iner"')


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a workload and two policies in it."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"net.py": WORKLOAD, "good.yaml": GOOD, "dead.yaml": DEAD}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["policy", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_check_without_a_workload(folder, capsys):
    code, out, err = _run(capsys, "check", "good.yaml")
    assert (code, err) == (0, "")
    assert out == 'good.yaml: policy "good" is well formed: 2 rules, formats bf16, fp32\n'


def test_check_on_a_workload_shows_who_wins(folder, capsys):
    code, out, _ = _run(capsys, "check", "good.yaml", "net.py")
    assert code == 0
    lines = [line.strip("│ ").split() for line in out.splitlines()]
    assert ["1", "│", "inner", "│", "bf16", "│", "1", "│", "inner:linear#0"] in lines
    assert ["2", "│", "*", "│", "fp32", "│", "3", "│", ":softmax#0"] in lines


def test_check_names_line_and_nearest_sites_of_a_dead_rule(folder, capsys):
    code, out, _ = _run(capsys, "check", "dead.yaml", "net.py")
    assert code == 1
    assert out.splitlines()[-1] == 'dead.yaml:4: rule 1 "iner" matches no site; nearest: "inner" (1 site)'


def test_a_preset_has_rules_for_ops_that_a_model_lacks(folder, capsys):
    code, out, _ = _run(capsys, "check", "autocast-bf16", "net.py")
    assert code == 0
    assert "matches no site" not in out


@pytest.mark.parametrize(
    "command", [["check", "wrong.yaml"], ["show", "wrong.yaml"], ["diff", "good.yaml", "wrong.yaml"]]
)
def test_a_wrong_file_is_told_with_its_line(folder, capsys, command):
    (folder / "wrong.yaml").write_text(GOOD.replace("bf16", "bf61"), encoding="utf-8")
    code, out, err = _run(capsys, *command)
    assert (code, out) == (2, "")
    assert err.startswith('error: wrong.yaml:4: rule "inner": "bf61" is not a format; formats: fp32, tf32')


def test_neither_file_nor_preset(folder, capsys):
    code, out, err = _run(capsys, "show", "autocast-bf61")
    assert (code, out) == (2, "")
    assert err == (
        "error: autocast-bf61: there is no such policy file, and no such preset for cpu; "
        f"presets: {', '.join(preset_names('cpu'))}; made for a workload: "
        "tf-graph-pass-bf16, tf-graph-pass-fp16\n"
    )
    assert _run(capsys, "show", "fp32", "--device", "tpu")[0] == 2


def test_show(folder, capsys):
    policy = Policy(name="n", rules=load_policy("good.yaml").rules, evidence={"speedup": 1.5})
    save_policy(policy, "evidence.yaml")
    code, out, _ = _run(capsys, "show", "evidence.yaml")
    assert code == 0
    assert "name            n\n" in out
    assert "loss_scale      none\n" in out
    assert "│ 1 │ inner │ bf16   │ wide [enough] │" in out
    assert out.endswith("speedup         1.5\n")
    assert "\x1b" not in out


def test_show_json_is_the_policy(folder, capsys):
    policy = Policy(name="n", rules=load_policy("good.yaml").rules, evidence={"loss": [float("inf"), 1.5]})
    save_policy(policy, "evidence.yaml")
    code, out, err = _run(capsys, "show", "evidence.yaml", "--json")
    assert (code, err) == (0, "")
    plain = json.loads(out)
    assert next(iter(plain)) == "autoprec"
    assert plain["rules"][0] == {"sites": "inner", "format": "bf16", "why": "wide [enough]"}
    assert plain["evidence"] == {"loss": ["inf", 1.5]}


def test_show_a_preset_for_a_device(folder, capsys):
    assert "*:softmax" not in _run(capsys, "show", "autocast-bf16")[1]
    assert "*:softmax" in _run(capsys, "show", "autocast-bf16", "--device", "cuda")[1]
    assert _run(capsys, "show", "fp32", "--device", "auto")[0] == 0


def test_show_a_preset_says_what_it_stands_for_and_leaves_out(folder, capsys):
    out = _run(capsys, "show", "apex-o2")[1]
    assert "stands for      NVIDIA Apex amp, opt_level O2\n" in out
    assert "left out        fp16 buffers: they stay FP32 and are cast where they are read\n" in out
    assert "stands for" not in _run(capsys, "show", "good.yaml")[1]


def test_a_graph_preset_is_made_for_a_workload_and_written(folder, capsys):
    code, out, err = _run(capsys, "show", "tf-graph-pass-bf16")
    assert (code, out) == (2, "")
    assert err == (
        'error: preset "tf-graph-pass-bf16" is made for the graph of a workload; write it as a file with "autoprec '
        'policy show tf-graph-pass-bf16 WORKLOAD --out policy.yaml" and give the file\n'
    )
    code, out, _ = _run(capsys, "show", "tf-graph-pass-bf16", "net.py", "--out", "made.yaml")
    assert (code, load_policy("made.yaml").name) == (0, "tf-graph-pass-bf16")
    assert "stands for      TensorFlow's auto_mixed_precision graph pass, bf16\n" in out
    assert _run(capsys, "check", "made.yaml", "net.py")[0] == 0
    assert _run(capsys, "check", "tf-graph-pass-bf16", "net.py")[0] == 0
    assert _run(capsys, "diff", "tf-graph-pass-bf16", "made.yaml", "net.py")[0] == 0
    assert _run(capsys, "trace", "net.py", "--policy", "tf-graph-pass-bf16")[0] == 0


def test_a_file_wins_over_a_preset_of_its_name(folder, capsys):
    (folder / "fp32").write_text(GOOD, encoding="utf-8")
    assert "name            good" in _run(capsys, "show", "fp32")[1]


def test_diff_of_equal_policies(folder, capsys):
    save_policy(load_policy("good.yaml"), "again.yaml")
    assert _run(capsys, "diff", "good.yaml", "again.yaml") == (0, "good.yaml and again.yaml do the same\n", "")


def test_diff_names_settings_and_rules(folder, capsys):
    code, out, _ = _run(capsys, "diff", "good.yaml", "low-bf16")
    assert code == 1
    assert out.splitlines() == [
        "device: {} -> {kind: cpu}",
        "parameters: {storage: fp32} -> {storage: bf16}",
        "outputs: fp32 -> computed",
        "- rule 1: inner bf16",
        "- rule 2: * fp32",
        "+ rule 1: * bf16",
    ]


def test_diff_of_presets_folds_rules_and_names_what_differs_in_a_setting(folder, capsys):
    lines = _run(capsys, "diff", "apex-o1", "autocast-fp16")[1].splitlines()
    assert lines[0] == ("loss_scale: {maximum: 16777216} -> {maximum: 1.7014118346046923e+38}")
    assert len(lines) < 30
    assert any(line.startswith("- rules 27 to ") and ", all fp32: *:acos, *:asin, " in line for line in lines)


@pytest.mark.parametrize("a", preset_names("cpu"))
def test_diff_of_each_pair_of_presets_is_readable(folder, capsys, a):
    names = preset_names("cpu")
    for b in names[names.index(a) :]:
        code, out, _ = _run(capsys, "diff", a, b)
        assert code == int(a != b)
        assert 1 <= len(out.splitlines()) <= 40


def test_diff_on_a_workload_compares_sites(folder, capsys):
    code, out, err = _run(capsys, "diff", "good.yaml", "low-bf16", "net.py", "--json")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert list(found) == ["schema_version", "a", "b", "equal", "settings", "rules", "sites"]
    assert found["equal"] is False
    assert found["sites"] == [
        {"site": site, "a": {"format": "fp32", "rule": "*"}, "b": {"format": "bf16", "rule": "*"}}
        for site in (":softmax#0", "head:linear#0", "@loss:cross_entropy#0")
    ]
    assert "3 sites run in another format" in _run(capsys, "diff", "good.yaml", "low-bf16", "net.py")[1]


def test_no_torch_without_a_workload(folder):
    code = (
        "import sys; from autoprec.cli import main; "
        "main(['policy', 'show', 'good.yaml']); main(['policy', 'check', 'good.yaml']); "
        "main(['policy', 'diff', 'good.yaml', 'fp32', '--json']); print('torch' in sys.modules)"
    )
    root = Path(cli.__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(root)}
    )
    assert result.stdout.splitlines()[-1] == "False"


def test_presets_say_what_files_say(folder, capsys):
    save_policy(preset("autocast-fp16", "cuda"), "autocast.yaml")
    assert _run(capsys, "diff", "autocast.yaml", "autocast-fp16", "--device", "cuda")[0] == 0


def test_check_names_sites_that_fp8_kernels_do_not_take_and_says_what_is_emulated(folder, capsys):
    text = GOOD.replace('"inner", format: bf16', '"*:linear", format: fp8_e4m3')
    (folder / "fp8.yaml").write_text(text, encoding="utf-8")
    code, out, _ = _run(capsys, "check", "fp8.yaml", "net.py")
    assert code == 1
    fault = (
        'fp8.yaml: rule 1 "*:linear": {}:linear#0 cannot run in fp8_e4m3: (2, 4) by ({}, 4): {} not a multiple of 16'
    )
    assert out.splitlines()[-2:] == [fault.format("inner", 4, "4 and 4"), fault.format("head", 2, "2 and 4")]
    said = [line for line in out.splitlines() if line.startswith("fp8_e4m3 is emulated on ")]
    assert len(said) == 1
    assert said[0].endswith(": its fidelity can be measured, its speed cannot")


def test_check_of_the_fp8_preset_on_a_model_of_multiples_of_16(folder, capsys):
    wide = WORKLOAD.replace("(4, 4)", "(16, 16)").replace("(4, 2)", "(16, 16)").replace("(2, 4)", "(2, 16)")
    (folder / "wide.py").write_text(wide, encoding="utf-8")
    code, out, _ = _run(capsys, "check", "fp8-matmul", "wide.py")
    assert code == 0
    assert "cannot run" not in out


def test_show_and_diff_tell_the_scaling(folder, capsys):
    text = GOOD.replace('"inner", format: bf16', '"*:linear", format: fp8_e4m3')
    (folder / "rows.yaml").write_text(text.replace("rules:", "float8: {scaling: rowwise}\nrules:"), encoding="utf-8")
    (folder / "tensor.yaml").write_text(text, encoding="utf-8")
    assert "memory_format   as_given\n" in _run(capsys, "show", "rows.yaml")[1]
    assert "float8          {scaling: rowwise}\n" in _run(capsys, "show", "rows.yaml")[1]
    code, out, _ = _run(capsys, "diff", "rows.yaml", "tensor.yaml")
    assert (code, out) == (1, "float8: {scaling: rowwise} -> {scaling: tensorwise}\n")


def test_trace_shows_what_ran(folder, capsys):
    code, out, err = _run(capsys, "trace", "net.py", "--policy", "good.yaml", "--device", "cpu")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert out.splitlines()[0] == 'What ran under policy "good": 4 sites, 0 exempt, 0 dishonored'
    assert ["inner:linear#0", "1", "bf16", "bf16", "bf16"] in lines
    assert ["head:linear#0", "2", "fp32", "fp32", "fp32"] in lines
    assert ["@loss:cross_entropy#0", "2", "fp32", "fp32", "fp32"] in lines


def test_trace_as_json_and_of_a_preset(folder, capsys):
    code, out, _ = _run(capsys, "trace", "net.py", "--policy", "low-bf16", "--device", "cpu", "--json")
    assert code == 0
    plain = json.loads(out)
    assert (plain["policy"], plain["num_dishonored"]) == ("low-bf16", 0)
    assert plain["sites"][0]["ran_backward"] == ["bf16"]


def test_trace_exits_1_where_a_rule_is_not_honored(folder, capsys, monkeypatch):
    monkeypatch.setattr("autoprec.runtime.cast_mode.CastMode.cast", lambda mode, value, dtype: value)
    code, out, _ = _run(capsys, "trace", "net.py", "--policy", "good.yaml", "--device", "cpu")
    assert code == 1
    assert "dishonored: its arguments were not cast: they came in as fp32" in out


def test_trace_names_the_line_of_a_rule_for_no_module(folder, capsys):
    code, _, err = _run(capsys, "trace", "net.py", "--policy", "dead.yaml", "--device", "cpu")
    assert code == 2
    assert 'dead.yaml:4: rule "iner" of policy "' in err
    assert 'matches no module of this Net; nearest modules: "inner"' in err


def test_trace_of_no_file(folder, capsys):
    code, out, err = _run(capsys, "trace", "net.py", "--policy", "none.yaml", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "none.yaml: there is no such policy file" in err


def test_export_prints_a_module_for_fsdp2(folder, capsys):
    code, out, err = _run(capsys, "export", "good.yaml", "net.py", "--to", "fsdp2")
    assert (code, err) == (0, "")
    assert out.startswith('"""Shard a model with FSDP2')
    assert 'from policy "good" (good.yaml) on net.py, graph ' in out
    assert '    ("inner", torch.bfloat16, torch.float32, None),\n    ("head", torch.float32' in out
    assert '- rule "*" (fp32): it covers sites that read no parameters, as :softmax#0: they run in' in out
    made = {}
    exec(out, made)
    assert callable(made["shard"])


def test_export_writes_a_module_for_torchao(folder, capsys):
    wide = WORKLOAD.replace("(4, 4)", "(16, 16)").replace("(4, 2)", "(16, 16)").replace("(2, 4)", "(2, 16)")
    (folder / "wide.py").write_text(wide, encoding="utf-8")
    text = GOOD.replace('"inner", format: bf16', '"inner:linear", format: fp8_e4m3')
    (folder / "fp8.yaml").write_text(text.replace("rules:", "float8: {scaling: rowwise}\nrules:"), encoding="utf-8")
    code, out, err = _run(capsys, "export", "fp8.yaml", "wide.py", "--to", "torchao-float8", "--out", "made.py")
    assert (code, err) == (0, "")
    assert out == "made.py: fp8.yaml for torchao-float8; left out, and listed in its docstring: 1\n"
    made = (folder / "made.py").read_text(encoding="utf-8")
    assert 'RECIPE = "rowwise"\nMODULES = (\n    "inner",\n)\n' in made
    assert "import autoprec" not in made


def test_export_refuses_what_check_refuses_and_what_the_tool_cannot_do(folder, capsys):
    assert _run(capsys, "export", "dead.yaml", "net.py", "--to", "fsdp2", "--out", "made.py") == (
        1,
        "",
        'dead.yaml:4: rule 1 "iner" matches no site; nearest: "inner" (1 site)\n',
    )
    assert not (folder / "made.py").exists()
    code, out, err = _run(capsys, "export", "good.yaml", "net.py", "--to", "torchao-float8")
    assert (code, out) == (2, "")
    assert err.startswith('error: export of policy "good" to torchao-float8: no linear would run in fp8_e4m3: no rule')
    code, _, err = _run(capsys, "export", "fp8-matmul", "net.py", "--to", "fsdp2")
    assert code == 2
    assert 'module "inner" runs in fp8_e4m3; FSDP2 gathers parameters in fp32, bf16 or fp16' in err
    code, _, err = _run(capsys, "export", "good.yaml", "net.py", "--to", "fsdp3")
    assert code == 2
    assert "'fsdp3' is not one of 'fsdp2', 'torchao-float8'" in err
    code, _, err = _run(capsys, "export", "good.yaml", "net.py", "--to", "fsdp2", "--out", "none/made.py")
    assert code == 2
    assert "cannot write none/made.py" in err


def test_check_as_json(folder, capsys):
    code, out, _ = _run(capsys, "check", "good.yaml", "--json")
    assert code == 0
    assert json.loads(out)["rules"][0]["num_sites"] is None
    code, out, _ = _run(capsys, "check", "dead.yaml", "net.py", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["schema_version"] == 1
    assert [rule["num_sites"] for rule in found["rules"]].count(0) == len(found["findings"])
    assert sum(rule["num_sites"] for rule in found["rules"]) == found["num_sites"]
    assert found["findings"][0].startswith("dead.yaml:")


def test_check_of_a_preset_shows_the_rules_that_win(folder, capsys):
    code, out, _ = _run(capsys, "check", "autocast-bf16", "net.py")
    assert code == 0
    assert "*:linear" in out
    assert "cholesky" not in out
