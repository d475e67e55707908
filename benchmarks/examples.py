"""What `autoprec tune` finds on the examples: python benchmarks/examples.py [--json reports/examples.json].

Each example is tuned in a fresh process and folder, and its JSON result kept whole: the verdict, the speed-up over
strict fp32 and over the best baseline with its spread, the fidelity with its power, every baseline.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ("char_gpt.py", "digits_vit.py")


def tuned(example: str, budget: str) -> dict[str, object]:
    """Return the JSON of a run, with its wall time as seen from outside."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "autoprec",
            "tune",
            str(ROOT / "examples" / example),
            "--budget",
            budget,
            "--json",
        ]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        wall_s = time.perf_counter() - started
        policy = (Path(folder) / "policy.yaml").read_text(encoding="utf-8")
    return {"process_wall_s": round(wall_s, 1), "policy": policy, "result": json.loads(done.stdout)}


def main() -> None:
    """Tune, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="2m")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {
        "command": f"python benchmarks/examples.py --budget {options.budget}",
        "examples": {name: tuned(name, options.budget) for name in EXAMPLES},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
