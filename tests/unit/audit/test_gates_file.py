"""The gates file: what it may say, and what is wrong with it, by line."""

from pathlib import Path

import pytest

from autoprec.audit.gate import Finding, Gate, Threshold
from autoprec.audit.gates import GATES
from autoprec.audit.gates_file import GatesFile, allowed, check_names, default_gates, load_gates
from autoprec.errors import GatesError


def quiet(*_: object) -> Finding:
    return Finding(verdict="pass", measured="")


FIDELITY = Gate(
    name="fidelity",
    proves="it trains",
    check=quiet,
    thresholds={
        "horizon": Threshold(default=100, unit="steps", means="how long", minimum=8, whole=True),
        "margin": Threshold(default=0.01, unit="", means="how much", maximum=0.5),
    },
)
PLAIN = Gate(name="match", proves="it fits", check=quiet)
ROWS = (PLAIN, FIDELITY)


def read(tmp_path: Path, text: str) -> GatesFile:
    (tmp_path / "gates.yaml").write_text(text)
    return load_gates(tmp_path / "gates.yaml", ROWS)


def test_thresholds_and_gates_that_are_off(tmp_path: Path) -> None:
    found = read(tmp_path, "autoprec_gates: 1\n\nmatch: off\nfidelity:\n  horizon: 200\n  margin: 0.02\n")
    assert found.thresholds == {"fidelity": {"horizon": 200.0, "margin": 0.02}}
    assert found.off == {"match": f"{tmp_path}/gates.yaml:3"}


def test_quoted_off_and_empty_gates(tmp_path: Path) -> None:
    found = read(tmp_path, 'autoprec_gates: 1\nfidelity: "off"\nmatch: {}\n')
    assert list(found.off) == ["fidelity"]
    assert found.thresholds == {"match": {}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fidelity: {horizon: 9}\n",
            r"gates.yaml:1: not a gates file: the key autoprec_gates.*starts with autoprec_gates: 1",
        ),
        ("", r"gates.yaml:1: the file is empty; a gates file starts with autoprec_gates: 1"),
        ("autoprec_gates: 2\n", r"gates.yaml:1: .*schema 2, from a newer autoprec, and this one reads up to 1"),
        ("autoprec_gates: 0\n", r"gates.yaml:1: the gates file has schema 0; schemas: 1 to 1"),
        (
            "autoprec_gates: 1\nfidelty: off\n",
            r'gates.yaml:2: .*no key "fidelty"; keys: .*match, fidelity; nearest: "fidelity"',
        ),
        (
            "autoprec_gates: 1\nfidelity:\n  horizn: 9\n",
            r'gates.yaml:3: gate fidelity has no key "horizn"; keys: horizon, margin; nearest: "horizon"',
        ),
        (
            "autoprec_gates: 1\nfidelity: {horizon: 7}\n",
            r"gates.yaml:2: fidelity.horizon is 7; allowed: whole numbers from 8",
        ),
        (
            "autoprec_gates: 1\nfidelity: {horizon: 9.5}\n",
            r"gates.yaml:2: fidelity.horizon is .*expected a whole number",
        ),
        (
            "autoprec_gates: 1\nfidelity: {margin: 0.6}\n",
            r"gates.yaml:2: fidelity.margin is 0.6; allowed: numbers from 0 to 0.5",
        ),
        ("autoprec_gates: 1\nfidelity: {margin: .nan}\n", r"gates.yaml:2: fidelity.margin is .nan; allowed"),
        ("autoprec_gates: 1\nfidelity: on\n", r"gates.yaml:2: gate fidelity is true or false.*expected a mapping"),
        ("autoprec_gates: 1\nmatch: {x: 1}\n", r"gates.yaml:2: gate match has no thresholds; write match: off"),
        ("autoprec_gates: 1\nmatch: [\n", r"gates.yaml:3: not YAML"),
    ],
)
def test_what_is_wrong_is_told_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(GatesError, match=message):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GatesError, match=r"none\.yaml: the gates file cannot be read: No such file"):
        load_gates(tmp_path / "none.yaml", ROWS)


def test_only_names_gates() -> None:
    assert check_names((), ROWS) == ROWS
    assert check_names(("fidelity", "match"), ROWS) == ROWS
    with pytest.raises(GatesError, match=r'"fidelty", which is no gate; gates: match, fidelity; nearest: "fidelity"'):
        check_names(("fidelty",), ROWS)


@pytest.mark.parametrize("rows", [ROWS, GATES], ids=["two", "all"])
def test_the_defaults_as_a_file_are_the_defaults(tmp_path: Path, rows: tuple[Gate, ...]) -> None:
    (tmp_path / "gates.yaml").write_text(default_gates(rows))
    found = load_gates(tmp_path / "gates.yaml", rows)
    assert found.off == {}
    assert {gate.name: dict(found.thresholds[gate.name]) for gate in rows} == {
        gate.name: gate.defaults for gate in rows
    }


def test_what_is_allowed_in_words() -> None:
    assert allowed(Threshold(default=1, unit="", means="", maximum=2)) == "numbers from 0 to 2"
