"""What recording costs, in forward passes: python benchmarks/recording.py [--json reports/recording.json].

For each model a plain forward with loss and a whole `record()` (model construction, batch and op graph included) are
timed in interleaved rounds of one process; the ratio is the median over rounds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from autoprec.capture import record
from autoprec.runtime.device import describe
from autoprec.workload import Workload, load

EXAMPLES = Path(__file__).parents[1] / "examples"


def _language_model(config: Any, name: str) -> Workload:
    ids = torch.randint(3, 1000, (4, 128), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    return Workload(model=lambda: getattr(transformers, name)(config), batches=lambda: [batch])


def workloads() -> dict[str, Callable[[], Workload]]:
    """Return the workloads to record: the two examples, and two architectures of others at a training size."""
    small = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    gpt2 = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2}
    return {
        "examples/char_gpt.py": lambda: load(str(EXAMPLES / "char_gpt.py")).workload,
        "examples/digits_vit.py": lambda: load(str(EXAMPLES / "digits_vit.py")).workload,
        "GPT-2, 4 layers of 256": lambda: _language_model(transformers.GPT2Config(**gpt2), "GPT2LMHeadModel"),
        "BERT, 4 layers of 256": lambda: _language_model(
            transformers.BertConfig(vocab_size=1000, **small), "BertForMaskedLM"
        ),
    }


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(workload: Workload, rounds: int) -> dict[str, float]:
    """Return median seconds of a forward and of a recording, and the median of their ratio within rounds."""
    model, batch = workload.model(), next(iter(workload.batches()))
    forwards, records = [], []
    record(workload)
    for _ in range(rounds):
        forwards.append(statistics.median(_seconds(lambda: workload.loss(model, batch)) for _ in range(3)))
        records.append(_seconds(lambda: record(workload)))
    ratios = [b / a for a, b in zip(forwards, records, strict=True)]
    return {
        "forward_s": round(statistics.median(forwards), 5),
        "record_s": round(statistics.median(records), 5),
        "forward_passes": round(statistics.median(ratios), 2),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {
        "command": "python benchmarks/recording.py",
        "device": describe("cpu").name,
        "torch": torch.__version__,
        "rounds": options.rounds,
        "workloads": {name: measure(make(), options.rounds) for name, make in workloads().items()},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
