"""`autoprec plan`: the plan, speed-up and memory to expect on a device that is not at hand, modeled."""

import json
from pathlib import Path
from typing import Annotated

import typer

from autoprec.cli.running import running
from autoprec.errors import DeviceError, WorkloadError


def plan(
    *,
    workload: Annotated[str | None, typer.Argument(help="The training run: file.py or file.py:name.")] = None,
    device_profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="The device to plan for; --list shows those there are.")
    ] = None,
    formats: Annotated[
        str | None, typer.Option(help="Low formats to plan in, as in bf16,fp8_e4m3; default: all that the device has.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Policy file to write; its evidence says modeled.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and random numbers.")] = 0,
    device: Annotated[str, typer.Option(help="Device at hand, to emulate on: auto, cpu, cuda or mps.")] = "auto",
    list_profiles: Annotated[
        bool, typer.Option("--list", help="Show the devices, their figures, and the source and date of each.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Predict plan, speed-up and memory for a device that is not at hand, from a row of data.

    Times and bytes are modeled, and labeled so; the gradient error of the formats is emulated on the device at hand.
    """
    if list_profiles:
        _list(as_json=as_json)
        return
    if workload is None:
        raise WorkloadError("plan for what? give a workload, as in autoprec plan train.py --device-profile a100")
    if device_profile is None:
        from autoprec.measure.device_profiles import PROFILES

        raise DeviceError(f"plan for which device? give --device-profile NAME, one of {', '.join(PROFILES)}")
    from autoprec.pipeline import PlanOptions
    from autoprec.pipeline import plan as run
    from autoprec.report.console import console
    from autoprec.report.plan_json import plan_json
    from autoprec.report.plan_text import print_plan
    from autoprec.report.plan_view import plan_view
    from autoprec.search.baselines import names_in

    options = PlanOptions(
        workload=workload,
        device_profile=device_profile,
        formats=names_in(formats),
        out=out,
        seed=seed,
        device=device,
    )
    with running():
        found = run(options)
    policy_file = None if out is None else str(out)
    if as_json:
        shown = plan_json(found, workload=workload, policy_file=policy_file)
        typer.echo(json.dumps(shown, indent=2, allow_nan=False))
    else:
        print_plan(plan_view(found, workload=workload, policy_file=policy_file), console())


def _list(*, as_json: bool) -> None:
    from autoprec.measure.device_profiles import PROFILES

    if as_json:
        from autoprec.report.plan_json import profiles_json

        typer.echo(json.dumps(profiles_json(PROFILES.values()), indent=2, allow_nan=False))
        return
    from autoprec.report.console import console
    from autoprec.report.plan_text import print_profiles
    from autoprec.report.plan_view import profile_rows, source_lines

    print_profiles(profile_rows(PROFILES.values()), source_lines(PROFILES.values()), console())
