"""Baselines and presets on one CUDA device: python benchmarks/gpu.py (make gpu runs it after the tests).

GPT-2 124M, BERT-base, ViT-B/16 and ResNet-50 from configs, random weights and batches. Each is tuned by the command
line, in a process of its own and with `--budget`; 0s does without, as does a machine without optuna. Then the policy it
wrote, strict fp32, every preset the device runs, and plain torch.autocast are timed in the same interleaved rounds,
with their memory, and the losses of the autocast preset and of torch.autocast are compared bit for bit. Then a stack of
linear layers: FP8 with both scalings, and TF32 site by site, beside bf16 and TF32 for all. Writes one JSON file a
device to reports/gpu/. `--tiny` shrinks the shapes, to see on any machine that the script runs.
"""

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from autoprec.measure import Training, interleave, measure_memory, speedup
from autoprec.policy import INSIDE_FP32, Float8, Policy, Rule, load_policy, preset, preset_names
from autoprec.records import load_record
from autoprec.runtime.device import DeviceInfo, describe
from autoprec.runtime.matmul_precision import supported
from autoprec.workload import Workload, load_batches

SEED = 0
NUM_BATCHES = 4
TINY = "AUTOPREC_BENCHMARK_TINY"
TUNED = "tuned"
COMPILED = ("autocast-bf16-compiled",)  # the strongest of them; each compiles for most of a minute


def _is_tiny() -> bool:
    """Return whether shapes are small: said by the environment, for `tune` loads the workloads from this file."""
    return TINY in os.environ


def _workload(name: str, config: Any, batch: Callable[[int], Mapping[str, torch.Tensor]]) -> Workload:
    return Workload(
        model=lambda: getattr(transformers, name)(config),
        batches=lambda: [dict(batch(seed)) for seed in range(NUM_BATCHES)],
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
    )


def _text(vocabulary: int, rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def _images(rows: int, size: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % 2
    return {"pixel_values": torch.rand(rows, 3, size, size, generator=generator), "labels": labels}


def gpt2() -> Workload:
    """Return GPT-2 124M on 8 rows of 1024 tokens."""
    small: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2} if _is_tiny() else {}
    rows, length = (2, 16) if _is_tiny() else (8, 1024)
    return _workload("GPT2LMHeadModel", transformers.GPT2Config(**small), partial(_text, 50257, rows, length))


def bert_base() -> Workload:
    """Return BERT-base on 32 rows of 512 tokens."""
    rows, length = (8, 16) if _is_tiny() else (32, 512)
    return _workload("BertForMaskedLM", transformers.BertConfig(**_narrow()), partial(_text, 30522, rows, length))


def vit_b16() -> Workload:
    """Return ViT-B/16 on 64 images."""
    rows, size = (2, 32) if _is_tiny() else (64, 224)
    config = transformers.ViTConfig(**_narrow(), image_size=size, num_labels=2)
    return _workload("ViTForImageClassification", config, partial(_images, rows, size))


def resnet50() -> Workload:
    """Return ResNet-50 on 64 images."""
    rows, size = (2, 32) if _is_tiny() else (64, 224)
    small: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16} if _is_tiny() else {}
    config = transformers.ResNetConfig(**small, num_labels=2)
    return _workload("ResNetForImageClassification", config, partial(_images, rows, size))


