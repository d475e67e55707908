"""What README and docs show is true as far as a test can tell: code compiles, files load, links lead somewhere."""

import ast
import re
import subprocess
import textwrap

import pytest

import autoprec
from autoprec.audit.gates import GATES
from autoprec.audit.gates_file import default_gates
from autoprec.errors import AutoprecError
from autoprec.policy import PRESETS
from tests.architecture.surface import ROOT

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def blocks(language: str) -> list[str]:
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    return [
        textwrap.dedent(block) for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_parse_and_name_what_exists(code):
    names = {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "autoprec"
    }
    assert names <= set(autoprec.__all__)


def test_the_policy_of_the_readme_loads(tmp_path):
    path = tmp_path / "policy.yaml"
    for block in (block for block in blocks("yaml") if block.startswith("autoprec:")):
        path.write_text(block)
        assert autoprec.load_policy(path).name == "char_gpt"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_table_of_presets_is_that_of_the_code():
    rows = [
        f"| `{row.name}` | {row.stands_for} | {row.does} | {'; '.join(row.leaves_out) or 'nothing'} |"
        for row in PRESETS.values()
    ]
    lines = (ROOT / "docs" / "presets.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| `")] == rows


def test_measured_output_in_the_readme_stays_short():
    (measured,) = re.findall(
        r"<!-- measured:.*?-->\n(.*?)<!-- /measured -->", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert len(measured.splitlines()) <= 27, "25 lines and the fence"


def test_make_knows_its_targets():
    targets = ("demo", "test", "lint", "bench", "gpu", "lock")
    done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_changelog_names_the_version():
    assert f"## {autoprec.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_error_is_an_autoprec_error():
    from autoprec import errors

    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(kinds) > 10
    assert all(issubclass(kind, AutoprecError) for kind in kinds)


def test_the_gates_and_thresholds_of_the_document_are_those_of_the_code():
    text = (ROOT / "docs" / "audit.md").read_text()
    rows = [f"| `{gate.name}` | {gate.proves} |" for gate in GATES]
    assert [line for line in text.splitlines() if line.startswith("| `")] == rows
    defaults = default_gates(GATES)
    assert f"```yaml\n{defaults}```" in text, (
        f"docs/audit.md lacks what autoprec audit --show-gates prints:\n{defaults}"
    )
