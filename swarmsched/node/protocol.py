"""Every message of the peer channel by its kind number: the vocabulary that two agents share.

Numbers are never used again for another message.  Gossip datagrams have their own numbers (below 64).
"""

from swarmsched.aggregation.message import (
    AggregationHosted,
    AggregationLease,
    AggregationMove,
    AggregationQuote,
    AggregationQuoted,
    AggregationRelease,
    AggregationRenewal,
)
from swarmsched.authority.message import (
    ContactAnswered,
    LeaseGranted,
    LeaseRenewal,
    OwnerContact,
    SilenceAnswer,
    SilenceRequest,
)
from swarmsched.gossip.exchange import STATE_MESSAGES
from swarmsched.gossip.message import MEMBERSHIP_PEER_KINDS, StreamPing, StreamPong
from swarmsched.jobs.message import AcceptAnswer, AcceptRequest, EndDecided, PrepareAnswer, PrepareRequest
from swarmsched.ledger.message import (
    CheckpointAnswer,
    CheckpointRequest,
    ClaimRequest,
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    Opening,
    OwnerAnswer,
    PreemptAnswer,
    PreemptRequest,
    ReleaseRequest,
    SignalRequest,
    StatusRequest,
    StopRequest,
    TaskBatch,
    TaskEstimate,
    TaskReport,
    TaskReportReceived,
    WorldRequest,
    YieldRequest,
)
from swarmsched.wire.codec import Codec

PEER_KINDS: dict[int, type] = {
    **MEMBERSHIP_PEER_KINDS,
    **STATE_MESSAGES,
    64: PrepareRequest,
    65: PrepareAnswer,
    66: AcceptRequest,
    67: AcceptAnswer,
    68: EndDecided,
    70: LeaseRenewal,
    71: LeaseGranted,
    72: OwnerContact,
    73: ContactAnswered,
    74: SilenceRequest,
    75: SilenceAnswer,
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
    90: CheckpointRequest,
    91: CheckpointAnswer,
    92: ClaimRequest,
    93: PreemptRequest,
    94: PreemptAnswer,
    95: YieldRequest,
    96: Opening,
    97: TaskEstimate,
    98: TaskBatch,
    99: WorldRequest,
    100: AggregationQuote,
    101: AggregationQuoted,
    102: AggregationLease,
    103: AggregationHosted,
    104: AggregationRenewal,
    105: AggregationRelease,
    106: AggregationMove,
}
PEER_CODEC = Codec(PEER_KINDS)

URGENT_MESSAGES = (LeaseRenewal, LeaseGranted, OwnerContact, ContactAnswered, StreamPing, StreamPong)
"""What says that a node lives and may act: it passes whatever else waits, at both ends."""
UNBARRED_MESSAGES = (LeaseRenewal, LeaseGranted, OwnerContact, StreamPing, StreamPong)
"""What rests on nothing that a disk holds, and so does not wait for one.  The answer to a contact does: it may say no
for the sake of a record."""
