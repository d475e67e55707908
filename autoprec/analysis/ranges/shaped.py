"""Range rules of ops that make, move and pick numbers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from autoprec.analysis.ranges.interval import TOP, Interval, add, grown, hull, multiply, point, sum_error
from autoprec.analysis.ranges.reading import Reading, Rule
from autoprec.graph.opgraph import Ref

_ZERO, _ONE = point(0.0), point(1.0)
_FRACTION = Interval(0.0, 1.0, is_number=True)
_BIT = Interval(0.0, 1.0, is_integer=True, is_number=True)


def _constant(interval: Interval) -> Callable[[Reading], Interval]:
    return lambda _: interval


def _argument(place: int, name: str) -> Callable[[Reading], Interval]:
    return lambda call: call.interval(place, name)


def _arange(call: Reading) -> Interval:
    numbers = [value for value in call.node.args if isinstance(value, int | float)]
    if len(numbers) != len(call.node.args):
        return TOP
    start, end, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1, 1)[:3] if numbers else (0, None, 1)
    start, end, step = (call.node.kwargs.get(n, v) for n, v in (("start", start), ("end", end), ("step", step)))
    if not all(isinstance(value, int | float) for value in (start, end, step)) or not step:
        return TOP
    count = call.node.outputs[0].numel if call.node.outputs else 0
    last = start + step * max(count - 1, 0)
    exact = all(float(value).is_integer() for value in (start, step))
    ends = Interval(min(start, last), max(start, last), is_integer=exact, is_number=True, is_tight=count > 0)
    return ends if exact else grown(ends, 1e-6 * (abs(start) + abs(last)))


def _linspace(call: Reading) -> Interval:
    ends = hull((call.interval(0, "start"), call.interval(1, "end")))
    return grown(replace(ends, is_integer=False), 1e-6 * ends.magnitude) if ends.is_finite else TOP


def _one_hot(call: Reading) -> Interval:
    return replace(_BIT, is_tight=(call.node.outputs[0].shape[-1:] or (0,))[0] > 1) if call.node.outputs else _BIT


def _indices(call: Reading) -> Interval:
    row, column = call.number(0, "row"), call.number(1, "col")
    return TOP if row is None or column is None else _below(max(row, column))


def _below(count: float) -> Interval:
    return Interval(0.0, max(count - 1, 0.0), is_integer=True, is_number=True)


def _randint(call: Reading) -> Interval:
    numbers = [value for value in call.node.args if isinstance(value, int)]
    low, high = (0, *numbers)[-2:] if numbers else (0, None)
    low, high = call.node.kwargs.get("low", low), call.node.kwargs.get("high", high)
    if not isinstance(low, int) or not isinstance(high, int):
        return TOP
    return Interval(low, max(high - 1, low), is_integer=True, is_number=True)


def _randperm(call: Reading) -> Interval:
    count = call.number(0, "n")
    return TOP if count is None else _below(count)


def _uniform(call: Reading) -> Interval:
    if "a" in call.node.kwargs or "b" in call.node.kwargs:  # of torch.nn.init
        return Interval(call.number(9, "a", 0.0) or 0.0, call.number(9, "b", 1.0) or 0.0)
    low, high = call.number(1, "from", 0.0), call.number(2, "to", 1.0)
    return TOP if low is None or high is None else Interval(low, high, is_number=True)


def _multinomial(call: Reading) -> Interval:
    size = call.size(0, "input", -1)
    return TOP if size is None else _below(size)


def _literal(call: Reading) -> Interval:
    numbers = list(call.given())[:64]
    data = [value for value in numbers if isinstance(value, int | float) and not isinstance(value, bool)]
    only = call.node.args and isinstance(call.node.args[0], int | float)
    return point(data[0]) if only and len(data) == 1 else TOP


def _whole(call: Reading) -> Interval:
    return call.interval(0)


def _part(call: Reading) -> Interval:
    return call.interval(0).loose()


def _indexed(call: Reading) -> Interval:
    """Return the interval of `tensor[index]`, which is all of the tensor where the index only adds dimensions."""
    index = call.value(1, "index")
    parts = index if isinstance(index, tuple) else (index,)
    whole = all(part in (None, slice(None), "Ellipsis") for part in parts if not isinstance(part, Ref))
    return call.interval(0) if whole and not any(isinstance(part, Ref) for part in parts) else call.interval(0).loose()


def _viewed(call: Reading) -> Interval:
    """Return the interval of a view, unless it reads the bits as another dtype."""
    given = [value for value in call.given() if isinstance(value, str)]
    return TOP if given else call.interval(0)


def _property(call: Reading) -> Interval:
    name = call.node.args[1] if len(call.node.args) > 1 else None
    return call.interval(0) if name in ("T", "mT", "H", "mH", "data", "real") else TOP


def _with_zeros(call: Reading) -> Interval:
    return hull((call.interval(0), _ZERO)).loose()


def _padded(call: Reading) -> Interval:
    mode = call.value(2, "mode", "constant")
    if mode != "constant":
        return call.interval(0).loose() if mode in ("reflect", "replicate", "circular") else TOP
    return hull((call.interval(0), call.interval(3, "value", _ZERO))).loose()


def _joined(call: Reading) -> Interval:
    return hull(call.intervals(0, "tensors"))


def _stored(call: Reading) -> Interval:
    """Return the interval of a tensor after `tensor[index] = value`."""
    return hull((call.interval(0), call.interval(2, "value"))).loose()


def _put(call: Reading) -> Interval:
    if call.value(3, "accumulate", default=False):
        return TOP
    return hull((call.interval(0), call.interval(2, "values"))).loose()


def _scattered(call: Reading) -> Interval:
    if call.value(4, "reduce", None) is not None:
        return TOP
    value = call.interval(3, "value", TOP) if "value" in call.node.kwargs else call.interval(3, "src")
    return hull((call.interval(0), value)).loose()


def _accumulated(call: Reading) -> Interval:
    """Return the interval after adding elements of the source, at most as often to one place as there are indices."""
    is_add = call.node.op == "index_add"  # whose index has one dimension
    num = math.prod(call.shape(2, "index") or (0,)) if is_add else call.size(2, "index", call.value(1, "dim"))
    source = call.interval(3, "source" if is_add else "src")
    if num is None or not source.is_finite or not call.node.outputs:
        return TOP
    one = hull((multiply(source, call.interval(4, "alpha", _ONE)), _ZERO))
    total = add(call.interval(0), multiply(one, point(float(num)))).loose()
    return total if total.is_integer else grown(total, sum_error(num + 1, total.magnitude, call.node.outputs[0].dtype))


def _looked_up(call: Reading) -> Interval:
    """Return the interval of rows of a table; torch.embedding and its namesake in functional differ in their order."""
    table = 0 if call.dtype(0).startswith(("float", "bfloat")) else 1
    rows = call.interval(table, "weight").loose()
    is_shortened = table == 1 and call.value(3, "max_norm", None) is not None
    return hull((rows, _ZERO)).loose() if is_shortened else rows


_WHOLE = (
    "reshape reshape_as permute transpose t adjoint movedim swapaxes unsqueeze squeeze flatten unflatten ravel expand "
    "expand_as broadcast_to atleast_1d atleast_2d atleast_3d detach contiguous clone repeat tile roll flip fliplr "
    "flipud rot90 pixel_shuffle pixel_unshuffle channel_shuffle to float half bfloat16 double long int short char byte "
    "bool type type_as cpu cuda pin_memory requires_grad"
)
_PART = (
    "view_as narrow select split split_with_sizes tensor_split hsplit vsplit dsplit chunk unbind diagonal "
    "linalg_diagonal as_strided gather index_select masked_select take take_along_dim real resolve_conj "
    "resolve_neg repeat_interleave"
)
_WITH_ZEROS = "tril triu diag diag_embed diagflat unfold"

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{op: Rule(_whole, 0, keeps_numbers=True) for op in _WHOLE.split()},
        **{op: Rule(_part, 0, keeps_numbers=True) for op in _PART.split()},
        **{op: Rule(_with_zeros, 0, keeps_numbers=True) for op in _WITH_ZEROS.split()},
        **{op: Rule(_constant(_ZERO), 0, keeps_numbers=True) for op in ("zeros", "zeros_like", "new_zeros", "zero")},
        **{op: Rule(_constant(_ONE), 0, keeps_numbers=True) for op in ("ones", "ones_like", "new_ones")},
        **{
            op: Rule(_joined, 0, keeps_numbers=True)
            for op in ("cat", "stack", "hstack", "vstack", "dstack", "column_stack")
        },
        **{op: Rule(_constant(_FRACTION), 0, keeps_numbers=True) for op in ("rand", "rand_like")},
        "getitem": Rule(_indexed, 0, keeps_numbers=True),
        "view": Rule(_viewed, 0, keeps_numbers=True),
        "get": Rule(_property, 0, keeps_numbers=True),
        "full": Rule(_argument(1, "fill_value"), 1, keeps_numbers=True),
        "full_like": Rule(_argument(1, "fill_value"), 1, keeps_numbers=True),
        "new_full": Rule(_argument(2, "fill_value"), 1, keeps_numbers=True),
        "fill": Rule(_argument(1, "value"), 1, keeps_numbers=True),
        "copy": Rule(_argument(1, "src"), 1, keeps_numbers=True),
        "fill_diagonal": Rule(lambda call: hull((call.interval(0), call.interval(1, "fill_value"))).loose(), 1),
        "scalar_tensor": Rule(_argument(0, "s"), 1, keeps_numbers=True),
        "tensor": Rule(_literal, 1, keeps_numbers=True),
        "as_tensor": Rule(_literal, 1, keeps_numbers=True),
        "arange": Rule(_arange, 1, keeps_numbers=True),
        "linspace": Rule(_linspace, 1, keeps_numbers=True),
        "eye": Rule(_constant(_BIT), 0, keeps_numbers=True),
        "one_hot": Rule(_one_hot, 0, keeps_numbers=True),
        "tril_indices": Rule(_indices, 0, keeps_numbers=True),
        "triu_indices": Rule(_indices, 0, keeps_numbers=True),
        "randint": Rule(_randint, 1, keeps_numbers=True),
        "randperm": Rule(_randperm, 1, keeps_numbers=True),
        "uniform": Rule(_uniform, 1, keeps_numbers=True),
        "bernoulli": Rule(_constant(_BIT), 0, keeps_numbers=True),
        "multinomial": Rule(_multinomial, 0, keeps_numbers=True),
        "pad": Rule(_padded, 1, keeps_numbers=True),
        "setitem": Rule(_stored, 1, keeps_numbers=True),
        "index_put": Rule(_put, 1, keeps_numbers=True),
        "index_copy": Rule(lambda call: hull((call.interval(0), call.interval(3, "source"))).loose(), 1),
        "index_fill": Rule(lambda call: hull((call.interval(0), call.interval(3, "value"))).loose(), 1),
        "masked_scatter": Rule(lambda call: hull((call.interval(0), call.interval(2, "source"))).loose(), 1),
        "slice_scatter": Rule(lambda call: hull((call.interval(0), call.interval(1, "src"))).loose(), 1),
        "select_scatter": Rule(lambda call: hull((call.interval(0), call.interval(1, "src"))).loose(), 1),
        "scatter": Rule(_scattered, 1, keeps_numbers=True),
        "index_add": Rule(_accumulated, 1, keeps_numbers=True),
        "scatter_add": Rule(_accumulated, 1, keeps_numbers=True),
        "embedding": Rule(_looked_up, 1, keeps_numbers=True),
    }
)
