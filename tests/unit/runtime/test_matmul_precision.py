import itertools
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from threading import Event

import pytest
import torch

from autoprec.errors import DeviceError
from autoprec.runtime import matmul_precision
from autoprec.runtime.matmul_precision import restore, set_float32_matmul, supported
from autoprec.runtime.rounding import round_to

NODES = [("generic", "all"), *itertools.product(("mkldnn", "cuda"), ("all", "matmul", "conv", "rnn"))]

# Found in fresh processes of torch 2.13; the last two cannot be written back and are left at what they report.
INITIAL = dict.fromkeys(NODES, "none") | {("cuda", "conv"): "tf32", ("cuda", "rnn"): "tf32"}


def write(values: Mapping[tuple[str, str], str]) -> None:
    for (backend, op), value in values.items():
        torch._C._set_fp32_precision_setter(backend, op, value)


def reported() -> dict[tuple[str, str], str]:
    return {node: torch._C._get_fp32_precision_getter(*node) for node in NODES}


def followed(parents: Mapping[tuple[str, str], str]) -> list[dict[tuple[str, str], str]]:
    """Return what every node reports now, and under other values of its parents, which hold `parents`."""
    seen = [reported()]
    for parent, held in parents.items():
        for value in ("ieee", "tf32"):
            write({parent: value})
            seen.append(reported())
        write({parent: held})
    return seen


@pytest.fixture(autouse=True)
def initial_state() -> Iterator[None]:
    write(INITIAL)
    yield
    write(INITIAL)


