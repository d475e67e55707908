import json
from pathlib import Path

import pytest

from autoprec import cli

WORKLOAD = """
import torch
from torch import nn
import autoprec

print("loading")


class Scale(nn.Module):
    def forward(self, x):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        return (x - low) / (high - low + {eps})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = Scale()

    def forward(self, x):
        y = self.scale(x)
        for block in self.blocks:
            y = block(y)
        return y.exp()


def workload():
    return autoprec.Workload(
        model=Net,
        batches=lambda: [torch.tensor([[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 2.0]])],
        loss=lambda model, batch: model(batch).mean(),
    )
"""


@pytest.fixture
def faulty(tmp_path: Path) -> str:
    """Return a workload that divides by zero once 1e-8 is lost."""
    path = tmp_path / "faulty.py"
    path.write_text(WORKLOAD.format(eps="1e-8"))
    return str(path)


@pytest.fixture
def healthy(tmp_path: Path) -> str:
    path = tmp_path / "healthy.py"
    path.write_text(WORKLOAD.format(eps="1e-3"))
    return str(path)


INSPECTED: dict[tuple[str, ...], tuple[int, str]] = {}


def inspected(capsys: pytest.CaptureFixture[str], path: str, *arguments: str) -> tuple[int, dict]:
    """Return exit code and result; of one script with the same arguments, those of one run."""
    key = (Path(path).read_text(), *arguments)
    if key not in INSPECTED:
        code = cli.main(["inspect", path, *arguments, "--device", "cpu", "--json"])
        INSPECTED[key] = code, capsys.readouterr().out
    code, out = INSPECTED[key]
    return code, json.loads(out)


def test_json_has_the_documented_shape(capsys, faulty):
    code, found = inspected(capsys, faulty)
    assert code == 1
    assert list(found) == [
        "schema_version", "workload", "device", "graph", "num_batches", "fp32_error", "sites", "diagnoses", "storage",
        "loss_scale", "findings",
    ]  # fmt: skip
    assert (found["schema_version"], found["workload"], found["device"]["kind"]) == (1, "faulty", "cpu")
    assert list(found["graph"]) == ["num_sites", "num_nodes", "replay_matches"]
    assert found["graph"]["num_sites"] == len(found["sites"])
    assert found["graph"]["replay_matches"] is True
    for site in found["sites"]:
        assert list(site) == ["site", "module", "op", "index", "family", "class", "verdicts", "numerics"]
        assert list(site["numerics"]) == ["inputs", "outputs", "gradients"]
        assert site["site"] == f"{site['module']}:{site['op']}#{site['index']}"
        assert list(site["verdicts"]) == ["fp16", "bf16"]
        for verdict in site["verdicts"].values():
            assert list(verdict) == ["verdict", "reasons"]
            assert all(list(reason) == ["code", "detail", "evidence"] for reason in verdict["reasons"])
    for finding in found["findings"]:
        assert list(finding) == ["code", "severity", "site", "message", "fix", "names"]


def test_json_names_the_fault_at_its_site_first(capsys, faulty):
    _, found = inspected(capsys, faulty)
    assert (found["findings"][0]["severity"], found["findings"][0]["site"]) == ("error", "scale:add#0")
    (site,) = [each for each in found["sites"] if each["site"] == "scale:add#0"]
    assert site["verdicts"]["fp16"]["verdict"] == "must"
    reasons = site["verdicts"]["fp16"]["reasons"]
    # what the run showed, the pattern that explains it, and the constant
    assert [reason["code"] for reason in reasons] == ["underflow", "divisor_near_zero", "guard_vanishes"]
    assert reasons[2]["evidence"]["constant"] == 1e-8
    assert site["verdicts"]["bf16"]["verdict"] == "free"


def test_json_tells_what_breaks_and_the_smallest_repair(capsys, faulty):
    _, found = inspected(capsys, faulty)
    fp16, bf16 = found["diagnoses"]
    assert (fp16["format"], fp16["is_broken"], fp16["gradient_error"], fp16["is_broken"]) == ("fp16", True, "inf", True)
    assert fp16["repair"]["chains"] == [["scale:add#0", "scale:div#0"]]
    assert fp16["repair"]["sites"] == ["scale:add#0", "scale:div#0"]
    assert fp16["repair"]["is_minimal"] is True
    assert fp16["repair"]["gradient_error"] < fp16["allowed_error"]
    assert (bf16["format"], bf16["is_broken"], bf16["repair"], bf16["kernel_faults"]) == ("bf16", False, None, [])


LATE = """
import torch
from torch import nn
import autoprec


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.gain).square().mean().sqrt()


def workload():
    return autoprec.Workload(
        model=Net,
        batches=lambda: [torch.ones(4), torch.ones(4), torch.full((4,), 300.0), torch.ones(4)],
        loss=lambda model, batch: model(batch),
    )
"""


