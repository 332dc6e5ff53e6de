"""Messages of leases and contacts.  None of them is durable, and all of them may be lost, doubled or reordered."""

from collections.abc import Iterator
from enum import Enum
from itertools import count
from typing import Annotated

from msgspec import Meta

from swarmsched.fields import U32, U53, Job, NodeName, Seconds, Value
from swarmsched.holders import Configuration
from swarmsched.task import OfAttempt

TASKS_MAX = 4_096
LIFE_BITS = 21  # two million numbers a life; a life that needs more has lasted longer than that many seconds
GENERATION_BITS = 32  # seconds since 1970 until 2106; together they fit the 53 bits of a message's number


def sequences(generation: int) -> Iterator[int]:
    """Numbers of renewals and contacts in one life, above those of all lives with a lower generation.

    An answer counts from the *sending* of what it answers, so an answer to an earlier life of this agent must find no
    sending of this life under its number.
    """
    return count((generation % 2**GENERATION_BITS) << LIFE_BITS)


class LeaseRenewal(Value):
    """Shepherd to holder, for all jobs that this life of it acts for: vote for nobody else in my place for one TTL."""

    sequence: U53
    generation: U53 = 0


class LeaseGranted(Value):
    """Holder to shepherd: from the receipt of that renewal."""

    sequence: U53


class ContactedTask(OfAttempt):
    """A task that the owner runs; `(epoch, version)` of the newest record that it knows the holders from."""

    epoch: U32
    version: U32


class OwnerContact(Value):
    """Owner to holder, every 2 s, for all tasks between the two: may they run on?"""

    sequence: U53
    tasks: Annotated[tuple[ContactedTask, ...], Meta(max_length=TASKS_MAX)]


class TaskStanding(Enum):
    """What a holder's record says of a task."""

    VALID = "valid"
    OVER = "over"  # the job has ended, or its attempt was given up
    UNKNOWN = "unknown"  # this holder has no record of the job, or holds it no more


class TaskNews(OfAttempt):
    """What the owner did not know: a standing other than valid, or a newer record's holders."""

    standing: TaskStanding
    epoch: U32 = 0
    version: U32 = 0
    configuration: Configuration = Configuration()  # frozen


class ContactAnswered(Value):
    """Holder to owner: all tasks of that contact may run on, but for what `news` says."""

    sequence: U53
    news: Annotated[tuple[TaskNews, ...], Meta(max_length=TASKS_MAX)] = ()


class SilenceRequest(Value):
    """Shepherd to holder: for how long has that task heard no yes, and have you my record `(epoch, version)`?"""

    job_id: Job
    attempt: U32
    owner: NodeName
    epoch: U32
    version: U32


class SilenceAnswer(Value):
    """Holder to shepherd.  `silent_s`: since this holder last let the task run on, or since its own start if it never
    did.  It proves something only with `has_record`, for only then the holder will never let it run on again."""

    job_id: Job
    attempt: U32
    owner: NodeName
    epoch: U32
    version: U32
    has_record: bool
    silent_s: Seconds
