"""One forward and backward of an applied model under observation, after which the run goes on as if it had not been."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoprec.errors import TraceError, a_or_an
from autoprec.graph.site import LOSS_MODULE
from autoprec.runtime.forwards import is_replaced, original_forward
from autoprec.runtime.precision import Precision
from autoprec.runtime.running import RUNNING
from autoprec.runtime.undisturbed import Undisturbed, leaves_behind
from autoprec.runtime.watch import Probe, Watch

Loss: TypeAlias = Callable[[nn.Module, Any], torch.Tensor]


def watch_step(
    what: str,
    precision: Precision,
    batch: Any,
    loss: Loss | None,
    *,
    probe: Probe | None = None,
    scale: float = 1.0,
    at_end: Callable[[torch.Tensor], None] = lambda _: None,
) -> Watch:
    """Return what was seen of one step; `what` names it in errors. `at_end(loss)` is called before all is put back.

    Raises: `TraceError` if the model is compiled, or if there is nothing to go backward from.
    """
    _refuse(what, precision)
    model = precision.model
    undisturbed = Undisturbed(model, batch)
    watch = Watch(precision, undisturbed.before, probe)
    with (
        undisturbed.running(),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        with watch.running():
            with precision.frame(LOSS_MODULE) if loss else nullcontext():  # our own sums are no sites of the user's
                value = (loss or default_loss)(model, batch)
            _check_loss(what, value)
            undisturbed.set_gradients_aside(leaves_behind(value))
            (value if scale == 1 else value * scale).backward()
        at_end(value)
    return watch


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a scalar made of what the model returns for `batch`: its `.loss`, or the sum of its floating tensors.

    A mapping is given as keywords, a tuple or list as arguments, anything else as the one argument.
    """
    if isinstance(batch, Mapping):
        args, kwargs = (), dict(batch)
    else:
        args, kwargs = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}
    _check_takes(model, args, kwargs)
    output = model(*args, **kwargs)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    differentiable = [leaf.float().sum() for leaf in floats if leaf.requires_grad]
    if not differentiable:
        raise TraceError(
            f"{type(model).__name__} returned nothing that a backward pass can start from ({type(output).__name__}); "
            "give loss=..., a function (model, batch) that returns a scalar tensor which requires grad"
        )
    return torch.stack(differentiable).sum() if len(differentiable) > 1 else differentiable[0]


def _check_takes(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a batch that is not what the model is called with: it has a target too, say."""
    signature = inspect.signature(original_forward(model) if is_replaced(model) else model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"{type(model).__name__}.forward{signature} cannot be called with the batch alone ({error}); give "
            "loss=..., a function (model, batch), such as lambda model, batch: loss_fn(model(batch[0]), batch[1])"
        ) from error


def _check_loss(what: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else a_or_an(value)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            found = "a tensor that does not require grad"
        raise TraceError(f"{what}: the loss is {found}; it must be a scalar tensor that requires grad")


def _refuse(what: str, precision: Precision) -> None:
    """Refuse what cannot be watched from below: compiled modules, and a precision that was taken out again."""
    if not precision.is_installed:
        raise TraceError(f'{what}: policy "{precision.policy.name}" is not installed any more; apply it again first')
    if RUNNING.mode is not None:
        raise TraceError(
            f"{what}: called inside `with precision.loss()` or a forward, whose ops would hide the step's own; call it "
            "outside, the loss code as loss=..., a function (model, batch)"
        )
    for path, module in precision.model.named_modules():
        if module is precision.model and precision.policy.compile != "as_given":
            continue  # its own compilation, which is set aside
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise TraceError(
                f"{what}: {f'module {path}' if path else 'the model'} is compiled, and compiled code runs kernels of "
                "its own that no op can be told from; build the model once more without torch.compile, apply the same "
                "policy, and trace that"
            )
