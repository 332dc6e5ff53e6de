"""The main jobs, end to end: a local swarm of three agents, a training job that spans two of them or more, and one that
grows, shrinks and loses a worker and an agent while it trains.

Three agents run as three processes with real UDP and HTTP on loopback.  Their GPUs are simulated (two each), so a job
of four ranks cannot fit on one; the training itself is real PyTorch on real data.  Every step is the `swarm` command
that a user would type.  What is started here is stopped here.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from picture import Picture

HERE = Path(__file__).resolve().parent
LEAST_ACCURACY = 0.95


def swarm(environment, *arguments, show=True):
    """Run one `swarm` command as a user would and return its exit code and standard output."""
    if show:
        print(f"\n$ swarm {' '.join(arguments)}", flush=True)
    command = [str(Path(sys.executable).with_name("swarm")), *arguments]
    lines = []
    told = None if show else subprocess.DEVNULL  # an agent that was killed is missed at every look
    piped = {"stdout": subprocess.PIPE, "stderr": told, "text": True}
    with subprocess.Popen(command, env=environment, cwd=HERE, **piped) as process:
        for line in process.stdout:
            lines.append(line)
            if show:
                print(line, end="", flush=True)
    return process.returncode, "".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", required=True, help="environment with torch and scikit-learn")
    parser.add_argument("--report", default="demo.html", help="where the page with the pictures goes")
    options = parser.parse_args()
    report = Path(options.report).absolute()
    scratch = tempfile.mkdtemp(prefix="swarm-demo-")
    environment = {**os.environ, "XDG_CONFIG_HOME": f"{scratch}/config", "XDG_STATE_HOME": f"{scratch}/state"}
    environment = {name: value for name, value in environment.items() if not name.startswith("SWARM_")}
    try:
        return run(environment, options.venv) or Elastic(environment, options.venv).run(report)
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
    return judged(output)


def judged(output):
    """Whether it has learned."""
    found = re.search(r"test accuracy ([0-9.]+)", output)
    if found is None or float(found.group(1)) < LEAST_ACCURACY:
        print(f"demo: the test accuracy is missing or below {LEAST_ACCURACY}", file=sys.stderr)
        return 1
    print(f"\nThe swarm trained it: test accuracy {found.group(1)}.", flush=True)
    return 0


class Elastic:
    """A job that takes two to four GPUs, and what happens to it while it trains."""

    def __init__(self, environment, venv):
        self.environment, self.venv = environment, venv
        self.began_s = time.monotonic()
        self.picture = Picture({f"node{number}": 2 for number in (1, 2, 3)})
        self.lines = 0  # of the picture on the screen
        self.jobs = []

    def run(self, report):
        """All acts, the table, the page."""
        print("\nA job that changes while it trains: two to four GPUs, as many as there are.", flush=True)
        self.submit("others", 4, "--", "sleep", "25")
        training = ("python", "train_elastic.py", "--epochs", "50", "--sample-ms", "4")
        self.submit("training", "2:4", "--elastic", "--venv", self.venv, "--", *training)
        self.act("two workers train: others have the rest", lambda: self.size == 2 and self.progress.get("step"))
        self.act("others have ended: it grows to four", lambda: self.size == 4)
        self.submit("second", 4, "--", "sleep", "12")
        self.act("a second job wants four GPUs: it makes room", lambda: self.size == 2)
        self.act("the second job has ended: it grows again", lambda: self.size == 4)
        worker, pid = max(self.workers().items())
        os.kill(pid, signal.SIGKILL)
        self.act(f"kill -9 of worker {worker}: the others go on", lambda: f"worker {worker} on" in self.told)
        node = self.training["nodes"][-1]["node"]
        self.command("local", "stop", "--kill", node)
        self.act(f"kill -9 of the agent of {node}: the others go on", lambda: f"{node} was lost" in self.told)
        self.act("it has trained all epochs", lambda: self.training["state"] == "ended")
        self.command("local", "start", node)  # with what its workers have written there
        code, output = swarm(self.environment, "logs", self.training["id"], show=False)
        print("\n".join(output.splitlines()[-3:]))
        return code or self.tell(report, output)

    def submit(self, name, gpus, *words):
        self.command("run", "-d", "--name", name, "--gpus", str(gpus), *words)

    def command(self, *words):
        """In the place of the picture, which is drawn again below it."""
        self.erase()
        code, output = swarm(self.environment, *words)
        assert code == 0, output

    # Looking.

    def act(self, text, is_over, patience_s=150):
        """Watch until something is so, and note it."""
        self.look()
        deadline_s = time.monotonic() + patience_s
        while not is_over():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"demo: not within {patience_s} s: {text}")
            time.sleep(0.5)
            self.look()
        self.picture.note(text)
        self.draw()

    def look(self):
        """One more moment of the picture."""
        code, output = swarm(self.environment, "ps", "-a", "-o", "json", show=False)
        if code:
            return  # whoever was asked has just been killed
        self.jobs = json.loads(output)["items"]
        running = [job for job in self.jobs if job["state"] in ("starting", "running", "stopping")]
        ranks = {job["name"]: {each["node"]: each["ranks"] for each in job["nodes"]} for job in running}
        self.picture.add(time.monotonic() - self.began_s, ranks, self.progress.get("loss"))
        self.draw()

    def draw(self):
        """In place on a terminal; elsewhere not at all."""
        if not sys.stdout.isatty():
            return
        self.erase()
        text = self.picture.text(self.width)
        print(text, flush=True)
        self.lines = text.count("\n") + 1

    def erase(self):
        if self.lines:
            print(f"\x1b[{self.lines}F\x1b[J", end="")
        self.lines = 0

    @property
    def width(self):
        return shutil.get_terminal_size().columns

    @property
    def training(self):
        return next((job for job in self.jobs if job["name"] == "training"), None)

    @property
    def size(self):
        """How many workers train, those that are still to come left out."""
        return (self.training["world_size"] if self.training else None) or 0

    @property
    def progress(self):
        """As it reports, once it does."""
        return (self.training["progress"] if self.training else None) or {}

    @property
    def changes(self):
        return self.training["rescalings"]

    @property
    def told(self):
        """Why it was changed, once those that train have switched."""
        return "; ".join(each["reason"] for each in self.changes if each["ranks_after"])

    def workers(self):
        """Process ids of its workers by their numbers."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                env = dict(pair.split("=", 1) for pair in path.read_text(errors="replace").split("\0") if "=" in pair)
            except OSError:  # it has ended, or is somebody else's
                continue
            if env.get("SWARM_JOB_ID") == self.training["id"] and "SWARM_WORKER" in env:
                found[int(env["SWARM_WORKER"])] = int(path.parent.name)
        return found

    # Telling.

    def tell(self, report, output):
        """The picture, a table of pauses, and the page."""
        print(self.picture.text(self.width) if not sys.stdout.isatty() else "")
        table = [("GPUs", "pause", "why")]
        for each in self.changes:
            is_over = bool(each["ranks_after"])  # or the next one came before all had switched
            size = f"{each['ranks_before']} -> {each['ranks_after'] if is_over else '?'}"
            table.append((size, f"{each['pause_seconds'] or 0.0:.3f} s" if is_over else "-", each["reason"]))
        for size, pause, why in table:
            print(textwrap.fill(why, self.width, initial_indent=f"{size:8} {pause:>9}  ", subsequent_indent=" " * 20))
        accuracy = re.search(r"test accuracy ([0-9.]+)", output)
        told = [
            f"Test accuracy {accuracy.group(1) if accuracy else 'unknown'}; one attempt, {len(self.changes)} changes."
        ]
        report.write_text(self.picture.html("An elastic job", told, table), encoding="utf-8")
        print(f"\nThe same as a page: {report}", flush=True)
        return judged(output)


if __name__ == "__main__":
    sys.exit(main())
