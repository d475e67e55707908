"""`autoprec audit`: a policy held against every gate before it goes to production."""

import json
from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.running import running
from autoprec.errors import PolicyError, WorkloadError


def audit(
    *,
    workload: Annotated[str | None, typer.Argument(help="The training run: file.py or file.py:name.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file to audit, or the name of a preset.")] = None,
    gates: Annotated[Path | None, typer.Option(help="Gates file with thresholds; default: those of each gate.")] = None,
    only: Annotated[str | None, typer.Option(metavar="NAMES", help="Gates to run, as in match,honoured.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="JUnit XML to write, for CI systems.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Page to write, which needs no other file.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for audit.json; default: runs/ and the workload's name.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of weights and random numbers; default: one that tuning has not used."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device to train on: auto, cpu, cuda or mps.")] = "auto",
    price_per_hour: Annotated[
        float | None, typer.Option(min=0.0, help="What an hour of the device costs, for the gate cost.")
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Give it twice, an earlier and a later one, to see the drift between them."),
    ] = None,
    show_gates: Annotated[
        bool, typer.Option("--show-gates", help="Print a gates file with every default and what it means, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Prove a policy before production: every gate with its verdict, the number, the threshold and what to do.

    Exit 0: every gate passes or is not applicable; 1: one fails; 2: wrong usage or input; 3: a bug in autoprec.
    """
    if show_gates:
        _show_gates()
        return
    if workload is None:
        raise WorkloadError("audit what? give a workload, as in autoprec audit train.py --policy policy.yaml")
    if policy is None:
        raise PolicyError("audit which policy? give --policy FILE, the file that autoprec tune wrote, or a preset")
    from autoprec.files import check_writable, write_text
    from autoprec.pipeline import AuditOptions
    from autoprec.pipeline import audit as run
    from autoprec.report.audit_html import audit_html
    from autoprec.report.audit_json import audit_json
    from autoprec.report.audit_junit import audit_junit
    from autoprec.report.audit_text import print_audit
    from autoprec.report.audit_view import audit_view
    from autoprec.report.console import console
    from autoprec.report.progress import RichObserver
    from autoprec.search.baselines import names_in

    options = AuditOptions(
        workload=workload,
        policy=policy,
        gates=gates,
        run_dir=run_dir,
        seed=seed,
        device=device,
        price_per_hour=price_per_hour,
        checkpoints=tuple(checkpoint or ()),
        only=names_in(only),
    )
    for file in (junit, html):
        if file is not None:
            check_writable(file.parent)
    with running():
        record = run(options, RichObserver(console(stderr=True)))
    view = audit_view(record)
    if junit is not None:
        write_text(junit, audit_junit(record))
    if html is not None:
        write_text(html, audit_html(view))
    if as_json:
        typer.echo(json.dumps(audit_json(record), indent=2, allow_nan=False))
    else:
        print_audit(view, console())
    if not record.passed:
        raise typer.Exit(1)


def _show_gates() -> None:
    from autoprec.audit.gates import GATES
    from autoprec.audit.gates_file import default_gates

    typer.echo(default_gates(GATES), nl=False)
