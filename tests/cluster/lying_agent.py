"""An agent with the right key whose register tells others nonsense: `python lying_agent.py LIE OPTIONS-OF-SWARM-AGENT`.

It joins, holds records and is asked like any other; only its answers to register messages are spoilt on their way out.
"""

import os
import random
import sys

from msgspec.structs import replace

from swarm_agent.__main__ import main
from swarmsched.ids import NodeId, make_job_id
from swarmsched.jobs.message import AcceptAnswer, Ballot, PrepareAnswer
from swarmsched.jobs.proposer import COUNTER_MAX
from swarmsched.wire.codec import Codec

ANSWERS = (PrepareAnswer, AcceptAnswer)
encode = Codec.encode


def random_bytes(codec, answer):
    return os.urandom(200)


def truncated(codec, answer):
    return encode(codec, answer)[:-3]


def of_another_job(codec, answer):
    return encode(codec, replace(answer, job_id=make_job_id(1.7e9, random.Random(7))))


def of_another_store(codec, answer):
    return encode(codec, replace(answer, store=answer.store + 1))


def contradictory(codec, answer):
    """Yes to a ballot, and a promise or a record that forbid it."""
    if isinstance(answer, AcceptAnswer):
        return encode(codec, replace(answer, is_accepted=True, promised=Ballot()))
    return encode(codec, replace(answer, is_promised=True, accepted_ballot=Ballot(7, NodeId("n3"), 1), accepted=None))


def endless_ballots(codec, answer):
    no = "is_accepted" if isinstance(answer, AcceptAnswer) else "is_promised"
    return encode(codec, replace(answer, **{no: False, "promised": Ballot(COUNTER_MAX + 1, NodeId("n3"), 1)}))


def refusing(codec, answer):
    """No to everything, with the very ballot that it was asked about."""
    no = "is_accepted" if isinstance(answer, AcceptAnswer) else "is_promised"
    return encode(codec, replace(answer, **{no: False, "promised": answer.ballot}))


LIES = (random_bytes, truncated, of_another_job, of_another_store, contradictory, endless_ballots, refusing)


def lie_with(name):
    """Spoil every answer of this process from now on."""
    spoil = next(lie for lie in LIES if lie.__name__ == name)
    Codec.encode = lambda self, message: (spoil if isinstance(message, ANSWERS) else encode)(self, message)


if __name__ == "__main__":
    lie_with(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
