"""Build a workload from the plain names that a training script already has.

| name | what it may be |
|---|---|
| `model` or `build_model` | a module (each run trains a copy), a module class, or a function that returns a module |
| `train_loader` or `batches` | a data loader or list, or a function that returns an iterable of batches |
| `loss_fn` or `criterion` | see `loss_of`; left out, the loss is `model(**batch).loss` |
| `optimizer` | an optimizer, its class, or a function (params) that returns one; left out, it is AdamW(lr=1e-3) |

The first name of a pair wins. Learning-rate schedules, `evaluate` functions (whose sense no name tells) and everything
else in the script are not looked at.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoprec.errors import WorkloadError, a_or_an
from autoprec.workload.loader import replayed
from autoprec.workload.workload import Workload

if TYPE_CHECKING:
    import torch

_NAMES = {
    "model": ("model", "build_model"),
    "batches": ("train_loader", "batches"),
    "loss": ("loss_fn", "criterion"),
    "optimizer": ("optimizer",),
}
_NEEDED = ("model", "batches")
_MODEL_PARAMETERS = ("model", "net", "network")


def missing(names: Mapping[str, Any]) -> list[str]:
    """Return what a script lacks to be a workload, each as the names it could have."""
    return [" or ".join(_NAMES[part]) for part in _NEEDED if _first(names, part) is None]


def offers(names: Mapping[str, Any]) -> bool:
    """Return whether a script has the plain names that a workload needs."""
    return not missing(names)


def workload_of(names: Mapping[str, Any], file: str) -> Workload:
    """Return the workload that a script's module-level `names` make; `file` is for messages.

    Raises: `WorkloadError` if a name holds something else than the table above allows.
    """
    parts = {part: (_first(names, part) or "", names.get(_first(names, part) or "")) for part in _NAMES}
    original = parts["model"][1]
    fields: dict[str, Any] = {
        "model": _model_of(*parts["model"], file),
        "batches": _batches_of(*parts["batches"], file),
    }
    if parts["loss"][1] is not None:
        fields["loss"] = loss_of(*parts["loss"], file)
    if parts["optimizer"][1] is not None:
        fields["optimizer"] = _optimizer_of(*parts["optimizer"], original, file)
    return Workload(**fields)


def loss_of(name: str, value: Any, file: str) -> "Callable[[torch.nn.Module, Any], torch.Tensor]":
    """Return the loss that a script's `loss_fn` or `criterion` stands for.

    A function whose first parameter is called `model`, `net` or `network` is called as `loss(model, batch)`. Everything
    else (a module such as `nn.CrossEntropyLoss()`, a function such as `F.mse_loss`) is a criterion, called as
    `criterion(model(*inputs), target)` where the last item of the batch is the target.
    """
    if not callable(value) or isinstance(value, type):
        raise _wrong(file, name, value, "a function (model, batch), or a criterion (output, target)")
    if _first_parameter(value) in _MODEL_PARAMETERS:
        loss: Callable[[torch.nn.Module, Any], torch.Tensor] = value
        return loss

    def criterion_loss(model: "torch.nn.Module", batch: Any) -> "torch.Tensor":
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise WorkloadError(
                f"{file}: {name} is called as {name}(model(*inputs), target), but a batch is a "
                f"{type(batch).__name__}; make batches of (input, target), or write {name}(model, batch)"
            )
        *inputs, target = batch
        result: torch.Tensor = _moved(value, target)(model(*inputs), target)
        return result

    return criterion_loss


def _first(names: Mapping[str, Any], part: str) -> str | None:
    return next((name for name in _NAMES[part] if names.get(name) is not None), None)


def _wrong(file: str, name: str, value: object, allowed: str) -> WorkloadError:
    kind = f"the class {value.__name__}" if isinstance(value, type) else a_or_an(value)
    return WorkloadError(f"{file}: {name} is {kind}; it must be {allowed}")


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except ValueError:  # a builtin without a signature
        return ""


def _check_needs_no_arguments(name: str, function: Callable[..., Any], file: str) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
    if needed:
        raise WorkloadError(
            f"{file}: {name} needs the arguments {', '.join(needed)}; autoprec calls it without any. Give them "
            f"defaults, or add a function workload() that says how to call it"
        )


def _model_of(name: str, value: Any, file: str) -> "Callable[[], torch.nn.Module]":
    import torch

    if isinstance(value, torch.nn.Module):
        original = value

        def fresh_copy() -> torch.nn.Module:
            """Return a copy of the module as the script left it; the original itself is never handed out."""
            return copy.deepcopy(original)

        return fresh_copy
    if not callable(value):
        raise _wrong(file, name, value, "a torch.nn.Module, a module class, or a function that returns a module")
    _check_needs_no_arguments(name, value, file)
    factory: Callable[[], torch.nn.Module] = value
    return factory


def _batches_of(name: str, value: Any, file: str) -> Callable[[], Iterable[Any]]:
    from torch.utils.data import DataLoader

    allowed = "a data loader, a list, or a function that returns a new iterable of batches"
    if isinstance(value, DataLoader):
        return replayed(value)
    if isinstance(value, Iterator):
        raise _wrong(file, name, value, f"{allowed}; an iterator can be read only once")
    if isinstance(value, Iterable) and not isinstance(value, type):
        return lambda: value
    if not callable(value):
        raise _wrong(file, name, value, allowed)
    _check_needs_no_arguments(name, value, file)
    factory: Callable[[], Iterable[Any]] = value
    return factory


def _moved(criterion: Callable[..., Any], target: Any) -> Callable[..., Any]:
    """Return the criterion with its buffers (class weights) on the target's device."""
    import torch

    if isinstance(criterion, torch.nn.Module) and isinstance(target, torch.Tensor):
        return criterion.to(target.device)
    return criterion


