"""A shepherd and a register for tests of negotiation; owners, and their workers, are played by the test."""

import random
from itertools import count

from msgspec.structs import replace

from swarmsched.api import JobSpec
from swarmsched.authority.message import SilenceAnswer, SilenceRequest
from swarmsched.clock import Clock
from swarmsched.effects import Announce, SendPeer
from swarmsched.events import PeerMessageReceived
from swarmsched.ids import NodeId
from swarmsched.jobs.update import UpdateDecided, UpdateRequested
from swarmsched.ledger.message import (
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    Refusal,
    TaskReport,
)
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.record_writer import WriteRecord
from swarmsched.negotiation.settlement import GIVE_UP_S
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.negotiation.told import FirstWritten, NodeLost, StartWished, TakenUp
from swarmsched.resources import Demand, Share
from swarmsched.task import TaskFailure, TaskStage, TaskStatus
from tests.swarmsched.building import JOB, NOTHING_FREE, answer_to, make_record, word

ME, A, B = NodeId("boss"), NodeId("a"), NodeId("b")
SHARES = (Share(A, 2), Share(B, 1))
UTC = 1_700_000_000.0


def silence(asked, silent_s, has_record=False):
    """A holder's answer."""
    numbers = (asked.job_id, asked.attempt, asked.owner, asked.epoch, asked.version)
    return SilenceAnswer(*numbers, has_record, silent_s)


class Scene:
    """One shepherd and a register that decides at once; owners are played by the test."""

    def __init__(self, **spec):
        self.now_s = 10.0
        self.updates = []
        self.sent = []
        self.announced = []
        self.is_register_silent = False
        self.undecided = []
        asked = JobSpec(("python", "t.py"), ranks=3, demand=Demand(gpus=1))
        asked = replace(asked, **spec)
        record = make_record(ME, spec=asked, submitted_utc_s=UTC, shepherd_generation=7)
        self.others_could_take_it = True
        self.others_are_well = True
        self.needed = set()  # nodes without which none could

        def could_take(spec, without, *, once_well):
            is_there = self.others_could_take_it and (self.others_are_well or once_well)
            return is_there and self.needed.isdisjoint(without)

        self.shepherd = JobShepherd(record, ME, random.Random(1), count(1), could_take=could_take)
        self.do(self.shepherd.step(FirstWritten(), self.clock))

    @property
    def clock(self):
        return Clock(self.now_s, UTC + self.now_s)

    @property
    def record(self):
        return self.shepherd.record

    def do(self, effects):
        for effect in effects:
            match effect:
                case WriteRecord(update=UpdateRequested() as update):
                    self.undecided.append(update)
                    if not self.is_register_silent:
                        self.decide()
                case SendPeer():
                    self.sent.append((effect.recipient, effect.message))
                case Announce():
                    self.announced.append(effect)

    def decide(self):
        self.is_register_silent = False
        while self.undecided:
            update = self.undecided.pop(0)
            self.updates.append(update.value)
            self.do(self.shepherd.step(UpdateDecided(update.update_id, update.value), self.clock))

    def take(self, kind):
        """Messages of one kind that were sent since the last call, and forget all others."""
        found = [(node, message) for node, message in self.sent if isinstance(message, kind)]
        self.sent = []
        return found

    def answer(self, requests, refusal=Refusal.NONE, **changes):
        for node, request in requests:
            self.do(self.shepherd.step(word(answer_to(request, node, refusal, **changes)), self.clock))

    def lose(self, node, silent_s=GIVE_UP_S):
        """A node is believed lost, and its job's holders have let nothing run there for so long."""
        self.do(self.shepherd.step(NodeLost(node), self.clock))
        asked = [message for _, message in self.sent if isinstance(message, SilenceRequest)]
        for holder in self.record.configuration.members:
            for request in dict.fromkeys(asked):
                self.do(self.shepherd.step(PeerMessageReceived(holder.node, silence(request, silent_s)), self.clock))

    def report(
        self, node, stage, revision, exits=(), failure=TaskFailure.NONE, detail="", phase="", attempt=None, **more
    ):
        attempt = self.shepherd.record.attempt if attempt is None else attempt
        status = TaskStatus(JOB, 1, attempt, node, stage, tuple(exits), failure, detail, phase, revision, **more)
        self.do(self.shepherd.step(word(TaskReport(status, NOTHING_FREE)), self.clock))

    def succeed(self):
        """The register has made a shepherd of a later epoch; it knows the record and nothing else."""
        last = self.updates[-1]
        record = last.updated(epoch=last.epoch + 1, shepherd_generation=8)
        self.shepherd, self.sent = JobShepherd(record, ME, random.Random(2), count(1)), []
        self.do(self.shepherd.step(TakenUp(()), self.clock))
        return self.shepherd

    def place(self):
        self.do(self.shepherd.step(StartWished(SHARES, Ranking("fifo", (1,))), self.clock))
        return self.take(HoldRequest)

    def launch(self):
        self.answer(self.place(), rendezvous_host="10.0.0.1", rendezvous_port=29500)
        self.answer(self.take(CommitRequest), is_staged=True)
        self.answer(self.take(LaunchRequest))

    def run(self):
        self.launch()
        self.report(A, TaskStage.STARTED, 5)
        self.report(B, TaskStage.STARTED, 5)
