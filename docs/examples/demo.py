"""The main job, end to end: a local swarm of three agents, and one training job that spans two of them or more.

Three agents run as three processes with real UDP and HTTP on loopback.  Their GPUs are simulated (two each), so a job
of four ranks cannot fit on one; the training itself is real PyTorch on real data.  Every step is the `swarm` command
that a user would type.  What is started here is stopped here.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LEAST_ACCURACY = 0.95


def swarm(environment, *arguments, show=True):
    """Run one `swarm` command as a user would and return its exit code and standard output."""
    if show:
        print(f"\n$ swarm {' '.join(arguments)}", flush=True)
    command = [str(Path(sys.executable).with_name("swarm")), *arguments]
    lines = []
    with subprocess.Popen(command, env=environment, cwd=HERE, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append(line)
            if show:
                print(line, end="", flush=True)
    return process.returncode, "".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", required=True, help="environment with torch and scikit-learn")
    options = parser.parse_args()
    scratch = tempfile.mkdtemp(prefix="swarm-demo-")
    environment = {**os.environ, "XDG_CONFIG_HOME": f"{scratch}/config", "XDG_STATE_HOME": f"{scratch}/state"}
    environment = {name: value for name, value in environment.items() if not name.startswith("SWARM_")}
    try:
        return run(environment, options.venv)
    finally:
        swarm(environment, "local", "down")
        shutil.rmtree(scratch)


def run(environment, venv):
    """Start, train, show, judge."""
    print("Three agents on this machine, two simulated GPUs each; the training is real.", flush=True)
    code, _ = swarm(environment, "local", "up", "--agents", "3", "--gpus", "2")
    if code:
        return code
    swarm(environment, "nodes")
    job = ("--name", "digits", "--gpus", "4", "--venv", venv, "--", "python", "train_digits.py")
    code, output = swarm(environment, "run", *job)
    if code:
        return code
    swarm(environment, "ps", "-a")
    swarm(environment, "status", "@last")
    found = re.search(r"test accuracy ([0-9.]+)", output)
    if found is None or float(found.group(1)) < LEAST_ACCURACY:
        print(f"demo: the test accuracy is missing or below {LEAST_ACCURACY}", file=sys.stderr)
        return 1
    print(f"\nThe swarm trained it: test accuracy {found.group(1)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
