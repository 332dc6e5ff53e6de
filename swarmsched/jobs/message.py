"""Plane C messages: one CASPaxos register per job (Rystsov, "CASPaxos: Replicated State Machines without logs", 2018).

A ballot is (counter, node name, generation).  Holders put promise and accepted value on disk before they answer.
Every request names the store that is meant, and every answer the one that answers: a machine that lost its disk is
another holder and must not vote in the place of the one that it was.
"""

from swarmsched.fields import U32, U53, Job, NodeName, Value
from swarmsched.record import JobRecord


class Ballot(Value, order=True):
    """Totally ordered; (0, "", 0) is below all."""

    counter: U32 = 0
    node: NodeName = ""  # type: ignore[assignment]  # the least name of all
    generation: U53 = 0


class PrepareRequest(Value):
    """Promise not to accept anything below `ballot`, and say what you accepted.  The counter is 2 or more."""

    job_id: Job
    ballot: Ballot
    store: U53 = 0  # of the holder that is meant
    takes_over: bool = False  # for a change of shepherd: a vote, which a running lease forbids


class PrepareAnswer(Value):
    """Where `is_promised` is false, `promised` is the ballot that stands in the way. If it is not above `ballot`, the
    lease of the accepted record's shepherd does. The accepted pair is always told."""

    job_id: Job
    ballot: Ballot
    is_promised: bool
    promised: Ballot
    accepted_ballot: Ballot
    accepted: JobRecord | None
    store: U53 = 0  # of the holder that answers
    is_over: bool = False  # the job's end was decided, and its record is past its retention here: no vote, ever


class AcceptRequest(Value):
    """Accept `value` under `ballot`; `next_ballot` is promised along with it, so a steady proposer needs one round.

    Counter 1 is for a first record alone, and belongs to the first of its holders; see `proposer`.
    """

    job_id: Job
    ballot: Ballot
    value: JobRecord
    next_ballot: Ballot
    store: U53 = 0


class AcceptAnswer(Value):
    """`is_accepted` false: `promised` is the ballot that stands in the way."""

    job_id: Job
    ballot: Ballot
    is_accepted: bool
    promised: Ballot
    store: U53 = 0
    is_over: bool = False  # as in `PrepareAnswer`


class EndDecided(Value):
    """To a holder, once: the end of the job that was accepted under `ballot` is decided.

    Without it a holder has to ask before it may drop the record, so it may be lost.
    """

    job_id: Job
    ballot: Ballot
    store: U53 = 0  # of the holder that is meant


RegisterMessage = PrepareRequest | PrepareAnswer | AcceptRequest | AcceptAnswer | EndDecided
