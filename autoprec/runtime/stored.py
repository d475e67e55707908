"""One parameter stored low: its FP32 side in an optimizer step, and how a step comes back into the low format."""

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autoprec.errors import ApplyError
from autoprec.runtime.rounding import stochastic_bf16

# Every parameter of this process that a policy stores low and an optimizer steps on in FP32. The values know no
# parameter, so that an entry goes when its model goes.
STORED: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Generators:
    """The random numbers of stochastic rounding: one generator a device, of its own, so that torch's are untouched.

    All start from one seed: the replicas of a parameter on several ranks must round alike.
    """

    def __init__(self) -> None:
        self._of: dict[str, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device."""
        key = str(device)
        if key not in self._of:
            self._of[key] = torch.Generator(device).manual_seed(0)
        return self._of[key]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of each generator by device."""
        return {key: generator.get_state() for key, generator in sorted(self._of.items())}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from `state`, and from the seed on devices that it lacks."""
        self._of.clear()
        for key, value in state.items():
            self.on(torch.device(key)).set_state(value.cpu())


class StoredParameter:
    """What belongs to a parameter stored low: its master, or the generators that round without one.

    `master` is the FP32 parameter that optimizers step on; None with `has_master` if no step was taken yet. Without
    `has_master` the FP32 copy lives for one step and comes back by stochastic rounding.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, generators: Generators, *, has_master: bool, master: nn.Parameter | None
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.generators = generators
        self.has_master = has_master
        self.master = master
        self._begun: int | None = None

    def begin(self, low: nn.Parameter) -> nn.Parameter:
        """Return the FP32 parameter to step on in place of `low`, with the gradient and the attributes of `low`.

        Raises: `ApplyError` if something has changed the dtype of `low` since the policy was applied.
        """
        if low.dtype != self.dtype:
            raise ApplyError(
                f'optimizer step: parameter "{self.name}" is {low.dtype} and the policy stores it as {self.dtype}; '
                "the model was cast (float(), half(), to(dtype)) under the policy: call remove() before that"
            )
        wide = self._wide(low)
        wide.requires_grad_(low.requires_grad)
        wide.__dict__.update(low.__dict__)
        take_gradient(wide, low)
        self._begun = low._version
        return wide

    def publish(self, low: nn.Parameter, wide: nn.Parameter) -> None:
        """Round what the step has made of `wide` into `low`, in place."""
        with torch.no_grad():
            low.copy_(wide if self.has_master else stochastic_bf16(wide, self.generators.on(wide.device)))
        if self._begun is not None:
            self._begun = low._version

    def end(self) -> None:
        """Note that the step has ended as it should."""
        self._begun = None
        if self.master is not None:
            self.master.grad = None

    def settle(self, low: nn.Parameter) -> None:
        """Make master and `low` agree: `low` is the rounding of its master, or it was edited and the edit counts.

        What an edit left as it was keeps its exact master. After a step that raised, the master holds what the
        optimizer has made of it, and `low` follows.
        """
        if self.master is None:
            return
        with torch.no_grad():
            if self.master.device != low.device:  # the model was moved
                self.master.data = self.master.data.to(low.device)
            if self._begun == low._version:
                low.copy_(self.master)
            else:
                _take_edits(self.master, low)
        self._begun = None

    def take(self, low: nn.Parameter, master: torch.Tensor) -> None:
        """Go on with a copy of `master`; `low` becomes its rounding."""
        with torch.no_grad():
            if self.master is None:
                self.master = nn.Parameter(torch.empty_like(low, dtype=torch.float32))
            self.master.copy_(master)
            low.copy_(self.master)
        self._begun = None

    def _wide(self, low: nn.Parameter) -> nn.Parameter:
        if self.master is not None:
            self.settle(low)
            return self.master
        wide = nn.Parameter(low.detach().float())
        if self.has_master:
            self.master = wide
        return wide


def _take_edits(master: nn.Parameter, low: nn.Parameter) -> None:
    """Set the elements of `master` that do not round to those of `low` to the latter.

    A GPU is not asked whether there are any: that would wait for it.
    """
    rounded = master.to(low.dtype)
    if low.device.type != "cpu" or not _same_bits(rounded, low.detach()):
        torch.where(rounded != low, low, master, out=master)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two 16 bit tensors are equal; compares four numbers at a time where they lie side by side."""
    divides = all(number % 4 == 0 for number in (one.numel(), one.storage_offset(), other.storage_offset()))
    if divides and one.is_contiguous() and other.is_contiguous():
        return torch.equal(one.view(-1).view(torch.int64), other.view(-1).view(torch.int64))
    return torch.equal(one, other)


def take_gradient(wide: nn.Parameter, low: nn.Parameter) -> None:
    """Give `wide` the gradient of `low`: the very tensor where it is FP32, a copy where it is not."""
    wide.grad = None if low.grad is None else low.grad.float()


def give_gradient(wide: nn.Parameter, low: nn.Parameter) -> None:
    """Give `low` the gradient that the optimizer left, which may have dropped or replaced it."""
    if wide.grad is None or (wide.grad is not low.grad and low.grad_dtype == torch.float32):
        low.grad = wide.grad


def stored(parameter: Any) -> StoredParameter | None:
    """Return what belongs to a parameter that is stored low and stepped on in FP32, None for any other."""
    found: StoredParameter | None = STORED.get(parameter)
    return found
