"""The loops of docs/integrations.md train as a loop of one's own does, bit for bit, and their checkpoints go on so."""

import re
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autoprec
from tests.architecture.surface import ROOT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torchao, whose sources warn when they are compiled for the first time
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

POLICIES = ["fp32", "autocast-fp16", "bf16-master"]
STEPS, ROWS = 8, 8
_TEXT = (ROOT / "docs" / "integrations.md").read_text()
BLOCKS = dict(re.findall(r"^## ([^\n]*)\n\n```python\n(.*?)^```", _TEXT, re.MULTILINE | re.DOTALL))


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(16) * (index % 5 + 1) % 64
        return {"input_ids": ids, "labels": ids}


def gpt() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def own_loop(policy: str, *, micro_batches: int = 1) -> nn.Module:
    """Return the model that a loop as docs/runtime.md has it trains."""
    model = gpt()
    precision = autoprec.apply(model, policy)
    optimizer = precision.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for number, batch in enumerate(DataLoader(Texts(), batch_size=ROWS), 1):
        precision.backward(model(**batch).loss / micro_batches)
        if number % micro_batches == 0:
            precision.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
    return model


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    found = theirs.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("policy", POLICIES)
def test_accelerate(policy: str, tmp_path: Path) -> None:
    from accelerate import Accelerator

    names: dict[str, Any] = {
        "Accelerator": Accelerator, "autoprec": autoprec, "torch": torch,
        "model": gpt(), "policy": policy, "loader": DataLoader(Texts(), batch_size=ROWS),
    }  # fmt: skip
    exec(BLOCKS["Accelerate"], names)
    assert_equal(names["model"], own_loop(policy))

    accelerator, precision = names["accelerator"], names["precision"]
    accelerator.register_for_checkpointing(precision)
    before = precision.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of safetensors, which drops the tied head
        accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    assert str(precision.state_dict()) == str(before)


@pytest.mark.parametrize("policy", POLICIES)
def test_accelerate_that_accumulates_gradients(policy: str) -> None:
    from accelerate import Accelerator

    names: dict[str, Any] = {
        "Accelerator": partial(Accelerator, gradient_accumulation_steps=2), "autoprec": autoprec, "torch": torch,
        "model": gpt(), "policy": policy, "loader": DataLoader(Texts(), batch_size=ROWS),
    }  # fmt: skip
    start, loop = re.split(r"(?<=in loader:\n)", BLOCKS["Accelerate"])
    exec(f"{start}    with accelerator.accumulate(model):\n{indent(loop, '    ')}", names)
    assert_equal(names["model"], own_loop(policy, micro_batches=2))


def trained(policy: str, folder: Path, *, steps: int, resumes: bool) -> nn.Module:
    class Sequential(Trainer):
        """Takes the batches in order and the loss as the model returns it, so that another loop can do the same."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

        def _get_train_sampler(self, *_: Any, **__: Any) -> None:
            return None

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=ROWS, save_steps=STEPS // 2,
        report_to=[], use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant", logging_strategy="no",
    )  # fmt: skip
    names: dict[str, Any] = {
        "Trainer": Sequential, "TrainerCallback": TrainerCallback, "Path": Path, "autoprec": autoprec, "torch": torch,
        "model": gpt(), "policy": policy, "dataset": Texts(), "arguments": arguments, "resumes": resumes,
    }  # fmt: skip
    exec(BLOCKS["The Trainer of transformers"], names)
    model: nn.Module = names["model"]
    return model


@pytest.mark.parametrize("policy", POLICIES)
def test_trainer_of_transformers(policy: str, tmp_path: Path) -> None:
    wanted = own_loop(policy)
    assert_equal(trained(policy, tmp_path / "whole", steps=STEPS, resumes=False), wanted)
    trained(policy, tmp_path / "parts", steps=STEPS // 2, resumes=False)
    assert_equal(trained(policy, tmp_path / "parts", steps=STEPS, resumes=True), wanted)


@pytest.mark.parametrize("policy", POLICIES)
def test_lightning(policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    names: dict[str, Any] = {
        "Trainer": lightning.Trainer, "MixedPrecision": lightning.pytorch.plugins.MixedPrecision, "autoprec": autoprec,
        "nullcontext": nullcontext, "module": Module(), "policy": policy,
        "loader": DataLoader(Texts(), batch_size=ROWS),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning's own
        exec(BLOCKS["Lightning"], names)
    assert_equal(names["module"].model, own_loop(policy))
