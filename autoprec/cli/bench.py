"""`autoprec bench`: a policy and the baselines, measured side by side."""

import json
from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.running import running


def bench(
    *,
    workload: Annotated[str, typer.Argument(help="The training run: file.py or file.py:name.")],
    policy: Annotated[Path, typer.Option(help="Policy file to measure, or the name of a preset.")],
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for bench.json; default: runs/ and the workload's name.")
    ] = None,
    baselines: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Presets to measure beside it, as in fp32,apex-o1; or default, or all."),
    ] = None,
    steps: Annotated[int, typer.Option(min=24, help="Steps that each policy trains.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and random numbers.")] = 0,
    device: Annotated[str, typer.Option(help="Device to train on: auto, cpu, cuda or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure a policy and all baselines in the same interleaved rounds: speed, fidelity, memory."""
    from autoprec.pipeline import BenchOptions
    from autoprec.pipeline import bench as run
    from autoprec.report.console import console
    from autoprec.report.progress import RichObserver
    from autoprec.report.run_json import bench_json
    from autoprec.report.text import print_run
    from autoprec.report.views import run_view
    from autoprec.search.baselines import names_in

    options = BenchOptions(
        workload=workload,
        policy=policy,
        run_dir=run_dir,
        baselines=names_in(baselines),
        horizon=steps,
        seed=seed,
        device=device,
    )
    with running():
        record = run(options, RichObserver(console(stderr=True)))
    if as_json:
        typer.echo(json.dumps(bench_json(record), indent=2, allow_nan=False))
    else:
        print_run(run_view(record), console())
