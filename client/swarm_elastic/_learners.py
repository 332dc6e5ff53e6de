"""A learner among those of its plan: its links to their shards, and what they tell one another.

Plans come in the agent's thread, where shards and links follow at once, however long a step takes.  Training goes on by
the former plan until its next step: only who learns with it changes, and nothing that was trained is lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from swarm_elastic._hosting import LOOK_MOST_S, LOOK_S, Hosting
from swarm_elastic._roster import LearnerPlan, LearnerRoster
from swarm_elastic._shard_link import LearnerSeat, ShardLink, ShardPlace
from swarm_elastic._shown import Shown

LEAVE_S = 60.0  # for the others to read the last words


class Learners:
    """As one of them sees them.  `layout` names the model; `complain` hears what people should know."""

    def __init__(self, roster: LearnerRoster, layout: str, complain: Callable[[str], None]) -> None:
        self._roster, self._layout, self._complain = roster, layout, complain
        self._heard: LearnerPlan | None = None
        self._hosting: Hosting | None = None
        self._lock = threading.Condition()  # guards what was heard, and orders plans
        self._is_over = False
        self.links: list[tuple[int, int, ShardLink]] = []
        roster.begin(layout, self._hear)
        self.plan = self._first()

    @property
    def number(self) -> int:
        """Of this learner, from 0 on."""
        return self.plan.learners.index(self._roster.learner)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.plan.learners)

    @property
    def is_changing(self) -> bool:
        """Whether others may come and go."""
        return self._roster.is_changing

    def connect(
        self, parts: Sequence[tuple[int, int]], told: Mapping[str, Any], every: int, shown: Callable[[int, int], Shown]
    ) -> bool:
        """Have the shards of these ranges hosted, and connect to them; False where an agent hosts none."""
        hosting = Hosting(self._roster, parts, {"layout": self._layout, **told}, every)
        with self._lock:
            assert self._heard is not None
            self._hosting, newest = hosting, self._heard
            hosting.follow(newest)
        if self.plan.is_first and not hosting.is_hosted():
            return False
        with self._lock:
            seat = self._seat(newest)
            for index, (start, stop) in enumerate(parts):
                link = ShardLink(seat, start, shown(start, stop), self._finder(index), self._complain)
                self.links.append((start, stop, link))
            if newest is not self._heard:
                self._follow(self._heard)
        return True

    def news(self) -> LearnerPlan | None:
        """The newest plan, where training does not follow it yet."""
        newest = self._heard
        return newest if newest is not None and newest.number > self.plan.number else None

    def names_me(self, plan: LearnerPlan) -> bool:
        """Whether this learner goes on by that plan."""
        return self._roster.learner in plan.learners

    def enter(self, plan: LearnerPlan) -> None:
        """Training goes on by this plan."""
        self.plan = plan

    def tell(self, **changes: Any) -> None:
        """Let the agent know how this learner stands."""
        self._roster.tell(**changes)

    def show(self, name: str, text: str) -> None:
        """Have the others read it from now on."""
        self._roster.show(name, text)

    def shown(self, name: str) -> list[str]:
        """What the learners of the plan show by that name, of those that show it."""
        return [text for learner in self.plan.learners if (text := self._read(learner, name)) is not None]

    def meet(self, where: str, timeout_s: float, told: str, each_turn: Callable[[], None]) -> list[str]:
        """Show it, and hear what all have shown; fewer where some have not come there in time."""
        self._roster.show(where, told)
        end_s, pause_s = time.monotonic() + timeout_s, LOOK_S
        while len(texts := self.shown(where)) < self.count and time.monotonic() < end_s:
            time.sleep(pause_s)
            pause_s = min(LOOK_MOST_S, 1.5 * pause_s)
            each_turn()
        return texts

    def close(self, *, is_done: bool) -> None:
        """Let go of all; what this one shows ends with it, so the others get time to read its last words."""
        with self._lock:
            self._is_over = True
        for _, _, link in self.links:
            link.close()
        if self._hosting is not None:
            self._hosting.close()
        with suppress(OSError, RuntimeError):
            self._roster.show("left", "-")
            end_s = time.monotonic() + (LEAVE_S if is_done and self._roster.keeps_board else 0.0)
            while time.monotonic() < end_s and not all(self._has_left(each) for each in self.plan.learners):
                time.sleep(LOOK_S)
        self._roster.close()
        self.links = []

    # In the thread of plans, too.

    def _hear(self, plan: LearnerPlan) -> None:
        with self._lock:
            if self._is_over:
                return
            self._heard = plan
            self._follow(plan)
            self._lock.notify_all()

    def _follow(self, plan: LearnerPlan) -> None:
        if self._hosting is not None:
            self._hosting.follow(plan)
        for _, _, link in self.links:
            link.follow(self._seat(plan))

    def _first(self) -> LearnerPlan:
        """The first plan that names this learner."""
        with self._lock:
            self._lock.wait_for(lambda: self._heard is not None and self.names_me(self._heard))
            assert self._heard is not None
            return self._heard

    def _seat(self, plan: LearnerPlan) -> LearnerSeat:
        job, learner = os.environ.get("SWARM_JOB_ID", ""), self._roster.learner
        is_leaving = not self.names_me(plan)
        return LearnerSeat(job, plan.number[0], plan.number, learner, self._layout, plan.key, is_leaving)

    def _finder(self, index: int) -> Callable[[], ShardPlace | None]:
        hosting = self._hosting
        assert hosting is not None
        return lambda: hosting.place(index)

    def _read(self, learner: str, name: str) -> str | None:
        with suppress(OSError):
            return self._roster.read(learner, name)
        return None

    def _has_left(self, learner: str) -> bool:
        """Or is no more."""
        try:
            return self._roster.read(learner, "left") is not None
        except OSError:
            return True
