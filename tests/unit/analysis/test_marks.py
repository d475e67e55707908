from autoprec.analysis.marks import Mark, Reason, ReasonCode, Verdict, merge
from autoprec.graph.site import Site

SITE = Site("blocks.0", "add", 0)


def reason(detail: str) -> Reason:
    return Reason(code=ReasonCode.DENY_OP, detail=detail, evidence={"n": 1})


def mark(verdict: Verdict, *details: str, site: Site = SITE, fmt: str = "fp16") -> Mark:
    return Mark(site=site, format=fmt, verdict=verdict, reasons=tuple(map(reason, details)))


def test_the_strongest_verdict_wins_and_its_reasons_come_first() -> None:
    assert merge([mark("free"), mark("prefer", "b"), mark("must", "a"), mark("prefer", "c")]) == (
        mark("must", "a", "b", "c"),
    )


def test_a_reason_given_twice_is_told_once() -> None:
    assert merge([mark("prefer", "a"), mark("prefer", "a", "b")]) == (mark("prefer", "a", "b"),)


def test_each_site_and_format_keeps_its_own_mark_in_order_of_appearance() -> None:
    other = Site("blocks.1", "add", 0)
    marks = (mark("free", site=other), mark("must", "a"), mark("prefer", "b", fmt="bf16"))
    assert merge(marks) == marks


def test_reasons_can_be_hashed_although_their_evidence_cannot() -> None:
    assert len({reason("a"), reason("a"), reason("b")}) == 2


def test_nothing_merges_to_nothing() -> None:
    assert merge([]) == ()
