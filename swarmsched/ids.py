"""Identifiers: nodes by name, jobs by a 128-bit id that any agent makes without asking another.

A job id is 26 characters of Crockford base 32, lower case: 10 for 48 bits of milliseconds since 1970 and 16 for 80
random bits.  The *handle* shown to people is the first eight characters of the random part, because the time part is
the same for all jobs of a quarter of a second.
"""

import hashlib
import random
import re
from typing import NamedTuple, NewType

NodeId = NewType("NodeId", str)
"""A node's configured name: 1 to 63 characters, letters, digits, '-', '_' and '.'."""

JobId = NewType("JobId", str)
"""Full job id, 26 characters."""


class AttemptKey(NamedTuple):
    """One attempt of a job to run, whole: what its holders let run on, and what its checkpoints and reports are of."""

    job_id: JobId
    attempt: int


class TaskKey(NamedTuple):
    """A job's part on one node, and the booking that it needs there.

    `part` is 0 in a gang of fixed size, which has one part on each of its nodes.  Parts of an elastic one are numbered
    from 1 as they come, over all nodes; a number is never used again in that attempt.
    """

    job_id: JobId
    attempt: int
    part: int = 0

    def __str__(self) -> str:
        """As entries on disk are named: JOB/ATTEMPT, and /PART where there are several."""
        return f"{self.job_id}/{self.attempt}" + (f"/{self.part}" if self.part else "")

    @classmethod
    def read(cls, name: str) -> "TaskKey":
        """From such a name."""
        job_id, attempt, *part = name.split("/")
        return cls(JobId(job_id), int(attempt), *map(int, part))

    @property
    def of_attempt(self) -> AttemptKey:
        """The attempt that it is a part of."""
        return AttemptKey(self.job_id, self.attempt)


class Place(NamedTuple):
    """Where a part of a gang is; the key of its task without job and attempt."""

    node: NodeId
    part: int = 0


Address = tuple[str, int]
"""(IP address, port) of an agent; UDP and TCP share the number."""


def address_text(address: Address) -> str:
    """`HOST:PORT`, IPv6 in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
JOB_ID_LENGTH = 26
TIME_LENGTH = 10
HANDLE_LENGTH = 8

ORIGIN_BYTES = 6

_NODE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_JOB_ID = re.compile(rf"[{CROCKFORD}]{{{JOB_ID_LENGTH}}}")


def make_job_id(now_utc_s: float, rng: random.Random) -> JobId:
    """A new id from the wall clock (seconds since 1970, for display and sorting only) and a generator."""
    milliseconds = int(now_utc_s * 1000) & ((1 << 48) - 1)
    return JobId(_base32(milliseconds, TIME_LENGTH) + _base32(rng.getrandbits(80), JOB_ID_LENGTH - TIME_LENGTH))


def handle(job_id: JobId) -> str:
    """The eight characters that people type."""
    return job_id[TIME_LENGTH : TIME_LENGTH + HANDLE_LENGTH]


def matches_prefix(job_id: JobId, prefix: str) -> bool:
    """True when `prefix` begins the full id or its random part (that is, the handle)."""
    lowered = prefix.lower()
    return bool(lowered) and (job_id.startswith(lowered) or job_id[TIME_LENGTH:].startswith(lowered))


def origin_of(address: Address) -> int:
    """48 bits that tell where an agent is: of two machines with one name, each answers from a place of its own."""
    host, port = address
    return int.from_bytes(hashlib.blake2b(f"{host} {port}".encode(), digest_size=ORIGIN_BYTES).digest())


def is_job_id(text: str) -> bool:
    """True for a well-formed full job id."""
    return _JOB_ID.fullmatch(text) is not None


def is_node_name(text: str) -> bool:
    """True for a name that a node may carry."""
    return _NODE_NAME.fullmatch(text) is not None


def _base32(value: int, length: int) -> str:
    digits = []
    for _ in range(length):
        digits.append(CROCKFORD[value & 31])
        value >>= 5
    return "".join(reversed(digits))
