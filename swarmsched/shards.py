"""Shards as the scheduler knows them: ranges of the parameters that jobs train, and what they cost their hosts."""

from swarmsched.fields import U53, Amount, Value


class ShardLoad(Value):
    """What a shard takes of its host: memory always, the rest in a burst each `period_s`."""

    cpu_s: Amount
    link_bytes: Amount  # both ways
    period_s: Amount
    memory_bytes: U53 = 0
    is_measured: bool = False

    @property
    def cores(self) -> float:
        """On average."""
        return self.cpu_s / self.period_s

    @property
    def link_bytes_per_s(self) -> float:
        """On average."""
        return self.link_bytes / self.period_s
