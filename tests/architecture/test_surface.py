"""Public names and command-line options are promises: changing one takes a changed line in a committed list."""

import re
import shlex

import pytest

import autoprec
from tests.architecture.surface import COMMITTED, ROOT, command_lines, commands, public_names


@pytest.mark.parametrize(
    ("file", "lines"), [("public_names.txt", public_names()), ("command_line.txt", command_lines())]
)
def test_what_is_shown_equals_the_committed_list(file, lines):
    committed = (COMMITTED / file).read_text().splitlines()
    assert lines == committed, f"if this is meant, write it to tests/architecture/{file} and to CHANGELOG.md"


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_is_there(name):
    assert getattr(autoprec, name) is not None
    assert name in dir(autoprec)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'autocast'"):
        autoprec.autocast  # noqa: B018 touching it is the test


def test_every_home_belongs_to_a_public_name():
    assert sorted(autoprec._HOMES) == sorted(set(autoprec.__all__) - {"__version__"})


def documented_calls() -> list[list[str]]:
    """Return the words of every `autoprec ...` call in README, docs, Makefile and examples, code and running text."""
    documents = [
        ROOT / "README.md",
        ROOT / "Makefile",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").glob("*.py"),
    ]
    text = "\n".join(path.read_text() for path in documents)
    lines = re.findall(r"^(?:\$ | {4}|\t\$\(BIN\)/)(autoprec .*)$", text, re.MULTILINE)
    inline = re.findall(r"`(autoprec [^`\n]+)`", text)
    return [list(words) for words in sorted({tuple(shlex.split(call, comments=True)) for call in [*lines, *inline]})]


def test_every_command_is_documented():
    named = {words[1] for words in documented_calls() if not words[1].startswith(("-", "..."))}
    assert {path.split()[1] for path, _, _ in commands() if " " in path} == named


@pytest.mark.parametrize("words", documented_calls(), ids=" ".join)
def test_every_documented_command_and_option_exists(words):
    known = {path: options for path, _, options in commands()}
    named = [word for word in words if not word.startswith("-")]
    path = next(" ".join(named[:n]) for n in (3, 2, 1) if " ".join(named[:n]) in known)
    assert path != "autoprec" or len(named) == 1, f"{named[1]} is no command"
    assert not path.endswith("policy") or len(named) == 2, f"{named[2]} is no command of policy"
    for option in (word.split("=")[0] for word in words if word.startswith("-")):
        assert option in known[path], f"{path} has no {option}"
