"""What `apply` promises bit for bit: fp32 changes nothing, and the autocast presets are torch.autocast.

wav2vec2 is left out: it masks with numpy's unseeded generator, so two plain FP32 runs of it differ.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import runtime
from tests.tiny_models import MODELS

REPRODUCIBLE = sorted(set(MODELS) - {"wav2vec2"})
FORMATS = {"autocast-bf16": torch.bfloat16, "autocast-fp16": torch.float16}


def two_steps(
    name: str, install: Callable[[nn.Module], AbstractContextManager[Any] | runtime.Precision]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the losses of two SGD steps, and the gradients and state after them."""
    build, batch = MODELS[name]()
    torch.manual_seed(0)
    model = build()
    around = install(model)
    torch.manual_seed(1)
    losses = []
    for _ in range(2):
        model.zero_grad()
        with around.loss() if isinstance(around, runtime.Precision) else around:
            loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad)
    gradients = {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, {**gradients, **model.state_dict()}


def assert_equal_bits(name: str, policy: str, reference: AbstractContextManager[Any]) -> None:
    losses, tensors = two_steps(name, lambda model: runtime.apply(model, policy))
    wanted_losses, wanted = two_steps(name, lambda model: reference)
    assert [loss.item() for loss in losses] == [loss.item() for loss in wanted_losses]
    assert losses[0].dtype == wanted_losses[0].dtype
    assert tensors.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(tensors[key], wanted[key])] == []


@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_fp32_changes_nothing(name: str) -> None:
    assert_equal_bits(name, "fp32", nullcontext())


@pytest.mark.parametrize("preset", FORMATS)
@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_autocast_presets_are_torch_autocast(name: str, preset: str) -> None:
    assert_equal_bits(name, preset, torch.autocast("cpu", FORMATS[preset]))


@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_low_bf16_trains(name: str) -> None:
    losses, tensors = two_steps(name, lambda model: runtime.apply(model, "low-bf16"))
    wanted_losses, _ = two_steps(name, lambda model: nullcontext())
    assert torch.stack(losses).allclose(torch.stack(wanted_losses).to(losses[0].dtype), rtol=0.05, atol=0.05)
    assert {t.dtype for key, t in tensors.items() if key.startswith("grad of")} == {torch.bfloat16}
