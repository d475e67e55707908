"""One small call of each op of the catalog that computes: what the contract tests of the catalog run.

`EXAMPLES` maps the canonical name to a call that takes a maker of floating tensors, `t(*shape)`, all of one dtype, and
a maker of integer tensors, `i(*shape, high)`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import _VF
from torch.nn import functional

Call = Callable[[Callable[..., torch.Tensor], Callable[..., torch.Tensor]], Any]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_LINALG_UNARY = _words(
    "cholesky_ex cond det eig eigh eigvals eigvalsh inv inv_ex ldl_factor lu lu_factor matrix_norm norm qr slogdet "
    "svd svdvals vector_norm pinv lu_factor_ex ldl_factor_ex cholesky"
)
_FFT_1D = _words("fft ifft rfft irfft hfft ihfft")
_FFT_ND = _words("fft2 ifft2 fftn ifftn rfft2 irfft2 rfftn irfftn hfft2 ihfft2 hfftn ihfftn")
_UNARY = _words(
    "sum mean nansum nanmean var std var_mean std_mean trace prod max min amax amin aminmax median nanmedian mode sort "
    "msort sqrt rsqrt reciprocal sigmoid tanh erf erfc deg2rad rad2deg square abs neg positive sign sgn ceil floor "
    "round trunc frac nan_to_num frexp log log1p log2 log10 exp exp2 expm1 sin cos tan asin acos atan sinh cosh asinh "
    "acosh atanh erfinv logit sinc lgamma digamma i0 angle relu selu celu rrelu diff gradient cov corrcoef "
    "pinverse det logdet slogdet qr svd geqrf matrix_exp norm histc cumulative_trapezoid trapezoid"
)
_BINARY = _words(
    "add sub mul div floor_divide pow float_power remainder fmod hypot maximum minimum fmax fmin copysign heaviside "
    "nextafter atan2 xlogy igamma igammac logaddexp logaddexp2 dist kron inner ldexp equal allclose"
)
_ACTIVATIONS = _words(
    "relu relu6 hardtanh gelu silu mish elu selu celu leaky_relu rrelu softplus softsign softshrink tanhshrink "
    "hardswish hardsigmoid hardshrink dropout alpha_dropout feature_alpha_dropout"
)
_SPECIAL = _words("entr erfcx log_ndtr ndtr ndtri i0e i1 i1e bessel_j0 bessel_j1 bessel_y0 bessel_y1")


def _lstm(t: Any, i: Any) -> Any:
    weights = [t(16, 4), t(16, 4), t(16), t(16)]
    return _VF.lstm(t(3, 2, 4), (t(1, 2, 4), t(1, 2, 4)), weights, True, 1, 0.0, True, False, False)


def _rnn(name: str, gates: int) -> Call:
    def call(t: Any, i: Any) -> Any:
        weights = [t(gates * 4, 4), t(gates * 4, 4), t(gates * 4), t(gates * 4)]
        return getattr(_VF, name)(t(3, 2, 4), t(1, 2, 4), weights, True, 1, 0.0, True, False, False)

    return call


def _cell(name: str, gates: int) -> Call:
    def call(t: Any, i: Any) -> Any:
        state = (t(2, 4), t(2, 4)) if name == "lstm_cell" else t(2, 4)
        return getattr(_VF, name)(t(2, 4), state, t(gates * 4, 4), t(gates * 4, 4), t(gates * 4), t(gates * 4))

    return call


def _unary(module: Any, name: str) -> Call:
    return lambda t, i: getattr(module, name)(t(4, 4))


def _binary(name: str) -> Call:
    return lambda t, i: getattr(torch, name)(t(4, 4), t(4, 4))


def _pooled(name: str, dims: int, *args: Any) -> Call:
    return lambda t, i: getattr(functional, name)(t(1, 2, *[4] * dims), *(args or (2,)))


def _unpooled(dims: int) -> Call:
    def call(t: Any, i: Any) -> Any:
        return getattr(functional, f"max_unpool{dims}d")(t(1, 1, *[2] * dims), i(1, 1, *[2] * dims, high=1), 2)

    return call


def _conv(name: str, dims: int) -> Call:
    return lambda t, i: getattr(functional, name)(t(1, 2, *[4] * dims), t(2, 2, *[3] * dims), t(2))


def _spd(t: Any) -> Any:
    return torch.eye(4, device=t(1).device, dtype=t(1).dtype) * 4 + 0.1


def _on_spd(call: Callable[[torch.Tensor], Any]) -> Call:
    return lambda t, i: call(_spd(t))


def _table() -> dict[str, Call]:
    calls: dict[str, Call] = {}
    calls |= {name: _unary(torch, name) for name in _UNARY}
    calls |= {name: _binary(name) for name in _BINARY}
    calls |= {name: _unary(functional, name) for name in _ACTIVATIONS}
    calls |= {f"special_{name}": _unary(torch.special, name) for name in _SPECIAL}
    calls |= {f"linalg_{name}": _on_spd(getattr(torch.linalg, name)) for name in _LINALG_UNARY}
    calls |= {f"fft_{name}": _unary(torch.fft, name) for name in (*_FFT_1D, *_FFT_ND)}
    for d in (1, 2, 3):
        calls[f"conv{d}d"] = _conv(f"conv{d}d", d)
        calls[f"conv_transpose{d}d"] = _conv(f"conv_transpose{d}d", d)
        calls[f"max_pool{d}d"] = _pooled(f"max_pool{d}d", d)
        calls[f"avg_pool{d}d"] = _pooled(f"avg_pool{d}d", d)
        calls[f"adaptive_avg_pool{d}d"] = _pooled(f"adaptive_avg_pool{d}d", d)
        calls[f"adaptive_max_pool{d}d"] = _pooled(f"adaptive_max_pool{d}d", d)
        calls[f"max_pool{d}d_with_indices"] = _pooled(f"max_pool{d}d_with_indices", d)
        calls[f"adaptive_max_pool{d}d_with_indices"] = _pooled(f"adaptive_max_pool{d}d_with_indices", d)
        calls[f"max_unpool{d}d"] = _unpooled(d)
        calls[f"dropout{d}d"] = lambda t, i, d=d: getattr(functional, f"dropout{d}d")(t(1, 2, *[4] * d))  # type: ignore[misc]
    for d in (2, 3):
        calls[f"fractional_max_pool{d}d"] = _pooled(f"fractional_max_pool{d}d", d, 2, 2)
        calls[f"fractional_max_pool{d}d_with_indices"] = _pooled(f"fractional_max_pool{d}d_with_indices", d, 2, 2)
    return calls | _MATMUL | _NORM | _REST


_MATMUL: dict[str, Call] = {
    "matmul": lambda t, i: t(4, 4) @ t(4, 4),
    "mm": lambda t, i: torch.mm(t(4, 4), t(4, 4)),
    "bmm": lambda t, i: torch.bmm(t(2, 4, 4), t(2, 4, 4)),
    "mv": lambda t, i: torch.mv(t(4, 4), t(4)),
    "dot": lambda t, i: torch.dot(t(4), t(4)),
    "vdot": lambda t, i: torch.vdot(t(4), t(4)),
    "addmm": lambda t, i: torch.addmm(t(4, 4), t(4, 4), t(4, 4)),
    "addmv": lambda t, i: torch.addmv(t(4), t(4, 4), t(4)),
    "addr": lambda t, i: torch.addr(t(4, 4), t(4), t(4)),
    "addbmm": lambda t, i: torch.addbmm(t(4, 4), t(2, 4, 4), t(2, 4, 4)),
    "baddbmm": lambda t, i: torch.baddbmm(t(2, 4, 4), t(2, 4, 4), t(2, 4, 4)),
    "linear": lambda t, i: functional.linear(t(2, 4), t(3, 4), t(3)),
    "outer": lambda t, i: torch.outer(t(4), t(4)),
    "_addmm_activation": lambda t, i: torch._addmm_activation(t(4, 4), t(4, 4), t(4, 4)),
    "convolution": lambda t, i: torch.convolution(
        t(1, 2, 4, 4), t(2, 2, 3, 3), t(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "_convolution": lambda t, i: torch._convolution(
        t(1, 2, 4, 4), t(2, 2, 3, 3), t(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True
    ),
    "bilinear": lambda t, i: functional.bilinear(t(2, 4), t(2, 4), t(3, 4, 4)),
    "einsum": lambda t, i: torch.einsum("ij,jk->ik", t(4, 4), t(4, 4)),
    "tensordot": lambda t, i: torch.tensordot(t(4, 4), t(4, 4), dims=1),
    "linalg_multi_dot": lambda t, i: torch.linalg.multi_dot([t(4, 4), t(4, 4), t(4, 4)]),
    "linalg_vecdot": lambda t, i: torch.linalg.vecdot(t(4, 4), t(4, 4)),
    "matrix_power": lambda t, i: torch.linalg.matrix_power(t(4, 4), 3),
    "conv_tbc": lambda t, i: torch.conv_tbc(t(4, 1, 2), t(3, 2, 2), t(2)),
    "scaled_dot_product_attention": lambda t, i: functional.scaled_dot_product_attention(
        t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)
    ),
    "lstm": _lstm,
    "gru": _rnn("gru", 3),
    "rnn_tanh": _rnn("rnn_tanh", 1),
    "rnn_relu": _rnn("rnn_relu", 1),
    "lstm_cell": _cell("lstm_cell", 4),
    "gru_cell": _cell("gru_cell", 3),
    "rnn_tanh_cell": _cell("rnn_tanh_cell", 1),
    "rnn_relu_cell": _cell("rnn_relu_cell", 1),
}

_NORM: dict[str, Call] = {
    "layer_norm": lambda t, i: functional.layer_norm(t(2, 4), (4,), t(4), t(4)),
    "rms_norm": lambda t, i: functional.rms_norm(t(2, 4), (4,), t(4)),
    "native_layer_norm": lambda t, i: torch.native_layer_norm(t(2, 4), (4,), t(4), t(4), 1e-5)[0],
    "_fused_rms_norm": lambda t, i: torch._fused_rms_norm(t(2, 4), (4,), t(4), 1e-5)[0],
    "batch_norm": lambda t, i: functional.batch_norm(t(4, 2), None, None, t(2), t(2), True),
    "instance_norm": lambda t, i: functional.instance_norm(t(2, 2, 4)),
    "group_norm": lambda t, i: functional.group_norm(t(2, 4, 3), 2, t(4), t(4)),
    "normalize": lambda t, i: functional.normalize(t(2, 4)),
    "norm_except_dim": lambda t, i: torch.norm_except_dim(t(2, 4), 2, 0),
    "_weight_norm": lambda t, i: torch._weight_norm(t(2, 4), t(2, 1), 0),
    "renorm": lambda t, i: torch.renorm(t(4, 4), 2, 0, 1.0),
    "softmax": lambda t, i: functional.softmax(t(4, 4), -1),
    "log_softmax": lambda t, i: functional.log_softmax(t(4, 4), -1),
    "softmin": lambda t, i: functional.softmin(t(4, 4), -1),
    "log_sigmoid": lambda t, i: functional.logsigmoid(t(4, 4)),
    "logsumexp": lambda t, i: torch.logsumexp(t(4, 4), -1),
    "logcumsumexp": lambda t, i: torch.logcumsumexp(t(4, 4), -1),
    "cross_entropy": lambda t, i: functional.cross_entropy(t(4, 4), i(4, high=4)),
    "nll_loss": lambda t, i: functional.nll_loss(t(4, 4), i(4, high=4)),
    "binary_cross_entropy": lambda t, i: functional.binary_cross_entropy(t(4, 4), t(4, 4)),
    "binary_cross_entropy_with_logits": lambda t, i: functional.binary_cross_entropy_with_logits(t(4, 4), t(4, 4)),
    "mse_loss": lambda t, i: functional.mse_loss(t(4, 4), t(4, 4)),
    "l1_loss": lambda t, i: functional.l1_loss(t(4, 4), t(4, 4)),
    "smooth_l1_loss": lambda t, i: functional.smooth_l1_loss(t(4, 4), t(4, 4)),
    "huber_loss": lambda t, i: functional.huber_loss(t(4, 4), t(4, 4)),
    "kl_div": lambda t, i: functional.kl_div(t(4, 4), t(4, 4), reduction="sum"),
    "ctc_loss": lambda t, i: functional.ctc_loss(t(6, 2, 4), i(2, 2, high=3) + 1, i(2, high=1) + 6, i(2, high=1) + 2),
    "poisson_nll_loss": lambda t, i: functional.poisson_nll_loss(t(4, 4), t(4, 4)),
    "margin_ranking_loss": lambda t, i: functional.margin_ranking_loss(t(4), t(4), t(4)),
    "hinge_embedding_loss": lambda t, i: functional.hinge_embedding_loss(t(4), t(4)),
    "multilabel_margin_loss": lambda t, i: functional.multilabel_margin_loss(t(4, 4), i(4, 4, high=4)),
    "soft_margin_loss": lambda t, i: functional.soft_margin_loss(t(4), t(4)),
    "cosine_embedding_loss": lambda t, i: functional.cosine_embedding_loss(t(4, 4), t(4, 4), i(4, high=1) + 1),
    "multi_margin_loss": lambda t, i: functional.multi_margin_loss(t(4, 4), i(4, high=4)),
    "triplet_margin_loss": lambda t, i: functional.triplet_margin_loss(t(4, 4), t(4, 4), t(4, 4)),
    "cosine_similarity": lambda t, i: functional.cosine_similarity(t(4, 4), t(4, 4)),
    "pairwise_distance": lambda t, i: functional.pairwise_distance(t(4, 4), t(4, 4)),
    "cdist": lambda t, i: torch.cdist(t(4, 4), t(4, 4)),
    "pdist": lambda t, i: functional.pdist(t(4, 4)),
}

_REST: dict[str, Call] = {
    "quantile": lambda t, i: torch.quantile(t(4), 0.5),
    "nanquantile": lambda t, i: torch.nanquantile(t(4), 0.5),
    "kthvalue": lambda t, i: torch.kthvalue(t(4), 2),
    "topk": lambda t, i: torch.topk(t(4), 2),
    "cumsum": lambda t, i: torch.cumsum(t(4), 0),
    "cumprod": lambda t, i: torch.cumprod(t(4), 0),
    "cummax": lambda t, i: torch.cummax(t(4), 0),
    "cummin": lambda t, i: torch.cummin(t(4), 0),
    "addcmul": lambda t, i: torch.addcmul(t(4), t(4), t(4)),
    "addcdiv": lambda t, i: torch.addcdiv(t(4), t(4), t(4)),
    "lerp": lambda t, i: torch.lerp(t(4), t(4), 0.5),
    "cross": lambda t, i: torch.cross(t(2, 3), t(2, 3), dim=1),
    "linalg_cross": lambda t, i: torch.linalg.cross(t(2, 3), t(2, 3)),
    "prelu": lambda t, i: functional.prelu(t(2, 4), t(1)),
    "glu": lambda t, i: functional.glu(t(2, 4)),
    "threshold": lambda t, i: functional.threshold(t(4), 0.5, 0.0),
    "clamp": lambda t, i: t(4).clamp(0.2, 0.8),
    "clamp_min": lambda t, i: t(4).clamp_min(0.2),
    "clamp_max": lambda t, i: t(4).clamp_max(0.2),
    "masked_fill": lambda t, i: t(4).masked_fill(t(4) > 0.5, 0.0),
    "where": lambda t, i: torch.where(i(4, high=2) > 0, t(4), t(4)),
    "mvlgamma": lambda t, i: torch.mvlgamma(t(4) + 1, 2),
    "polygamma": lambda t, i: torch.polygamma(1, t(4)),
    "special_xlog1py": lambda t, i: torch.special.xlog1py(t(4), t(4)),
    "special_zeta": lambda t, i: torch.special.zeta(t(4) + 2, t(4)),
    "polar": lambda t, i: torch.polar(t(4), t(4)),
    "complex": lambda t, i: torch.complex(t(4), t(4)),
    "view_as_complex": lambda t, i: torch.view_as_complex(t(4, 2)),
    "embedding": lambda t, i: functional.embedding(i(3, high=4), t(4, 2)),
    "embedding_bag": lambda t, i: functional.embedding_bag(i(2, 3, high=4), t(4, 2)),
    "cat": lambda t, i: torch.cat([t(4), t(4)]),
    "stack": lambda t, i: torch.stack([t(4), t(4)]),
    "hstack": lambda t, i: torch.hstack([t(4), t(4)]),
    "vstack": lambda t, i: torch.vstack([t(4), t(4)]),
    "dstack": lambda t, i: torch.dstack([t(4), t(4)]),
    "column_stack": lambda t, i: torch.column_stack([t(4), t(4)]),
    "block_diag": lambda t, i: torch.block_diag(t(2, 2), t(2, 2)),  # type: ignore[no-untyped-call]
    "index_add": lambda t, i: t(4).index_add(0, i(2, high=4), t(2)),
    "index_copy": lambda t, i: t(4).index_copy(0, i(2, high=4), t(2)),
    "index_fill": lambda t, i: t(4).index_fill(0, i(2, high=4), 0.0),
    "index_put": lambda t, i: t(4).index_put((i(2, high=4),), t(2)),
    "index_reduce": lambda t, i: t(4).index_reduce(0, i(2, high=4), t(2), "prod"),
    "scatter": lambda t, i: t(4).scatter(0, i(2, high=4), t(2)),
    "scatter_add": lambda t, i: t(4).scatter_add(0, i(2, high=4), t(2)),
    "scatter_reduce": lambda t, i: t(4).scatter_reduce(0, i(2, high=4), t(2), "sum"),
    "masked_scatter": lambda t, i: t(4).masked_scatter(i(4, high=2) > 0, t(4)),
    "put": lambda t, i: t(4).put(i(2, high=4), t(2)),
    "slice_scatter": lambda t, i: torch.slice_scatter(t(4), t(2), 0, 1, 3),
    "select_scatter": lambda t, i: torch.select_scatter(t(4, 4), t(4), 0, 1),
    "diagonal_scatter": lambda t, i: torch.diagonal_scatter(t(4, 4), t(4)),
    "searchsorted": lambda t, i: torch.searchsorted(t(4), t(2)),
    "bucketize": lambda t, i: torch.bucketize(t(2), t(4)),
    "take_along_dim": lambda t, i: torch.take_along_dim(t(4), i(2, high=4), 0),
    "interpolate": lambda t, i: functional.interpolate(t(1, 1, 4, 4), scale_factor=2.0),
    "grid_sample": lambda t, i: functional.grid_sample(t(1, 1, 4, 4), t(1, 4, 4, 2), align_corners=False),
    "grid_sampler": lambda t, i: torch.grid_sampler(t(1, 1, 4, 4), t(1, 4, 4, 2), 0, 0, False),
    "grid_sampler_2d": lambda t, i: torch.grid_sampler_2d(t(1, 1, 4, 4), t(1, 4, 4, 2), 0, 0, False),
    "grid_sampler_3d": lambda t, i: torch.grid_sampler_3d(t(1, 1, 2, 4, 4), t(1, 2, 4, 4, 3), 0, 0, False),
    "affine_grid_generator": lambda t, i: torch.affine_grid_generator(t(1, 2, 3), [1, 1, 4, 4], False),
    "affine_grid": lambda t, i: functional.affine_grid(t(1, 2, 3), [1, 1, 4, 4], align_corners=False),
    "fold": lambda t, i: functional.fold(t(1, 4, 4), (4, 4), 2, stride=2),
    "pad": lambda t, i: functional.pad(t(4), (1, 1)),
    "stft": lambda t, i: torch.stft(t(32), 8, window=t(8), return_complex=True),
    "linalg_solve": lambda t, i: torch.linalg.solve(_spd(t), t(4)),
    "linalg_lstsq": lambda t, i: torch.linalg.lstsq(_spd(t), t(4, 1)),
    "linalg_matrix_rank": lambda t, i: torch.linalg.matrix_rank(_spd(t)),
    "linalg_tensorinv": lambda t, i: torch.linalg.tensorinv(_spd(t), ind=1),
    "linalg_tensorsolve": lambda t, i: torch.linalg.tensorsolve(_spd(t), t(4)),
    "linalg_solve_triangular": lambda t, i: torch.linalg.solve_triangular(_spd(t), t(4, 1), upper=True),
    "linalg_householder_product": lambda t, i: torch.linalg.householder_product(t(4, 4), t(4)),
    "inverse": lambda t, i: torch.inverse(_spd(t)),
    "cholesky": lambda t, i: torch.cholesky(_spd(t)),
    "cholesky_inverse": lambda t, i: torch.cholesky_inverse(_spd(t)),
    "cholesky_solve": lambda t, i: torch.cholesky_solve(t(4, 1), _spd(t)),
    "lu_solve": lambda t, i: torch.lu_solve(t(4, 1), _spd(t), torch.arange(1, 5, dtype=torch.int32)),
    "orgqr": lambda t, i: torch.orgqr(t(4, 4), t(4)),
    "ormqr": lambda t, i: torch.ormqr(t(4, 4), t(4), t(4, 4)),
    "triangular_solve": lambda t, i: torch.triangular_solve(t(4, 1), _spd(t)),
    "frobenius_norm": lambda t, i: torch.frobenius_norm(t(4, 4), [0, 1]),
    "nuclear_norm": lambda t, i: torch.nuclear_norm(t(4, 4)),
    "fake_quantize_per_tensor_affine": lambda t, i: torch.fake_quantize_per_tensor_affine(t(4), 0.1, 0, 0, 255),
}

EXAMPLES: Mapping[str, Call] = _table()
