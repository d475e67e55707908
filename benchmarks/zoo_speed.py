"""How fast is what `tune` finds: python benchmarks/zoo_speed.py [--json reports/zoo_speed.json].

Each workload of benchmarks/zoo/ is tuned by the command line in a fresh process and folder. Then the policy it wrote
and every rival are trained in the same interleaved rounds. Rivals are the configurations people use: strict FP32, FP32
with reduced matmul precision, autocast in bf16 and fp16, bf16 weights with FP32 masters, each also with channels_last
where the workload convolves, and compiled; of these, the ones that the device runs and that `tune` found faithful.
FP32 under torch.compile is FP32: it is a rival even where the budget had no room to try it. The ratio that counts is
the step time of the fastest rival over that of the policy, by the medians of the rounds; its interval pairs the rounds.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from autoprec.measure import Training, interleave, speedup
from autoprec.policy import load_policy, preset
from autoprec.records import load_record
from autoprec.records.run import RunRecord, TrialRecord
from autoprec.runtime.compilation import compile_fault
from autoprec.runtime.device import describe
from autoprec.workload import load, load_batches

ROOT = Path(__file__).parents[1]
ZOO = Path(__file__).parent / "zoo"
NAMES = ("gpt", "bert256", "vit", "convnext", "resnet", "depthwise", "mlp1024", "moe", "mamba")
RIVALS = ("fp32", "fp32-matmul-bf16", "fp32-matmul-tf32", "autocast-bf16", "autocast-fp16", "bf16-master")
NUM_BATCHES = 8


def tuned(name: str, budget: str, folder: Path) -> RunRecord:
    """Return the record of `autoprec tune` on a workload; the policy lies in `folder`."""
    command = [sys.executable, "-m", "autoprec", "tune", str(ZOO / f"{name}.py"), "--budget", budget, "--json"]
    subprocess.run(
        [*command, "--run-dir", "run"],
        cwd=folder, check=True, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return load_record(folder / "run" / "record.json")


def rivals(record: RunRecord) -> tuple[dict[str, str], dict[str, str]]:
    """Return the baselines to hold the policy against, and the others with the reason why they are none.

    The key is the name of the rival, the value that of the preset.
    """
    trials = {trial.name: trial for trial in record.baselines}
    wanted = [name for name in trials if name.removesuffix("-compiled").removesuffix("-channels-last") in RIVALS]
    sound = {name for name in wanted if _is_sound(trials[name], record)}
    if "fp32-compiled" not in trials and compile_fault(record.device.kind) is None:
        sound |= {f"{name}-compiled" for name in sound if name in ("fp32", "fp32-channels-last")}
    left_out = {name: _why_not(trials[name]) for name in wanted if name not in sound}
    return {name: name for name in sorted(sound)}, left_out


def _is_sound(trial: TrialRecord, record: RunRecord) -> bool:
    """Return whether a baseline passed; a proof on the longer horizon counts for more than its trial."""
    for check in record.verification:
        if check.name == trial.name:
            return check.passed
    return trial.name == "fp32" or trial.is_faithful


def _compile_fault(run: Training) -> str:
    """Return why a compiled run takes no first step, as inductor has bugs; empty if it does."""
    try:
        run.step()
    except torch._dynamo.exc.TorchDynamoException as error:
        return f"torch.compile fails: {str(error).splitlines()[0]}"
    return ""


def _why_not(trial: TrialRecord) -> str:
    return trial.reason or (trial.fidelity.reason if trial.fidelity else trial.state)


def measure(name: str, budget: str, rounds: int) -> dict[str, Any]:
    """Return what was found for one workload, and its step time beside those of the rivals."""
    kind = describe("auto").kind
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        record = tuned(name, budget, folder)
        policy = load_policy(folder / "policy.yaml")
        tune_s = time.perf_counter() - started
    workload = load(str(ZOO / f"{name}.py")).workload
    batches = load_batches(workload, NUM_BATCHES, kind)
    names, left_out = rivals(record)
    assert record.chosen is not None
    with ExitStack() as stack:

        def train(each: Any) -> Training:
            return stack.enter_context(Training(workload, each, device=kind, seed=0, batches=batches))

        runs = {each: train(preset(each, kind)) for each in names}
        for each in [name for name in names if name.endswith("-compiled")]:
            if fault := _compile_fault(runs[each]):
                left_out[each] = fault
                del runs[each], names[each]
        chosen = record.chosen.name  # a baseline is not run twice: its ratio to itself is 1
        key = chosen if chosen in runs else f"tuned: {chosen}"
        if key not in runs:
            runs[key] = train(policy)
        times = interleave(runs, rounds=rounds, steps_per_round=2, warmup=3, device=kind)
    step_s = {each: sorted(values)[rounds // 2] for each, values in times.items()}
    best = min(names, key=lambda each: step_s[each])
    ratio = speedup(times[best], times[key])
    return {
        "chosen": chosen,
        "verdict": record.verdict,
        "verified": record.chosen.verified,
        "settings": {each: getattr(policy, each) for each in ("memory_format", "optimizer", "compile")},
        "low_sites": record.chosen.low_sites,
        "num_sites": record.chosen.num_sites,
        "best_rival": best,
        "speedup_vs_best_rival": asdict(ratio),
        "speedup_vs_fp32": asdict(speedup(times["fp32"], times[key])),
        "step_s": step_s,
        "not_rivals": left_out,
        "budget": budget,
        "tune_s": round(tune_s, 1),
        "num_trials": sum(1 for trial in record.trials if trial.state in ("complete", "pruned")),
        "policy": record.chosen.policy,
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    """Measure, print and write; what a file has of other workloads stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--budget", default="6m", help="of each tune; that of mamba's many ops is twice as long")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text(encoding="utf-8"))["workloads"]
    for name in options.workloads:
        found[name] = _rounded(measure(name, options.budget, options.rounds))
        found[name]["load_average"] = [round(each, 1) for each in os.getloadavg()]
        print(name, json.dumps({k: v for k, v in found[name].items() if k != "policy"}), flush=True)
        ratios = [each["speedup_vs_best_rival"]["median"] for each in found.values()]
        result = {
            "command": f"python benchmarks/zoo_speed.py --budget {options.budget} --rounds {options.rounds}",
            "device": describe("auto").name,
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "geometric_mean": round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4),
            "smallest": min(ratios),
            "workloads": found,
        }
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "workloads"}, indent=2))


if __name__ == "__main__":
    main()
