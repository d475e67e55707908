"""An ordinary training loop under a policy that `autoprec tune` wrote; it stops and resumes like any other.

python examples/train_with_policy.py --policy policy.yaml --steps 200 --checkpoint run.pt
python examples/train_with_policy.py --policy policy.yaml --steps 400 --checkpoint run.pt   # goes on from 200
python examples/train_with_policy.py --policy none --steps 200                              # without autoprec
"""

import argparse
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import char_gpt
import torch
from torch import nn

import autoprec


def main() -> None:
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    model = char_gpt.GPT().to(device)

    # The lines that autoprec adds: install the policy before the optimizer is made, let it hold its state as the policy
    # says, wrap the loss, `_step`, and checkpoint its state beside model and optimizer.
    try:
        precision = None if options.policy == "none" else autoprec.apply(model, options.policy)
    except autoprec.AutoprecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

    optimizer = char_gpt.optimizer(model.parameters())
    if precision:
        optimizer = precision.optimizer(optimizer)
    parts = {"model": model, "optimizer": optimizer, **({"precision": precision} if precision else {})}
    step = _resume(options.checkpoint, parts) if options.checkpoint else 0
    while step < options.steps:
        for batch in islice(char_gpt.batches(), step % char_gpt.EPOCH, None):
            with precision.loss() if precision else nullcontext():
                loss = char_gpt.loss(model, tuple(tensor.to(device) for tensor in batch))
            optimizer.zero_grad()
            _step(precision, optimizer, loss, model)
            step += 1
            if step % options.print_every == 0 or step == options.steps:
                print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
            if step == options.steps:
                break
    if options.checkpoint:
        _save(options.checkpoint, parts, step)


def _step(
    precision: autoprec.Precision | None, optimizer: torch.optim.Optimizer, loss: torch.Tensor, model: nn.Module
) -> None:
    """Go backward and step, with gradients clipped to a norm of 1; unscaled first where the policy scales the loss."""
    if precision:
        precision.backward(loss)
        precision.step(optimizer, max_norm=1.0)
    else:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()


def _save(path: Path, parts: Mapping[str, Any], step: int) -> None:
    """Write all that the next run needs; a reader sees the old checkpoint or the new one, never half of it."""
    states = {name: part.state_dict() for name, part in parts.items()}
    unfinished = path.with_suffix(".unfinished")
    torch.save({**states, "rng": torch.get_rng_state(), "step": step}, unfinished)
    unfinished.replace(path)


def _resume(path: Path, parts: Mapping[str, Any]) -> int:
    """Put everything back as `_save` wrote it and return the step; 0 where there is no checkpoint yet."""
    if not path.exists():
        return 0
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    torch.set_rng_state(saved["rng"])
    step: int = saved["step"]
    print(f"resumed {path} at step {step}")
    return step


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="policy.yaml", help="policy file, preset name, or none")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step")
    parser.add_argument("--checkpoint", type=Path, help="resume from this file if it exists, and write it at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-every", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
