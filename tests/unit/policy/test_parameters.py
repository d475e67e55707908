"""How parameters are stored: what may be said together, and what to write instead."""

import re
from typing import Any

import pytest

from autoprec.errors import PolicyError
from autoprec.policy import Parameters


def test_the_default_is_fp32_throughout() -> None:
    assert Parameters() == Parameters(
        storage="fp32",
        master="none",
        rounding="nearest",
        gradients="fp32",
        keep=(),
        batch_norm="storage",
        optimizer_state="fp32",
    )
    assert not Parameters().steps_in_fp32


def test_who_steps_in_fp32() -> None:
    assert Parameters(storage="fp16", master="fp32").steps_in_fp32
    assert Parameters(storage="bf16", rounding="stochastic").steps_in_fp32
    assert not Parameters(storage="bf16").steps_in_fp32


def test_keep_is_a_tuple_whatever_it_is_given_as() -> None:
    assert Parameters(storage="bf16", keep=["*.bias"]).keep == ("*.bias",)  # type: ignore[arg-type]
    assert hash(Parameters(storage="bf16", keep=["*.bias"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"storage": "fp8"}, "parameters.storage is 'fp8'; allowed: fp32, bf16, fp16"),
        ({"master": "bf16"}, "parameters.master is 'bf16'; allowed: none, fp32"),
        ({"rounding": "up"}, "parameters.rounding is 'up'; allowed: nearest, stochastic"),
        ({"gradients": "bf16"}, "parameters.gradients is 'bf16'; allowed: fp32, storage"),
        ({"optimizer_state": "4bit"}, "parameters.optimizer_state is '4bit'; allowed: fp32, bf16, 8bit"),
        ({"storage": "bf16", "keep": "*.bias"}, "parameters.keep is '*.bias'; allowed: a list of globs, such as"),
        ({"storage": "bf16", "keep": [3]}, "a glob of parameters.keep is 3; allowed: text"),
        ({"storage": "bf16", "keep": [""]}, 'has the glob ""; globs name parameters'),
        (
            {"storage": "bf16", "keep": ["*:softmax"]},
            'has the glob "*:softmax"; globs name parameters, not sites, as in',
        ),
        ({"master": "fp32"}, "master: fp32 beside storage: fp32; write storage: bf16 (or fp16) with it, or leave"),
        ({"storage": "fp16", "batch_norm": "bf16"}, "parameters.batch_norm is 'bf16'; allowed: storage, fp32"),
        (
            {"batch_norm": "fp32"},
            "batch_norm: fp32 beside storage: fp32, which keeps all; write storage: bf16 (or fp16) with it, or leave",
        ),
        ({"keep": ["*"]}, "keep beside storage: fp32, which keeps all; write storage: bf16 (or fp16) with it, or"),
        ({"rounding": "stochastic"}, "rounding: stochastic beside storage: fp32; write storage: bf16, or leave"),
        ({"storage": "fp16", "rounding": "stochastic"}, "rounding: stochastic beside storage: fp16; write storage"),
        (
            {"storage": "bf16", "master": "fp32", "rounding": "stochastic"},
            "rounding: stochastic beside master: fp32, which loses no update; leave one of the two out",
        ),
        ({"storage": "bf16", "gradients": "storage"}, "where gradients follow storage anyway; leave gradients out"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        Parameters(**fields)
