"""A rank that says every 50 ms that it is at work: one line in FOLDER/JOB.RANK, which all attempts append to.

Run as `python -I -S beat.py FOLDER LIMIT_S EXIT_CODE`.  It ends after LIMIT_S (0: never) with EXIT_CODE, or when
FOLDER/JOB.end appears, with the code in it.  When FOLDER/JOB.checkpoint appears, rank 0 writes a file of the name in it
into SWARM_CHECKPOINT_DIR and commits it with `swarm checkpoint`; CHAOS_SWARM is that command's path.

A line is `time attempt epoch rank pid node word...`, by the machine's monotonic clock, which all namespaces share.  A
frozen rank writes nothing, so the lines tell exactly when each attempt was at work.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

PERIOD_S = 0.05


class Rank:
    """What this process is, and its file."""

    def __init__(self, folder):
        self.job, self.rank = os.environ["SWARM_JOB_ID"], os.environ.get("RANK", "0")
        self.folder = Path(folder)
        attempt, epoch = os.environ["SWARM_ATTEMPT"], os.environ.get("SWARM_EPOCH", "0")
        self.identity = f"{attempt} {epoch} {self.rank} {os.getpid()} {os.environ['SWARM_NODE']}"
        self.stream = os.open(self.folder / f"{self.job}.{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.committed = ""

    def say(self, word):
        os.write(self.stream, f"{time.monotonic():.6f} {self.identity} {word}\n".encode())

    def told(self, what):
        """Content of FOLDER/JOB.what, or nothing."""
        try:
            return (self.folder / f"{self.job}.{what}").read_text()
        except FileNotFoundError:
            return ""

    def checkpoint(self, name):
        Path(os.environ["SWARM_CHECKPOINT_DIR"], name).write_text(f"{name} of attempt {os.environ['SWARM_ATTEMPT']}\n")
        words = [os.environ["CHAOS_SWARM"], "checkpoint", name]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        self.say(f"checkpoint {name} {done.returncode} {done.stderr.strip()!r}")
        self.committed = name


def resumed_from():
    """The checkpoint that this attempt was given, and what is in it."""
    path = os.environ.get("SWARM_RESUME_FROM", "")
    if not path:
        return "nothing"
    try:
        return f"{path} {Path(path).read_text().strip()!r}"
    except OSError as error:
        return f"{path} unreadable: {error}"


def main(folder, limit_s, exit_code):
    """The exit code."""
    rank, began_s = Rank(folder), time.monotonic()
    rank.say(f"begin {resumed_from()}")
    while not limit_s or time.monotonic() < began_s + limit_s:
        if end := rank.told("end"):
            rank.say("end")
            return int(end)
        name = rank.told("checkpoint") if rank.rank == "0" else ""
        if name and name != rank.committed:
            rank.checkpoint(name)
        time.sleep(PERIOD_S)
        rank.say("beat")
    rank.say("end")
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
