"""Agents that fall behind for a while: what they begin meanwhile must not keep them there when they could go on.

Jobs without GPUs fit at any time, so nothing but the agents' own restraint limits what is begun at once.
"""

from collections import Counter

from swarmsched.api import JobSpec
from swarmsched.commands import CreateTicket, JobAccepted, SubmitJob, TicketIssued
from swarmsched.effects import Announce
from swarmsched.simulator.observer import Observer
from swarmsched.simulator.swarm import SimulatedSwarm

EVENT_S, DISTURBED_EVENT_S = 0.004, 0.04
DISTURBED_S, BACK_S = 40.0, 60.0
JOBS, AT_ONCE = 200, 60


class Announced(Observer):
    """How often what was announced."""

    def __init__(self):
        self.counts = Counter()

    def stepped(self, host, event, effects):
        pass

    def performed(self, host, effect):
        if isinstance(effect, Announce):
            self.counts[effect.kind] += 1


class Clients:
    """Each submits jobs one after the other at an agent of its own, as long as there are any."""

    def __init__(self, swarm, jobs, at_once):
        self.left, self.accepted, self._asked = jobs, [], 0
        hosts = list(swarm.hosts.values())
        for host in hosts:
            host.on_reply = lambda _id, reply, host=host: self._answered(host, reply)
        for number in range(at_once):
            self._next(hosts[number % len(hosts)])

    def _next(self, host):
        if self.left:
            self.left -= 1
            self._ask(host, CreateTicket())

    def _ask(self, host, command):
        self._asked += 1
        host.command(self._asked, command)

    def _answered(self, host, reply):
        if isinstance(reply, TicketIssued):
            self._ask(host, SubmitJob(reply.job_id, reply.holders, JobSpec(("true",))))
            return
        if isinstance(reply, JobAccepted):
            self.accepted.append(reply.record.job_id)
        self._next(host)


def slow_down(swarm, event_s):
    for host in swarm.hosts.values():
        host.event_s = event_s


def test_a_swarm_that_was_overloaded_works_at_full_speed_a_minute_after():
    announced = Announced()
    swarm = SimulatedSwarm(3, 1, 1, observers=[announced])
    swarm.start()
    swarm.run_for(5.0)
    slow_down(swarm, DISTURBED_EVENT_S)
    clients = Clients(swarm, JOBS, AT_ONCE)
    swarm.run_for(DISTURBED_S)
    assert announced.counts["negotiation.round"] > 0, "there was no overload to recover from"
    slow_down(swarm, EVENT_S)
    swarm.run_for(BACK_S)
    assert announced.counts["job.stepped_down"] == 0
    assert not clients.left
    assert swarm.run_until(lambda: announced.counts["job.ended"] >= JOBS, 20.0), announced.counts
    slow_down(swarm, 0.0)
    swarm.run_for(30.0)
    assert all(swarm.record(job_id).is_ended for job_id in clients.accepted)
