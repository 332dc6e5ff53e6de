"""Errors of the core, split by who is to blame.

    SwarmError
        ConfigError            what is wrong, in which key, what would be accepted
        ProtocolError          peer, message kind
            LocalProtocolError     our own code broke the rules: a bug
            RemoteProtocolError    the peer did: drop, count, carry on
        InvalidTransition      object, state, event
        StorageError           a stored file that cannot be used, and what to do about it
        JobError               job id
            UnknownJob
            JobRejected        reasons, one per field
        CapacityError          what was asked, what there is
        AgentUnreachable       addresses tried, last cause (client side)

Expected outcomes are values, not exceptions: a refused hold is an `OwnerAnswer` with a `Refusal`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class SwarmError(Exception):
    """Base of all errors; `code` is stable, `str()` is the sentence and `remedy` says what to do next."""

    code = "internal"
    remedy = ""


class ConfigError(SwarmError):
    """A setting that cannot be used; nothing was changed."""

    code = "bad_config"

    def __init__(self, key: str, problem: str, remedy: str = "") -> None:
        self.key, self.problem, self.remedy = key, problem, remedy
        super().__init__(f"{key}: {problem}")


class ProtocolError(SwarmError):
    """A message that breaks the protocol."""

    code = "protocol"

    def __init__(self, problem: str, *, kind: str = "", peer: str = "") -> None:
        self.problem, self.kind, self.peer = problem, kind, peer
        where = " ".join(part for part in (kind, f"from {peer}" if peer else "") if part)
        super().__init__(f"{where}: {problem}" if where else problem)


class LocalProtocolError(ProtocolError):
    """Our own code tried to send or do what the protocol forbids: a bug."""


class RemoteProtocolError(ProtocolError):
    """A peer sent what the protocol forbids; the message was dropped and no state changed."""


class InvalidTransition(SwarmError):
    """A life cycle has no such edge; the object is unchanged."""

    code = "invalid_transition"

    def __init__(self, subject: str, state: str, event: str) -> None:
        self.subject, self.state, self.event = subject, state, event
        super().__init__(f"{subject}: no transition from {state} on {event}")


class StorageError(SwarmError):
    """A database or file that cannot be used as it is; it was left untouched.

    The core names an entry as its path, and knows no remedy for one that is damaged: who owns the file adds both.
    """

    code = "storage"

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        self.path, self.problem, self.remedy = path, problem, remedy
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One thing wrong with a request: where (JSON pointer), what, what to do, and the stable code."""

    pointer: str
    problem: str
    remedy: str = ""


class JobError(SwarmError):
    """Something about one job."""

    code = "job"

    def __init__(self, job_id: str, problem: str) -> None:
        self.job_id, self.problem = job_id, problem
        super().__init__(f"job {job_id}: {problem}" if job_id else problem)


class UnknownJob(JobError):
    """No agent that answered knows the job."""

    code = "unknown_job"

    def __init__(self, job_id: str, silent_nodes: Sequence[str] = ()) -> None:
        self.silent_nodes = tuple(silent_nodes)
        silent = f"; {', '.join(silent_nodes)} did not answer" if silent_nodes else ""
        super().__init__(job_id, f"no such job{silent}")


class JobRejected(JobError):
    """The request cannot become a job; nothing was stored."""

    code = "job_rejected"

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("", "; ".join(f"{p.pointer.lstrip('/') or 'job'}: {p.problem}" for p in problems))
        self.remedy = "; ".join(p.remedy for p in problems if p.remedy)


class CapacityError(SwarmError):
    """More was asked than the swarm has ever had."""

    code = "impossible_request"

    def __init__(self, asked: str, available: str) -> None:
        self.asked, self.available = asked, available
        super().__init__(f"asked for {asked}; the swarm has {available}")


class AgentUnreachable(SwarmError):
    """No configured agent answered."""

    code = "unreachable"

    def __init__(self, addresses: Sequence[str], cause: str) -> None:
        self.addresses, self.cause = tuple(addresses), cause
        super().__init__(f"no agent answered at {', '.join(addresses) or '(no address known)'}: {cause}")
