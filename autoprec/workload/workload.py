"""The workload: what is tuned, as four functions a training script already has."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoprec.errors import WorkloadError, a_or_an

if TYPE_CHECKING:
    import torch


def _loss_of_the_model(model: "torch.nn.Module", batch: Any) -> "torch.Tensor":
    """Return the loss a Hugging Face style model computes itself: `model(**batch).loss`.

    Raises: `WorkloadError` if the batch is not a mapping or the model returns no loss.
    """
    if not isinstance(batch, Mapping):
        raise WorkloadError(
            f"the default loss is model(**batch).loss, but a batch is {a_or_an(batch)}, not a mapping; "
            "give Workload(loss=...): a function (model, batch) that returns a scalar tensor"
        )
    loss: torch.Tensor | None = getattr(model(**batch), "loss", None)
    if loss is None:
        raise WorkloadError(
            f"the default loss is model(**batch).loss, but {type(model).__name__} returned no loss for a batch with "
            f"the keys {sorted(map(str, batch))}; add the labels to the batch or give Workload(loss=...)"
        )
    return loss


def _adamw(params: Any) -> "torch.optim.Optimizer":
    import torch

    return torch.optim.AdamW(params, lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training run that can be started again and again.

    `model()` returns a fresh module and is called under a fixed seed; `batches()` returns an iterable of batches,
    the same ones in the same order every time; `loss(model, batch)` returns a scalar tensor;
    `optimizer(params)` returns an optimizer; `evaluate(model)`, if given, returns a float, smaller is better.

    Raises: `WorkloadError` if one of them is not callable.
    """

    model: Callable[[], "torch.nn.Module"]
    batches: Callable[[], Iterable[Any]]
    loss: Callable[["torch.nn.Module", Any], "torch.Tensor"] = _loss_of_the_model
    optimizer: Callable[[Any], "torch.optim.Optimizer"] = _adamw
    evaluate: Callable[["torch.nn.Module"], float] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be called again and again."""
        for name, allowed in _FIELDS.items():
            value = getattr(self, name)
            if not callable(value) and not (name == "evaluate" and value is None):
                raise WorkloadError(f"Workload({name}=...) is {a_or_an(value)}; it must be {allowed}")
        if _is_module(self.model):
            raise WorkloadError(f"Workload(model=...) is {a_or_an(self.model)} instance; it must be {_FIELDS['model']}")


_FIELDS = {
    "model": "a function without arguments that returns a fresh module (a module class will do)",
    "batches": "a function without arguments that returns a new iterable of batches, the same ones every time",
    "loss": "a function (model, batch) that returns a scalar tensor",
    "optimizer": "a function (params) that returns an optimizer",
    "evaluate": "a function (model) that returns a float, smaller is better, or None",
}


def _is_module(value: object) -> bool:
    """Return whether `value` is a module instance, without importing torch."""
    return hasattr(value, "named_parameters") and not isinstance(value, type)
