"""Canonical op names: one name for all the spellings torch has of one op."""

from functools import cache

# Operator methods, as in `a + b`; reflected (`__radd__`) and in-place (`__iadd__`) forms are found through these.
_OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "invert": "bitwise_not",
    "pos": "positive",
    "nonzero": "bool",
    "long": "long",
}

_ALIASES = {
    "_sparse_addmm": "addmm",  # what torch.sparse.addmm calls itself
    "_sparse_mm": "mm",
    "_threshold": "threshold",  # what torch.nn.functional.threshold calls itself
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "fix": "trunc",
    "ger": "outer",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "linalg_matmul": "matmul",
    "linalg_matrix_exp": "matrix_exp",
    "linalg_matrix_power": "matrix_power",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "row_stack": "vstack",
    "rsub": "sub",
    "special_digamma": "digamma",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_erfinv": "erfinv",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_gammainc": "igamma",
    "special_gammaincc": "igammac",
    "special_gammaln": "lgamma",
    "special_i0": "i0",
    "special_log1p": "log1p",
    "special_log_softmax": "log_softmax",
    "special_logit": "logit",
    "special_logsumexp": "logsumexp",
    "special_multigammaln": "mvlgamma",
    "special_polygamma": "polygamma",
    "special_psi": "digamma",
    "special_round": "round",
    "special_sinc": "sinc",
    "special_softmax": "softmax",
    "special_xlogy": "xlogy",
    "spmm": "mm",
    "subtract": "sub",
    "swapdims": "swapaxes",
    "trapz": "trapezoid",
    "true_divide": "div",
}


@cache
def canonical_name(function_name: str) -> str:
    """Return the op name of a torch function's `__name__`.

    Dunders, in-place underscores, reflected forms and aliases are folded: `__iadd__`, `__radd__`, `add_` and `add`
    are all `add`; so is the overload `add.Tensor` of `torch.ops.aten`. A name that nothing is known of comes back as it
    is, without trailing underscores.
    """
    function_name = function_name.partition(".")[0]
    if len(function_name) > 4 and function_name.startswith("__") and function_name.endswith("__"):
        return _operator_name(function_name[2:-2])
    name = function_name.rstrip("_") or function_name
    return _ALIASES.get(name, name)


def is_reflected(function_name: str) -> bool:
    """Return whether a torch function takes its operands in the other order: `__rsub__` and `rsub` for `1 - x`."""
    if function_name == "rsub":
        return True
    bare = function_name[2:-2] if function_name.startswith("__") and function_name.endswith("__") else ""
    return bare not in _OPERATORS and bare[:1] == "r" and bare[1:] in _OPERATORS


def _operator_name(bare: str) -> str:
    """Return the op of a dunder without its underscores; `__rand__` is `&` reflected, not the op `rand`."""
    if bare in _OPERATORS:
        return _OPERATORS[bare]
    if bare[:1] in ("r", "i") and bare[1:] in _OPERATORS:
        return _OPERATORS[bare[1:]]
    return _ALIASES.get(bare, bare)