def test_batches_says_on_how_many_to_judge(capsys, tmp_path):
    path = tmp_path / "late.py"
    path.write_text(LATE)
    assert [inspected(capsys, str(path), "--batches", count)[0] for count in ("2", "3", "9")] == [0, 1, 1]
    assert inspected(capsys, str(path))[0] == 1  # three, where nothing is said


def test_no_batches_are_refused(capsys, healthy):
    assert cli.main(["inspect", healthy, "--batches", "0"]) == 2
    assert "--batches" in capsys.readouterr().err


def test_without_a_fault_the_exit_code_is_0(capsys, healthy):
    code, found = inspected(capsys, healthy)
    assert code == 0
    assert all(finding["severity"] != "error" for finding in found["findings"])
    (exp,) = [each for each in found["sites"] if each["op"] == "exp"]
    assert (exp["family"], exp["class"], exp["verdicts"]["bf16"]["verdict"]) == ("transcendental", "deny", "prefer")


def test_a_fault_in_a_format_that_was_not_asked_for_is_none(capsys, faulty):
    code, found = inspected(capsys, faulty, "--formats", "bf16")
    assert code == 0
    assert list(found["sites"][0]["verdicts"]) == ["bf16"]


def test_json_tells_what_is_stored_and_which_loss_scale(capsys, healthy):
    _, found = inspected(capsys, healthy)
    storage, scale = found["storage"], found["loss_scale"]
    assert storage["measured"] is True
    assert storage["bytes"]["parameters"] == {"fp32": 240, "fp16": 120, "bf16": 120}
    assert storage["bytes"]["optimizer_state"]["fp32"] == 480
    assert storage["parameters"][0]["name"] == "blocks.0.weight"
    assert set(storage["parameters"][0]["lost_update_frac"]) == {"fp16", "bf16"}
    assert scale["measured"] is True
    assert scale["formats"]["fp16"]["needed"] is False
    assert sum(each["count"] for each in scale["histogram"]) + scale["num_zero"] == 60


def test_what_the_workload_prints_does_not_reach_stdout(capsys, healthy):
    cli.main(["inspect", healthy, "--device", "cpu", "--json"])
    out, err = capsys.readouterr()
    assert out.startswith("{")
    assert "loading" in err


