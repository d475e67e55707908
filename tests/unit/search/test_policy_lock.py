"""The lock: small, in a policy file and back, and enough to name every site."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.capture import record
from autoprec.errors import DeviceError
from autoprec.policy import load_policy, preset, save_policy
from autoprec.runtime.device import describe
from autoprec.search import policy_lock as module
from autoprec.search.policy_lock import locked_sites, policy_lock
from tests.unit.search import mlp


def test_every_site_comes_back_from_a_policy_file(tmp_path: Path) -> None:
    op_graph = record(mlp.workload()).op_graph
    lock = policy_lock(op_graph, describe("cpu"))
    policy = replace(preset("fp32", "cpu"), evidence={"lock": lock})
    save_policy(policy, tmp_path / "policy.yaml")
    assert load_policy(tmp_path / "policy.yaml") == policy
    found = load_policy(tmp_path / "policy.yaml").evidence["lock"]
    assert set(locked_sites(found)) == set(op_graph.sites())
    assert found["graph"] == op_graph.fingerprint()
    assert found["parameters"]["first.weight"] == "float32[32,32]"
    assert found["inputs"] == ("float32[16,32]", "int64[16]")
    assert len(found["autocast"]["lists"]) == 16
    assert max(map(len, (tmp_path / "policy.yaml").read_text().splitlines())) <= 120


def test_a_device_without_autocast_has_no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str) -> None:
        raise DeviceError(kind)

    monkeypatch.setattr(module, "kernels", refuse)
    assert policy_lock(record(mlp.workload()).op_graph, describe("cpu"))["autocast"] == {}
