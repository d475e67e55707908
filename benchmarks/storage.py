"""What storing parameters and optimizer state low saves and costs: python benchmarks/storage.py [--json FILE].

One byte-level GPT, trained from one seed on the same batches under policies that differ in storage alone: every op
computes in FP32. Bytes are those of the tensors that lie there between two steps. Fidelity is that of
`autoprec.measure.compare` against the FP32 run. `unmoved_frac` is the fraction of elements with a gradient that a step
left exactly as they were, in the master where there is one: swamped under nearest rounding; under stochastic rounding
the same elements move by a whole ulp with the probability that keeps the mean.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autoprec.measure import Training, compare
from autoprec.policy import Parameters, Policy, Rule

ROOT = Path(__file__).parents[1]
KEPT = ("*norm*", "*.bias")
ROWS = {
    "fp32": Parameters(),
    "bf16, nothing beside it (the failing choice)": Parameters(storage="bf16"),
    "bf16 + fp32 master": Parameters(storage="bf16", master="fp32"),
    "bf16 + fp32 master, bf16 gradients": Parameters(storage="bf16", master="fp32", gradients="storage"),
    "bf16 + fp32 master, norms and biases kept": Parameters(storage="bf16", master="fp32", keep=KEPT),
    "bf16, stochastic rounding": Parameters(storage="bf16", rounding="stochastic"),
    "fp32 + bf16 optimizer state": Parameters(optimizer_state="bf16"),
    "fp32 + 8 bit optimizer state": Parameters(optimizer_state="8bit"),
    "bf16, stochastic rounding + 8 bit optimizer state": Parameters(
        storage="bf16", rounding="stochastic", optimizer_state="8bit"
    ),
}
SIZES = {"WIDTH": 64, "HEADS": 2, "DEPTH": 2, "CONTEXT": 32}
SAMPLED_EVERY = 10


def small_gpt(num_steps: int) -> ModuleType:
    """Return examples/char_gpt.py with a model that trains in a few milliseconds a step."""
    spec = importlib.util.spec_from_file_location("char_gpt", ROOT / "examples" / "char_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {**SIZES, "EPOCH": num_steps}.items():
        setattr(module, name, value)
    return module


def num_bytes(tensors: Iterator[Any]) -> int:
    """Return what tensors occupy; a quantized one is the tensors it is made of."""
    total = 0
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            total += num_bytes(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif isinstance(tensor, torch.Tensor):
            total += tensor.numel() * tensor.element_size()
    return total


def lying_there(run: Training) -> dict[str, int]:
    """Return the bytes between two steps."""
    state = run.optimizer.state.values()
    parts = {
        "parameters": num_bytes(iter(run.model.parameters())),
        "masters": num_bytes(iter(run.precision.state_dict()["masters"].values())),
        "gradients": num_bytes(parameter.grad for parameter in run.model.parameters()),
        "optimizer_state": num_bytes(value for values in state for value in values.values()),
    }
    return {**parts, "all": sum(parts.values())}


def effective(run: Training) -> dict[str, torch.Tensor]:
    """Return a copy of the numbers that steps add to: masters, or the parameters themselves."""
    masters = run.precision.state_dict()["masters"]
    return {name: masters.get(name, p).detach().clone() for name, p in run.model.named_parameters()}


def unmoved_frac(run: Training) -> float:
    """Return the fraction of elements with a gradient that the next step leaves as they are."""
    before = effective(run)
    run.step()
    num_still = num_pushed = 0
    for name, after in effective(run).items():
        grad = run.model.get_parameter(name).grad
        pushed = torch.zeros_like(after, dtype=torch.bool) if grad is None else grad != 0
        num_pushed += int(pushed.sum())
        num_still += int((pushed & (after == before[name])).sum())
    return num_still / num_pushed


def trained(parameters: Parameters, num_steps: int, nudge: float = 0.0) -> dict[str, Any]:
    """Train under one storage; return the losses and what was counted on the way."""
    module = small_gpt(num_steps)
    policy = Policy(name="storage", rules=(Rule(sites="*", format="fp32"),), parameters=parameters)
    batches = list(module.batches())
    started, unmoved = time.perf_counter(), []
    with Training(module.workload(), policy, device="cpu", seed=0, batches=batches, nudge=nudge) as run:
        while run.num_steps < num_steps:
            if run.num_steps % SAMPLED_EVERY == SAMPLED_EVERY - 1:
                unmoved.append(unmoved_frac(run))
            else:
                run.step()
        counted = lying_there(run)
        losses = list(run.losses)
    return {
        "losses": losses,
        "bytes": counted,
        "unmoved_frac": {"median": statistics.median(unmoved), "last": unmoved[-1]},
        "wall_s": round(time.perf_counter() - started, 1),
    }


def row(found: dict[str, Any], fp32: dict[str, Any], chaos: list[float]) -> dict[str, Any]:
    """Return one row of the table."""
    fidelity = compare(fp32["losses"], found["losses"], chaos=chaos)
    tail = max(len(chaos) // 10, 1)
    mean = statistics.fmean(found["losses"][-tail:])
    return {
        "bytes": found["bytes"],
        "bytes_of_fp32": round(found["bytes"]["all"] / fp32["bytes"]["all"], 3),
        "unmoved_frac": {name: round(value, 4) for name, value in found["unmoved_frac"].items()},
        "final_loss": round(mean, 4),
        "final_loss_minus_fp32": round(mean - statistics.fmean(fp32["losses"][-tail:]), 5),
        "steps_lost": round(fidelity.steps_lost, 2),
        "steps_lost_frac": round(fidelity.steps_lost_frac, 5),
        "verdict": fidelity.verdict,
        "reason": fidelity.reason,
        "wall_s": found["wall_s"],
    }


def main() -> None:
    """Train every row, print the table, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    fp32 = trained(Parameters(), options.steps)
    chaos = trained(Parameters(), options.steps, nudge=2.0**-8)["losses"]
    rows = {}
    for label, parameters in ROWS.items():
        rows[label] = row(trained(parameters, options.steps), fp32, chaos)
        print(label, json.dumps(rows[label]), flush=True)
    result = {
        "command": f"python benchmarks/storage.py --steps {options.steps}",
        "torch": torch.__version__,
        "model": {**SIZES, "example": "examples/char_gpt.py", "optimizer": "AdamW, lr 1e-3"},
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