def _narrow() -> dict[str, Any]:
    """Return the sizes of a small transformer, or none."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return sizes if _is_tiny() else {}


WORKLOADS = {"GPT-2": gpt2, "BERT-base": bert_base, "ViT-B/16": vit_b16, "ResNet-50": resnet50}


def tuned(function: str, budget: str, device: str) -> tuple[Policy | None, dict[str, Any]]:
    """Return the policy that `autoprec tune` writes for a workload of this file, and what its record says of it."""
    if budget == "0s" or importlib.util.find_spec("optuna") is None:
        return None, {"not tuned": "no budget" if budget == "0s" else "optuna is not installed"}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autoprec", "tune", f"{Path(__file__).resolve()}:{function}"]
        done = subprocess.run(
            [*command, "--budget", budget, "--device", device, "--run-dir", "run", "--out", "policy.yaml"],
            cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )  # fmt: skip
        if done.returncode != 0:
            return None, {"not tuned": done.stderr.splitlines()[-1:], "exit code": done.returncode}
        record, policy = load_record(Path(folder) / "run" / "record.json"), load_policy(Path(folder) / "policy.yaml")
    assert record.chosen is not None
    return policy, {
        "chosen": record.chosen.name,
        "verdict": record.verdict,
        "low_sites": record.chosen.low_sites,
        "num_sites": record.chosen.num_sites,
        "wall_s": round(time.perf_counter() - started, 1),
        "policy": record.chosen.policy,
    }


def _under_autocast(workload: Workload, kind: str) -> Workload:
    """Return `workload` with forward and loss under torch.autocast itself."""

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(kind, torch.bfloat16):
            return workload.loss(model, batch)

    return replace(workload, loss=loss)


def measure(function: Callable[[], Workload], info: DeviceInfo, rounds: int, budget: str) -> dict[str, Any]:
    """Return step times, speed-ups over strict fp32, memory, and whether the preset equals torch.autocast."""
    policy, found = tuned(function.__name__, budget, info.kind)
    workload = function()
    batches = load_batches(workload, 1, info.kind)
    policies = {name: preset(name, info.kind) for name in preset_names(info.kind)}
    # Of the models' layers, some have sizes that FP8 kernels do not take; the linear layers below have none.
    names = [name for name in policies if name != "fp8-matmul" and not _lacks(policies[name], info)]
    names = [name for name in names if policies[name].compile == "as_given" or name in COMPILED]
    with ExitStack() as stack:

        def train(each: Workload, under: Policy | str) -> Training:
            return stack.enter_context(Training(each, under, device=info.kind, seed=SEED, batches=batches))

        runs = {name: train(workload, name) for name in names}
        runs["torch.autocast bf16"] = train(_under_autocast(workload, info.kind), "fp32")
        if policy is not None:
            runs[TUNED] = train(workload, policy)
        losses = {name: [run.step() for _ in range(3)] for name, run in runs.items()}
        memory = {name: measure_memory(run).total_bytes for name, run in runs.items()}
        times = interleave(runs, rounds=rounds, steps_per_round=3, warmup=3, device=info.kind)
    step_s = {name: sorted(each)[rounds // 2] for name, each in times.items()}
    best = min((name for name in runs if name != TUNED), key=step_s.__getitem__)
    return {
        "equals_torch_autocast": losses["autocast-bf16"] == losses["torch.autocast bf16"],
        "tune": found | ({"speedup_vs_fastest": asdict(speedup(times[best], times[TUNED]))} if policy else {}),
        "fastest_untuned, faithful or not": best,
        "runs": {
            name: {
                "step_s": step_s[name],
                "speedup_vs_fp32": asdict(speedup(times["fp32"], times[name])),
                "memory_bytes": memory[name],
                "losses": losses[name],
            }
            for name in runs
        },
    }


def _lacks(policy: Policy, info: DeviceInfo) -> str:
    """Return what the device has not of what `policy` needs to be timed, or an empty text."""
    formats = {*policy.formats, policy.parameters.storage} - {*info.formats, "tf32"}
    precisions = {f"{name} inside fp32" for name in policy.matmul_precisions if name not in supported(info.kind)}
    return ", ".join(sorted(formats | precisions))


def linear_layers(*, tiny: bool) -> Workload:
    """Return the workload of feed-forward layers as wide as those of a 7B language model."""
    width, depth, rows = (32, 1, 16) if tiny else (4096, 4, 8192)
    layers = [layer for _ in range(depth) for layer in ((width, 4 * width), torch.nn.GELU, (4 * width, width))]
    return Workload(
        model=lambda: torch.nn.Sequential(
            *(layer() if callable(layer) else torch.nn.Linear(*layer, bias=False) for layer in layers)
        ),
        batches=lambda: [torch.randn(rows, width, generator=torch.Generator().manual_seed(SEED))],
        loss=lambda model, batch: model(batch).float().square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
    )


def _linear_policies() -> dict[str, Policy]:
    def linear(name: str, fmt: str, **settings: Any) -> Policy:
        rest = "fp32" if fmt in ("fp32", *INSIDE_FP32) else "bf16"
        return Policy(name=name, rules=(Rule(sites="*:linear", format=fmt), Rule(sites="*", format=rest)), **settings)

    return {
        "fp32": linear("fp32", "fp32"),
        "tf32 for all": linear("tf32 for all", "fp32", float32_matmul="tf32"),
        "tf32 site by site": linear("tf32 site by site", "tf32"),
        "bf16 inside fp32, site by site": linear("bf16 inside fp32, site by site", "fp32_bf16"),
        "bf16": linear("bf16", "bf16"),
        "fp8 tensorwise": linear("fp8 tensorwise", "fp8_e4m3"),
        "fp8 rowwise": linear("fp8 rowwise", "fp8_e4m3", float8=Float8(scaling="rowwise")),
    }


def measure_linear(info: DeviceInfo, rounds: int, *, tiny: bool) -> dict[str, Any]:
    """Return step times and speed-ups over fp32 of the policies the device has units for, and what the others lack."""
    workload, policies = linear_layers(tiny=tiny), _linear_policies()
    batches = load_batches(workload, 1, info.kind)
    lacking = {name: lack for name, policy in policies.items() if (lack := _lacks(policy, info))}
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(Training(workload, policy, device=info.kind, seed=SEED, batches=batches))
            for name, policy in policies.items()
            if name not in lacking
        }
        times = interleave(runs, rounds=rounds, steps_per_round=3, warmup=3, device=info.kind)
    timed = {
        name: {
            "step_s": sorted(times[name])[rounds // 2],
            "speedup_vs_fp32": asdict(speedup(times["fp32"], times[name])),
        }
        for name in runs
    }
    return {"runs": timed, "not timed, the device lacks": lacking}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", default="40s", help="of each tune")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "reports" / "gpu")
    options = parser.parse_args()
    if options.tiny:
        os.environ[TINY] = "1"
    info = describe(options.device)
    facts = {"name": info.name, "torch": info.torch_version, "native_formats": list(info.native_formats)}
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "device": facts, "rounds": options.rounds}
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "linear layers": lambda: measure_linear(info, options.rounds, tiny=options.tiny),
        **{name: partial(measure, each, info, options.rounds, options.budget) for name, each in WORKLOADS.items()},
    }
    for name, run in measured.items():
        result[name] = run()
        print(name, json.dumps(result[name], indent=2), flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / f"{info.name.split(',')[0].replace(' ', '-')}.json"
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
