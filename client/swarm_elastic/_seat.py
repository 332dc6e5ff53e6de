"""A worker's place in the present membership, and the way to the next one.

A switch has three moments: all say who they are and what they have done, those that are ahead give their state to the
others, and only then the old group is let go.  Whatever goes wrong before that, the old group still stands, and
training goes on in it; if it does not, because a member died, the next plan is waited for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Protocol

from swarm_elastic import _commits, _handover, _switch
from swarm_elastic._builder import CandidatePlan
from swarm_elastic._group import Alone, Group, GroupLost
from swarm_elastic._handover import TrainingState
from swarm_elastic._link import PROBLEM_LENGTH
from swarm_elastic._membership import RECOVERY_S, CandidateSource
from swarm_elastic._own_time import OwnTime
from swarm_elastic._plan import GangPlan
from swarm_elastic._stall import StallWatch
from swarm_elastic._switch import SwitchRefused, SwitchVerdict, SwitchVote

STEP_WEIGHT = 0.2  # of the newest step in the usual length of one


class Left(SystemExit):
    """A newer plan goes on without this worker.  Ends the script with code 0 unless it is caught."""


class MembersLost(RuntimeError):
    """A rank was lost, and no plan without it came."""


class TrainingProgress(Protocol):
    """How far training has come, beside weights and optimizer."""

    rounds: int
    step_number: int

    def state_dict(self) -> dict[str, Any]:
        """All of it, small."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class Seat:
    """Where this worker sits.

    `layouts` are hashes of all that is summed and given: by this library, and by its first version.  `on_change` is
    called after each switch, before training goes on; who keeps it waiting for longer than `timeout_s` may be given up.
    """

    def __init__(
        self,
        membership: CandidateSource,
        state: TrainingState,
        layouts: tuple[str, str],
        progress: TrainingProgress,
        on_change: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._membership, self._state, self._progress = membership, state, progress
        self._layout, self._former_layout = layouts
        self._on_change = on_change
        self._current: CandidatePlan | None = None
        self.group: Group = Alone()
        self.version = 0
        self.is_trained = False  # whether the weights here are those of the job
        self._trains = 0  # the version in which a round was completed last
        self._is_lost = False  # whether the group is of no more use
        self.step_s = 0.0  # how long a step takes
        self._stands_since_s = 0.0  # when the last step of the former membership ended, or was lost; 0: it trains
        self._own_time = OwnTime()
        self._stalls = StallWatch(self._tell_stall, timeout_s)

    def took(self, step_s: float) -> None:
        """A step has taken that long: the newest weigh most."""
        self.step_s += (STEP_WEIGHT if self.step_s else 1.0) * (step_s - self.step_s)

    @property
    def workers(self) -> tuple[str, ...]:
        """The members in rank order."""
        return self._current.plan.workers if self._current else ()

    @property
    def is_former(self) -> bool:
        """Whether members have the library of the first version."""
        return self._current is not None and self._current.plan.is_former

    @property
    def worker(self) -> str:
        """This one's name."""
        return self._membership.worker

    def join(self, start: int, *, may_start: bool) -> None:
        """Wait for a plan that names this worker, and for its state.  `start`: the step from which it could begin."""
        self._start, self._may_start = start, may_start
        self._membership.tell(state="ready", layout=self._layout)
        while self._current is None:
            candidate = self._membership.wait(self.version, None, as_member=True)
            if candidate is None:
                raise RuntimeError("the ranks of this job do not fit together; see the lines before")
            self.switch(candidate)

    def offer(self) -> tuple[int, CandidatePlan | None]:
        """How many versions ahead the plan is that this worker could switch to; 0 and None: there is none."""
        candidate = self._membership.candidate(self.version)
        return (candidate.plan.version - self.version, candidate) if candidate else (0, None)

    @contextmanager
    def operating(self) -> Iterator[None]:
        """Around operations of the group, so that a newer plan can end them."""
        what = f"all ranks to call step(), in round {self._progress.rounds}"
        with self._membership.waiting(self.step_s), self._stalls.waiting(what, self.step_s):
            yield

    def switch(self, candidate: CandidatePlan) -> bool:
        """Go over to a plan, as all its members do now; false when it came to nothing.

        Raises `Left` where it is without this worker, and what went wrong where that is this worker's own.
        """
        group = candidate.group or self._leave(candidate)
        self._stands_since_s = self._stands_since_s or time.monotonic()
        self._membership.enter(candidate)
        what = f"the members of plan {candidate.plan.version}, who switch to it in step()"
        step_s = self.step_s if self.is_trained else None
        try:
            with self._membership.waiting(step_s), self._stalls.waiting(what, self.step_s):
                self._take_over(group, candidate.plan)
        except Exception as error:  # noqa: BLE001  # no memory for the state, say: the others must not wait for this one
            self._give_up(candidate, error)
            self._stands_since_s = self._stands_since_s if self._is_lost else 0.0
            return False
        pause_s = round(time.monotonic() - self._stands_since_s, 6) if self.is_trained else 0.0
        self._stands_since_s = 0.0
        old, self._current = self._current, candidate
        self.group, self.version, self.is_trained = group, candidate.plan.version, True
        _commits.state().world = self.version
        self._is_lost = False
        if not self._trains:  # if all are lost that gave it the state, training can begin from here
            self._start, self._may_start = self._progress.rounds, True
        if old:
            old.close()
        standing = {"trains": self.version, "step": self._progress.rounds, "pause_s": pause_s}
        self._membership.tell(state="training", problem="", **standing)
        self._on_change()
        return True

    def was_busy(self, seconds: float) -> None:
        """This worker's own part of a step has taken so long."""
        if busy_s := self._own_time.news(seconds):
            self._membership.tell(busy_s=busy_s)

    @property
    def has_trained_once(self) -> bool:
        """Whether a round was completed here."""
        return self._trains > 0

    def part(self, problem: str, *, is_refused: bool) -> None:
        """This worker is about to end for a problem; `is_refused`: the others go on without it."""
        changes = {"state": "refused"} if is_refused else {}
        self._membership.tell(problem=problem[:PROBLEM_LENGTH], **changes)
        self._membership.part()

    def has_trained(self) -> None:
        """A round was completed in the present membership: only that makes its members know more than others do."""
        self._trains = self.version

    def meet(self) -> None:
        """Let nobody go on before all members are here.  What is lost from here on is needed by none of them."""
        with suppress(GroupLost), self.operating():
            self.group.gather([self._progress.rounds])

    def recover(self, problem: str) -> None:
        """A member was lost, as the problem tells: wait for plans until one of them holds.  Raises `MembersLost`."""
        self._is_lost, self._stands_since_s = True, time.monotonic()
        assert self._current is not None
        self._membership.reject(self._current)
        self._membership.enter(None)
        self._membership.tell(
            step=self._progress.rounds, problem=f"plan {self.version} lost a member: {problem}"[:PROBLEM_LENGTH]
        )
        while True:
            candidate = self._membership.wait(self.version, RECOVERY_S, as_member=False)
            if candidate is None:
                raise MembersLost(f"a rank was lost, and {self._membership.no_plan}")
            if self.switch(candidate):
                return

    def _take_over(self, group: Group, plan: GangPlan) -> None:
        may_start = plan.version == 1 or plan.may_start or self._may_start
        step, layout = (
            self._progress.rounds if self._trains else -1,
            self._former_layout if plan.is_former else self._layout,
        )
        claim = SwitchVote(self._trains, step, self._start if may_start else -1, int(layout, 16))
        verdict = _switch.agree(group, plan, claim)
        if verdict.behind and group.rank in verdict.holders:
            self._give(group, verdict)
        elif verdict.behind:
            self._receive(group, verdict)
        if verdict.behind:
            group.gather([verdict.step])  # they have it: until then all can go on in the group before

    def _give(self, group: Group, verdict: SwitchVerdict) -> None:
        small, large = self._state.document()
        if group.rank == verdict.holders[0]:
            document = {**small, "progress": self._progress.state_dict()}
            _handover.send_document(group, document, verdict.behind)
        _handover.send_tensors(group, large, verdict.holders, verdict.behind)

    def _receive(self, group: Group, verdict: SwitchVerdict) -> None:
        document = _handover.receive_document(group, verdict.holders[0])
        places = self._state.places(document, is_kept=self.is_trained)
        _handover.receive_tensors(group, places, verdict.holders, verdict.behind)
        self._state.load(document, places, is_new=not self.is_trained)
        self._progress.load_state_dict(document["progress"])

    def _give_up(self, candidate: CandidatePlan, error: Exception) -> None:
        self._membership.reject(candidate)
        self._membership.enter(None if self._is_lost else self._current)
        problem = f"plan {candidate.plan.version} came to nothing: {error}"
        print(f"swarm_elastic: {problem}", file=sys.stderr)
        rank = candidate.group.rank if candidate.group else -1
        is_culprit = rank in error.culprits if isinstance(error, SwitchRefused) else not isinstance(error, GroupLost)
        self._membership.tell(state="refused" if is_culprit else self._state_now(), problem=problem[:PROBLEM_LENGTH])
        if is_culprit:
            self._membership.part()
            raise error

    def _tell_stall(self, problem: str, has_timed_out: bool) -> None:
        if problem:
            print(f"swarm_elastic: {problem}", file=sys.stderr)
        self._membership.tell(problem=problem, has_timed_out=has_timed_out)

    def _leave(self, candidate: CandidatePlan) -> NoReturn:
        self._membership.enter(candidate)
        self._membership.tell(state="left", step=self._progress.rounds)
        self._membership.part()
        self.group.close()
        print(
            f"swarm_elastic: left after step {self._progress.step_number}, for plan {candidate.plan.version}",
            file=sys.stderr,
        )
        raise Left(0)

    def _state_now(self) -> str:
        return "training" if self.is_trained else "ready"
