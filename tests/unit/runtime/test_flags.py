"""The flags of torch that a policy's lock holds."""

import pytest
import torch

from autoprec.runtime.flags import torch_flags


def test_what_is_set_is_read():
    before = dict(torch_flags("cpu"))
    assert before["deterministic_algorithms"] is False
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    torch.set_flush_denormal(True)
    found = torch._C._get_fp32_precision_getter("mkldnn", "conv")
    torch._C._set_fp32_precision_setter("mkldnn", "conv", "tf32")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            changed = torch_flags("cpu")
    finally:
        torch._C._set_fp32_precision_setter("mkldnn", "conv", found)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        torch.set_flush_denormal(False)
    different = {name for name in before if before[name] != changed[name]}
    expected = {"deterministic_algorithms", "default_dtype", "autocast", "fp32_precision.conv"}
    assert expected <= different <= expected | {"flush_denormal"}
    assert dict(torch_flags("cpu")) == before


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_flags_are_what_a_policy_file_holds(kind):
    assert all(isinstance(value, str | bool) for value in torch_flags(kind).values())
    assert ("cudnn.benchmark" in torch_flags(kind)) is (kind == "cuda")