def _optimizer_of(name: str, value: Any, model: object, file: str) -> "Callable[[Any], torch.optim.Optimizer]":
    import torch

    if isinstance(value, torch.optim.Optimizer):
        return _same_optimizer(value, _positions(value, model, file), file)
    if not callable(value):
        raise _wrong(file, name, value, "a torch optimizer, its class, or a function (params) that returns one")
    factory: Callable[[Any], torch.optim.Optimizer] = value
    return factory


def _positions(optimizer: "torch.optim.Optimizer", model: object, file: str) -> list[list[int]]:
    """Return, for each parameter group, where its parameters stand in `model.parameters()`."""
    import torch

    place = {id(each): at for at, each in enumerate(model.parameters())} if isinstance(model, torch.nn.Module) else {}
    groups = [[id(each) for each in group["params"]] for group in optimizer.param_groups]
    if not all(each in place for group in groups for each in group):
        raise WorkloadError(
            f"{file}: optimizer holds parameters that are not the module-level model's; "
            f"write a function optimizer(params) that returns an optimizer"
        )
    return [[place[each] for each in group] for group in groups]


def _same_optimizer(
    original: "torch.optim.Optimizer", positions: Sequence[Sequence[int]], file: str
) -> "Callable[[Any], torch.optim.Optimizer]":
    """Return a function that makes an optimizer like `original`, without its state, for a copy of its model."""
    kind = type(original)
    accepted = inspect.signature(kind.__init__).parameters
    defaults = {key: copy.copy(value) for key, value in original.defaults.items() if key in accepted}
    options = [{key: value for key, value in group.items() if key != "params"} for group in original.param_groups]

    def optimizer(params: Any) -> "torch.optim.Optimizer":
        given = list(params)
        if max(at for group in positions for at in group) >= len(given):
            raise WorkloadError(
                f"{file}: optimizer was made for a model of more parameters than the {len(given)} it now gets; "
                f"write a function optimizer(params) that returns an optimizer"
            )
        groups = [
            {**copy.deepcopy(option), "params": [given[at] for at in group]}
            for option, group in zip(options, positions, strict=True)
        ]
        return kind(groups, **defaults)

    return optimizer
