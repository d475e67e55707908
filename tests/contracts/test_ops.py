"""What every row of the ops catalog owes: a name torch uses, and the truth about `torch.autocast`.

The autocast columns are checked by execution: on real CPU tensors, and for CUDA and MPS on fake tensors, which go
through the dispatcher like real ones and need no device.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode, get_testing_overrides

from autoprec.ops import CATALOG, ENTERED, Op, canonical_name, lookup
from autoprec.runtime.autocast_lists import INNER_KERNELS, INTERNAL_KERNELS, kernels, list_changes
from tests.contracts.op_examples import EXAMPLES

KINDS = ("cpu", "cuda", "mps")
FAKE = FakeTensorMode()
LOW = (torch.bfloat16, torch.float16, torch.complex32)

# Listed ops without an example: fast paths of inference, and a deprecated name that warns and calls another.
NOT_RUN = {"_native_multi_head_attention", "chain_matmul", "upsample", "upsample_nearest", "upsample_bilinear"}

# What one word cannot say, with why. (op, device kind).
NOT_ONE_CLASS: Mapping[tuple[str, str], str] = {
    (
        "linalg_pinv",
        "cpu",
    ): "its svd is on the fp32 list and the product after it on the lower one; it has no bf16 kernel",
    **{("float_power", kind): "its result is fp64 whatever the input" for kind in KINDS},
    ("lstm", "cpu"): "oneDNN has no bf16 LSTM without AVX512: autocast itself raises there",
    ("stft", "cuda"): "fake tensors compute the FFT of bf16, which the device refuses",
    ("stft", "mps"): "fake tensors compute the FFT of bf16, which the device refuses",
    **{
        (name, kind): "there is no complex bf16, so a fake result is complex64 whatever the input"
        for name in ("complex", "polar", "linalg_eig", "linalg_eigvals")
        for kind in ("cuda", "mps")
    },
}


class _Names(TorchFunctionMode):
    """Records the canonical names of the functions called, outermost only."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(canonical_name(func.__name__))
        return func(*args, **(kwargs or {}))


@contextmanager
def _autocast(kind: str) -> Iterator[None]:
    """Turn autocast on as `torch.autocast` does, which refuses where the device is missing."""
    before = torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, False)
        torch.set_autocast_dtype(kind, before)
        torch.clear_autocast_cache()


def _run(name: str, kind: str, *dtypes: torch.dtype) -> tuple[torch.dtype, ...] | None:
    """Return the floating dtypes of the results of the op's example, or None if torch refuses to run it.

    The n-th floating argument has the n-th of `dtypes`, the others the last.
    """
    left = list(dtypes)

    def t(*shape: int) -> torch.Tensor:
        dtype = left.pop(0) if len(left) > 1 else left[0]
        return torch.full(shape, 0.3, device=kind).to(dtype)

    def i(*shape: int, high: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long, device=kind)

    fake = nullcontext() if kind == "cpu" else FAKE
    with warnings.catch_warnings(), fake, _autocast(kind):
        warnings.simplefilter("ignore")
        try:
            result = EXAMPLES[name](t, i)
        except (RuntimeError, NotImplementedError, AssertionError, ValueError):
            return None
    return tuple(x.dtype for x in _tensors(result) if x.is_floating_point() or x.is_complex())


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for item in result:
            yield from _tensors(item)


@cache
def _observed(name: str, kind: str) -> str | None:
    """Return the class that autocast shows for fp32 and for bf16 inputs: lower, fp32, follows; None where it raises."""
    full, low = _run(name, kind, torch.float32), _run(name, kind, torch.bfloat16)
    if not full or (low is not None and not low):
        return None  # refuses both, or has no floating result
    if set(full) <= set(LOW):
        return "lower"
    if low is None:
        return "follows"  # fp32 stays, and bf16 is not even cast to what there is a kernel for
    return "follows" if set(low) <= set(LOW) else "fp32"


