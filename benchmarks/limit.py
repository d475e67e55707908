"""How far from the hardware's limit: python benchmarks/limit.py [--json reports/limit.json].

The peak rate of FP32 matrix products and the memory bandwidth are measured: the best of square products, and of copies
far larger than any cache. For each workload of benchmarks/zoo/ the floor of a step is the larger of two times that
nothing can beat in FP32: its operations, forward and twice that backward, at the peak; and the bytes that must move
whatever is cached or fused: parameters read in both passes, gradients, and what the optimizer reads and writes. Then
the step of FP32, eager and as the policy of reports/zoo_speed.json has it, over that floor, in interleaved rounds; and
where the time of the eager step goes: calls by family of ops beside their own roofline, the optimizer, and what is
left.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from autoprec.capture import Recording, record
from autoprec.graph.flops import flops_of
from autoprec.measure import Training, interleave
from autoprec.measure.op_time import Limits, OpTimes, measure_op_times
from autoprec.ops import lookup
from autoprec.policy import load_policy
from autoprec.runtime.device import describe
from autoprec.workload import load, load_batches
from autoprec.workload.parts import build_optimizer

ROOT = Path(__file__).parents[1]
ZOO = Path(__file__).parent / "zoo"
NAMES = ("gpt", "bert256", "vit", "convnext", "resnet", "depthwise", "mlp1024", "moe", "mamba")
_SIDE, _COPY_BYTES, _TRIES = 2048, 2**28, 9
_BYTES = 4


def peak_flops() -> float:
    """Return the highest rate of FP32 matrix products, in operations a second."""
    a, b = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
    out = torch.empty(_SIDE, _SIDE)
    return 2 * _SIDE**3 / min(_seconds(lambda: torch.mm(a, b, out=out)) for _ in range(_TRIES))


def bandwidth() -> float:
    """Return the highest rate of a copy, in bytes a second, read and written."""
    a, b = torch.ones(_COPY_BYTES // _BYTES), torch.empty(_COPY_BYTES // _BYTES)
    return 2 * _COPY_BYTES / min(_seconds(lambda: b.copy_(a)) for _ in range(_TRIES))


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def floor(recording: Recording, peak: float, rate: float, state_tensors: int) -> dict[str, float]:
    """Return the two times that no FP32 step can beat."""
    numel = sum(parameter.numel() for parameter in recording.model.parameters())
    # Read forward and backward; the gradient written and read; weight and state read and written by the optimizer.
    moved = _BYTES * numel * (2 + 2 + 2 + 2 * state_tensors)
    operations = 3 * sum(flops_of(node) for node in recording.op_graph)
    return {"operations_s": operations / peak, "bytes_s": moved / rate}


def families(recording: Recording, times: OpTimes, peak: float, rate: float) -> dict[str, dict[str, float]]:
    """Return, by family of ops, the measured time of its FP32 calls and that of their rooflines."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"measured_s": 0.0, "roofline_s": 0.0})
    for facts in times.facts:
        node = recording.op_graph[facts.name]
        time_of = times.times.get(facts.signature, {}).get("fp32") if facts.signature else None
        if time_of is None:
            continue
        moved = 3 * sum(fact.numel * _BYTES for fact in (*facts.inputs, *facts.outputs))
        row = found[str(lookup(node.op).family)]
        row["measured_s"] += time_of.timing.total_s
        row["roofline_s"] += max(3 * flops_of(node) / peak, moved / rate)
    return dict(sorted(found.items(), key=lambda item: -item[1]["measured_s"]))


def measure(name: str, policy_text: str | None, peak: float, rate: float, rounds: int) -> dict[str, Any]:
    """Return floor, step times and where they go for one workload."""
    workload = load(str(ZOO / f"{name}.py")).workload
    recording = record(workload)
    times = measure_op_times(recording, (), describe("cpu"), limits=Limits(total_s=30.0))
    optimizer = build_optimizer(workload.optimizer, recording.model)
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    bound = floor(recording, peak, rate, 2 if is_adam else 1)
    batches = load_batches(workload, 4, "cpu")
    with ExitStack() as stack:

        def train(policy: Any) -> Training:
            return stack.enter_context(Training(workload, policy, device="cpu", seed=0, batches=batches))

        runs = {"fp32": train("fp32")}
        if policy_text:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                file.write(policy_text)
                file.flush()
                runs["tuned"] = train(load_policy(file.name))
        rounds_s = interleave(runs, rounds=rounds, steps_per_round=2, warmup=3)
    step_s = {each: statistics.median(values) for each, values in rounds_s.items()}
    limit_s = max(bound.values())
    by_family = families(recording, times, peak, rate)
    calls_s = sum(row["measured_s"] for row in by_family.values())
    return {
        **bound,
        "floor_s": limit_s,
        "step_s": step_s,
        "over_floor": {each: seconds / limit_s for each, seconds in step_s.items()},
        "families": by_family,
        "calls_s": calls_s,
        "optimizer_and_rest_s": step_s["fp32"] - calls_s,
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--policies", type=Path, default=ROOT / "reports" / "zoo_speed.json")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tuned = json.loads(options.policies.read_text(encoding="utf-8"))["workloads"] if options.policies.exists() else {}
    peak, rate = peak_flops(), bandwidth()
    result = {
        "command": f"python benchmarks/limit.py --rounds {options.rounds}",
        "device": describe("cpu").name,
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "load_average": [round(each, 1) for each in os.getloadavg()],
        "peak_fp32_flops": float(f"{peak:.4g}"),
        "bandwidth_bytes_per_s": float(f"{rate:.4g}"),
        "workloads": {},
    }
    for name in options.workloads:
        policy = tuned.get(name, {}).get("policy")
        result["workloads"][name] = _rounded(measure(name, policy, peak, rate, options.rounds))
        print(name, json.dumps(result["workloads"][name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
