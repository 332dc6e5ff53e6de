"""Every message of the peer channel by its kind number: the vocabulary that two agents share.

Numbers are never used again for another message.  Gossip datagrams have their own numbers (below 64).
"""

from swarmsched.gossip.exchange import STATE_MESSAGES
from swarmsched.gossip.message import MEMBERSHIP_PEER_KINDS
from swarmsched.jobs.message import AcceptAnswer, AcceptRequest, PrepareAnswer, PrepareRequest
from swarmsched.ledger.message import (
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    OwnerAnswer,
    ReleaseRequest,
    SignalRequest,
    StatusRequest,
    StopRequest,
    TaskReport,
    TaskReportReceived,
)
from swarmsched.wire.codec import Codec

PEER_KINDS: dict[int, type] = {
    **MEMBERSHIP_PEER_KINDS,
    **STATE_MESSAGES,
    64: PrepareRequest,
    65: PrepareAnswer,
    66: AcceptRequest,
    67: AcceptAnswer,
    80: HoldRequest,
    81: CommitRequest,
    82: LaunchRequest,
    83: ReleaseRequest,
    84: StopRequest,
    85: SignalRequest,
    86: StatusRequest,
    87: OwnerAnswer,
    88: TaskReport,
    89: TaskReportReceived,
}
PEER_CODEC = Codec(PEER_KINDS)

REGISTER_MESSAGES = (PrepareRequest, PrepareAnswer, AcceptRequest, AcceptAnswer)
OWNER_COMMANDS = (
    HoldRequest,
    CommitRequest,
    LaunchRequest,
    ReleaseRequest,
    StopRequest,
    SignalRequest,
    StatusRequest,
)
