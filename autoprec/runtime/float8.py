"""FP8 matrix products at single sites, computed by torchao.

torchao exchanges modules; here its function behind `Float8Linear` is called at a site instead, so that modules,
parameters and state dicts stay what they are. Without FP8 kernels torchao emulates: it rounds the operands to FP8 and
multiplies them in FP32, which shows the numerics and not the speed.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autoprec.errors import ApplyError, FormatError
from autoprec.graph.site import Site
from autoprec.ops import float8_fault
from autoprec.policy import FLOAT8, Scaling
from autoprec.runtime.load_torchao import load_torchao
from autoprec.runtime.plans import SiteKey

_KEPT = (torch.float16, torch.bfloat16)  # dtypes of activations that a product may have; FP32 ones become bf16
_OPERANDS = (*_KEPT, torch.float32)
_ROWS_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Float8Product:
    """torchao's autograd Function, and what it is told: its recipe, and how to run the kernels of the three products.

    `kernels_filled` fill sums over rows up with zeros, to a multiple of 16.
    """

    function: Any
    config: Any
    kernels: Any
    kernels_filled: Any
    emulated: bool

    def __call__(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Return the product of two matrices, in the dtype of the first."""
        fill = not self.emulated and rows.shape[0] % _ROWS_MULTIPLE != 0
        product: torch.Tensor = self.function.apply(
            rows, matrix, self.kernels_filled if fill else self.kernels, self.config
        )
        return product


@dataclass(frozen=True, kw_only=True, eq=False)
class Float8Matmul:
    """Runs the calls of a site as FP8 products; it is called in place of the torch function.

    The first operand and with it the result are bf16, or fp16 where that is what the site is given, as with torchao
    under autocast; the matrix is rounded from the dtype it is stored in. A bias is added in the dtype of the result.
    Calls that compute in float64 are left alone, and so are calls without rows, where there is nothing to round.

    Raises: `FormatError` for a shape that FP8 kernels do not take, also where they are emulated, and for a call that
    writes to a given tensor; `ApplyError` where a gradient of a gradient, or a transform of torch.func, is asked for.
    """

    product: Float8Product

    @property
    def is_emulated(self) -> bool:
        """Return whether torchao emulates the products."""
        return self.product.emulated

    def __call__(self, func: Any, call: Any, args: Any, kwargs: Any, site: SiteKey) -> Any:
        """Return what the call computes."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if any(each.dtype not in _OPERANDS for each in tensors):
            return func(*args, **kwargs)
        if call.writes_first or kwargs.get("out") is not None:
            raise _refusal(site, "the call writes its result to a tensor that is given to it")
        _check_transforms(site)
        rows, matrix, bias = self._operands(func, site, args, kwargs)
        rows = rows if rows.dtype in _KEPT else rows.to(torch.bfloat16)
        if rows.numel() == 0:
            result = rows @ matrix.to(rows.dtype)
        else:
            flat = self.product(rows.reshape(-1, rows.shape[-1]), matrix)
            if not torch.compiler.is_compiling() and flat.grad_fn is not None:
                flat.grad_fn.register_prehook(partial(_check_once, site))
            result = flat.reshape(*rows.shape[:-1], flat.shape[-1])
        return result if bias is None else result + bias.to(result.dtype)

    def _operands(
        self, func: Any, site: SiteKey, args: Any, kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the rows, the matrix they are multiplied by, and what is added, if anything."""
        op = site[1]
        if func is torch.Tensor.__rmatmul__:
            args = args[::-1]
        given = {
            **dict(zip(_NAMES[op], args, strict=False)),
            **{_SAME[op].get(key, key): kwargs[key] for key in kwargs},
        }
        shapes = [tuple(given[name].shape) for name in _NAMES[op] if given.get(name) is not None]
        fault = float8_fault(op, shapes)
        if fault:
            raise _refusal(site, fault)
        if given.get("alpha", 1) != 1 or given.get("beta", 1) != 1:
            raise _refusal(site, "addmm has alpha or beta other than 1")
        matrix = given["mat2"].t() if op == "linear" else given["mat2"]
        return given["mat1"], matrix, given.get("bias")


def _refusal(site: SiteKey, fault: str) -> FormatError:
    module, op, _ = site
    return FormatError(
        f'site "{Site(*site)}" cannot run in {FLOAT8}: {fault}; give it another format by a rule above: '
        f'{{sites: "{module}:{op}", format: bf16}}'
    )


def _check_transforms(site: SiteKey) -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None and not torch.compiler.is_compiling():
        raise ApplyError(
            f'site "{Site(*site)}" runs in {FLOAT8} inside a transform of torch.func (grad, vmap, jvp, ...), and '
            "torchao has no rule for those; give the site another format (bf16), or use autograd"
        )


def _check_once(site: SiteKey, *_: object) -> None:
    if torch.is_grad_enabled():
        raise ApplyError(
            f'site "{Site(*site)}" runs in {FLOAT8}, and backward was called with create_graph=True: torchao has no '
            "gradient of its gradient; give the site another format (bf16), or leave create_graph out"
        )


# The arguments of each op in their order, and what else torch calls them.
_NAMES = {
    "linear": ("mat1", "mat2", "bias"),
    "matmul": ("mat1", "mat2"),
    "mm": ("mat1", "mat2"),
    "addmm": ("bias", "mat1", "mat2"),
}
_SAME = {
    "linear": {"input": "mat1", "weight": "mat2"},
    "matmul": {"input": "mat1", "other": "mat2"},
    "mm": {"input": "mat1"},
    "addmm": {"input": "bias"},
}


def float8_product(scaling: Scaling, *, emulated: bool) -> Float8Product:
    """Return the product that torchao's recipe of that name makes, with kernels or `emulated`.

    Raises: `ApplyError` if torchao is not installed.
    """
    need = f"a rule with format {FLOAT8}"
    linear = load_torchao("torchao.float8.float8_linear", need)
    config_of = load_torchao("torchao.float8.config", need).Float8LinearConfig.from_recipe_name
    types = load_torchao("torchao.float8.float8_training_tensor", need)
    config = replace(config_of(scaling), emulate=emulated)
    kinds = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)

    def kernels(*, fill: bool) -> Any:
        each = [types.ScaledMMConfig(emulated, kind.use_fast_accum, False, fill) for kind in kinds]
        return types.LinearMMConfig(*each)

    return Float8Product(
        function=linear.matmul_with_hp_or_float8_args,
        config=config,
        kernels=kernels(fill=False),
        kernels_filled=kernels(fill=True),
        emulated=emulated,
    )
