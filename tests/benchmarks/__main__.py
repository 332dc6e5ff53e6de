"""Run every benchmark beside this file and print its figures: `make bench`, or `python -m tests.benchmarks NAME...`.

Each `bench_NAME.py` has `run() -> list[tuple[measure, value, unit]]`; figures are medians of several runs, because
machines are noisy.  One that takes long also has `short()`, which is taken when no benchmark is named.
"""

import importlib
import os
import platform
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(names: list[str]) -> int:
    found = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    unknown = [name for name in names if name not in found]
    if unknown:
        print(f"bench: no benchmark is called {', '.join(unknown)}; there are: {', '.join(found)}", file=sys.stderr)
        return 2
    print(f"# {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    for name in names or found:
        print(f"\n## {name}", flush=True)
        benchmark = importlib.import_module(f"tests.benchmarks.bench_{name}")
        run = benchmark.run if names else getattr(benchmark, "short", benchmark.run)
        for measure, value, unit in run():
            print(f"{measure:<64} {value:>12.4g} {unit}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
