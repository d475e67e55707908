"""What an audit shows: the numbers, on a terminal, as JSON, as JUnit and as a page."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from autoprec.records.audit import AuditRecord
from autoprec.report.audit_html import audit_html
from autoprec.report.audit_json import audit_json
from autoprec.report.audit_junit import audit_junit
from autoprec.report.audit_text import print_audit
from autoprec.report.audit_view import audit_view, headline, number_text, threshold_text
from tests.unit.records.audit_samples import AUDIT, FAILED, HEALTHY, PASSED, SKIPPED


def shown(record: AuditRecord, width: int = 120) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        print_audit(audit_view(record), console)
    return capture.get()


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (AUDIT, "policy.yaml fails 1 of 2 gates: match"),
        (HEALTHY, "policy.yaml passes the gate; 1 not applicable"),
        (replace(AUDIT, gates=(PASSED, PASSED)), "policy.yaml passes 2 of 2 gates"),
        (replace(AUDIT, gates=(SKIPPED,)), "policy.yaml: none of 1 gate applies, so nothing is proven"),
    ],
)
def test_the_headline(record: AuditRecord, text: str) -> None:
    assert headline(record) == text


def test_a_threshold_says_which_way_it_bounds() -> None:
    assert threshold_text(FAILED) == "at most 0 differences"
    assert threshold_text(replace(FAILED, unit="steps", threshold=0.12345)) == "0.1235 steps"
    assert threshold_text(SKIPPED) == ""
    assert (number_text(None), number_text(float("inf")), number_text(1e6)) == ("", "inf", "1000000")


def test_a_failure_has_site_number_threshold_and_next_command() -> None:
    (failure,) = audit_view(AUDIT).failures
    assert failure.threshold == "at most 0 differences"
    assert (failure.evidence[1].where, failure.evidence[1].number) == ("blocks.1:linear#0", "0.3333")
    assert failure.evidence[1].threshold == "0.5"
    assert len(failure.evidence) == 6
    assert failure.more == "and 3 more in the record"
    assert failure.advice == "tune again: autoprec tune run.py"


@pytest.mark.parametrize("width", [60, 120])
def test_a_terminal_shows_the_table_and_what_fails(width: int) -> None:
    text = " ".join(shown(AUDIT, width).split())
    for words in ("FAIL", "pass", "n/a", "no price is given", "at least 1 x fp32", "(0.3333, allowed 0.5)"):
        assert words in text
    assert "next tune again: autoprec tune run.py" in text
    assert "runs/run/audit.json" in text


def test_a_healthy_audit_has_nothing_below_its_table() -> None:
    assert "next" not in shown(HEALTHY)


def test_json_is_strict() -> None:
    found = json.loads(json.dumps(audit_json(AUDIT), allow_nan=False))
    assert (found["passed"], found["failed"]) == (False, ["match"])
    gates = {gate["gate"]: gate for gate in found["gates"]}
    assert gates["speed"]["value"] is None
    assert gates["match"]["evidence"][1] == {
        "where": "blocks.1:linear#0",
        "what": "is new",
        "value": pytest.approx(1 / 3),
        "threshold": 0.5,
    }


def test_junit_has_a_case_for_each_gate() -> None:
    bell = replace(FAILED, measured="odd \x07 \ufffe text")
    root = ET.fromstring(audit_junit(replace(AUDIT, gates=(bell, PASSED, SKIPPED))))
    (suite,) = root
    assert root.tag == "testsuites"
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "3", "failures": "1", "errors": "0", "skipped": "1"}
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert list(cases) == ["match", "speed", "cost"]
    failure = cases["match"].find("failure")
    assert failure is not None
    assert failure.get("message") == "odd ? ? text"
    assert "blocks.1:linear#0: is new (0.3333 allowed 0.5)" in (failure.text or "")
    assert "next: tune again" in (failure.text or "")
    assert cases["speed"].find("failure") is None
    skipped = cases["cost"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "no price is given"


class Tags(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_beside_it_and_escapes_what_it_is_given() -> None:
    page = audit_html(audit_view(AUDIT))
    tags = Tags()
    tags.feed(page)
    assert tags.links == []
    assert not {"script", "link", "img", "b"} & set(tags.tags)
    assert "url(" not in page
    assert "@media print" in page
    assert "prefers-color-scheme: dark" in page
    for words in (
        "architecture (blocks.2) <1 & 2>",
        "tune again: autoprec tune run.py",
        "name: gpt  # <b>",
        "1 failed",
    ):
        assert words in tags.text


def test_a_healthy_page_has_no_failures() -> None:
    assert "What fails" not in audit_html(audit_view(HEALTHY))
