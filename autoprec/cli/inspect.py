"""`autoprec inspect`: what must stay FP32, what should by default, and why, without training."""

import json
import linecache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoprec.cli.running import running
from autoprec.errors import FormatError, PolicyError

if TYPE_CHECKING:
    from autoprec.analysis import Inspection
    from autoprec.graph.site import Site
    from autoprec.runtime.device import DeviceInfo


def inspect(
    *,
    workload: Annotated[str, typer.Argument(help="The training run: file.py or file.py:name.")],
    formats: Annotated[str, typer.Option(help="Low formats to judge, separated by commas.")] = "fp16,bf16",
    device: Annotated[str, typer.Option(help="Device to run on: auto, cpu, cuda or mps.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model's weights and of every other random choice.")] = 0,
    batches: Annotated[int, typer.Option(min=1, help="Batches to judge on.")] = 3,
    every_site: Annotated[bool, typer.Option("--all", help="Show every site, not one line a layer.")] = False,
    static: Annotated[bool, typer.Option("--static", help="Say only what needs no run in a low format: fast.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="SITE", help="Show one site: every reason, its numbers and its neighbors.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show what must stay FP32 in a training run, what should by default, and why, without training it.

    Exit code 1 if anything must stay FP32.
    """
    names = _formats(formats)
    if explain is not None and every_site:
        raise PolicyError(f'--explain "{explain}" shows one site and --all a line for each; give one of the two')
    if explain is not None and static:
        raise PolicyError(f'--explain "{explain}" shows measured numbers, and --static measures none; leave one out')
    from autoprec.analysis import inspect_recordings, inspect_static
    from autoprec.capture import record_batches
    from autoprec.graph.find_site import the_site
    from autoprec.report.inspect_json import inspect_json
    from autoprec.report.inspect_view import inspect_view
    from autoprec.runtime.device import describe
    from autoprec.search.broken import check_first_loss
    from autoprec.workload import load

    with running():
        loaded, info = load(workload), describe(device)
        recordings = record_batches(loaded.workload, 1 if static else batches, device=info.kind, seed=seed)
        for recording in recordings:
            check_first_loss(recording)
        site = None if explain is None else the_site(recordings[0].op_graph.sites(), explain)
        if static:
            inspection = inspect_static(recordings[0], names, info.kind)
        else:
            inspection = inspect_recordings(recordings, loaded.workload, names, info)
    if site is not None:
        _explain(inspection, site, loaded.name, info, as_json=as_json)
    elif as_json:
        found = inspect_json(inspection, workload=loaded.name, device=_device_json(info))
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        from autoprec.report.console import console
        from autoprec.report.inspect_text import print_inspection

        title = f"{info.kind} ({info.name})"
        view = inspect_view(inspection, workload=loaded.name, device=title, every_site=every_site)
        print_inspection(view, console())
    if any(mark.verdict == "must" for mark in inspection.marks):
        raise typer.Exit(1)


def _explain(inspection: "Inspection", site: "Site", workload: str, info: "DeviceInfo", *, as_json: bool) -> None:
    """Print all that is known of one site."""
    if as_json:
        from autoprec.report.explain_json import explain_json

        found = explain_json(inspection, site, workload=workload, device=_device_json(info))
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
        return
    from autoprec.report.console import console
    from autoprec.report.explain_text import LABEL_COLUMNS, print_explanation
    from autoprec.report.explain_view import explain_view

    out, title = console(), f"{info.kind} ({info.name})"
    file, _, line = inspection.op_graph.calls_of(site)[0].source.rpartition(":")
    code = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
    width = max(out.width - LABEL_COLUMNS, 1)
    print_explanation(explain_view(inspection, site, workload=workload, device=title, code=code, width=width), out)


def _formats(text: str) -> tuple[str, ...]:
    """Return the formats that `text` lists.

    Raises: `FormatError` for none, for a name that is no format, and for one that is not low.
    """
    from autoprec.numerics import FORMATS, format_named

    low = [row.name for row in FORMATS.values() if row.storage_bits < FORMATS["fp32"].storage_bits]
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise FormatError(f'--formats "{text}" lists no format; low formats: {", ".join(low)}')
    for name in names:
        if format_named(name).name not in low:
            raise FormatError(f'--formats: "{name}" is not a low format; low formats: {", ".join(low)}')
    return names


def _device_json(info: "DeviceInfo") -> dict[str, Any]:
    return {"kind": info.kind, "name": info.name, "formats": list(info.formats)}
