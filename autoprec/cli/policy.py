"""`autoprec policy`: check a policy file, show it, compare two, trace what one really runs, export one to other tools.

Torch is loaded only where a workload is given: its sites are what the rules are held against.
"""

import contextlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoprec.cli.policy_pages import (
    about_preset,
    check_plain,
    diff_plain,
    draw,
    draw_diff,
    print_json,
    resolution_table,
    table_of,
)

if TYPE_CHECKING:
    from autoprec.capture import Recording
    from autoprec.policy import Policy, ResolvedPolicy


class Target(StrEnum):
    """The tools that a policy can be written for."""

    FSDP2 = "fsdp2"
    TORCHAO_FLOAT8 = "torchao-float8"


app = typer.Typer(
    help="Check, show, compare, trace and export policies.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

File = Annotated[str, typer.Argument(help="Policy file, or the name of a preset.", show_default=False)]
Workload = Annotated[str | None, typer.Argument(help="Workload whose sites to hold against the rules.")]
Device = Annotated[str, typer.Option(help="Device of presets, and to run the workload on: auto, cpu, cuda or mps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command()
def check(file: File, workload: Workload = None, *, device: Device = "cpu", as_json: AsJson = False) -> None:
    """Check that a policy is well formed and, on a workload, that every rule wins somewhere.

    Exit 0: fine; 1: a rule wins nowhere, or FP8 kernels do not take a shape; 2: the file is wrong.
    """
    device = _kind(device)
    policy = _read(file, device, workload)
    if workload is None:
        if as_json:
            print_json(check_plain(policy, None, (), ()))
            return
        formats = ", ".join(dict.fromkeys(rule.format for rule in policy.rules))
        rules = f"{len(policy.rules)} rule{'s' * (len(policy.rules) != 1)}"
        typer.echo(f'{file}: policy "{policy.name}" is well formed: {rules}, formats {formats}')
        return
    from autoprec.graph.float8 import float8_faults
    from autoprec.policy import resolve
    from autoprec.runtime.device import describe

    info = describe(device)
    info.require(policy)
    op_graph = _recording(workload, device).op_graph
    resolved = resolve(policy, op_graph.sites())
    emulated = info.emulates(policy)
    findings = [*_findings(file, resolved), *(f"{file}: {fault}" for fault in float8_faults(resolved, op_graph))]
    if as_json:
        print_json(check_plain(policy, resolved, emulated, findings))
    else:
        draw(resolution_table(resolved, with_dead=Path(file).exists()))
        for name in emulated:
            typer.echo(f"{name} is emulated on {info.name}: its fidelity can be measured, its speed cannot")
        for finding in findings:
            typer.echo(finding)
    if findings:
        raise typer.Exit(1)


@app.command()
def show(
    file: File,
    workload: Annotated[
        str | None, typer.Argument(help="Workload for whose graph a preset such as tf-graph-pass-bf16 is made.")
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option(help="Policy file to write it to as well.")] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Show a policy: its settings, and its rules in the order in which they are tried.

    Of a preset also the system it stands for, and what of that no policy can say.
    """
    from autoprec.policy import save_policy, to_plain

    policy = _read(file, _kind(device), workload)
    plain = to_plain(policy)
    if out is not None:
        save_policy(policy, out)
    if as_json:
        print_json(plain)
        return
    from autoprec.policy.yaml_text import flow

    for key, value in plain.items():
        if key not in ("rules", "evidence"):
            typer.echo(f"{key:<15} {flow(value)}")
    rows = [(str(number), rule.sites, rule.format, rule.why) for number, rule in enumerate(policy.rules, start=1)]
    draw(table_of("Rules, first match wins", ("#", "sites", "format", "why"), rows))
    for key, value in plain["evidence"].items():
        typer.echo(f"{key:<15} {flow(value)}")
    for line in about_preset(file):
        typer.echo(line)


@app.command()
def diff(a: File, b: File, workload: Workload = None, *, device: Device = "cpu", as_json: AsJson = False) -> None:
    """Compare two policies: settings, rules and, on a workload, the format of every site.

    Exit 0: they do the same; 1: they differ; 2: a file is wrong.
    """
    from autoprec.policy import diff as diff_policies

    device = _kind(device)
    policy_a, policy_b = _read(a, device, workload), _read(b, device, workload)
    found = diff_policies(policy_a, policy_b, () if workload is None else _recording(workload, device).op_graph.sites())
    if as_json:
        print_json(diff_plain(policy_a, policy_b, found))
    else:
        draw_diff(a, b, found, with_sites=workload is not None)
    if found:
        raise typer.Exit(1)


@app.command()
def trace(
    workload: Annotated[str, typer.Argument(help="The training run: file.py or file.py:name.", show_default=False)],
    *,
    policy: Annotated[str, typer.Option(help="Policy file, or the name of a preset.", show_default=False)],
    device: Device = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and random numbers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show in which formats the kernels of one training step really run, forward and backward.

    Exit 0: every rule is honored; 1: one is not; 2: the file is wrong, or the step cannot be traced.
    """
    from autoprec.measure import trace_policy
    from autoprec.runtime.device import describe
    from autoprec.workload import load

    device = _kind(device)
    rules = _read(policy, device, workload)
    describe(device).require(rules)
    with contextlib.redirect_stdout(sys.stderr):  # what the workload prints is not the result
        given = policy if Path(policy).is_file() else rules  # of a file, a rule that fits nothing is told with its line
        found = trace_policy(load(workload).workload, given, device=device, seed=seed)
    if as_json:
        print_json(found.to_plain())
    else:
        typer.echo(str(found))
    if found.dishonored:
        raise typer.Exit(1)


@app.command()
def export(
    file: File,
    workload: Annotated[str, typer.Argument(help="The training run: file.py or file.py:name.", show_default=False)],
    *,
    to: Annotated[Target, typer.Option(help="Tool to write the policy for.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Python file to write; default: print it.")] = None,
    device: Device = "cpu",
) -> None:
    """Write a policy as a Python module for FSDP2 or torchao, which says in its docstring what it leaves out.

    Exit 0: written; 1: a rule wins nowhere, and nothing is written; 2: the file is wrong, or the tool cannot do it.
    """
    from autoprec.files import write_text
    from autoprec.graph.uses import uses_of
    from autoprec.policy import resolve
    from autoprec.runtime.export import float8_module_filter, fsdp2_policies
    from autoprec.runtime.export_module import Origin, float8_module, fsdp2_module

    device = _kind(device)
    policy = _read(file, device, workload)
    recording = _recording(workload, device)
    findings = _findings(file, resolve(policy, recording.op_graph.sites()))
    for finding in findings:
        typer.echo(finding, err=True)
    if findings:
        raise typer.Exit(1)
    origin = Origin(policy=policy.name, file=file, workload=workload, graph=recording.op_graph.fingerprint())
    uses = uses_of(recording.op_graph)
    if to is Target.FSDP2:
        fsdp2 = fsdp2_policies(recording.model, policy, uses)
        text, left_out = fsdp2_module(fsdp2, origin), len(fsdp2.unexpressed)
    else:
        float8 = float8_module_filter(recording.model, policy, uses)
        text, left_out = float8_module(float8, origin), len(float8.unexpressed)
    if out is None:
        typer.echo(text, nl=False)
        return
    write_text(out, text)
    typer.echo(f"{out}: {file} for {to.value}; left out, and listed in its docstring: {left_out}")


def _kind(device: str) -> str:
    """Return the kind of device that is meant; `auto` is asked of torch."""
    if device != "auto":
        return device
    from autoprec.runtime.device import describe

    return str(describe(device).kind)


def _read(file: str, device: str, workload: str | None) -> "Policy":
    """Return the policy in a file, or the preset of that name, made for the workload if it needs one; a file wins."""
    from autoprec.policy import graph_preset_names, policy_or_preset

    if workload is None or file not in graph_preset_names() or Path(file).exists():
        return policy_or_preset(file, device)
    from autoprec.search.graph_pass import policy_for

    return policy_for(file, device, _recording(workload, device).op_graph)


def _recording(workload: str, device: str) -> "Recording":
    from autoprec.capture import record
    from autoprec.workload import load

    with contextlib.redirect_stdout(sys.stderr):  # what the workload prints is not the result
        return record(load(workload).workload, device=device)


def _findings(file: str, resolved: "ResolvedPolicy") -> list[str]:
    """Return a line for each rule that wins nowhere; a preset names every op there is, so it has none."""
    if not Path(file).exists():
        return []
    from autoprec.policy import rule_lines

    lines = rule_lines(file)
    return [f"{file}:{lines[index]}: {resolved.explain_dead(index)}" for index in resolved.dead_rules]