@pytest.mark.parametrize("generic", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("backend", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("matmul", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_restore_leaves_exactly_the_state_found(
    generic: str, backend: str, matmul: str, kind: str, precision: matmul_precision.Float32Matmul
) -> None:
    name = {"cpu": "mkldnn", "cuda": "cuda"}[kind]
    parents = {("generic", "all"): generic, (name, "all"): backend}
    write(parents | {(name, "matmul"): matmul, (name, "conv"): "none"})
    before = followed(parents)
    state = matmul_precision._write(kind, precision)
    assert all(reported()[name, op] == precision for op in ("matmul", "conv", "rnn"))
    restore(state)
    assert followed(parents) == before


def test_only_the_nodes_of_the_kind_are_written() -> None:
    before = reported()
    state = matmul_precision._write("cpu", "bf16")
    changed = {node for node, value in reported().items() if value != before[node]}
    assert changed == {("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")}
    restore(state)
    assert reported() == before


def test_nodes_that_report_the_precision_already_are_left_alone() -> None:
    assert set(matmul_precision._write("cuda", "tf32").stored) == {("cuda", "matmul")}


@pytest.mark.slow
def test_restore_in_a_fresh_process() -> None:
    # Until they are written, CUDA's conv and rnn report a "tf32" of torch's own that yields to their parents.
    script = """
from autoprec.runtime import matmul_precision
ops = ("matmul", "conv", "rnn")
print(*[matmul_precision._reported("cuda", op) for op in ops])
state = matmul_precision._write("cuda", "ieee")
print(*[matmul_precision._reported("cuda", op) for op in ops])
matmul_precision.restore(state)
print(*[matmul_precision._reported("cuda", op) for op in ops])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, during, after = ran.stdout.splitlines()
    assert during == "ieee ieee ieee"
    assert after == before


def test_nested_settings_unwind() -> None:
    outer = matmul_precision._write("cpu", "bf16")
    inner = matmul_precision._write("cpu", "ieee")
    restore(inner)
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    restore(outer)
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_the_legacy_switches_report_the_same_afterwards() -> None:
    def legacy() -> tuple[object, ...]:
        return torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32

    before = legacy()
    for kind, precision in (("cpu", "bf16"), ("cpu", "tf32"), ("cpu", "ieee"), ("cuda", "tf32"), ("cuda", "ieee")):
        restore(matmul_precision._write(kind, precision))  # type: ignore[arg-type]
        assert legacy() == before


def test_attributes_of_torch_name_the_same_nodes() -> None:
    matmul_precision._write("cpu", "bf16")
    mkldnn, cuda, cudnn = torch.backends.mkldnn, torch.backends.cuda, torch.backends.cudnn
    assert [op.fp32_precision for op in (mkldnn.matmul, mkldnn.conv, mkldnn.rnn)] == ["bf16"] * 3
    matmul_precision._write("cuda", "ieee")
    assert [op.fp32_precision for op in (cuda.matmul, cudnn.conv, cudnn.rnn)] == ["ieee"] * 3


def test_supported_starts_with_ieee_leaves_no_trace_and_draws_nothing() -> None:
    parents = {node: "none" for node in NODES if node[1] == "all"}
    before, rng = followed(parents), torch.get_rng_state()
    matmul_precision._supported.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert supported("cpu")[0] == "ieee"
    assert followed(parents) == before
    assert torch.equal(torch.get_rng_state(), rng)


def test_supported_is_what_changes_a_product() -> None:
    operand = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    exact = operand.double() @ operand.double()
    for precision in ("tf32", "bf16"):
        state = matmul_precision._write("cpu", precision)  # type: ignore[arg-type]
        error = ((operand @ operand).double() - exact).abs().max() / exact.abs().max()
        restore(state)
        # Rounded operands err by about u sqrt(2): 7e-4 for tf32, 6e-3 for bf16, relative to the largest element
        # some tenths of that; IEEE FP32 is below 1e-6.
        assert (error > 1e-5) == (precision in supported("cpu"))


@pytest.mark.parametrize(("inside", "changes"), [("fp32", False), ("tf32", True), ("bf16", True)])
def test_the_probe_sees_rounded_operands(monkeypatch: pytest.MonkeyPatch, inside: str, changes: bool) -> None:
    def rounded_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(round_to(a, inside), round_to(b, inside))

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded_product)
    assert matmul_precision._changes_a_matmul("cpu", "bf16") is changes


def test_a_probe_that_fails_still_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> bool:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "equal", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        matmul_precision._changes_a_matmul("cpu", "bf16")
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_a_precision_that_changes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_precision, "_supported", lambda kind: ("ieee",))
    message = 'float32_matmul "bf16" changes nothing on this cpu device; it supports: ieee'
    with pytest.raises(DeviceError, match=message):
        set_float32_matmul("cpu", "bf16")
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_a_supported_precision_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_precision, "_supported", lambda kind: ("ieee", "bf16"))
    state = set_float32_matmul("cpu", "bf16")
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    restore(state)
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_mps_has_nothing_to_set() -> None:
    assert matmul_precision._write("mps", "ieee").stored == {}


def test_unknown_kinds_and_precisions() -> None:
    with pytest.raises(DeviceError, match='"tpu" is not a device kind; kinds: cpu, cuda, mps'):
        supported("tpu")
    with pytest.raises(DeviceError, match='"fp16" is not a precision; precisions: ieee, tf32, bf16'):
        matmul_precision._write("cpu", "fp16")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_missing_device_is_an_error() -> None:
    with pytest.raises(DeviceError, match="no cuda device is there to multiply on"):
        supported("cuda")


@pytest.mark.gpu
def test_tf32_is_seen_on_ampere_and_later() -> None:
    expected = ("ieee", "tf32") if torch.cuda.get_device_capability() >= (8, 0) else ("ieee",)
    assert supported("cuda") == expected


def test_claims_are_given_back_in_any_order() -> None:
    before = reported()
    first = matmul_precision._claim(matmul_precision._write("cpu", "bf16"))
    second = matmul_precision._claim(matmul_precision._write("cpu", "ieee"))
    matmul_precision.release(first)
    assert matmul_precision._reported("mkldnn", "matmul") == "ieee"
    matmul_precision.release(second)
    assert reported() == before
    assert not any(claim() in (first, second) for claim in matmul_precision._claims)


def test_a_claim_is_given_back_when_its_owner_dies() -> None:
    before = reported()
    claims = len(matmul_precision._claims)  # other tests' models may still live
    owner, other = Event(), Event()
    matmul_precision.release_with(owner, matmul_precision._claim(matmul_precision._write("cpu", "bf16")))
    now = matmul_precision.release_with(other, matmul_precision._claim(matmul_precision._write("cpu", "ieee")))
    del owner
    assert matmul_precision._reported("mkldnn", "matmul") == "ieee", "a later claim holds"
    now()
    assert reported() == before
    now()
    del other
    assert reported() == before
    assert len(matmul_precision._claims) <= claims


def test_an_owner_that_dies_while_a_call_has_set_the_precision_waits_for_it() -> None:
    before = reported()
    owner = Event()
    matmul_precision.release_with(owner, matmul_precision._claim(matmul_precision._write("cpu", "bf16")))
    with matmul_precision.TURN:
        found = matmul_precision.set_for_call("cpu", "tf32", ("matmul",))
        del owner
        assert matmul_precision._reported("mkldnn", "matmul") == "tf32"
        matmul_precision.put_back(found)
    assert reported() == before


def test_a_claim_that_is_dropped_is_forgotten() -> None:
    dropped = matmul_precision._claim(matmul_precision._write("cpu", "ieee"))
    before = len(matmul_precision._claims)
    del dropped
    assert len(matmul_precision._claims) < before
