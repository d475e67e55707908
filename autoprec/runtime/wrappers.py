"""What is around a model or in it that no policy can be installed in: compiled code, TorchScript, parallel wrappers."""

from torch import nn

from autoprec.errors import ApplyError

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"

# Wrappers that are modules and hold the model under a name of their own, which every path inside then begins with.
# FSDP2 is none: `fully_shard` leaves the paths as they are.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    _FSDP1: "module",
    "torch.optim.swa_utils.AveragedModel": "module",
}


def check_wrappers(model: nn.Module) -> None:
    """Refuse a model whose forwards would not run as they are replaced, or whose paths are not the policy's.

    Raises: `ApplyError`, which says what to apply the policy to, or when.
    """
    _check_wrapped(model)
    for path, module in model.named_modules():
        _check_compiled(path, module)
        if path and _FSDP1 in _names_of(module):
            raise ApplyError(
                f'apply: module "{path}" is wrapped in FullyShardedDataParallel, and paths inside it are not those the '
                "policy names; apply the policy before the model is wrapped"
            )


def _check_wrapped(model: nn.Module) -> None:
    for name in _names_of(model):
        inner = _WRAPPERS.get(name)
        if inner is not None:
            raise ApplyError(
                f"apply: the model is wrapped in {name.rpartition('.')[2]}, whose modules have other paths than the "
                f"policy names; apply the policy to model.{inner}; one that stores parameters low before the model is "
                "wrapped"
            )


def _names_of(module: nn.Module) -> tuple[str, ...]:
    """Return the full names of a module's classes; wrappers are told by name, since not every torch has each."""
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)


def _check_compiled(path: str, module: nn.Module) -> None:
    """Refuse compiled modules: what they run was traced from the forward they had, or is traced behind its back."""
    if hasattr(module, "_orig_mod"):
        remedy = "then call torch.compile on"
    elif getattr(module, "_compiled_call_impl", None) is not None:
        remedy = "then call compile() of"
    else:
        return
    where = f'module "{path}"' if path else "the model"
    what = "the module" if path else "the model"
    raise ApplyError(f"apply: {where} is compiled; apply the policy first, {remedy} {what}")
