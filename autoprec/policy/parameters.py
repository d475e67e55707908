"""How parameters, their gradients and the optimizer's state are stored: a frozen value without torch."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from autoprec.errors import PolicyError
from autoprec.policy.checks import check_choice, check_text

Storage: TypeAlias = Literal["fp32", "bf16", "fp16"]
Master: TypeAlias = Literal["none", "fp32"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
Gradients: TypeAlias = Literal["fp32", "storage"]
BatchNorm: TypeAlias = Literal["storage", "fp32"]
OptimizerState: TypeAlias = Literal["fp32", "bf16", "8bit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """How parameters are stored, and what goes with them.

    `master: fp32` keeps an FP32 copy of every parameter stored low; the optimizer steps on the copy. `rounding` is how
    a step comes back into `storage`; `stochastic` needs an FP32 copy for the length of a step only. With either,
    gradients are accumulated in FP32, or in the storage format where `gradients` says `storage`, which
    DistributedDataParallel needs. With neither, gradients and optimizer state follow `storage`, and updates below half
    an ulp of a weight are lost.
    `keep` holds anchored globs over parameter names that stay FP32; `batch_norm: fp32` keeps those of torch's batch
    norm modules, whatever their names, and does nothing to a model without. `optimizer_state` is the format of the
    optimizer's moments; fp32 leaves the optimizer as it is.

    Raises: `PolicyError` if parameters cannot be stored so.
    """

    storage: Storage = "fp32"
    master: Master = "none"
    rounding: Rounding = "nearest"
    gradients: Gradients = "fp32"
    keep: tuple[str, ...] = ()
    batch_norm: BatchNorm = "storage"
    optimizer_state: OptimizerState = "fp32"

    def __post_init__(self) -> None:
        """Check the fields one by one, then what they say together."""
        choices = {
            "storage": Storage,
            "master": Master,
            "rounding": Rounding,
            "gradients": Gradients,
            "batch_norm": BatchNorm,
            "optimizer_state": OptimizerState,
        }
        for name, allowed in choices.items():
            check_choice(f"parameters.{name}", getattr(self, name), get_args(allowed))
        if not isinstance(self.keep, list | tuple):
            raise PolicyError(
                f'parameters.keep is {self.keep!r}; allowed: a list of globs, such as ["*norm*", "*.bias"]'
            )
        object.__setattr__(self, "keep", tuple(self.keep))
        for glob in self.keep:
            _check_glob(glob)
        _check_together(self)

    @property
    def steps_in_fp32(self) -> bool:
        """Return whether the optimizer steps on FP32 numbers although the parameters are stored low."""
        return self.master == "fp32" or self.rounding == "stochastic"


def _check_glob(glob: object) -> None:
    check_text("a glob of parameters.keep", glob)
    if not glob or set(str(glob)) & set(":#"):
        raise PolicyError(
            f'parameters.keep has the glob "{glob}"; globs name parameters, not sites, as in "blocks.*.norm.weight"'
        )


def _check_together(parameters: Parameters) -> None:
    """Refuse settings that contradict each other; the message says what to write."""
    p = parameters
    if p.storage == "fp32" and p.master == "fp32":
        _refuse("master: fp32 beside storage: fp32", "write storage: bf16 (or fp16) with it, or leave master out")
    if p.storage == "fp32" and p.keep:
        _refuse(
            "keep beside storage: fp32, which keeps all", "write storage: bf16 (or fp16) with it, or leave keep out"
        )
    if p.storage == "fp32" and p.batch_norm == "fp32":
        _refuse(
            "batch_norm: fp32 beside storage: fp32, which keeps all",
            "write storage: bf16 (or fp16) with it, or leave batch_norm out",
        )
    if p.rounding == "stochastic" and p.storage != "bf16":
        _refuse(f"rounding: stochastic beside storage: {p.storage}", "write storage: bf16, or leave rounding out")
    if p.rounding == "stochastic" and p.master == "fp32":
        _refuse("rounding: stochastic beside master: fp32, which loses no update", "leave one of the two out")
    if p.gradients == "storage" and not p.steps_in_fp32:
        _refuse(
            "gradients: storage without master: fp32 or rounding: stochastic, where gradients follow storage anyway",
            "leave gradients out",
        )


def _refuse(what: str, instead: str) -> None:
    raise PolicyError(f"parameters have {what}; {instead}")
