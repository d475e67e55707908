"""What an inspection costs: python benchmarks/inspection.py [--json reports/inspection.json].

`instrumented`: one run of `measured_numerics` against plain training steps (forward, backward, optimizer step), timed
in interleaved rounds of one process; and the most memory that was alive at once in each, with what the model and the
optimizer's state take throughout.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from autoprec.analysis import measured_numerics
from autoprec.capture import record
from autoprec.runtime.device import describe
from autoprec.workload import Workload, load

ROOT = Path(__file__).parents[1]
FORMATS = ("fp16", "bf16")
FILES = (
    "examples/char_gpt.py",
    "examples/digits_vit.py",
    "zoo/gpt.py",
    "zoo/resnet.py",
    "zoo/mlp1024.py",
    "cases/residual-add-overflow.py",
    "cases/recurrent-state-decay.py",
    "cases/rope-autocast-matmul.py",
    "cases/gradient-penalty-double-backward.py",
    "cases/bn-stats-bf16-stall.py",
    "controls/nc-gpt-sdpa.py",
    "controls/nc-lstm.py",
)


class LiveBytes(TorchDispatchMode):
    """Follows the memory of every tensor that an operation makes, and notes the most that was alive at once."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in held:
            self._note(tensor)
        self.peak = self._sum()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note its results."""
        result = func(*args, **(kwargs or {}))
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        for each in result if isinstance(result, (tuple, list)) else [result]:
            self._note(each)
        self.peak = max(self.peak, self._sum())
        return result

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            storage = value.untyped_storage()
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _sum(self) -> int:
        return sum(size for _, size in self._storages.values())


class PlainStep:
    """A training step as a script would write it."""

    def __init__(self, workload: Workload) -> None:
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model.parameters())
        self._batch, self._loss = next(iter(workload.batches())), workload.loss

    def __call__(self) -> None:
        """Run forward, backward and optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        self._loss(self.model, self._batch).backward()
        self.optimizer.step()

    def held(self) -> list[torch.Tensor]:
        """Return what is alive between steps: the model and the optimizer's state."""
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        return [*self.model.state_dict().values(), *(each for each in states if isinstance(each, torch.Tensor))]


def _seconds(call: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _peak(call: Callable[[], object], held: list[torch.Tensor]) -> int:
    with LiveBytes(held) as live:
        call()
    return live.peak


def instrumented(workload: Workload, rounds: int) -> dict[str, float]:
    """Return how many plain steps an instrumented run takes, and its peak memory over that of a plain step."""
    recording, step = record(workload), PlainStep(workload)

    def run() -> None:
        measured_numerics([recording], workload.optimizer, FORMATS)

    step()
    run()
    plain, whole = [], []
    for _ in range(rounds):
        plain.append(statistics.median(_seconds(step) for _ in range(3)))
        whole.append(_seconds(run))
    ratios = sorted(b / a for a, b in zip(plain, whole, strict=True))
    step.optimizer.zero_grad(set_to_none=True)
    recording.model.zero_grad(set_to_none=True)
    plain_bytes = _peak(step, step.held())
    run_bytes = _peak(run, list(recording.model.state_dict().values()))
    return {
        "sites": len(recording.op_graph.sites()),
        "plain_step_s": round(statistics.median(plain), 5),
        "run_s": round(statistics.median(whole), 5),
        "steps": round(statistics.median(ratios), 2),
        "worst_round_steps": round(ratios[-1], 2),
        "plain_peak_bytes": plain_bytes,
        "run_peak_bytes": run_bytes,
        "memory_ratio": round(run_bytes / plain_bytes, 3),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of zoo, cases and controls")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    places = [(name, (ROOT if name.startswith("examples") else options.shared) / name) for name in FILES]
    result = {
        "command": "python benchmarks/inspection.py",
        "device": describe("cpu").name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "instrumented": {
            "rounds": options.rounds,
            "formats": list(FORMATS),
            "workloads": {
                name: instrumented(load(str(path)).workload, options.rounds) for name, path in places if path.exists()
            },
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
