"""`apply`: install a policy in a module, in place and reversibly."""

import copy
import difflib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoprec.errors import ApplyError, FormatError
from autoprec.graph.site import LOSS_MODULE, Site
from autoprec.policy import Policy, SitePattern, load_policy, preset, preset_names
from autoprec.runtime.cast_mode import PROMOTE, Action, CastMode
from autoprec.runtime.dtypes import torch_dtype
from autoprec.runtime.forwards import replace_forward, restore_forward
from autoprec.runtime.loss_scale import BoundedGradScaler
from autoprec.runtime.matmul_precision import MatmulState, restore, set_float32_matmul

_APPLIED = "_autoprec_precision"


class Precision:
    """A policy installed in a model. `scaler` scales the loss as the policy says; `remove()` takes all of it back.

    Use as a context manager to remove the policy at the end of a block. A deep copy of the model runs the policy
    too, under a `Precision` of its own.
    """

    def __init__(self, model: nn.Module, policy: Policy, device: str) -> None:
        self.model = model
        self.policy = policy
        self.device = device
        self.scaler = BoundedGradScaler(device, policy.loss_scale)
        self._lowered: tuple[str, ...] = ()
        self._matmul_found: MatmulState | None = None
        self._active = threading.local()
        self._actions: dict[tuple[str, str, int], Action] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Precision":
        twin = memo[id(self)] = Precision(self.model, self.policy, self.device)
        twin.model = copy.deepcopy(self.model, memo)
        twin._lowered = self._lowered
        return twin

    def __reduce__(self) -> Any:
        raise ApplyError(
            f'pickling a model that runs policy "{self.policy.name}": a policy is installed, not saved; '
            "save model.state_dict(), or call remove() on the Precision first, and apply() after loading"
        )

    @property
    def casts(self) -> bool:
        """Return whether any site can be cast: False for a policy of fp32 alone, which installs nothing."""
        return not {"fp32", "as_given"}.issuperset(self.policy.formats) or self.policy.parameters.storage != "fp32"

    def loss(self) -> Any:
        """Return a context manager for the loss code, whose sites have the module `@loss`.

        It may hold the call of the model as well: `with precision.loss(): loss = criterion(model(x), y)`.
        """
        return self.frame(LOSS_MODULE) if self.casts else nullcontext()

    def install(self) -> None:
        """Do what the policy says to the model and to torch's matmul precision; `remove()` undoes it."""
        self.model.__dict__[_APPLIED] = self
        self._matmul_found = set_float32_matmul(self.device, self.policy.float32_matmul)
        if not self.casts:
            return
        if self.policy.parameters.storage != "fp32":
            self._lowered = _store(self.model, torch.float32, torch_dtype(self.policy.parameters.storage))
        for path, module in self.model.named_modules():
            replace_forward(module, _forward_of(self, path, module))

    def remove(self) -> None:
        """Restore the model: its forwards, the dtype of its parameters, torch's matmul precision. Idempotent."""
        if self.model.__dict__.pop(_APPLIED, None) is None:
            return
        for module in self.model.modules():
            restore_forward(module)
        if self._lowered:
            _store(self.model, torch_dtype(self.policy.parameters.storage), torch.float32, self._lowered)
        if self._matmul_found is not None:
            restore(self._matmul_found)

    @contextmanager
    def frame(self, module: str) -> Iterator[None]:
        """Make `module` own the sites of this block; the outermost frame of a thread switches casting on."""
        mode: CastMode | None = getattr(self._active, "mode", None)
        if mode is not None:
            with mode.frame(module):
                yield
            return
        mode = _PausedInBackward(self._action_of, self._active)
        self._active.mode = mode
        try:
            with mode, mode.frame(module):
                yield
        finally:
            self._active.mode = None

    def _action_of(self, module: str, op: str, index: int) -> Action:
        key = (module, op, index)
        if key not in self._actions:
            self._actions[key] = _action(self.policy.format_of(Site(*key))[0])
        return self._actions[key]


