"""An ordinary training loop under a policy and a guard: the example GPT, with a fault to plant if you like.

python examples/guarded_training.py --policy policy.yaml --steps 200 --checkpoint run.pt
python examples/guarded_training.py --policy policy.yaml --steps 400 --checkpoint run.pt   # goes on from 200
python examples/guarded_training.py --policy fp32 --steps 60 --inject-overflow-at 40       # see what the guard does
"""

import argparse
import logging
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import char_gpt
import torch
from torch import Tensor

import autoprec

KEYS = ("model", "optimizer", "guard", "precision")  # the guard before precision: it puts a promoted policy in place


def main() -> None:
    options = _options()
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    model = char_gpt.GPT().to(device)
    try:
        _train(model, device, options)
    except autoprec.AutoprecError as error:  # a policy that cannot be applied, or a run that the guard stopped
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _train(model: torch.nn.Module, device: str, options: argparse.Namespace) -> None:
    precision = autoprec.apply(model, options.policy)
    optimizer = precision.optimizer(char_gpt.optimizer(model.parameters()))

    # The guard. `loss` and `batch=` let it name the very site of an overflow; `snapshot_every` bounds what is lost.
    guard = autoprec.guard(
        model, optimizer, precision, loss=char_gpt.loss, snapshot_every=options.snapshot_every, events=options.events
    )
    parts = dict(zip(KEYS, (model, optimizer, guard, precision), strict=True))
    step = _resume(options.checkpoint, parts) if options.checkpoint else 0
    hook = _Overflow(model, at=options.inject_overflow_at)
    while step < options.steps:
        for each in islice(char_gpt.batches(), step % char_gpt.EPOCH, None):
            batch = tuple(tensor.to(device) for tensor in each)
            hook.step = step
            optimizer.zero_grad()
            with precision.loss():
                loss = char_gpt.loss(model, batch)
            precision.backward(loss)
            outcome = guard.step(loss, batch=batch, max_norm=1.0)  # in place of precision.step(optimizer, max_norm=1.0)
            step += 1
            if step % options.print_every == 0 or step == options.steps or not outcome.stepped:
                print(f"step {step:5d}  loss {loss.item():.4f}{'' if outcome.stepped else '  skipped'}", flush=True)
            if step == options.steps:
                break
    if options.checkpoint:
        _save(options.checkpoint, parts, step)


class _Overflow:
    """Multiplies what the first block makes, at one step, until it is infinite."""

    def __init__(self, model: Any, at: int | None) -> None:
        self.step, self.at = 0, at
        model.blocks[0].register_forward_hook(lambda _, __, made: self.planted(made))

    def planted(self, made: Tensor) -> Tensor | None:
        return made * torch.inf if self.step == self.at else None


def _save(path: Path, parts: Mapping[str, Any], step: int) -> None:
    unfinished = path.with_suffix(".unfinished")
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**states, "rng": torch.get_rng_state(), "step": step}, unfinished)
    unfinished.replace(path)


def _resume(path: Path, parts: Mapping[str, Any]) -> int:
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
    parser.add_argument("--policy", default="policy.yaml", help="policy file or preset name")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step")
    parser.add_argument("--checkpoint", type=Path, help="resume from this file if it exists, and write it at the end")
    parser.add_argument("--events", type=Path, help="a file of JSON lines: what the guard found and did")
    parser.add_argument("--snapshot-every", type=int, default=100)
    parser.add_argument("--inject-overflow-at", type=int, metavar="STEP", help="plant an infinity at this step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-every", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