def test_text_tells_a_layer_pattern_in_one_line(capsys, faulty):
    assert cli.main(["inspect", faulty, "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("faulty on cpu (")
    assert "\x1b[" not in out  # no color off a terminal
    (line,) = [line for line in out.splitlines() if line.strip().startswith("blocks.*")]
    assert line.split() == ["blocks.*", "3", "3", "free"]
    assert "blocks.1" not in out.partition("\nStorage")[0]  # which names parameters
    assert "faulty.py:12" in out


def test_all_shows_every_site(capsys, faulty):
    assert cli.main(["inspect", faulty, "--device", "cpu", "--all"]) == 1
    out = capsys.readouterr().out
    assert all(f"blocks.{index}:linear#0" in out for index in range(3))


def test_text_is_120_wide_where_no_terminal_says_otherwise(capsys, faulty, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    cli.main(["inspect", faulty, "--device", "cpu"])
    assert 80 < max(map(len, capsys.readouterr().out.splitlines())) <= 120
    monkeypatch.setenv("COLUMNS", "70")
    cli.main(["inspect", faulty, "--device", "cpu"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 70


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ("fp17", '"fp17" is not a format'),
        ("fp32", '"fp32" is not a low format; low formats: bf16, fp16, fp8_e4m3, fp8_e5m2'),
        ("tf32", '"tf32" is not a low format'),
        (" , ", "lists no format"),
    ],
)
def test_formats_that_cannot_be_judged_are_refused(capsys, healthy, formats, message):
    assert cli.main(["inspect", healthy, "--formats", formats]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_workload_that_is_broken_in_fp32_is_an_error_that_names_the_op(capsys, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(WORKLOAD.format(eps="0.0"))
    assert cli.main(["inspect", str(path), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "scale:div#0" in err


def test_a_missing_file_is_an_error(capsys, tmp_path):
    assert cli.main(["inspect", str(tmp_path / "none.py")]) == 2
    assert "none.py" in capsys.readouterr().err


def test_static_runs_nothing_again(capsys, faulty, monkeypatch):
    from autoprec.capture import Replay

    def refuse(*_):
        raise AssertionError("a replay")

    monkeypatch.setattr(Replay, "loss", refuse)
    code, found = inspected(capsys, faulty, "--static")
    assert code == 0
    assert (found["graph"]["replay_matches"], found["storage"], found["loss_scale"]) == (None, None, None)
    assert {"guard_vanishes", "divisor_near_zero"} <= {each["code"] for each in found["findings"]} | {
        reason["code"] for site in found["sites"] for reason in site["verdicts"]["fp16"]["reasons"]
    }
    assert cli.main(["inspect", faulty, "--device", "cpu", "--static"]) == 0
    printed = capsys.readouterr().out
    assert "replay  not run" in printed
    assert "Storage" not in printed


def explained(capsys: pytest.CaptureFixture[str], workload: str, site: str) -> str:
    assert cli.main(["inspect", workload, "--device", "cpu", "--explain", site]) == 1
    return capsys.readouterr().out


def test_explain_shows_one_site_with_every_reason(capsys, faulty):
    out = explained(capsys, faulty, "scale:add#0")
    assert out.startswith("scale:add#0 in faulty on cpu (")
    lines = [line.split() for line in out.splitlines()]
    assert ["source", "faulty.py:12", *["return", "(x", "-", "low)", "/", "(high", "-", "low", "+", "1e-8)"]] in lines
    (verdict,) = [line for line in lines if line[:2] == ["fp16", "must"]]
    assert " ".join(verdict[2:]).startswith("1 of its 2 results are 0 in fp16 and not in FP32")
    assert ["1e-08", "becomes", "0", "in", "fp16"] in lines  # the last of its reasons, on a line of its own
    assert ["reads", "scale:sub#1", "faulty.py:12"] in lines
    assert ["read", "by", "scale:div#0", "faulty.py:12"] in lines


def test_explain_draws_each_tensor_of_the_site(capsys, faulty):
    out = explained(capsys, faulty, "scale:add")
    assert [title for title in ("input", "output") if f"\n  {title}" in out] == ["input", "output"]
    # high - low is 3 in one row and 0 in the other
    assert "2 elements, 50 % exactly 0, from 0 to 3, tallest bar 100 % in 2^1 to 2^2" in out
    picture = out.split("\n  output")[1].splitlines()
    bars = [line for line in picture if "█" in line]
    (zones,) = [line for line in picture if line.startswith("  fp16  ") and "---" in line]
    (ticks,) = [line for line in picture if "2^-20" in line]
    # 1e-8 is in the binade of -27: it flushes, as it stands left of -25, six columns left of the tick of -20
    one = next(i for i, char in enumerate(picture[2]) if char != " ") if picture[2].strip() else None
    assert len(bars) == 4
    columns = [i for line in bars for i, char in enumerate(line) if char == "█"]
    assert {zones[column] for column in columns} == {"0", "-"}
    assert min(columns) == ticks.index("2^-20") - 7
    assert one is None or one in columns


def test_explain_is_plain_text_of_80_or_120_columns(capsys, faulty, monkeypatch):
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        out = explained(capsys, faulty, "scale:add#0")
        assert max(map(len, out.splitlines())) <= width
        assert "\x1b[" not in out
        assert "…" not in out
        assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_explain_as_json_has_the_same_numbers(capsys, faulty):
    code, found = inspected(capsys, faulty, "--explain", "scale:add#0")
    assert code == 1
    assert list(found) == [
        "schema_version", "workload", "device", "num_batches", "site", "calls", "reads", "read_by", "findings",
    ]  # fmt: skip
    _, whole = inspected(capsys, faulty)
    (site,) = [each for each in whole["sites"] if each["site"] == "scale:add#0"]
    assert found["site"] == site
    (output,) = site["numerics"]["outputs"]
    assert output["histogram"] == [{"exponent": -27, "count": 1}, {"exponent": 1, "count": 1}]
    assert (output["num_elements"], output["num_zero"], output["maximum"]) == (2, 0, 3)
    fp16 = output["formats"]["fp16"]
    assert (fp16["flush_frac"], fp16["subnormal_frac"], fp16["num_overflow"], fp16["overflow_frac"]) == (0.5, 0.5, 0, 0)
    assert output["formats"]["bf16"]["flush_frac"] == 0
    assert 0 < fp16["rounding_error"] < 1e-8
    assert [(each["kind"], each["name"], each["via"]) for each in found["reads"]] == [("site", "scale:sub#1", [])]
    assert [each["name"] for each in found["read_by"]] == ["scale:div#0"]
    assert [each["severity"] for each in found["findings"]] == ["error"]
    assert found["calls"][0]["constants"] == [1e-8]


def test_explain_refuses_a_site_that_is_not_there_and_names_the_nearest(capsys, faulty):
    assert cli.main(["inspect", faulty, "--device", "cpu", "--explain", "scale:ad#0"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert 'error: "scale:ad#0" names no site of this workload; nearest: "scale:add#0"' in err
    assert cli.main(["inspect", faulty, "--device", "cpu", "--explain", "blocks.*"]) == 2
    assert '"blocks.*" names 3 sites, and one is wanted: "blocks.0:linear#0"' in capsys.readouterr().err


def test_explain_is_about_one_site_not_all(capsys, faulty):
    assert cli.main(["inspect", faulty, "--explain", "scale:add#0", "--all"]) == 2
    assert '--explain "scale:add#0" shows one site and --all a line for each' in capsys.readouterr().err
