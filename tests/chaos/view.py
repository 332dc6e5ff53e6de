"""A swarm as its users see it: agents that answer, jobs that were submitted, and what the ranks write.

All of it lies in one folder, so that the process of a test and the checker's see the same:

    token                   what agents ask of whom they answer
    NAME/up                 there while that agent should answer
    submitted               ids of the jobs that the test submitted, one a line
    beats/JOB.RANK          what ranks wrote, see `beat.py`
"""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmsched.errors import AgentUnreachable
from tests.agent.testing import AgentApi, wait_until_sync
from tests.chaos.history import Beat, read_beats

BEATS = "beats"
BEAT = Path(__file__).with_name("beat.py")
TICKET_KEYS = ("job_id", "holders", "stores")


@dataclass
class View:
    """Agents by name, n1 first, and the folder that all of the swarm lies in."""

    folder: Path
    agents: Mapping[str, AgentApi]

    @property
    def beats_dir(self) -> Path:
        """Where all ranks write to."""
        return self.folder / BEATS

    @property
    def submitted(self) -> list[str]:
        """Jobs that the test submitted."""
        path = self.folder / "submitted"
        return path.read_text().split() if path.exists() else []

    def note(self, job: str) -> None:
        """Let the checker know of a job."""
        with (self.folder / "submitted").open("a") as stream:
            stream.write(f"{job}\n")

    def answering(self) -> list[AgentApi]:
        """Agents that should answer."""
        return [agent for name, agent in self.agents.items() if up_file(self.folder, name).exists()]

    def beats(self, job: str) -> list[Beat]:
        """All that the job's ranks have written so far, in the order of time."""
        return read_beats(self.beats_dir, job)

    def attempts(self, job: str) -> set[int]:
        """Attempts that have written."""
        return {beat.attempt for beat in self.beats(job)}

    def document(self, job: str, *via: str) -> dict[str, Any]:
        """The job as the first of these agents that answers (all that are up, if none is named) tells it."""
        agents = [self.agents[name] for name in via] or self.answering()
        for agent in agents[:-1]:
            with contextlib.suppress(AgentUnreachable):
                status, document = agent.call("GET", f"/v1/jobs/{job}", timeout_s=5)
                if status == 200:
                    return dict(document)
        return dict(agents[-1].get(f"/v1/jobs/{job}", timeout_s=15))

    def wait_ended(self, job: str, timeout_s: float = 30.0) -> dict[str, Any]:
        """The document of the job once all agents that are up say that it has ended."""

        def is_ended() -> bool:
            return all(self.document(job, agent.name).get("state") == "ended" for agent in self.answering())

        wait_until_sync(is_ended, timeout_s, f"{job} has ended for all")
        return self.document(job)


def up_file(folder: Path, name: str) -> Path:
    """There while the agent of that name should answer."""
    return folder / name / "up"


def beat_command(folder: Path, limit_s: float = 0, exit_code: int = 0) -> list[str]:
    """The command of a beating rank."""
    return [sys.executable, "-I", "-S", str(BEAT), str(folder), str(limit_s), str(exit_code)]
