"""Storing a model's parameters in a low format, in place and reversibly."""

import copy
import difflib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoprec.errors import ApplyError
from autoprec.policy import Parameters, anchored
from autoprec.runtime.dtypes import torch_dtype
from autoprec.runtime.optimizer_step import activate, deactivate_if_unused
from autoprec.runtime.stored import STORED, Generators, StoredParameter


class ParameterStorage:
    """The parameters of one model that a policy stores low.

    Stored low are FP32 parameters that neither `keep` nor `batch_norm` keeps. With FP32 masters or stochastic rounding,
    optimizers step on FP32 numbers, see `runtime.optimizer_step`; a frozen parameter has no master until it is stepped
    on, and then starts from its stored value. A tied parameter is stored, and has a master, once.
    """

    def __init__(self, settings: Parameters) -> None:
        self.settings = settings
        self.generators = Generators()
        self._parameters: dict[str, nn.Parameter] = {}
        self._model: Callable[[], nn.Module | None] = lambda: None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters stored low."""
        return tuple(self._parameters)

    @property
    def has_wide_gradients(self) -> bool:
        """Return whether there are parameters stored low whose gradients are FP32."""
        return bool(self._parameters) and self.settings.steps_in_fp32 and self.settings.gradients == "fp32"

    @property
    def is_flattened(self) -> bool:
        """Return whether FSDP1 has taken the parameters stored low into flat ones."""
        first = next(iter(self._parameters.values()), None)
        return getattr(first, "_fsdp_flattened", False)

    def lower(self, model: nn.Module) -> None:
        """Store the parameters of `model` as the policy says.

        Raises: `ApplyError` if `keep` has a glob without a parameter, or if the parameters belong to
        DistributedDataParallel or are sharded already.
        """
        if self.settings.storage == "fp32":
            return
        self._model = weakref.ref(model)
        kept = _kept(model, self.settings.keep)
        if self.settings.batch_norm == "fp32":
            kept |= _of_batch_norms(model)
        _check_free(model)
        dtype = torch_dtype(self.settings.storage)
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float32 and parameter not in kept:
                self._parameters[name] = parameter
                if self.settings.steps_in_fp32:
                    self._register(name, parameter, dtype)
                _store(parameter, dtype, _gradient_dtype(self.settings, dtype))
        if self.settings.steps_in_fp32:
            activate(self.check)

    def restore(self) -> None:
        """Store in FP32 again what `lower` stored low: masters as they are, others as rounded. Idempotent."""
        for parameter in self._parameters.values():
            record = STORED.pop(parameter, None)
            if record is not None:
                record.settle(parameter)
            master = None if record is None else record.master
            _store(parameter, torch.float32, torch.float32, None if master is None else master.data)
        self._parameters.clear()
        deactivate_if_unused()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer of parameters that took the place of those stored low.

        Raises: `ApplyError` for such an optimizer: its updates below half an ulp would be lost.
        """
        model = self._model()
        if model is None or not self._parameters:
            return
        dtype = torch_dtype(self.settings.storage)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in model.named_parameters():
            if id(parameter) in held and parameter.dtype == dtype and parameter not in STORED:
                raise ApplyError(
                    f'optimizer step: parameter "{name}" of the model is not the one that the policy stored low; it '
                    "was exchanged since (fully_shard, load_state_dict(assign=True), a new module in bf16): apply the "
                    "policy after that; under FSDP2 keep storage: fp32, which is its master"
                )

    def masters(self) -> dict[str, torch.Tensor]:
        """Return the FP32 master of every parameter that has one, by its name."""
        found = {}
        for name, parameter in self._parameters.items():
            record = STORED.get(parameter)
            if record is not None and record.master is not None:
                record.settle(parameter)
                found[name] = record.master.detach()
        return found

    def load_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Take over `masters`; the stored parameters become their roundings.

        Raises: `ApplyError`, before anything is changed, unless they are those of this model.
        """
        able = {
            name: parameter
            for name, parameter in self._parameters.items()
            if (record := STORED.get(parameter)) is not None and record.has_master
        }
        _check_same(self.masters(), able, masters)
        for name, master in masters.items():
            STORED[able[name]].take(able[name], master)

    def copied(self, model: nn.Module, memo: dict[int, Any]) -> "ParameterStorage":
        """Return the storage of `model`, a deep copy whose parameters `memo` has; masters are copied too."""
        twin = ParameterStorage(self.settings)
        twin._model = weakref.ref(model)
        twin.generators.load(self.generators.state())
        for name, parameter in self._parameters.items():
            other = twin._parameters[name] = copy.deepcopy(parameter, memo)
            record = STORED.get(parameter)
            if record is not None:
                record.settle(parameter)
                master = None if record.master is None else nn.Parameter(record.master.detach().clone())
                twin._register(name, other, record.dtype, master)
                _store(other, record.dtype, parameter.grad_dtype)
        if self.settings.steps_in_fp32 and self._parameters:
            activate(twin.check)
        return twin

    def _register(
        self, name: str, parameter: nn.Parameter, dtype: torch.dtype, master: nn.Parameter | None = None
    ) -> None:
        """Have optimizers step on FP32 numbers: on `master`, or on the very numbers that the parameter now has."""
        has_master = self.settings.master == "fp32"
        if has_master and parameter.requires_grad and master is None:
            master = nn.Parameter(parameter.data)
        STORED[parameter] = StoredParameter(name, dtype, self.generators, has_master=has_master, master=master)


def _store(
    parameter: nn.Parameter, dtype: torch.dtype, grad_dtype: torch.dtype | None, data: torch.Tensor | None = None
) -> None:
    """Store a parameter in `dtype`, its gradient in `grad_dtype`; its values are `data`, or those it has."""
    grad, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype) if data is None else data
    if parameter.grad_dtype != grad_dtype:  # torch has no way back from a set one to one that follows the dtype
        parameter.grad_dtype = grad_dtype
    parameter.grad = None if grad is None else grad.to(grad_dtype)


def _gradient_dtype(settings: Parameters, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if settings.steps_in_fp32 and settings.gradients == "fp32" else dtype


def _kept(model: nn.Module, globs: Iterable[str]) -> set[nn.Parameter]:
    """Return the parameters that globs name, by any of their names."""
    named = list(model.named_parameters(remove_duplicate=False))
    kept: set[nn.Parameter] = set()
    for glob in globs:
        pattern = anchored(glob)
        found = {parameter for name, parameter in named if pattern.fullmatch(name)}
        if not found:
            near = difflib.get_close_matches(glob, [name for name, _ in named], n=3, cutoff=0.3)
            names = ", ".join(f'"{name}"' for name in near) or "none"
            raise ApplyError(
                f'apply: "{glob}" of parameters.keep matches no parameter of this {type(model).__name__}; '
                f"nearest parameters: {names}; mend the glob"
            )
        kept |= found
    return kept


def _of_batch_norms(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that torch's batch norm modules own."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return {parameter for norm in norms for parameter in norm.parameters(recurse=False)}


def _check_free(model: nn.Module) -> None:
    """Refuse a model whose parameters others hold by address: they would go on with the FP32 ones."""
    if is_in_ddp(model):
        raise ApplyError(
            "apply: the policy stores parameters low and the model is in DistributedDataParallel already, which holds "
            "the FP32 ones and would average no gradient any more; apply the policy first, with parameters: "
            "{gradients: storage} where it steps in FP32, and wrap the model after that"
        )
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        raise ApplyError(
            "apply: the policy stores parameters low and the model has sharded parameters; under FSDP2 keep storage: "
            "fp32, which is its master, and let its MixedPrecisionPolicy(param_dtype=...) make the working copies"
        )


def is_in_ddp(model: nn.Module) -> bool:
    """Return whether the model, or a part of it, is wrapped; nothing in a module leads to what wraps it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    own = set(model.modules())
    wrappers = (each for each in gc.get_objects() if issubclass(type(each), nn.parallel.DistributedDataParallel))
    return any(each.__dict__.get("_modules", {}).get("module") in own for each in wrappers)


def _check_same(
    ours: Mapping[str, torch.Tensor], able: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> None:
    """Refuse masters `theirs` unless they are for all parameters that have one and only for those that can."""
    lacking, foreign = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - able.keys())
    if lacking or foreign:
        what = f'no master of "{lacking[0]}"' if lacking else f'a master of "{foreign[0]}", which has none here'
        raise ApplyError(
            f"load_state_dict: the checkpoint has {what} (and {len(lacking or foreign) - 1} more like it); "
            "load it into the model it was saved from"
        )
    for name, master in theirs.items():
        if master.shape != able[name].shape or master.dtype != torch.float32:
            raise ApplyError(
                f'load_state_dict: the master of "{name}" is {master.dtype} of shape {tuple(master.shape)} in the '
                f"checkpoint and torch.float32 of {tuple(able[name].shape)} here; load it into the model it was saved "
                "from"
            )
