"""The catalog: what is known of each op, one row an op.

The rows are the lines of `autoprec.ops.rows`, with these columns:

op        canonical name, as `canonical_name` gives it
family    what kind of computation it is
numerics  what lowering it does to the numbers, after the four lists of TensorFlow's graph pass
          allow: safe, and fast when low; infer: safe unless an upstream deny op makes it unsafe;
          deny: unsafe by default, and unsafe for what follows it; clear: no numerics of its own, follows its input.
          Source: tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h. Ops that TensorFlow lacks
          follow the ops they are made of, except that a fused kernel which accumulates in fp32 inside is infer
          (the norms, the softmaxes); what TensorFlow has on no list (sin, cos) it never lowers: deny.
cast      which floating tensor arguments are cast: all, first (norms keep parameters and statistics as stored), none
cost      what its time goes with: flops, bytes (of its tensors), none (no kernel runs)
cpu cuda mps  what torch.autocast does on that kind of device, seen from the Python function:
          lower, fp32, promote, or - (on no list)
dtypes    one: an argument that is written to fixes the dtype of the others (index_add_, addmm_), else torch raises
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias, cast, get_args

from autoprec.ops.rows import indexing, linalg, matmul, movement, norm, pointwise, reduction

Family: TypeAlias = Literal[
    "matmul",
    "convolution",
    "attention",
    "recurrent",
    "norm",
    "softmax",
    "loss",
    "reduction",
    "scan",
    "pointwise",
    "transcendental",
    "embedding",
    "indexing",
    "movement",
    "creation",
    "query",
    "random",
    "linalg",
    "fft",
    "sampling",
    "pooling",
    "sparse",
    "quantized",
    "autograd",
    "unknown",
]
Numerics: TypeAlias = Literal["allow", "infer", "deny", "clear"]
Cast: TypeAlias = Literal["all", "first", "none"]
Cost: TypeAlias = Literal["flops", "bytes", "none"]
AutocastList: TypeAlias = Literal["lower", "fp32", "promote"]

_TABLES = (matmul.ROWS, norm.ROWS, reduction.ROWS, pointwise.ROWS, indexing.ROWS, movement.ROWS, linalg.ROWS)
_AUTOCAST_KINDS = ("cpu", "cuda", "mps")
_ALLOWED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "family": get_args(Family),
        "numerics": get_args(Numerics),
        "cast": get_args(Cast),
        "cost": get_args(Cost),
        **{kind: ("-", *get_args(AutocastList)) for kind in _AUTOCAST_KINDS},
        "dtypes": ("any", "one"),
    }
)
_NO_LIST: Mapping[str, AutocastList] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One kind of computation; the module's docstring says what the fields mean.

    `autocast` maps a device kind to the list torch.autocast has the op on; a kind without an entry: on no list.
    `one_dtype` says that a call which writes to one argument needs all others in that argument's dtype.
    """

    name: str
    family: Family
    numerics: Numerics
    cast: Cast
    cost: Cost
    autocast: Mapping[str, AutocastList] = field(default_factory=lambda: _NO_LIST)
    one_dtype: bool = False

    @property
    def is_site(self) -> bool:
        """Return whether a policy may cast the arguments of this op."""
        return self.cast != "none"


def lookup(name: str) -> Op:
    """Return the row of the op with the canonical `name`; an op the catalog lacks is `unknown` and denied."""
    known = CATALOG.get(name)
    return known or Op(name=name, family="unknown", numerics="deny", cast="all", cost="bytes")


def _parse(tables: Iterable[str]) -> dict[str, Op]:
    """Return the ops that the lines of `tables` state."""
    ops: dict[str, Op] = {}
    for line in (line for table in tables for line in table.splitlines()):
        if line and not line.startswith("#"):
            op = _parse_row(line)
            if op.name in ops:
                raise ValueError(f'catalog: op "{op.name}" has two rows')
            ops[op.name] = op
    return ops


def _parse_row(line: str) -> Op:
    cells = dict(zip(_ALLOWED, line.split()[1:], strict=True))
    name = line.split(maxsplit=1)[0]
    for column, cell in cells.items():
        if cell not in _ALLOWED[column]:
            raise ValueError(f'catalog: row "{name}" has {column} "{cell}"; allowed: {", ".join(_ALLOWED[column])}')
    lists = {kind: cells[kind] for kind in _AUTOCAST_KINDS if cells[kind] != "-"}
    return Op(
        name=name,
        family=cast("Family", cells["family"]),
        numerics=cast("Numerics", cells["numerics"]),
        cast=cast("Cast", cells["cast"]),
        cost=cast("Cost", cells["cost"]),
        autocast=MappingProxyType(cast("dict[str, AutocastList]", lists)),
        one_dtype=cells["dtypes"] == "one",
    )


CATALOG: Mapping[str, Op] = MappingProxyType(_parse(_TABLES))

# Functions written in Python on top of other torch functions, where one format for the whole would hide what matters:
# they are entered, and the ops inside are the sites.
ENTERED: frozenset[str] = frozenset(
    {
        "multi_head_attention_forward",  # four matmuls and a softmax; autocast gives them different formats
        "gumbel_softmax",  # the log of its noise needs range, its softmax does not
        "gaussian_nll_loss",  # a division by a variance, a log and a mean
        "multilabel_soft_margin_loss",  # log-sigmoids and a mean
        "triplet_margin_with_distance_loss",  # calls a distance function of the user's own
        "local_response_norm",  # a sum of squares and a power
        "lp_pool1d",  # a power, an average and a root
        "lp_pool2d",
        "lp_pool3d",
    }
)
