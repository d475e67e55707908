"""How long the command line and the import take: python benchmarks/startup.py [--json reports/startup.json].

Each figure comes from interleaved rounds of fresh processes; `import autoprec` is the paired difference between
importing torch and autoprec's runtime, and importing torch alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "autoprec --help": [sys.executable, "-m", "autoprec", "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import torch, autoprec": [sys.executable, "-c", "import torch, autoprec"],
    "import torch, autoprec; autoprec.apply": [sys.executable, "-c", "import torch, autoprec; autoprec.apply"],
}


def seconds(command: list[str]) -> float:
    """Return the wall time of one process."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for command in COMMANDS.values():
        seconds(command)
    rounds = [{name: seconds(command) for name, command in COMMANDS.items()} for _ in range(options.rounds)]
    result = {
        "command": "python benchmarks/startup.py",
        "rounds": options.rounds,
        "median_s": {name: round(statistics.median(r[name] for r in rounds), 4) for name in COMMANDS},
        "added_to_import_torch_s": {
            name: round(statistics.median(r[name] - r["import torch"] for r in rounds), 4)
            for name in list(COMMANDS)[3:]
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
