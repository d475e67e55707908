"""The catalog as a table: how rows are read, and facts a reader would look up first."""

import dataclasses
import subprocess
import sys

import pytest

from autoprec.ops import CATALOG, ENTERED, Op, lookup
from autoprec.ops.catalog import _parse

# Data movement, queries and bookkeeping that keep the dtype they were given. masked_fill is not among them: it
# writes a constant that the format may lack.
NEVER_CAST = (
    "view permute transpose reshape unbind getitem flatten contiguous expand unsqueeze squeeze chunk split t get set "
    "size dim detach clone to float half bfloat16 double type type_as numel stride is_floating_point item backward "
    "requires_grad setitem copy fill zero movedim swapaxes narrow long int bool cpu tolist register_hook retain_grad "
    "is_complex element_size data_ptr new_zeros new_ones zeros_like ones_like empty_like expand_as view_as repeat "
    "repeat_interleave unfold nelement shape isnan isinf isfinite len iter repr format deepcopy is_leaf grad "
    "randn_like rand_like"
)
SITES = (
    "add mul div sub sqrt softmax log layer_norm sin cos matmul linear clamp where var sum square sigmoid pow "
    "normalize exp mean cumsum cross_entropy conv2d bmm avg_pool2d rms_norm neg log1p group_norm masked_fill cat "
    "stack lstm gru"
)


@pytest.mark.parametrize("name", NEVER_CAST.split())
def test_movement_and_queries_are_no_sites(name: str) -> None:
    assert name in CATALOG
    assert not CATALOG[name].is_site


@pytest.mark.parametrize("name", SITES.split())
def test_what_computes_is_a_site(name: str) -> None:
    assert CATALOG[name].is_site


@pytest.mark.parametrize(
    ("name", "family", "numerics", "cast", "cost"),
    [
        ("matmul", "matmul", "allow", "all", "flops"),
        ("scaled_dot_product_attention", "attention", "allow", "all", "flops"),
        ("lstm", "recurrent", "allow", "all", "flops"),
        ("layer_norm", "norm", "infer", "first", "bytes"),
        ("softmax", "softmax", "infer", "all", "bytes"),
        ("exp", "transcendental", "deny", "all", "bytes"),
        ("sum", "reduction", "deny", "all", "bytes"),
        ("cumsum", "scan", "deny", "all", "bytes"),
        ("cross_entropy", "loss", "deny", "all", "bytes"),
        ("add", "pointwise", "infer", "all", "bytes"),
        ("relu", "pointwise", "clear", "all", "bytes"),
        ("masked_fill", "pointwise", "clear", "all", "bytes"),
        ("embedding", "embedding", "clear", "all", "bytes"),
        ("view", "movement", "clear", "none", "none"),
        ("rand_like", "random", "clear", "none", "bytes"),
    ],
)
def test_rows_people_look_up(name: str, family: str, numerics: str, cast: str, cost: str) -> None:
    op = CATALOG[name]
    assert (op.family, op.numerics, op.cast, op.cost) == (family, numerics, cast, cost)


def test_devices_protect_different_ops() -> None:
    assert dict(lookup("softmax").autocast) == {"cuda": "fp32", "mps": "fp32"}
    assert dict(lookup("mse_loss").autocast) == {"cpu": "fp32", "cuda": "fp32", "mps": "fp32"}
    assert dict(lookup("cat").autocast) == {"cpu": "promote"}
    assert dict(lookup("add").autocast) == {}


def test_an_unknown_op_is_denied() -> None:
    op = lookup("my_kernel")
    assert op == Op(name="my_kernel", family="unknown", numerics="deny", cast="all", cost="bytes")
    assert op.is_site
    assert lookup("multi_head_attention_forward").family == "unknown"
    assert "multi_head_attention_forward" in ENTERED


def test_rows_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CATALOG["add"].cast = "none"  # type: ignore[misc]
    with pytest.raises(TypeError):
        CATALOG["add"] = CATALOG["sub"]  # type: ignore[index]
    with pytest.raises(TypeError):
        CATALOG["add"].autocast["cpu"] = "fp32"  # type: ignore[index]


def test_a_bad_row_is_refused() -> None:
    row = "add pointwise infer all bytes - lower fp32 any"
    assert dict(_parse([row])["add"].autocast) == {"cuda": "lower", "mps": "fp32"}
    with pytest.raises(ValueError, match='op "add" has two rows'):
        _parse([row, row])
    with pytest.raises(ValueError, match='row "add" has numerics "maybe"; allowed: allow, infer, deny, clear'):
        _parse([row.replace("infer", "maybe")])
    with pytest.raises(ValueError, match='row "add" has cuda "low"; allowed: -, lower, fp32, promote'):
        _parse([row.replace("lower", "low")])
    with pytest.raises(ValueError, match="zip"):
        _parse([row + " more"])


def test_importing_the_catalog_loads_no_torch() -> None:
    code = (
        "import sys, autoprec.ops, autoprec.policy; print(*{'torch', 'networkx', 'optuna', 'rich'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