class _PausedInBackward(CastMode):
    """A cast mode that steps aside while a backward pass runs inside it.

    Activation checkpointing runs forwards again in there; each of them is then the outermost one and casts by itself.
    """

    def __init__(self, action_of: Callable[[str, str, int], Action], active: threading.local) -> None:
        super().__init__(action_of)
        self._active = active

    def on_other(self, func: Any, call: Any, args: Any, kwargs: Any) -> Any:
        if call.op.family != "autograd":
            return func(*args, **kwargs)
        self._active.mode = None
        try:
            return func(*args, **kwargs)
        finally:
            self._active.mode = self


def _action(format_name: str) -> Action:
    if format_name == "as_given":
        return None
    return PROMOTE if format_name == "promote" else torch_dtype(format_name)


def apply(model: nn.Module, policy: Policy | str | PathLike[str]) -> Precision:
    """Install `policy` in `model`, in place, and return the handle that takes it back.

    `policy` is a `Policy`, a policy file, or the name of a preset. Call it before the optimizer is built: the
    policy may change the dtype in which parameters are stored. A policy of fp32 alone installs nothing.

    Raises: `ApplyError` if the model has a policy already, or if a rule names modules that the model lacks;
    `FormatError` for a format that this runtime cannot execute; whatever `load_policy` raises.
    """
    if _APPLIED in model.__dict__:
        raise ApplyError(
            f'apply: the model already runs policy "{model.__dict__[_APPLIED].policy.name}"; '
            "call remove() on the Precision that apply() returned first"
        )
    device = next((tensor.device.type for tensor in model.parameters()), "cpu")
    policy = _policy(policy, device)
    _check_formats(policy)
    _check_modules(policy, model)
    precision = Precision(model, policy, device)
    try:
        precision.install()
    except BaseException:
        precision.remove()
        raise
    return precision


def _policy(policy: Policy | str | PathLike[str], device: str) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if fspath(policy) in preset_names(device) and not Path(policy).exists():
        return preset(fspath(policy), device)
    return load_policy(policy)


def _check_formats(policy: Policy) -> None:
    runnable = {"fp32", "bf16", "fp16", "as_given", "promote"}
    for rule in policy.rules:
        if rule.format not in runnable:
            raise FormatError(
                f'apply: rule "{rule.sites}" asks for {rule.format}, which this runtime cannot execute per site; '
                f"it executes {', '.join(sorted(runnable))}"
            )


def _check_modules(policy: Policy, model: nn.Module) -> None:
    """Refuse a rule that names modules the model lacks: the policy belongs to another model, or has a typo."""
    paths = [LOSS_MODULE, *(path for path, _ in model.named_modules())]
    for rule in policy.rules:
        pattern = SitePattern(rule.sites)
        if not any(pattern.matches_module(path) for path in paths):
            near = difflib.get_close_matches(rule.sites.split(":")[0], paths, n=3, cutoff=0.4)
            names = ", ".join(f'"{name}"' for name in near) or "none"
            raise ApplyError(
                f'apply: rule "{rule.sites}" of policy "{policy.name}" matches no module of this '
                f"{type(model).__name__}; nearest modules: {names}; mend the rule, or tune this model anew"
            )


def _store(
    model: nn.Module, found: torch.dtype, wanted: torch.dtype, names: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Store parameters of dtype `found` (all, or those named) and their gradients in `wanted`; return their names."""
    changed = []
    for name, parameter in model.named_parameters():
        if parameter.dtype == found and (names is None or name in names):
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(wanted)
            parameter.grad = None if grad is None else grad.to(wanted)
            changed.append(name)
    return tuple(changed)


def _forward_of(precision: Precision, path: str, module: nn.Module) -> Callable[..., Any]:
    """Return what runs in place of a module's forward: the same code in a frame of its own."""
    returns_fp32 = path == "" and precision.policy.outputs == "fp32"
    agrees = isinstance(module, nn.RNNBase)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with precision.frame(path):
            if agrees:  # nn.LSTM and its kin compare the input's dtype with the stored weights' before any op runs
                args, kwargs = _map_floats((args, kwargs), next(module.parameters()).dtype)
            result = original(*args, **kwargs)
        return _map_floats(result, torch.float32) if returns_fp32 else result

    return around


def _map_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Return `tree` with its fp16, bf16 and fp32 tensors in `dtype`."""
    low = (torch.float16, torch.bfloat16, torch.float32)

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in low else leaf

    return pytree.tree_map(cast, tree)
