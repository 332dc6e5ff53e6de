"""Invariant 4: the register of each job is linearizable, and so is what clients are told of it.

Decided records form one chain, each with a larger stamp than the one before.  A client is told only what is decided,
and never anything older than what any client had been told before it asked.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from swarmsched.commands import JobAccepted, SubmitJob
from swarmsched.effects import Effect, ReplyToClient
from swarmsched.events import ClientCommandReceived, Event, LoopLagged
from swarmsched.ids import JobId
from swarmsched.record import JobRecord
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords, is_new_beginning
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host

Stamp = tuple[int, int]


class LinearityChecker(Checker):
    """Told states never go back."""

    EVENTS = (ClientCommandReceived, LoopLagged)
    PERFORMED = (JobAccepted,)

    def __init__(self, decided: DecidedRecords) -> None:
        self._decided = decided
        self._told: dict[JobId, list[tuple[float, Stamp]]] = {}  # virtual time and the newest stamp told by then
        self._dry: dict[tuple[str, int], None] = {}  # requests that create nothing, by machine
        self._asked_s: dict[tuple[str, int], float] = {}  # when each open request was made, at the latest
        self._stood_since: dict[str, tuple[float, float]] = {}  # machine -> (when it went on, since when it stood)
        decided.subscribe(self._decided_next)

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Note when a request was made: while the agent was paused, that may have been at any moment of the pause."""
        now_s = host.loop.now_s
        if isinstance(event, LoopLagged):
            self._stood_since[host.node_id] = (now_s, now_s - event.lag_s)
        elif isinstance(event, ClientCommandReceived):
            went_on_s, since_s = self._stood_since.get(host.node_id, (-1.0, -1.0))
            key = (host.node_id, event.request_id)
            self._asked_s[key] = since_s if went_on_s == now_s else now_s
            if isinstance(event.command, SubmitJob) and event.command.is_dry_run:
                self._dry[key] = None

    def performed(self, host: Host, effect: Effect) -> None:
        """A client is told a record."""
        assert isinstance(effect, ReplyToClient)
        reply = effect.reply
        key = (host.node_id, effect.request_id)
        asked_s = self._asked_s.pop(key, host.loop.now_s)
        if key in self._dry:
            del self._dry[key]
            return
        assert isinstance(reply, JobAccepted)
        record = reply.record
        self._decided.settle(host)
        if not self._decided.has_decided(record.job_id, record.stamp):
            last = self._decided.last(record.job_id)
            newest = "none" if last is None else f"{last.stamp}"
            raise Violation(
                4, f"{host.node_id} told a client {record.stamp} of {record.job_id}; the newest decided is {newest}"
            )
        self._compare(host, record, asked_s)

    def agent_crashed(self, host: Host) -> None:
        """Nobody answers its clients any more."""
        for book in (self._asked_s, self._dry):
            for key in [key for key in book if key[0] == host.node_id]:
                del book[key]

    def _compare(self, host: Host, record: JobRecord, asked_s: float) -> None:
        told = self._told.setdefault(record.job_id, [])
        floor = max((stamp for at_s, stamp in told if at_s < asked_s), default=(0, 0))
        if record.stamp < floor:
            raise Violation(
                4,
                f"{host.node_id} told a client {record.stamp} of {record.job_id}, "
                f"and before it asked another had been told {floor}",
            )
        if not told or record.stamp > told[-1][1]:
            told.append((host.loop.now_s, record.stamp))

    def _decided_next(self, job_id: JobId, before: JobRecord | None, after: JobRecord) -> None:
        if before is None:
            return
        is_forced = is_new_beginning(before, after)
        if after.stamp <= before.stamp or (after.version <= before.version and not is_forced):
            raise Violation(4, f"the register of {job_id} went from {_short(before)} to {_short(after)}")
        told, now = _fixed(before, is_forced=is_forced), _fixed(after, is_forced=is_forced)
        for name, value in told.items():
            if now[name] != value:
                raise Violation(4, f"{name} of {job_id} changed from {_short(before)} to {_short(after)}")


def _fixed(record: JobRecord, *, is_forced: bool) -> dict[str, object]:
    """What nothing changes, but for sizes, which people may.

    One ticket at two holders makes first records that differ in time; a forced recovery may find the other one.
    """
    fixed = {"job_id": record.job_id, "spec": replace(record.spec, ranks=0, ranks_most=0)}
    return fixed if is_forced else {**fixed, "submitted_utc_s": record.submitted_utc_s}


def _short(record: JobRecord) -> str:
    return f"{record.stamp} ({record.shepherd}, {record.state.value}, attempt {record.attempt})"
