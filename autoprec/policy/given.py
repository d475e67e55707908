"""A policy as people give it: a file, or the name of a preset."""

import os
from pathlib import Path

from autoprec.errors import PolicyFileError
from autoprec.policy.file import load_policy
from autoprec.policy.policy import Policy
from autoprec.policy.presets import graph_preset_names, preset, preset_names


def policy_or_preset(given: str | os.PathLike[str], device_kind: str) -> Policy:
    """Return the policy in a file, or the preset of that name for a kind of device; a file wins.

    Raises: `PolicyFileError` if there is neither; `PolicyError` for a preset that needs the graph of a workload;
    whatever `load_policy` raises.
    """
    if Path(given).exists():
        return load_policy(given)
    names = preset_names(device_kind)
    if os.fspath(given) in (*names, *graph_preset_names()):
        return preset(os.fspath(given), device_kind)
    raise PolicyFileError(
        f"{os.fspath(given)}: there is no such policy file, and no such preset for {device_kind}; "
        f"presets: {', '.join(names)}; made for a workload: {', '.join(graph_preset_names())}"
    )
