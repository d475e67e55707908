import json
import platform
from importlib import metadata

import pytest
import torch

import autoprec
from autoprec import cli


def test_json_holds_device_formats_and_versions(capsys):
    assert cli.main(["env", "--json", "--device", "cpu"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == ["schema_version", "device", "versions", "platform"]
    assert facts["device"]["kind"] == "cpu"
    assert "fp32" in facts["device"]["formats"]
    assert facts["device"]["emulated_formats"] == ["fp8_e4m3", "fp8_e5m2"]
    assert facts["versions"]["autoprec"] == autoprec.__version__
    assert facts["versions"]["torch"] == metadata.version("torch")
    assert facts["versions"]["python"] == platform.python_version()


def test_text_names_the_device_and_its_formats(capsys):
    assert cli.main(["env", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["device", "cpu:"]
    assert any(line.startswith("formats") and "fp32" in line for line in lines)
    assert "emulated    fp8_e4m3, fp8_e5m2" in lines
    assert any(line.split() == ["torch", metadata.version("torch")] for line in lines)


def test_a_package_that_is_missing_is_said_so(capsys, monkeypatch):
    def version(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    assert cli.main(["env", "--device", "cpu"]) == 0
    assert "optuna      not installed" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error(capsys):
    assert cli.main(["env", "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_device_that_does_not_exist_is_an_error(capsys):
    assert cli.main(["env", "--device", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
