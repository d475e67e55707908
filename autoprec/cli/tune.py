"""`autoprec tune`: search, prove and write the fastest faithful policy of a training run."""

import contextlib
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_INTERRUPTED = 130


class Objective(StrEnum):
    """What the search makes small: the time of a step, or time, memory and gradient error at once."""

    TIME = "time"
    PARETO = "pareto"


def tune(
    *,
    workload: Annotated[str, typer.Argument(help="The training run: file.py or file.py:name.")],
    out: Annotated[Path, typer.Option(help="Policy file to write.")] = Path("policy.yaml"),
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for record and study; default: runs/ and the workload's name.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Wall-clock time from recording to proof: 90s, 5m, 1h30m.")] = "5m",
    trials: Annotated[
        int | None, typer.Option(min=0, help="Stop the search after this many trials besides the baselines.")
    ] = None,
    space: Annotated[Path | None, typer.Option(help="Search space; default: the one for the device.")] = None,
    baselines: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Presets to beat, as in fp32,apex-o1; or default, or all."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, random numbers and search.")] = 0,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="Optuna storage; default: SQLite in the run folder.")
    ] = None,
    study: Annotated[str | None, typer.Option(metavar="NAME", help="Study; default: the workload's name.")] = None,
    device: Annotated[str, typer.Option(help="Device to train on: auto, cpu, cuda or mps.")] = "auto",
    objective: Annotated[
        Objective, typer.Option(help="What the search makes small; pareto also writes the policies of the front.")
    ] = Objective.TIME,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Search, prove and write the fastest policy that trains as faithfully as FP32 does.

    The same command resumes a run that was interrupted. Exit code 130 after Ctrl-C or SIGTERM; the
    best so far is written then.
    """
    from autoprec.pipeline import TuneOptions
    from autoprec.pipeline import tune as run
    from autoprec.report.console import console
    from autoprec.report.progress import RichObserver
    from autoprec.report.run_json import result_json
    from autoprec.report.text import print_run
    from autoprec.report.views import run_view
    from autoprec.search.baselines import names_in
    from autoprec.search.duration import parse_duration

    options = TuneOptions(
        workload=workload,
        out=out,
        run_dir=run_dir,
        budget_s=parse_duration(budget),
        trials=trials,
        space=space,
        baselines=names_in(baselines),
        seed=seed,
        storage=storage,
        study=study,
        device=device,
        objective=objective.value,
    )
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the workload prints is not the result
            record = run(options, RichObserver(console(stderr=True)))
    except KeyboardInterrupt:
        typer.echo("interrupted before fp32 was measured: no policy is written; run the same command again", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(result_json(record), indent=2, allow_nan=False))
    else:
        print_run(run_view(record), console())
    if record.interrupted:
        typer.echo(f"the best so far is in {record.policy_file}; the same command resumes the study", err=True)
        raise typer.Exit(_INTERRUPTED)
