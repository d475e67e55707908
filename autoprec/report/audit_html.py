"""An audit as one page that needs nothing beside it: places a view and computes nothing."""

from html import escape

from autoprec.report.audit_view import AuditView, EvidenceRow, FailureView, GateRow

_STYLE = """
:root { color-scheme: light dark;
  --page: #fff; --ink: #1d2126; --quiet: #626b76; --line: #dfe3e8; --card: #f6f8fa;
  --pass: #1a7f37; --fail: #b42318; --none: #767f8b; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --ink: #e4e7eb; --quiet: #98a2ae; --line: #2d333b; --card: #1b2026;
  --pass: #4cc06d; --fail: #ff7b6e; --none: #8b949e; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 3rem 1.5rem 4rem; max-width: 62rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { margin: 0 0 .25rem; font-size: 1.45rem; line-height: 1.3; font-weight: 600; overflow-wrap: anywhere }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.05rem; font-weight: 600 }
h3 { margin: 0; font-size: 1rem; font-weight: 600; color: var(--fail) }
code, pre, .mono { font: .87em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace }
.state { margin: 0 0 .5rem; font-size: .8rem; font-weight: 600; letter-spacing: .04em }
.state span { margin-right: 1rem }
.quiet { color: var(--quiet) }
.pass { color: var(--pass) } .fail { color: var(--fail) } .none { color: var(--none) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.25rem; margin: 1rem 0 0 }
dt { color: var(--quiet) } dd { margin: 0; overflow-wrap: anywhere }
table { width: 100%; border-collapse: collapse }
th { text-align: left; font-weight: 500; color: var(--quiet); font-size: .85rem }
th, td { padding: .5rem .9rem .5rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td:last-child, th:last-child { padding-right: 0 }
td.name { font-weight: 600; white-space: nowrap } td.verdict { white-space: nowrap; font-weight: 600 }
td.time { text-align: right; white-space: nowrap; color: var(--quiet); font-variant-numeric: tabular-nums }
td p { margin: .15rem 0 0; font-size: .87rem; color: var(--quiet) }
td.measured { overflow-wrap: anywhere }
tr.is-none td.name, tr.is-none td.measured { color: var(--quiet); font-weight: 400 }
section.failure { margin: 0 0 1rem; padding: 1rem 1.25rem 1.1rem; background: var(--card);
  border-left: 3px solid var(--fail) }
section.failure > p { margin: .15rem 0 0 }
section.failure table { margin-top: .75rem; font-size: .9rem } section.failure td { padding-block: .3rem }
section.failure tr:last-child td { border-bottom: 0 } section.failure td.where { width: 26%; overflow-wrap: anywhere }
.next { margin-top: .9rem !important; white-space: pre-wrap; overflow-wrap: anywhere }
details { margin-top: 2.5rem } summary { cursor: pointer; font-weight: 600 }
pre { overflow-x: auto; padding: 1rem; background: var(--card); white-space: pre-wrap; overflow-wrap: anywhere }
footer { margin-top: 2.5rem; font-size: .85rem; color: var(--quiet) }
@media (max-width: 40rem) { td.time, th.time { display: none } body { padding: 1.5rem 1rem } }
@media print { body { padding: 0; max-width: none; font-size: 10.5pt } section.failure, tr { break-inside: avoid }
  details { display: none } }
"""
_CLASSES = {"pass": "pass", "fail": "fail", "not-applicable": "none"}
_COUNTS = {"passed": "pass", "failed": "fail", "not applicable": "none"}


def audit_html(view: AuditView) -> str:
    """Return the page."""
    counts = "".join(f'<span class="{_COUNTS[name]}">{count} {name}</span>' for name, count in view.counts if count)
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in view.facts)
    failures = "".join(_failure(failure) for failure in view.failures)
    files = "; ".join(f"{escape(label)} <span class=mono>{escape(path)}</span>" for label, path in view.files)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(view.headline)}</title>
<style>{_STYLE}</style>
<main>
<p class="state">{counts}</p>
<h1>{escape(view.headline)}</h1>
<dl>{facts}</dl>
{f"<h2>What fails, and what to do</h2>{failures}" if failures else ""}
<h2>Gates</h2>
<table>
<thead><tr><th>gate<th>verdict<th>measured<th>threshold<th class="time">took</thead>
<tbody>
{"".join(_row(row) for row in view.gates)}</tbody>
</table>
<details><summary>The policy that was audited</summary><pre>{escape(view.policy)}</pre></details>
</main>
<footer>autoprec audit; {files}</footer>
</html>
"""


def _row(row: GateRow) -> str:
    kind = _CLASSES[row.state]
    notes = "".join(f"<p>{escape(note)}</p>" for note in row.notes)
    return (
        f'<tr class="is-{kind}"><td class="name">{escape(row.gate)}<td class="verdict {kind}">{escape(row.verdict)}'
        f'<td class="measured">{escape(row.measured)}<p>proves that {escape(row.proves)}</p>{notes}'
        f'<td class="quiet">{escape(row.threshold)}<td class="time">{escape(row.took)}</tr>\n'
    )


def _failure(failure: FailureView) -> str:
    allowed = f'<p class="quiet">allowed: {escape(failure.threshold)}</p>' if failure.threshold else ""
    rows = "".join(_evidence(row) for row in failure.evidence)
    more = f'<p class="quiet">{escape(failure.more)}</p>' if failure.more else ""
    advice = f'<p class="next"><span class="quiet">next:</span> {escape(failure.advice)}</p>' if failure.advice else ""
    return (
        f'<section class="failure"><h3>{escape(failure.gate)}</h3><p>{escape(failure.measured)}</p>{allowed}'
        f"{f'<table>{rows}</table>' if rows else ''}{more}{advice}</section>\n"
    )


def _evidence(row: EvidenceRow) -> str:
    numbers = f"{row.number}{f', allowed {row.threshold}' if row.threshold else ''}"
    return (
        f'<tr><td class="where mono">{escape(row.where)}<td>{escape(row.what)}<td class="quiet">{escape(numbers)}</tr>'
    )
