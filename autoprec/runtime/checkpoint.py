"""What a checkpoint must hold of a policy beside model and optimizer, so that training goes on bit for bit."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from autoprec.errors import ApplyError
from autoprec.policy import COMPANIONS, Policy, to_plain
from autoprec.runtime.loss_scale import BoundedGradScaler
from autoprec.runtime.storage import ParameterStorage

SCHEMA = 1
_KEYS = ("schema", "policy", "policy_hash", "scaler", "masters", "generators")
# Keys of a policy file that say nothing about how training computes.
_SILENT = ("name", "device", "evidence")


def policy_hash(policy: Policy) -> str:
    """Return a hash of everything in a policy that decides how training computes."""
    plain = {key: value for key, value in to_plain(policy).items() if key not in _SILENT}
    for name in COMPANIONS:
        if plain[name] == "as_given":  # as in checkpoints of versions that knew no other
            del plain[name]
    plain["rules"] = [(rule.sites, rule.format) for rule in policy.rules]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def save(policy: Policy, scaler: BoundedGradScaler, storage: ParameterStorage) -> dict[str, Any]:
    """Return the state as tensors, numbers and text, which `torch.load(..., weights_only=True)` reads."""
    return {
        "schema": SCHEMA,
        "policy": policy.name,
        "policy_hash": policy_hash(policy),
        "scaler": scaler.state_dict(),
        "masters": storage.masters(),
        "generators": storage.generators.state(),
    }


def load(state: Mapping[str, Any], policy: Policy, scaler: BoundedGradScaler, storage: ParameterStorage) -> None:
    """Go on from what `save` returned.

    Raises: `ApplyError`, before anything is changed, if it is no such state or that of another policy or model.
    """
    _check_state(state)
    if state["policy_hash"] != policy_hash(policy):
        raise ApplyError(
            f'load_state_dict: the checkpoint was written under policy "{state["policy"]}" ({state["policy_hash"]}) '
            f'and this model runs "{policy.name}" ({policy_hash(policy)}), which computes otherwise; apply the policy '
            "of the checkpoint, or load model and optimizer only to go on with fresh masters and a fresh loss scale"
        )
    storage.load_masters(state["masters"])
    storage.generators.load(state["generators"])
    if scaler.is_enabled():
        scaler.load_state_dict(state["scaler"])


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping) or "schema" not in state:
        raise ApplyError("load_state_dict: this is not what Precision.state_dict() returned; save and load that")
    if state["schema"] != SCHEMA:
        raise ApplyError(
            f"load_state_dict: the state has schema {state['schema']} and this autoprec reads {SCHEMA}; "
            "load it with the autoprec that wrote it"
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise ApplyError(
            f"load_state_dict: the state lacks {', '.join(missing)}; save what Precision.state_dict() returns"
        )
