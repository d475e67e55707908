"""The terminal summary and the progress places what views computed."""

import io
from dataclasses import replace

from rich.console import Console

from autoprec.report.progress import RichObserver
from autoprec.report.text import print_run
from autoprec.report.views import run_view
from tests.unit.records.samples import MEMORY, RUN, trial


def console(*, terminal: bool = False, width: int = 200) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False)


def printed(place: Console) -> str:
    assert isinstance(place.file, io.StringIO)
    return place.file.getvalue()


def test_everything_in_the_view_is_printed() -> None:
    view = run_view(RUN)
    place = console()
    print_run(view, place)
    text = printed(place)
    wanted = [view.headline, view.kept_title, *view.usage]
    rows = (*view.baselines, *view.best)
    wanted += [cell for row in rows for cell in (row.name, row.step, row.speedup, row.steps_lost, row.memory, row.note)]
    wanted += [view.baselines_title, view.best_title]
    wanted += [cell for row in view.kept for cell in (row.sites, row.count, row.why)]
    wanted += [cell for pair in (*view.facts, *view.proof, *view.files) for cell in pair]
    assert [each for each in wanted if each not in text] == []


def test_eighty_columns_hold_every_number_and_note() -> None:
    slow = trial("matmul-and-conv-bf16-norms", 10.25, number=9, verdict="inconclusive")
    assert slow.fidelity is not None
    slow = replace(
        slow,
        reason="slower than the best trial (Wilcoxon test)",
        num_skipped=0,
        fidelity=replace(slow.fidelity, steps_lost_frac=-0.00123),
        memory=replace(MEMORY, total_bytes=1234 * 2**20),
    )
    view = run_view(replace(RUN, trials=(*RUN.trials, slow)))
    place = console(width=80)
    print_run(view, place)
    lines = printed(place).splitlines()
    assert "…" not in printed(place)
    assert [line for line in lines if line != line.rstrip() or len(line) > 80] == []
    row = next(row for row in view.best if row.name == slow.name)
    place_of = next(index for index, line in enumerate(lines) if slow.name in line)
    assert all(cell in lines[place_of] for cell in (row.name, row.speedup, row.step, row.steps_lost, row.memory))
    assert lines[place_of + 1] == f"    {row.note}"


def test_brackets_in_names_are_printed_as_they_are() -> None:
    place = console()
    print_run(run_view(replace(RUN, workload="[bold]m.py[/bold]")), place)
    assert "[bold]m.py[/bold]" in printed(place)


def test_off_a_terminal_progress_is_plain_lines() -> None:
    place = console()
    with RichObserver(place) as observer:
        observer.stage("search", budget_s=60)
        observer.trial_begins("fp32", 0)
        observer.round_ends(0.5, 1.25)
        observer.trial_ends(RUN.trials[0], RUN.trials[0])
        observer.note("a [note]")
    lines = printed(place).splitlines()
    assert lines[0].startswith("search (")
    assert lines[0].endswith("left)")
    assert lines[1].startswith("trial 0 fp32: complete")
    assert lines[2] == "a [note]"
    assert "\x1b" not in printed(place)


def test_on_a_terminal_the_trial_the_best_and_the_time_left_are_in_view() -> None:
    place = console(terminal=True)
    with RichObserver(place) as observer:
        observer.stage("search", budget_s=3600)
        observer.trial_begins("graph-pass-bf16", 7)
        observer.round_ends(0.5, 1.25)
        observer.trial_ends(RUN.trials[2], RUN.trials[2])
        observer.trial_begins("matmul-only-bf16", 8)
        observer.round_ends(0.5, 1.25)
        place.print(observer._render())
    text = printed(place)
    assert "trial 8: matmul-only-bf16, 50 %, 0.80x fp32" in text
    assert "best: graph-pass-bf16 1.40x fp32" in text
    assert "left" in text
