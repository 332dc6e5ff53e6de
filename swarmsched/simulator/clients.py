"""Users of a simulated swarm: they do the planned work the way the client library does it.

A submit asks any agent for a ticket, gives the ticket to one of its holders, and repeats it at the next one until
somebody has accepted it or refused it for good.  Answers may get lost on the way to the user.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarmsched.api import EndReason, JobSpec
from swarmsched.commands import (
    CancelJob,
    Command,
    CreateTicket,
    JobAccepted,
    MigrateJob,
    RecoverJob,
    Refused,
    ScaleJob,
    SetSwarmSetting,
    SubmitJob,
    TicketIssued,
)
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import Free, counted, ranks_that_fit
from swarmsched.simulator.host import Host
from swarmsched.simulator.swarm import SimulatedSwarm
from swarmsched.simulator.workload import Work, WorkPlan, ends_of, spec_of
from swarmsched.view import Elasticity, PolicySetting

ANSWER_S = 3.0  # then the user asks somebody else
AGAIN_S = 1.0  # after an answer that says: try again
CANCELS_MAX = 30  # repeats of one cancel
RECOVER_S = 3.0  # between two looks of an operator at jobs that nobody can decide about
TRY_AGAIN = ("not_ready", "unavailable")

OnReply = Callable[[object], None]


@dataclass(slots=True)
class UserJob:
    """One job as its user sees it."""

    spec: JobSpec
    node: NodeId  # which its user asks first
    may_end: tuple[EndReason, ...] = (EndReason.COMPLETED,)  # if nobody cancels it
    copies: int = 0  # of the request, to several holders at once
    ticket: TicketIssued | None = None
    tries: int = 0
    answers_to_lose: int = 0
    accepted_s: float = math.inf  # virtual time at which the user knew
    refusal: Refused | None = None
    wants_cancel: bool = False
    cancelled: bool = False
    ranks_asked: int = 0  # the most that people wanted it to have at least, later

    def refuse(self, refusal: Refused) -> None:
        """The user is told that the swarm does not take the job."""
        self.refusal = refusal

    @property
    def job_id(self) -> JobId | None:
        """Known once there is a ticket."""
        return self.ticket.job_id if self.ticket is not None else None

    @property
    def is_accepted(self) -> bool:
        """True once the user has read that the job will run."""
        return not math.isinf(self.accepted_s)

    @property
    def is_settled(self) -> bool:
        """True when the user asks no more."""
        return self.is_accepted or self.refusal is not None


class Users:
    """All users.  They reach every agent that is up, whatever the network between agents is like."""

    def __init__(self, swarm: SimulatedSwarm) -> None:
        self._swarm = swarm
        self._loop = swarm.loop
        self._waiting: dict[int, OnReply] = {}
        self._last_request_id = 0
        self._planned_count = 0
        self._is_closed = False
        self.submissions: dict[int, UserJob] = {}
        for host in swarm.hosts.values():
            host.on_reply = self._replied

    def schedule(self, plan: WorkPlan) -> None:
        """All of it will be done at its time."""
        self._planned_count += len(plan)
        for work in plan:
            self._loop.post_at(work.at_s, self._begin, work)

    @property
    def is_idle(self) -> bool:
        """True when everything planned was done, or the users have gone home."""
        return self._is_closed or not self._planned_count

    def close(self) -> None:
        """Users go home: they give up what has not been accepted, and ask for the end of every other job.

        The others, if they end by themselves, are left to themselves: a cancel would hide that one stands still.
        """
        self._is_closed = True
        for number, submission in self.submissions.items():
            is_long = bool(submission.spec.time_limit_s) or self._is_avoided(submission)
            if number % 2 or is_long or not submission.is_accepted or not self._can_run(submission):
                self._cancel(submission, 0.0, CANCELS_MAX)

    def _is_avoided(self, submission: UserJob) -> bool:
        """True where a start that fails keeps it, and all behind it, from the only machine for a minute."""
        return submission.spec.command[0] == "no-shim" and len(self._swarm.up) == 1

    def _can_run(self, submission: UserJob) -> bool:
        """True while the machines that are up are enough for it, and for what was asked for it later."""
        spec = submission.spec
        hosts = [host for host in self._swarm.up if not (host.is_witness or host.node_id in spec.exclude)]
        offered = [host.resources for host in hosts if not spec.nodes or host.node_id in spec.nodes]
        free = [Free(counted(each.gpus), each.cpu_count, each.memory_bytes) for each in offered]
        return sum(ranks_that_fit(each, spec.demand) for each in free) >= max(spec.ranks, submission.ranks_asked)

    def ends(self) -> dict[JobId, tuple[EndReason, ...]]:
        """How each accepted job may end for which nobody has asked for a cancel."""
        left = [each for each in self.submissions.values() if each.is_accepted and not each.wants_cancel]
        return {each.job_id: each.may_end for each in left if each.job_id is not None}

    def _begin(self, work: Work) -> None:
        self._planned_count -= 1
        if work.kind == "submit":
            parameters = work.parameters
            lost, copies = parameters["answers_lost"], parameters["copies"]
            spec, node = spec_of(parameters), parameters["node"]
            submission = UserJob(spec, node, ends_of(parameters), copies, answers_to_lose=lost)
            self.submit(parameters["job"], submission)
            return
        if work.kind == "policy":
            name, parameters = work.parameters["policy"], work.parameters["parameters"]
            setting = PolicySetting(name, parameters, Elasticity(work.parameters["elasticity"]))
            self._ask(self._nearest(work.parameters["node"]), SetSwarmSetting(setting))
            return
        if work.kind == "recover":
            self._recover()
            return
        known = self.submissions.get(work.parameters["job"])
        if known is None or known.ticket is None:
            return
        if work.kind == "repeat":
            self._give(known, known.ticket)
        elif work.kind == "cancel":
            self._cancel(known, work.parameters["grace_s"], CANCELS_MAX)
        else:
            self._change(known, known.ticket.job_id, work)

    # --- submits

    def submit(self, number: int, submission: UserJob) -> None:
        """Have a job accepted, whatever happens to agents and answers."""
        self.submissions[number] = submission
        self._ask_for_ticket(submission)

    def _ask_for_ticket(self, submission: UserJob) -> None:
        def heard(reply: object) -> None:
            if submission.ticket is not None or self._is_closed:
                return
            if isinstance(reply, TicketIssued):
                submission.ticket = reply
                for _ in range(1 + submission.copies):
                    self._give(submission, reply)
                self._loop.post_later(ANSWER_S, self._insist, submission, reply)
            else:
                self._loop.post_later(AGAIN_S, self._ask_for_ticket, submission)

        self._ask(self._nearest(submission.node), CreateTicket(), heard)

    def _insist(self, submission: UserJob, ticket: TicketIssued) -> None:
        """No answer yet: the next holder is asked."""
        if not submission.is_settled and not self._is_closed:
            self._give(submission, ticket)
            self._loop.post_later(ANSWER_S, self._insist, submission, ticket)

    def _give(self, submission: UserJob, ticket: TicketIssued) -> None:
        holder = ticket.holders[submission.tries % len(ticket.holders)]
        submission.tries += 1

        def heard(reply: object) -> None:
            if isinstance(reply, JobAccepted):
                self._accepted(submission)
            elif isinstance(reply, Refused) and reply.code not in TRY_AGAIN and not submission.is_settled:
                submission.refuse(reply)

        self._ask(self._swarm.hosts[holder.node], SubmitJob(ticket.job_id, ticket.holders, submission.spec), heard)

    def _accepted(self, submission: UserJob) -> None:
        if submission.answers_to_lose > 0:
            submission.answers_to_lose -= 1
        elif not submission.is_accepted:
            submission.accepted_s = self._loop.now_s

    # --- cancels

    def _cancel(self, submission: UserJob, grace_s: float, tries: int) -> None:
        """Ask the shepherd, wherever it is by now, until it says that it heard."""
        job_id = submission.job_id
        if job_id is None or submission.cancelled or not tries:
            return
        submission.wants_cancel = True

        def heard(reply: object) -> None:
            submission.cancelled = submission.cancelled or isinstance(reply, JobAccepted)

        shepherd = next((host for host in self._swarm.up if host.node and host.node.is_shepherd(job_id)), None)
        if shepherd is not None:
            self._ask(shepherd, CancelJob(job_id, grace_s, "the user asked"), heard)
        self._loop.post_later(ANSWER_S, self._cancel, submission, grace_s, tries - 1)

    # --- other sizes and other hosts

    def _change(self, known: UserJob, job_id: JobId, work: Work) -> None:
        """Asked once: it may be refused."""
        wanted = work.parameters
        scale = work.kind == "scale" and ScaleJob(job_id, wanted["ranks"], wanted["ranks_most"])
        if scale:
            known.ranks_asked = max(known.ranks_asked, scale.ranks)
        shepherd = next((host for host in self._swarm.up if host.node and host.node.is_shepherd(job_id)), None)
        if shepherd is not None:
            self._ask(shepherd, scale or MigrateJob(job_id, avoid=tuple(wanted["avoid"])))

    # --- recovery

    def _recover(self) -> None:
        """An operator who knows which stores are gone for good has their jobs go on without them, one after another."""
        for submission in self.submissions.values():
            job_id = submission.job_id
            holder = None if job_id is None else self._survivor(job_id)
            if job_id is not None and holder is not None:
                self._ask(holder, RecoverJob(job_id))
                self._cancel_again(submission)
        self._loop.post_later(RECOVER_S, self._recover)

    def _cancel_again(self, submission: UserJob) -> None:
        """What the user was told may be lost with those holders, and the job comes back as if nobody had asked."""
        if submission.cancelled:
            submission.cancelled = False
            self._cancel(submission, 0.0, CANCELS_MAX)

    def _survivor(self, job_id: JobId) -> Host | None:
        """Who has the newest record of a job that has lost a majority of its holders; None for one that has not."""
        known = [(host.node.record(job_id), host) for host in self._swarm.up if host.node is not None]
        found = [(record.stamp, host.node_id, record, host) for record, host in known if record is not None]
        if not found:
            return None
        _, _, record, host = max(found, key=lambda each: each[:2])
        is_stuck = not record.is_ended and not record.configuration.is_quorum(
            self._stores(record.configuration.members)
        )
        return host if is_stuck else None

    def _stores(self, holders: Iterable[Holder]) -> list[Holder]:
        """Those that exist, up or down."""
        hosts = self._swarm.hosts
        return [
            each for each in holders if each.store == hosts[each.node].storage.store_id and not hosts[each.node].is_lost
        ]

    # --- asking

    def _nearest(self, node: NodeId) -> Host:
        """That machine, or the next one of which the agent is up."""
        hosts = list(self._swarm.hosts.values())
        first = next(n for n, host in enumerate(hosts) if host.node_id == node)
        around = [*hosts[first:], *hosts[:first]]
        return next((host for host in around if host.is_up), around[0])

    def _ask(self, host: Host, command: Command, heard: OnReply = lambda reply: None) -> None:
        """An agent that is down, or dies before it answers, looks like one that answers `unavailable`."""
        self._last_request_id += 1
        request_id = self._last_request_id
        self._waiting[request_id] = heard
        if host.is_up:
            host.command(request_id, command)
        self._loop.post_later(ANSWER_S, self._replied, request_id, Refused("unavailable", "no answer"))

    def _replied(self, request_id: int, reply: object) -> None:
        heard = self._waiting.pop(request_id, None)
        if heard is not None:
            heard(reply)
