"""The switches of torch that change what a training step computes, as they stand in this process."""

from collections.abc import Callable, Mapping

import torch

from autoprec.runtime.matmul_precision import internal_precision

Flag = str | bool


def torch_flags(kind: str) -> Mapping[str, Flag]:
    """Return the switches that matter on devices of `kind`, by the names that torch gives them."""
    found: dict[str, Flag] = {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "autocast": torch.is_autocast_enabled(kind),
        **{f"fp32_precision.{op}": internal_precision(kind, op) for op in ("matmul", "conv", "rnn")},
    }
    return found | {name: read() for name, read in _OF_KIND.get(kind, {}).items()}


def _text(value: object) -> Flag:
    return value if isinstance(value, bool) else str(value)


def _flushes() -> bool:
    """Return whether subnormal numbers become zero, which torch sets and does not tell."""
    return bool(torch.full((1,), 2.0**-140, dtype=torch.float32).mul(1.0).item() == 0.0)


_OF_KIND: Mapping[str, Mapping[str, Callable[[], Flag]]] = {
    "cpu": {
        "mkldnn.enabled": lambda: bool(torch.backends.mkldnn.enabled),
        "flush_denormal": _flushes,
    },
    "cuda": {
        "cudnn.enabled": lambda: bool(torch.backends.cudnn.enabled),
        "cudnn.benchmark": lambda: bool(torch.backends.cudnn.benchmark),
        "cudnn.deterministic": lambda: bool(torch.backends.cudnn.deterministic),
        "fp16_reduced_precision_reduction": lambda: _text(
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        ),
        "bf16_reduced_precision_reduction": lambda: _text(
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "flash_sdp": lambda: bool(torch.backends.cuda.flash_sdp_enabled()),
        "mem_efficient_sdp": lambda: bool(torch.backends.cuda.mem_efficient_sdp_enabled()),
        "math_sdp": lambda: bool(torch.backends.cuda.math_sdp_enabled()),
        "cudnn_sdp": lambda: bool(torch.backends.cuda.cudnn_sdp_enabled()),
    },
}
