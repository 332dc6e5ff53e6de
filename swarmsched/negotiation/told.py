"""What a shepherd is told of its job, as values: each is taken by `JobShepherd.step` and by nothing else.

Words of peers (`PeerMessageReceived`, `PeerSendFailed`), the register's (`UpdateDecided` and its like) and time's
(`TimerFired`) come as the node hears them; those below are what other machines of the node see, decide and wish.
"""

from collections.abc import Collection

from swarmsched.api import JobSpec
from swarmsched.fields import Value
from swarmsched.holders import Holders
from swarmsched.ids import NodeId
from swarmsched.ledger.message import PreemptRequest
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.claiming import Shares, Victims
from swarmsched.view import Allocation

# Its life under this shepherd.


class FirstWritten(Value):
    """The job's first record is durable."""


class TakenUp(Value):
    """The register has made this node its shepherd: go on from whatever its record says."""

    lost_nodes: Collection[NodeId]


class SteppedDown(Value):
    """This node acts for it no more: nobody here will answer those who wait."""


# Nodes of its gang.


class NodeSilent(Value):
    """A node is believed failed; its ranks may well run on."""

    node: NodeId


class NodeReturned(Value):
    """A node is back, perhaps without its memory."""

    node: NodeId


class NodeLost(Value):
    """A node is believed to be gone for good; to be told again for as long as that is believed."""

    node: NodeId


class LossDeclared(Value):
    """An operator vouches for it that nothing is left on the nodes that do not answer."""


class FilesLooked(Value):
    """The files that the job ships can be had, or no agent that can be reached has them; the latter is told again."""

    is_away: bool


# What placement decides.


class StartWished(Value):
    """A job that waits is to try these nodes, with that batch (0: the one of before)."""

    shares: Shares
    ranking: Ranking
    global_batch: int = 0


class ChangeWished(Value):
    """A job that runs is to go on there: while it trains, those of `leave` going first of all, or by another attempt.

    Newcomers are not called slow for `spared_s`.
    """

    target: Allocation
    reason: str
    ranking: Ranking
    leave: Collection[int] = ()
    spared_s: float = 0.0


class BatchWished(Value):
    """A job's ranks are to go on with another batch; they are told in answer to what they report."""

    global_batch: int
    reason: str


class ClaimWished(Value):
    """A job that waits is to have these places kept, and the victims are to make room for it."""

    shares: Shares
    victims: Victims
    ranking: Ranking
    starts_within_s: float


class VictimsLeft(Value):
    """Nobody has anything any more that was to make room for it."""


class ClaimUnwanted(Value):
    """No place is to be kept any more, if any is; people hear why, where something is to be said."""

    why: str = ""


class NextPlaceTried(Value):
    """The place where it was to go on has had its turn."""


class MakeRoom(Value):
    """Another job wants its place; `refusal` is the policy's reason why not, by this node's own figures."""

    request: PreemptRequest
    refusal: str


# What people and holders want.


class AnswerWished(Value):
    """A client is to be told the record, after the updates under way."""

    request_id: int
    was_known: bool = False


class StopAsked(Value):
    """A user wants it to end, and to be told once that is durable; a shorter grace shortens the wait."""

    request_id: int
    grace_s: float | None
    reason: str


class SizeAsked(Value):
    """People want it to have other numbers of ranks; the caller has checked that it may."""

    request_id: int
    spec: JobSpec


class SignalAsked(Value):
    """Each of its ranks is to get a signal."""

    request_id: int
    signal: int


class HoldersWished(Value):
    """A job's holders are to be exchanged, in two updates."""

    holders: Holders
    leaving: Holders


class SuccessorWished(Value):
    """Another holder is to be its shepherd, as soon as it sees the record."""

    successor: NodeId
