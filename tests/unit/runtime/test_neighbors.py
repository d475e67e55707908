"""A call never fails because a neighbor was lowered: every policy that lowers one site, or all but one, runs."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoprec
from autoprec.graph.site import Site
from autoprec.policy import Policy, Rule, pattern_of

INDEX = torch.tensor([0, 2])
GRID = INDEX[:, None].expand(2, 4)


def lowered(x: torch.Tensor) -> torch.Tensor:
    """Three sites, each a neighbor that a policy can lower."""
    return torch.tanh(x * 1.0 + 0.5)


class Family(nn.Module):
    """Feeds a call from lowered neighbors, and its result to one."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call, self.weight = call, nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lowered(self.call(lowered(x), lowered(x.sin()), self.weight))


class Layer(nn.Module):
    """Feeds a module from a lowered neighbor and its result to one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(lowered(x))
        while not isinstance(y, torch.Tensor):
            y = y[0]
        return lowered(y)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x * 1.0, x)


class CellSteps(nn.Module):
    """Two steps of a recurrent cell whose state comes from outside in FP32."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = torch.zeros(4, 4)
        state = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        for _ in range(2):
            state = self.cell(x, state)
        return state[0] if isinstance(state, tuple) else state


class States(nn.Module):
    """A recurrent layer that is given its first state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        state = x.new_zeros(1, 4) * 1.0
        return self.layer(x, (state, state * 1.0) if isinstance(self.layer, nn.LSTM) else state)


def _written(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    """Return a call that writes the second argument into what was computed from the first."""

    def call(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        target = a * 1.0 + w
        write(target, b * 2.0)
        return target

    return call


def _setitem(t: torch.Tensor, b: torch.Tensor) -> None:
    t[INDEX] = b[INDEX]
    t[t > 0] = b[0, 0]
    t[:, 1] = b[:, 0]


CALLS: Mapping[str, Callable[..., torch.Tensor]] = {
    "matmul": lambda a, b, w: a @ b @ w,
    "mm": lambda a, b, w: torch.mm(torch.mm(a, b), w),
    "bmm": lambda a, b, w: torch.bmm(a[None], b[None])[0] @ w,
    "linear": lambda a, b, w: F.linear(a, w, b[0]),
    "bilinear": lambda a, b, w: F.bilinear(a, b, w[None].expand(4, 4, 4)),
    "einsum": lambda a, b, w: torch.einsum("ij,jk,lk->il", a, b, w),
    "addmm": lambda a, b, w: torch.addmm(a, b, w),
    "baddbmm": lambda a, b, w: torch.baddbmm(a[None], b[None], w[None])[0],
    "addmv": lambda a, b, w: torch.addmv(a[0], b, w[0]) + a,
    "addbmm": lambda a, b, w: torch.addbmm(a, b[None], w[None]),
    "addr": lambda a, b, w: torch.addr(a, b[0], w[0]),
    "outer": lambda a, b, w: torch.outer(a[0], b[0]) + w,
    "dot": lambda a, b, w: torch.dot(a[0], b[0]) * w,
    "vdot": lambda a, b, w: torch.vdot(a[0], b[0]) * w,
    "tensordot": lambda a, b, w: torch.tensordot(a, b, 1) @ w,
    "chain_matmul": lambda a, b, w: torch.linalg.multi_dot([a, b, w]),
    "inner": lambda a, b, w: torch.inner(a, b) @ w,
    "kron": lambda a, b, w: torch.kron(a[:2, :2], b[:2, :2]) @ w,
    "attention": lambda a, b, w: F.scaled_dot_product_attention(a[None], b[None], w[None])[0],
    "attention_mask": lambda a, b, w: F.scaled_dot_product_attention(a[None], a[None], w[None], attn_mask=b[None])[0],
    "conv1d": lambda a, b, w: F.conv1d(a[None], w[:, :, None], b[0])[0],
    "conv_transpose1d": lambda a, b, w: F.conv_transpose1d(a[None], w[:, :, None], b[0])[0],
    "where": lambda a, b, w: torch.where(a > 0, b, w),
    "cat": lambda a, b, w: torch.cat([a, b, w])[:4],
    "stack": lambda a, b, w: torch.stack([a, b, w]).sum(0),
    "hstack": lambda a, b, w: torch.hstack([a, b, w])[:, :4],
    "lerp": lambda a, b, w: torch.lerp(a, b, w),
    "addcmul": lambda a, b, w: torch.addcmul(a, b, w, value=0.5),
    "addcdiv": lambda a, b, w: torch.addcdiv(a, b, w + 3.0),
    "maximum": lambda a, b, w: torch.maximum(a, b).minimum(w),
    "clamp": lambda a, b, w: torch.clamp(a, min=b, max=w + 2.0),
    "hypot": lambda a, b, w: torch.hypot(a, b) + torch.atan2(b, w),
    "fmod": lambda a, b, w: torch.fmod(a, b + 3.0) + torch.remainder(b, w + 3.0),
    "pow": lambda a, b, w: (a.abs() + 1.0).pow(b) + torch.xlogy(b, w + 2.0),
    "copysign": lambda a, b, w: torch.copysign(a, b) + torch.logaddexp(b, w) + torch.fmax(a, w),
    "prelu": lambda a, b, w: F.prelu(a, w[0]) + b,
    "dist": lambda a, b, w: torch.dist(a, b) * w,
    "cosine_similarity": lambda a, b, w: F.cosine_similarity(a, b)[:, None] * w,
    "pairwise_distance": lambda a, b, w: F.pairwise_distance(a, b)[:, None] * w,
    "cross": lambda a, b, w: torch.linalg.cross(a[:, :3], b[:, :3]) @ w[:3],
    "searchsorted": lambda a, b, w: torch.searchsorted(a.sort(-1).values, b) * w,
    "isclose": lambda a, b, w: torch.isclose(a, b) * w,
    "scatter": lambda a, b, w: (a + w).scatter(0, GRID, b),
    "scatter_add": lambda a, b, w: (a + w).scatter_add(0, GRID, b),
    "scatter_reduce": lambda a, b, w: (a + w).scatter_reduce(0, GRID, b[:2], "amax"),
    "index_add": lambda a, b, w: (a + w).index_add(0, INDEX, b[:2]),
    "index_copy": lambda a, b, w: (a + w).index_copy(0, INDEX, b[:2]),
    "index_put": lambda a, b, w: (a + w).index_put((INDEX,), b[:2], accumulate=True),
    "index_fill": lambda a, b, w: (a + w).index_fill(0, INDEX, b[0, 0]),
    "index_reduce": lambda a, b, w: (a + w).index_reduce(0, INDEX, b[:2], "amax"),
    "masked_scatter": lambda a, b, w: (a + w).masked_scatter(w > 0, b),
    "masked_fill": lambda a, b, w: (a + w).masked_fill(w > 0, b[0, 0]),
    "put": lambda a, b, w: (a + w).put(INDEX, b[0, :2]),
    "slice_scatter": lambda a, b, w: (a + w).slice_scatter(b[:2], 0, 0, 2),
    "select_scatter": lambda a, b, w: (a + w).select_scatter(b[0], 0, 1),
    "diagonal_scatter": lambda a, b, w: (a + w).diagonal_scatter(b[0]),
    "scatter_": _written(lambda t, b: t.scatter_(0, GRID, b)),
    "scatter_add_": _written(lambda t, b: t.scatter_add_(0, GRID, b)),
    "scatter_reduce_": _written(lambda t, b: t.scatter_reduce_(0, GRID, b, "sum")),
    "index_add_": _written(lambda t, b: t.index_add_(0, INDEX, b[:2])),
    "index_copy_": _written(lambda t, b: t.index_copy_(0, INDEX, b[:2])),
    "index_put_": _written(lambda t, b: t.index_put_((INDEX,), b[:2])),
    "masked_scatter_": _written(lambda t, b: t.masked_scatter_(t > 0, b)),
    "masked_fill_": _written(lambda t, b: t.masked_fill_(t > 0, b[0, 0])),
    "addmm_": _written(lambda t, b: t.addmm_(b, b)),
    "baddbmm_": _written(lambda t, b: t[None].baddbmm_(b[None], b[None])),
    "addcmul_": _written(lambda t, b: t.addcmul_(b, b)),
    "lerp_": _written(lambda t, b: t.lerp_(b, 0.5)),
    "add_": _written(lambda t, b: t.add_(b)),
    "copy_": _written(lambda t, b: t.copy_(b)),
    "setitem": _written(_setitem),
    "cross_entropy": lambda a, b, w: F.cross_entropy(a, b.softmax(-1)) * w,
    "cross_entropy_weight": lambda a, b, w: F.cross_entropy(a, torch.arange(4), weight=b[0].abs()) * w,
    "nll_loss": lambda a, b, w: F.nll_loss(a.log_softmax(-1), torch.arange(4), weight=b[0].abs()) * w,
    "mse_loss": lambda a, b, w: F.mse_loss(a, b) * w,
    "huber_loss": lambda a, b, w: (F.huber_loss(a, b) + F.smooth_l1_loss(a, b) + F.l1_loss(a, b)) * w,
    "kl_div": lambda a, b, w: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean") * w,
    "binary_cross_entropy": lambda a, b, w: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()) * w,
    "bce_with_logits": lambda a, b, w: (
        F.binary_cross_entropy_with_logits(a, b.sigmoid(), pos_weight=w[0].detach().abs()) * w
    ),
    "cosine_embedding_loss": lambda a, b, w: F.cosine_embedding_loss(a, b, torch.ones(4)) * w,
    "triplet_margin_loss": lambda a, b, w: F.triplet_margin_loss(a, b, w) * w,
    "layer_norm": lambda a, b, w: F.layer_norm(a, (4,), w[0], b[0]),
    "rms_norm": lambda a, b, w: F.rms_norm(a, (4,), w[0]) + b,
    "group_norm": lambda a, b, w: F.group_norm(a, 2, w[0], b[0]),
    "batch_norm": lambda a, b, w: F.batch_norm(a, torch.zeros(4), torch.ones(4), w[0], b[0], training=True),
    "instance_norm": lambda a, b, w: F.instance_norm(a[None], weight=w[0], bias=b[0])[0],
    "embedding": lambda a, b, w: F.embedding(INDEX, w) @ a + F.embedding(INDEX, b),
    "embedding_bag": lambda a, b, w: F.embedding_bag(GRID, w, per_sample_weights=a[:2], mode="sum") @ b,
    "grid_sample": lambda a, b, w: F.grid_sample(a[None, None], torch.stack([b, w], -1)[None], align_corners=False)[
        0, 0
    ],
}

LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "RNN": lambda: nn.RNN(4, 4),
    "GRU": lambda: nn.GRU(4, 4),
    "LSTM": lambda: nn.LSTM(4, 4),
    "bidirectional LSTM": lambda: nn.LSTM(4, 4, num_layers=2, bidirectional=True),
    "projected LSTM": lambda: nn.LSTM(4, 4, proj_size=2),
    "RNN with a state": lambda: States(nn.RNN(4, 4)),
    "GRU with a state": lambda: States(nn.GRU(4, 4)),
    "LSTM with a state": lambda: States(nn.LSTM(4, 4)),
    "RNNCell": lambda: CellSteps(nn.RNNCell(4, 4)),
    "GRUCell": lambda: CellSteps(nn.GRUCell(4, 4)),
    "LSTMCell": lambda: CellSteps(nn.LSTMCell(4, 4)),
    "MultiheadAttention": lambda: SelfAttention(4, 2),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 4),
    "BatchNorm": lambda: nn.BatchNorm1d(4),
    "PReLU": lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Softmax(-1)),
}

SEEN: list[Site] = []


class Watched(Policy):
    """Notes the sites it is asked about."""

    def format_of(self, site: Site) -> tuple[str, int]:
        SEEN.append(site)
        return super().format_of(site)


def step(build: Callable[[], nn.Module], rules: Policy) -> torch.Tensor:
    """Return the output of a training step, and run an evaluation after it."""
    torch.manual_seed(0)
    model = build()
    with autoprec.apply(model, rules):
        output: torch.Tensor = model(torch.linspace(-1, 1, 16).reshape(4, 4))
        if output.requires_grad:
            output.sum().backward()
        model.eval()
        with torch.no_grad():
            model(torch.linspace(-1, 1, 16).reshape(4, 4))
    return output


def policy(*rules: tuple[str, str]) -> Policy:
    return Policy(name="one", rules=tuple(Rule(sites=s, format=f) for s, f in rules))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    **{name: lambda call=call: Family(call) for name, call in CALLS.items()},
    **{name: lambda build=build: Layer(build()) for name, build in LAYERS.items()},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # of a norm: slower, right
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_no_neighbor_makes_a_call_fail(name: str) -> None:
    build = MODELS[name]
    SEEN.clear()
    plain = step(
        build, Watched(name="watched", rules=(Rule(sites="?*", format="bf16"), Rule(sites="*", format="as_given")))
    )
    sites = sorted(set(SEEN))
    assert len(sites) > 3
    for site in sites:
        pattern = pattern_of(site)
        for rules in (
            policy((pattern, "bf16"), ("*", "as_given")),
            policy((pattern, "bf16"), ("*", "fp32")),
            policy((pattern, "as_given"), ("*", "bf16")),
            policy((pattern, "fp16"), ("*", "bf16")),
            policy((pattern, "fp32"), ("*", "bf16")),
            policy((pattern, "promote"), ("*", "bf16")),
        ):
            output = step(build, rules)
            assert output.shape == plain.shape
            assert output.dtype in (torch.float32, torch.int64, torch.bool)