@pytest.fixture(autouse=True)
def _quiet_fake_tensors() -> Iterator[None]:
    """Keep fake tensors from printing a traceback for each op that refuses bf16."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_autocast_column_is_what_autocast_does(kind: str) -> None:
    said = {"lower": "lower", "fp32": "fp32", "promote": "follows", None: "follows"}
    observed = {name: _observed(name, kind) for name in EXAMPLES if (name, kind) not in NOT_ONE_CLASS}
    judged = {name: found for name, found in observed.items() if found is not None}
    assert judged == {name: said[CATALOG[name].autocast.get(kind)] for name in judged}


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_every_listed_example_can_be_judged(kind: str) -> None:
    listed = [name for name in EXAMPLES if kind in CATALOG[name].autocast]
    blind = [name for name in listed if _observed(name, kind) is None]
    assert len(blind) <= 0.1 * len(listed), blind


@pytest.mark.parametrize(
    ("name", "kind"),
    [(op.name, kind) for op in CATALOG.values() for kind in op.autocast if op.autocast[kind] == "promote"],
)
def test_promote_takes_the_widest_dtype(name: str, kind: str) -> None:
    dtypes = _run(name, kind, torch.float32, torch.bfloat16)
    assert dtypes is None or set(dtypes) <= {torch.float32}
    assert dtypes is not None or name in ("grid_sample", "grid_sampler"), "fake tensors only lack these"


@pytest.mark.parametrize("kind", KINDS)
def test_the_catalog_and_torch_have_the_same_lists(kind: str) -> None:
    changes = list_changes(kind)
    assert changes.gone == ()
    assert changes.new == ()


def test_list_changes_names_what_torch_no_longer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = kernels("cuda") - {"softmax", "layer_norm"} | {"brand_new"}
    monkeypatch.setattr("autoprec.runtime.autocast_lists.kernels", lambda kind: fewer)
    changes = list_changes("cuda")
    assert changes.gone == ("layer_norm", "softmax", "softmin")
    assert changes.new == ("brand_new",)


def test_inner_kernels_are_of_listed_ops() -> None:
    assert [name for name in INNER_KERNELS if not CATALOG[name].autocast] == []
    everything = frozenset().union(*(kernels(kind) for kind in KINDS))
    assert INTERNAL_KERNELS - everything <= {"cudnn_convolution", "cudnn_convolution_transpose"}


def test_every_listed_op_has_an_example() -> None:
    listed = {op.name for op in CATALOG.values() if op.autocast and op.is_site}
    assert listed - set(EXAMPLES) <= NOT_RUN


def test_the_row_has_the_name_that_a_mode_sees() -> None:
    def t(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0.3)

    def i(*shape: int, high: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long)

    unseen = []
    for name, example in EXAMPLES.items():
        with warnings.catch_warnings(), _Names() as names:
            warnings.simplefilter("ignore")
            example(t, i)
        if name not in names.seen:
            unseen.append(name)
    assert unseen == []


def test_every_overridable_function_is_known_or_of_a_kind_nobody_trains_with() -> None:
    rare = ("_", "special_", "fbgemm_", "quantize", "miopen_", "batch_norm_", "sparse_", "resize_as_sparse")
    odd = {"apply", "map", "map2", "hash_tensor", "choose_qparams_optimized", "native_norm"} | {
        f"{name}_copy" for name in ("ccol_indices", "col_indices", "crow_indices", "indices", "row_indices", "values")
    }
    names = {canonical_name(getattr(function, "__name__", "apply")) for function in get_testing_overrides()}
    unknown = {name for name in names - set(CATALOG) - ENTERED - odd if not name.startswith(rare)}
    assert unknown == set()


def test_entered_functions_are_written_in_python() -> None:
    for name in ENTERED:
        assert hasattr(getattr(functional, name), "__code__"), name
    assert not ENTERED & set(CATALOG)


@pytest.mark.parametrize("op", [op for op in CATALOG.values() if op.one_dtype], ids=lambda op: op.name)
def test_one_dtype_ops_raise_when_the_written_argument_differs(op: Op) -> None:
    lists: dict[str, Callable[[torch.Tensor], Any]] = {
        "index_add": lambda x: x.index_add_(0, torch.tensor([0]), torch.ones(1, 4, dtype=torch.bfloat16)),
        "index_copy": lambda x: x.index_copy_(0, torch.tensor([0]), torch.ones(1, 4, dtype=torch.bfloat16)),
        "index_reduce": lambda x: x.index_reduce_(0, torch.tensor([0]), torch.ones(1, 4, dtype=torch.bfloat16), "prod"),
        "index_put": lambda x: x.index_put_((torch.tensor([0]),), torch.ones(4, dtype=torch.bfloat16)),
        "scatter": lambda x: x.scatter_(0, torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bfloat16)),
        "scatter_add": lambda x: x.scatter_add_(
            0, torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bfloat16)
        ),
        "scatter_reduce": lambda x: x.scatter_reduce_(
            0, torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bfloat16), "sum"
        ),
        "masked_scatter": lambda x: x.masked_scatter_(x > 2, torch.ones(4, 4, dtype=torch.bfloat16)),
        "put": lambda x: x.put_(torch.tensor([0]), torch.ones(1, dtype=torch.bfloat16)),
        "lerp": lambda x: x.lerp_(torch.ones(4, 4, dtype=torch.bfloat16), 0.5),
        "addmm": lambda x: x.addmm_(*[torch.ones(4, 4, dtype=torch.bfloat16)] * 2),
        "addbmm": lambda x: x.addbmm_(*[torch.ones(2, 4, 4, dtype=torch.bfloat16)] * 2),
        "baddbmm": lambda x: x.unsqueeze(0).baddbmm_(*[torch.ones(1, 4, 4, dtype=torch.bfloat16)] * 2),
        "addmv": lambda x: x[0].addmv_(torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)),
    }
    with pytest.raises((RuntimeError, IndexError)):
        lists[op.name](torch.ones(4, 4))


def test_rows_agree_with_themselves() -> None:
    for op in CATALOG.values():
        assert canonical_name(op.name) == op.name
        assert canonical_name(op.name + "_") == op.name
        assert lookup(op.name) is op
        if op.family in ("query", "autograd", "creation", "random") and op.name not in ("equal", "allclose"):
            assert not op.is_site, op.name
        if not op.is_site:
            assert (op.numerics, op.autocast) == ("clear", {}), op.name
        if op.numerics == "allow":
            assert op.cost == "flops", op.name
            assert op.family in ("matmul", "convolution", "attention", "recurrent"), op.name
        if op.cast == "first":
            assert op.family == "norm", op.name
