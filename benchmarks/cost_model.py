"""How far the cost model is off: OMP_NUM_THREADS=1 python benchmarks/cost_model.py [--json reports/cost_model.json].

For each workload of benchmarks/zoo/ one step is recorded, its calls and casts are timed, and step time and saved bytes
of FP32 and of three low policies are predicted; then all four train in interleaved rounds and are measured. The low
policies are those that a CPU without units for bf16 runs at a sane speed: matmuls, convolutions and attention stay
FP32. With one thread the clock is the CPU time of the process, for calls and steps alike, since such a machine may be
shared. Nothing is read from the cache.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from autoprec.capture import record
from autoprec.measure.op_time import Limits, measure_op_times
from autoprec.measure.time_cache import VARIABLE
from autoprec.policy import Policy, Rule
from autoprec.records.codec import encode
from autoprec.runtime.device import describe
from autoprec.search.cost_check import check_cost_model
from autoprec.search.cost_model import CostModel
from autoprec.search.objective import Protocol
from autoprec.workload import Workload, load_batches

ZOO = Path(__file__).parent / "zoo"
NAMES = ("gpt", "resnet", "convnext", "mlp1024", "depthwise")
FP32_OPS = ("linear", "matmul", "scaled_dot_product_attention", "conv2d", "cross_entropy", "mse_loss")
NORMS = ("layer_norm", "batch_norm", "group_norm", "rms_norm")
NUM_BATCHES = 4


def low_policies() -> dict[str, Policy]:
    """Return the low policies."""
    kept = tuple(Rule(sites=f"*:{op}", format="fp32") for op in FP32_OPS)
    kept_norms = tuple(Rule(sites=f"*:{op}", format="fp32") for op in NORMS)
    low_norms = tuple(Rule(sites=f"*:{op}", format="bf16") for op in NORMS)
    low, fp32 = Rule(sites="*", format="bf16"), Rule(sites="*", format="fp32")
    return {
        "elementwise low": Policy(name="elementwise-low", rules=(*kept, *kept_norms, low)),
        "norms low": Policy(name="norms-low", rules=(*low_norms, fp32)),
        "both low": Policy(name="both-low", rules=(*kept, low)),
    }


def zoo_workload(name: str) -> Workload:
    """Return a workload of the zoo."""
    spec = importlib.util.spec_from_file_location(name, ZOO / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    workload: Workload = module.workload()
    return workload


def measure(name: str, rounds: int, budget_s: float) -> dict[str, Any]:
    """Return predicted and measured numbers of one workload."""
    started = time.perf_counter()
    workload, device = zoo_workload(name), describe("cpu")
    recording = record(workload)
    times = measure_op_times(recording, ("bf16",), device, limits=Limits(total_s=budget_s))
    protocol = Protocol(
        workload=workload, device="cpu", seed=0, batches=load_batches(workload, NUM_BATCHES, "cpu"), horizon=100,
        margin=0.01, slow_limit=3.0,
    )  # fmt: skip
    model = CostModel(op_graph=recording.op_graph, op_times=times)
    _, found = check_cost_model(model, protocol, low_policies(), rounds=rounds)
    return {**encode(found), "wall_s": round(time.perf_counter() - started, 1)}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the op times of a workload")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ[VARIABLE] = "off"  # everything is measured in this run
    found = {}
    for name in options.workloads:
        found[name] = _rounded(measure(name, options.rounds, options.budget))
        print(name, json.dumps(found[name]), flush=True)
        low = [e for each in found.values() for key, e in each["errors"].items() if key != "fp32"]
        result = {
            "command": f"python benchmarks/cost_model.py --rounds {options.rounds}",
            "device": describe("cpu").name,
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "clock": "CPU time of the process" if torch.get_num_threads() == 1 else "wall",
            "niceness": os.nice(0),
            "cpus": sorted(os.sched_getaffinity(0)),
            "load_average": [round(each, 1) for each in os.getloadavg()],
            "median_error": round(statistics.median(abs(each["time_error"]) for each in low), 4),
            "median_bytes_error": statistics.median(abs(each["bytes_error"]) for each in low),
            "workloads": found,
        }
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "workloads"}, indent=2))


if __name__ == "__main__":
    main()
