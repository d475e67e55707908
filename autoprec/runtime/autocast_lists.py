"""What `torch.autocast` of the torch at hand does, asked of torch's dispatcher, beside what the catalog says.

The catalog's autocast columns were proven by execution at the torch version that is tested. Another version may have
other lists; `list_changes` finds out without running anything, on a machine that need not have the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from autoprec.errors import DeviceError
from autoprec.ops import CATALOG

_DISPATCH_KEYS: Mapping[str, str] = MappingProxyType(
    {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "mps": "AutocastMPS"}
)

# Functions without a kernel of their own on a list: what decides is a kernel they call. One of these is enough.
INNER_KERNELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "adaptive_max_pool3d_with_indices": ("adaptive_max_pool3d",),
        "affine_grid": ("bmm",),
        "affine_grid_generator": ("bmm",),
        "chain_matmul": ("chain_matmul", "mm"),
        "corrcoef": ("matmul",),
        "cov": ("matmul",),
        "cross_entropy": ("cross_entropy_loss", "log_softmax"),
        "cumulative_trapezoid": ("cumsum",),
        "einsum": ("einsum", "bmm"),
        "fractional_max_pool2d_with_indices": ("fractional_max_pool2d",),
        "fractional_max_pool3d_with_indices": ("fractional_max_pool3d",),
        "grid_sample": ("grid_sampler",),
        "gru": ("_thnn_fused_gru_cell",),
        "inner": ("tensordot", "mm"),
        "instance_norm": ("batch_norm",),
        "interpolate": ("upsample_nearest2d",),
        "linalg_multi_dot": ("linalg_multi_dot", "mm"),
        "linalg_vecdot": ("linalg_vecdot", "sum"),
        "linalg_norm": ("linalg_vector_norm",),
        "lstm": ("_thnn_fused_lstm_cell", "mkldnn_rnn_layer"),
        "matrix_power": ("matmul",),
        "max_unpool1d": ("max_unpool2d",),
        "norm": ("norm", "linalg_vector_norm"),
        "norm_except_dim": ("norm",),
        "normalize": ("norm",),
        "pairwise_distance": ("norm",),
        "rnn_relu": ("linear",),
        "rnn_relu_cell": ("rnn_relu_cell", "linear"),
        "rnn_tanh": ("linear",),
        "rnn_tanh_cell": ("rnn_tanh_cell", "linear"),
        "softmin": ("softmax",),
        "square": ("pow",),
        "tensordot": ("tensordot", "mm"),
        "trapezoid": ("sum",),
        "upsample": ("upsample_nearest2d",),
        "upsample_bilinear": ("upsample_bilinear2d",),
        "upsample_nearest": ("upsample_nearest2d",),
    }
)

# Kernels on a list that no Python function of that name reaches: the insides of other functions.
INTERNAL_KERNELS: frozenset[str] = frozenset(
    {
        "_convolution",
        "_grid_sampler_2d_cpu_fallback",
        "_lu_with_info",
        "_mps_convolution",
        "_scaled_dot_product_flash_attention",
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "multilabel_margin_loss_forward",
        "nll_loss2d",
        "reflection_pad1d",
        "reflection_pad2d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "upsample_bicubic2d",
        "upsample_linear1d",
        "upsample_nearest1d",
        "upsample_nearest3d",
        "upsample_trilinear3d",
        # On a list to refuse, not to cast: autocast raises in binary_cross_entropy on CUDA.
        "binary_cross_entropy",
    }
)


@dataclass(frozen=True, kw_only=True)
class ListChanges:
    """Where the torch at hand and the catalog disagree; both are empty at the version that is tested.

    `gone`: ops that the catalog has on a list and torch has not; `new`: kernels on a list that the catalog lacks.
    """

    gone: tuple[str, ...]
    new: tuple[str, ...]


def kernels(device_kind: str) -> frozenset[str]:
    """Return the names of the aten kernels on any autocast list of a kind of device, overloads folded.

    Raises: `DeviceError` if there is no autocast for that kind.
    """
    if device_kind not in _DISPATCH_KEYS:
        raise DeviceError(f'autocast lists of device kind "{device_kind}"; device kinds: {", ".join(_DISPATCH_KEYS)}')
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(_DISPATCH_KEYS[device_kind])
    return frozenset(name.removeprefix("aten::").split(".", maxsplit=1)[0] for name in registered)


def list_changes(device_kind: str) -> ListChanges:
    """Return where torch's lists for a kind of device differ from the catalog's column.

    Raises: `DeviceError` if there is no autocast for that kind.
    """
    found = kernels(device_kind)
    listed = [op.name for op in CATALOG.values() if device_kind in op.autocast]
    deciding = {name: INNER_KERNELS.get(name, (name,)) for name in listed}
    gone = tuple(sorted(name for name, inner in deciding.items() if found.isdisjoint(inner)))
    known = INTERNAL_KERNELS.union(*deciding.values())
    return ListChanges(gone=gone, new=tuple(sorted(found - known)))
