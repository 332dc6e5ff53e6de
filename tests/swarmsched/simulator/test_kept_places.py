"""Places that are kept for jobs are used, or given up: nobody waits beside GPUs that are free and nobody's."""

from dataclasses import replace

import pytest

from swarmsched.api import JobState
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import ranks_by_node, ranks_that_fit
from swarmsched.simulator.story import BEGIN_S, Story, StoryOptions, draw_plan
from swarmsched.simulator.workload import Work, policy_work

LOOK_S, KEPT_S = 0.5, 4.0
"""The plan that knows that a place is free comes within a second or two, and is then followed."""


class Watch:
    """How long each place that is kept for a waiting job has been all free."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._since_s: dict[tuple[JobId, str], float] = {}
        self.worst_s = 0.0
        self.seen = 0
        self._later()

    def _later(self) -> None:
        self._story.swarm.loop.post_later(LOOK_S, self._look)

    def _look(self) -> None:
        now_s, since_s = self._story.swarm.loop.now_s, self._since_s
        nodes = {name: host.node for name, host in self._story.swarm.hosts.items() if host.node is not None}
        self._since_s = {}
        for node in nodes.values():
            for job in node._jobs._shepherds.jobs.values():
                wanted, demand = ranks_by_node(job.claim.place), job.decided.spec.demand
                fit = all(ranks_that_fit(nodes[NodeId(name)].ledger.free, demand) >= wanted[name] for name in wanted)
                if job.claim.is_open and job.decided.state is JobState.QUEUED and fit:
                    place = (job.job_id, str(wanted))
                    self._since_s[place] = since_s.get(place, now_s)
                    self.worst_s = max(self.worst_s, now_s - self._since_s[place])
                    self.seen += 1
        self._later()


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        ("elastic-tiresias", 6),  # a more urgent job comes while one makes room for another
        ("elastic-tiresias", 10),  # places overlap that are kept for two jobs
        ("gittins", 34),  # others let a job go first on a node where it could not start
        ("swarm", 13),  # jobs make room by a plan
    ],
)
def test_no_place_is_free_and_kept_for_longer_than_plans_take(policy, seed):
    drawn = draw_plan(seed, StoryOptions(nodes=3, fault_classes=()))
    chosen = Work(BEGIN_S, "policy", policy_work(NodeId("n000"), policy, {}, "on" if policy == "swarm" else "off"))
    work = (chosen, *[each for each in drawn.work if each.kind != "policy"])
    story = Story(replace(drawn, faults=(), work=work))
    watch = Watch(story)
    result = story.run()
    assert result.failure is None
    assert watch.seen, "no place was kept"
    assert watch.worst_s <= KEPT_S
