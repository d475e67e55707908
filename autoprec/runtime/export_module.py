"""An export as the text of a small Python module that needs torch or torchao, and nothing of autoprec."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from autoprec.errors import PolicyError
from autoprec.runtime.export import Float8Export, FSDP2Export

_FSDP2 = '''\
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# A module, the dtypes in which its parameters are gathered and its gradients reduced, and what its outputs are cast to
# (None: they stay as they are). Children first; the last one is the root.
MODULES = (
{rows}
)


def shard(model: nn.Module, **options) -> nn.Module:
    """Shard `model` in place, and return it; `options` (mesh, reshard_after_forward) go to every `fully_shard`."""
    modules = [model.get_submodule(path) for path, *_ in MODULES]
    for module, (_, param_dtype, reduce_dtype, output_dtype) in zip(modules, MODULES):
        dtypes = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=output_dtype)
        fully_shard(module, mp_policy=dtypes, **options)
    return model
'''

_FLOAT8 = '''\
import dataclasses

from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

RECIPE = "{recipe}"
MODULES = (
{rows}
)


def module_filter(module: nn.Module, path: str) -> bool:
    """Return whether a module is one of those above."""
    return path in MODULES


def convert(model: nn.Module, *, emulate: bool = False) -> nn.Module:
    """Exchange the linears above for float8 ones, in place, and return the model.

    Call it before `torch.compile` and `fully_shard`. `emulate` shows the numerics on a device without float8.
    """
    for path in MODULES:
        model.get_submodule(path)  # raises if there is no such module
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(RECIPE), emulate=emulate)
    return convert_to_float8_training(model, module_filter_fn=module_filter, config=config)
'''


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where an export comes from: a policy, the file or preset that holds it, a workload, and the hash of its graph."""

    policy: str
    file: str
    workload: str
    graph: str


def fsdp2_module(export: FSDP2Export, origin: Origin) -> str:
    """Return a module with a function `shard(model, **options)`."""
    rows = (
        f"    ({_quoted(path)}, {each.param_dtype}, {each.reduce_dtype}, {each.output_dtype}),"
        for path, each in export.policies.items()
    )
    docstring = _docstring("Shard a model with FSDP2 in the formats of a policy.", origin, export.unexpressed)
    return docstring + _FSDP2.replace("{rows}", "\n".join(rows))


def float8_module(export: Float8Export, origin: Origin) -> str:
    """Return a module with a function `convert(model)`.

    Raises: `PolicyError` if the export chooses no module.
    """
    if not export.modules:
        why = next((each for each in export.unexpressed if each.startswith('module "')), "no rule asks for it")
        raise PolicyError(
            f'export of policy "{origin.policy}" to torchao-float8: no linear would run in fp8_e4m3: {why}; '
            "give a linear whose sizes are multiples of 16 the format fp8_e4m3, or export to fsdp2"
        )
    rows = (f"    {_quoted(path)}," for path in export.modules)
    docstring = _docstring("Run linears in float8 training with torchao as a policy says.", origin, export.unexpressed)
    return docstring + _FLOAT8.replace("{recipe}", export.recipe).replace("{rows}", "\n".join(rows))


def _docstring(title: str, origin: Origin, unexpressed: Iterable[str]) -> str:
    made = f'Made by autoprec from policy "{origin.policy}" ({origin.file}) on {origin.workload}, graph {origin.graph}.'
    left_out = [_printable(f"- {each}") for each in unexpressed]
    listed = ["What this file cannot express of the policy:", "", *left_out] if left_out else ["Nothing is left out."]
    return "\n".join([f'"""{title}', "", _printable(made), "", *listed, '"""', "", ""])


def _printable(text: str) -> str:
    """Return text that can stand on one line of a docstring."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return plain.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
