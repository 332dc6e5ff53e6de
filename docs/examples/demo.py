"""The main jobs, end to end: a local swarm of three agents, a training job that spans two of them or more, one that
grows, shrinks and loses a worker and an agent while it trains, and one that trains over a bad cable.

Three agents run as three processes with real UDP and HTTP on loopback.  Their GPUs are simulated (two each), so a job
of four ranks cannot fit on one; the training itself is real PyTorch on real data.  Every step is the `swarm` command
that a user would type.  What is started here is stopped here.  The bad cable is between two network namespaces, which
root alone may make; others see the first parts.
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
sys.path.insert(0, str(HERE.parents[1]))  # hosts as network namespaces are those of the tests

from swarm_agent.security import generate_key  # noqa: E402
from tests.testbed.netns import Cables, Network, why_not  # noqa: E402

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
        code = run(environment, options.venv) or Elastic(environment, options.venv).run(report)
    finally:
        swarm(environment, "local", "down")
        shutil.rmtree(scratch)
    return code or BadCable(environment, options.venv).run()


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
        """Why it was changed, once those that train have switched: some by the next change, which came before."""
        done = [index for index, each in enumerate(self.changes) if each["ranks_after"]]
        return "; ".join(each["reason"] for each in self.changes[: max(done, default=-1) + 1])

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


class BadCable:
    """Two hosts with a cable of 100 Mbit/s and 10 ms between them, and the same training in three ways."""

    CABLES = Cables(mbit_s=100, delay_ms=5)  # a frame passes two
    ACROSS = ("--ranks", "2", "--gpus-per-rank", "2")  # a host has two GPUs, so each has a rank
    TRAINING = ("python", "train_apart.py", "--step-ms", "100")
    STEPS, FEW, EVERY = 192, 32, 8

    def __init__(self, environment, venv):
        self.environment, self.venv = environment, venv

    def run(self):
        """All three, and what became of them."""
        lack = why_not() or ("" if os.access("/dev/net/tun", os.W_OK) else "needs /dev/net/tun")
        if lack:
            print(f"\nA training over a bad cable is left out here: it {lack}.", flush=True)
            return 0
        print("\nTwo hosts whose cable is bad: 100 Mbit/s, 10 ms.", flush=True)
        with tempfile.TemporaryDirectory(prefix="swarm-demo-") as scratch, Network.build(2, self.CABLES) as network:
            agents = [self.start(Path(scratch), host, network.hosts) for host in network.hosts]
            try:
                return self.compare(network.hosts)
            finally:
                for agent in agents:
                    agent.terminate()
                    agent.wait()

    def start(self, base, host, hosts):
        """An agent on its host."""
        name = f"node{hosts.index(host) + 1}"
        if host is hosts[0]:
            for secret in ("cluster.key", "token"):
                (base / secret).touch(0o600)
                (base / secret).write_text(generate_key())
            address = {"SWARM_HOSTS": f"{host.address}:7433", "SWARM_TOKEN": (base / "token").read_text()}
            self.environment = {**self.environment, **address, "OMP_NUM_THREADS": "1"}
        config = base / f"{name}.toml"
        settings = {
            "name": name,
            "listen": f"{host.address}:7433",
            "seeds": [f"{hosts[0].address}:7433"],
            "data_dir": str(base / name),
            "cluster_key_file": str(base / "cluster.key"),
            "token_file": str(base / "token"),
            "job_user": "root",
            "simulated_gpus": 2,
        }
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        words = host.command(str(Path(sys.executable).with_name("swarm-agent")), "--config", str(config))
        with (base / f"{name}.log").open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def compare(self, hosts):
        """Gradients at each step on one host, and across the cable; then apart, with a kill in the middle."""
        for _ in range(60):
            if swarm(self.environment, "nodes", "-o", "name", show=False)[1].count("\n") == len(hosts):
                break
            time.sleep(0.5)
        swarm(self.environment, "nodes")
        rows = [("", "steps/s", "held-out loss")]
        one_host = ("--gpus", "2", "--node", "node1")
        rows.append(("synchronous, on one host", *self.trained(one_host, "--synchronous", "--steps", str(self.STEPS))))
        few = ("--synchronous", "--steps", str(self.FEW), "--every", str(self.EVERY))
        speed, _ = self.trained(self.ACROSS, *few)
        rows.append(("synchronous, over the cable", speed, "-"))
        rows.append(("apart, over the cable", *self.apart(hosts)))
        print()
        for what, speed, loss in rows:
            print(f"{what:30} {speed:>8} {loss:>14}")
        return 0

    def trained(self, where, *words):
        """Steps a second and loss of one run to its end."""
        code, output = swarm(self.environment, "run", *where, "--venv", self.venv, "--", *self.TRAINING, *words)
        found = re.search(r"held-out loss ([0-9.]+), ([0-9.]+) steps/s", output)
        if code or found is None:
            raise SystemExit("demo: a training over the bad cable has failed")
        return found[2], found[1]

    def apart(self, hosts):
        """One job; when it has merged once, the process that merges is killed."""
        training = (*self.TRAINING, "--steps", str(self.STEPS))
        swarm(self.environment, "run", "-d", *self.ACROSS, "--outer", "--venv", self.venv, "--", *training)
        for _ in range(120):
            if "loss" in swarm(self.environment, "logs", "@last", show=False)[1]:
                break
            time.sleep(0.5)
        for pid in hosts[0].pids():
            if b"aggregation.aggregator" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                print(f"\nkill -9 {pid}: the aggregator of node1, which merges what both learn")
        _, output = swarm(self.environment, "logs", "-f", "@last")
        swarm(self.environment, "status", "@last")
        found = re.search(r"held-out loss ([0-9.]+), ([0-9.]+) steps/s", output)
        if found is None:
            raise SystemExit("demo: training apart has failed")
        return found[2], found[1]


if __name__ == "__main__":
    sys.exit(main())
