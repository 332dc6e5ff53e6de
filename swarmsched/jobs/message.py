"""Plane C messages: one CASPaxos register per job (Rystsov, "CASPaxos: Replicated State Machines without logs", 2018).

A ballot is (counter, node name, generation).  Holders put promise and accepted value on disk before they answer.
"""

from dataclasses import dataclass

from swarmsched.fields import U32, U53, Job, NodeName
from swarmsched.record import JobRecord


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """Totally ordered; (0, "", 0) is below all."""

    counter: U32 = 0
    node: NodeName = ""  # type: ignore[assignment]  # the least name of all
    generation: U53 = 0


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """Promise not to accept anything below `ballot`, and say what you accepted."""

    job_id: Job
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class PrepareAnswer:
    """`is_promised` false: `promised` is the ballot that stands in the way.  The accepted pair is always told."""

    job_id: Job
    ballot: Ballot
    is_promised: bool
    promised: Ballot
    accepted_ballot: Ballot
    accepted: JobRecord | None


@dataclass(frozen=True, slots=True)
class AcceptRequest:
    """Accept `value` under `ballot`; `next_ballot` is promised along with it, so a steady proposer needs one round."""

    job_id: Job
    ballot: Ballot
    value: JobRecord
    next_ballot: Ballot


@dataclass(frozen=True, slots=True)
class AcceptAnswer:
    """`is_accepted` false: `promised` is the ballot that stands in the way."""

    job_id: Job
    ballot: Ballot
    is_accepted: bool
    promised: Ballot


RegisterMessage = PrepareRequest | PrepareAnswer | AcceptRequest | AcceptAnswer
