"""What agents tell one another of hosted shards: who asks for one (its broker) and who gives the room (its lender).

None of it is durable.  A lease is known by its range and its number; only its broker gives numbers, so a range has one
lease that is meant, and whatever else is left of earlier ones ends when nobody renews it.  Agents of versions that
know none of this offer nothing in their records, and are sent nothing.
"""

from typing import Annotated

from msgspec import Meta

from swarmsched.fields import I32, U16, U53, Amount, NodeName, Text, Value
from swarmsched.ids import NodeId
from swarmsched.shards import AggregatorPlace, LeaseNumber, RangeKey, ShardLoad, ShardOrder

LEASES_MOST = 512


class LeaseName(Value):
    """One lease of a range."""

    key: RangeKey
    number: LeaseNumber


LeaseNames = Annotated[tuple[LeaseName, ...], Meta(max_length=LEASES_MOST)]


class AggregationQuote(Value):
    """Broker to a lender: keep room for this for 5 s, if so much is left idle that it ranks above `(idle, node)`."""

    lease: LeaseName
    plan: tuple[U53, U53]
    load: ShardLoad
    above_idle: I32 = -1  # in thousandths
    above_node: NodeName = NodeId("")


class AggregationQuoted(Value):
    """Lender to broker: kept, with so much left idle then and waits as long as that; or why not."""

    lease: LeaseName
    refusal: Text = ""
    idle: U16 = 0  # in thousandths
    wait_s: Amount = 0.0


class AggregationLease(Value):
    """Broker to a lender: host it, in the room that was kept; also where the order has another plan."""

    lease: LeaseName
    order: ShardOrder
    load: ShardLoad


class HostedShard(Value):
    """How a lender says that a leased shard is."""

    lease: LeaseName
    load: ShardLoad
    version: U53 = 0
    wait_s: Amount = 0.0


class AggregationHosted(Value):
    """Lender to broker: these are leased and will be found there; of the `lost` ones it knows nothing."""

    place: AggregatorPlace
    shards: Annotated[tuple[HostedShard, ...], Meta(max_length=LEASES_MOST)] = ()
    lost: LeaseNames = ()


class AggregationRenewal(Value):
    """Broker to a lender: these are still wanted."""

    leases: LeaseNames


class AggregationRelease(Value):
    """Broker to a lender: these are not wanted any more."""

    leases: LeaseNames


class AggregationMove(Value):
    """Lender to broker: have it hosted elsewhere, by who ranks above `(idle, node)`; it stays until that is done."""

    lease: LeaseName
    idle: I32  # in thousandths
