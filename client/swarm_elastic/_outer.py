"""Training apart, with a step together now and then: each rank trains by itself, and its changes are merged in rounds.

    with swarm_elastic.Outer(model, optimizer, every=64):
        for x, y in loader: ...

The ranks of an attempt are its learners.  Each has its node's agent host a share of the outer weights, and the ranks
tell one another where, in the store at which they meet.  Outside of a swarm, with one rank, and under an agent that
knows no aggregation, this is plain training.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median_low
from typing import Any, NoReturn

import torch

from swarm_elastic import _commits
from swarm_elastic._arguments import check_objects, number, one_of, whole
from swarm_elastic._commits import warn
from swarm_elastic._learners import Learners
from swarm_elastic._patience import Patience
from swarm_elastic._reports import model_figures, report_figures
from swarm_elastic._roster import LearnerPlan, LearnerRoster, find_roster, rank_and_size
from swarm_elastic._seat import Left
from swarm_elastic._shard_link import ShardLink
from swarm_elastic._shown import BLOCK, PIECE, Shown

FIRST_S = 120.0  # until there are outer weights: others may still load their data
END_S = 600.0  # for the others to come to the end
LAST_S, LAST_TURN_S, LAST_VERSION_S = 60.0, 0.25, 10.0
AUTO, AUTO_LEAST, EVERY = "auto", 8, 64
RANGES_MOST = 8  # of a gang that changes: they stay the same however many learners there are
JOIN_TURN_S = 0.25
LEAVE_S = 10.0
WIRES = ("int8", "float32")


class Outer:
    """A training whose ranks take their steps alone, and merge what they have changed each `every` steps.

    The loop stays as it is: merging follows `optimizer.step()`.  `overlap` is by how many steps later a round is
    merged: 0 waits for it.  Give each rank samples of its own, by `learner` and `learners`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int | str = 64,
        overlap: int = 0,
        rate: float = 1.0,
        momentum: float = 0.0,
        quorum: int = 0,
        batch: int = 1,
        wire: str = "int8",
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Check, and connect on entry.

        `every` may be "auto": 8 to 512 steps, as few as let rounds take no more than a twentieth of the time.
        `rate` and `momentum` are those of the outer step; 1 and 0 are the mean of the learners.  `quorum` is how many
        learners make a round, 0: more than half of them.  `batch` is how many samples a step of this rank has: ranks
        count in a round by their samples.  `wire` is int8 or float32.
        """
        check_objects(model, optimizer, None, None, None, are_stepped=False)
        asked = _asked()
        every = asked.get("every", every)
        self._is_auto = every == AUTO
        self.every = EVERY if self._is_auto else whole("every", every, 1)
        self.overlap = whole("overlap", asked.get("overlap", overlap), 0, AUTO_LEAST if self._is_auto else self.every)
        self.batch = whole("batch", batch, 1)
        self.step_number = 0
        self.learner, self.learners = rank_and_size()
        self.is_merging = False
        self._optimizer = optimizer
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._is_quantised = one_of("wire", asked.get("wire", wire), WIRES) != "float32"
        self._rule = {"rate": number("rate", rate), "momentum": number("momentum", momentum)}
        self._quorum = whole("quorum", asked.get("quorum", quorum), 0)
        self._links: list[tuple[int, int, ShardLink]] = []
        self._learners: Learners | None = None
        self._on_change = on_change
        self._hook: Any = None
        self._due = -1  # the step in which a round is to be merged
        self._merged_step, self._is_behind = 0, False
        self._asked: list[ShardLink] = []  # the shards that have the last contribution
        self._asked_s = self._due_s = 0.0  # since when, and when their answers were due
        self._round_step = 0  # of the last round that began
        self._cost_s = -1.0  # of the last round that was answered; below 0: of none
        self._given_s = 0.0  # for how long the last contribution was made
        self._since = 0  # steps since the last contribution
        self._stepped_s = 0.0
        self._began_s = self._waited_s = 0.0
        self._patience = Patience()
        self._told: set[str] = set()

    def __enter__(self) -> Outer:  # noqa: PYI034  # Python 3.9 has no Self
        """Begin, with the same weights on all ranks."""
        self._began_s = time.monotonic()
        roster = find_roster()
        if roster is not None:
            self._join(roster)
        if self.is_merging:
            sent = sum(each.numel() for each in self._parameters) * (1 if self._is_quantised else 4)
            report_figures({**model_figures(self._parameters), "moved_bytes": sent / self.every})
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        if self.is_merging or "SWARM_OUTER" in os.environ:
            self._report()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End, with the same weights on all ranks where all have come to the end."""
        self._hook.remove()
        learners, self._learners = self._learners, None
        if learners is None:
            return
        if self.is_merging and kind is None:
            self._finish(learners)
        learners.close(is_done=kind is None)
        self.is_merging = False

    def _finish(self, learners: Learners) -> None:
        """The last round, with all that come to the end; what it leaves are the outer weights, alike on all ranks."""

        def follow() -> None:
            self._follow_plan(learners)

        if len(learners.meet("end", END_S, "-", follow)) < learners.count:
            self._complain(
                f"some ranks did not come to the end within {END_S:g} s; the weights are those of the others"
            )
        self._contribute()
        deadline_s = time.monotonic() + LAST_S
        needed = min(self._quorum or learners.count // 2 + 1, learners.count)
        while time.monotonic() < deadline_s and learners.count - len(learners.shown("version")) >= needed:
            self._wait([link for _, _, link in self._links], LAST_TURN_S)
            if all(link.is_settled for _, _, link in self._links):
                break
        told = json.dumps([link.version.number for _, _, link in self._links])
        last = [json.loads(each) for each in learners.meet("version", LAST_S, told, follow)]
        for newest, (_, _, link) in zip(zip(*last), self._links):  # noqa: B905  # Python 3.9
            link.wait_for_version(max(newest), LAST_VERSION_S)
        self._merge()
        for start, stop, link in self._links:
            self._write(start, stop, link.shown_weights(), is_added=False)

    @property
    def status(self) -> dict[str, Any]:
        """How merging stands: by shard its version, rounds and bytes."""
        shards = [
            {
                "start": start,
                "stop": stop,
                "version": link.version.number,
                "rounds": link.rounds,
                "bytes_sent": link.bytes_sent,
                "bytes_heard": link.bytes_heard,
            }
            for start, stop, link in self._links
        ]
        return {"learner": self.learner, "learners": self.learners, "waited_s": self._waited_s, "shards": shards}

    def state_dict(self) -> dict[str, Any]:
        """What the next attempt is to go on from: the outer weights, which all ranks share, steps and tempo.

        A rank's own weights and optimizer are the script's to save.
        """
        weights = self._now()
        for start, stop, link in self._links if self.is_merging else ():
            weights[start:stop] = link.shown_weights()
        return {"step_number": self.step_number, "every": self.every, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; before entry.  Raises RuntimeError after it, ValueError where the model is another one."""
        if self._hook is not None:
            raise RuntimeError("load_state_dict was called after entry; call it before `with`")
        weights, size = state["weights"], sum(each.numel() for each in self._parameters)
        if len(weights) != size:
            raise ValueError(f"weights of the state are {len(weights)}, and the model has {size}; give it that model")
        self._write(0, size, weights, is_added=False)
        self.step_number = self._round_step = whole("step_number", state["step_number"], 0)
        if self._is_auto:
            self.every = whole("every", state["every"], 1)

    # Joining, and going on by other plans.

    def _join(self, roster: LearnerRoster) -> None:
        shapes = [tuple(each.shape) for each in self._parameters]
        rule = {**self._rule, "is_quantised": self._is_quantised}
        known = [shapes, rule, AUTO] if self._is_auto else [shapes, rule]
        layout = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        learners = self._learners = Learners(roster, layout, self._complain)
        self.learner, self.learners = learners.number, learners.count
        size, now = sum(each.numel() for each in self._parameters), self._now()
        parts = _ranges(size, RANGES_MOST if learners.is_changing else self.learners)

        def shown(start: int, stop: int) -> Shown:
            return Shown(roster.learner, now[start:stop].clone(), is_quantised=self._is_quantised)

        told = {"rule": rule, "quorum": self._quorum}
        self.is_merging = learners.connect(parts, told, self.every if self._is_auto else 0, shown)
        self._links = learners.links
        if self.is_merging:
            self._receive(learners)
        else:
            self._complain("an agent of this job hosts no aggregation: ranks train alone, and nothing is merged")
        self._tell(learners)
        self._stepped_s = time.monotonic()

    def _receive(self, learners: Learners) -> None:
        """Wait for the outer weights: whoever comes to others that train has nothing to begin with before."""
        began_s = time.monotonic()
        while not all(link.wait(JOIN_TURN_S, link.is_shown) for _, _, link in self._links):
            self._refuse(learners)
            self._follow_plan(learners)
            if time.monotonic() > began_s + FIRST_S:
                problem = f"no outer weights came within {FIRST_S:g} s; they are waited for"
                self._complain(problem)
                learners.tell(problem=problem)
                if learners.plan.is_first:
                    break
        self._merge()
        if not learners.plan.is_first:
            steps = [int(text) for text in learners.shown("step")]
            self.step_number = self._round_step = median_low(steps) if steps else 0

    def _refuse(self, learners: Learners) -> None:
        """Raise RuntimeError where this learner can never come in."""
        problem = next((link.refusal for _, _, link in self._links if link.refusal), "")
        if problem and learners.is_changing:
            learners.tell(state="refused", problem=problem)
            learners.close(is_done=False)
            raise RuntimeError(f"this learner is refused: {problem}")

    def _follow_plan(self, learners: Learners) -> None:
        """Go on by the newest plan.  Raises `Left` where that is without this learner."""
        plan = learners.news()
        if plan is None:
            return
        if not learners.names_me(plan):
            self._leave(learners, plan)
        learners.enter(plan)
        self.learner, self.learners = learners.number, learners.count
        if all(link.is_shown() for _, _, link in self._links):
            self._tell(learners)
        if self._on_change is not None:
            self._on_change()

    def _tell(self, learners: Learners) -> None:
        """With the weights of the others this learner trains by the plan; before, nobody may count on it."""
        if learners.is_changing:
            version = learners.plan.number[1]
            _commits.state().world = version
            learners.tell(state="training", problem="", trains=version, step=self.step_number)
            self._show_step()

    def _leave(self, learners: Learners, plan: LearnerPlan) -> NoReturn:
        """Give the shards what was trained since the last round; they keep it for the next one."""
        end_s = time.monotonic() + LEAVE_S
        for _, _, link in self._links:
            link.wait(end_s - time.monotonic(), link.is_welcome)
        if self._since and self._contribute():
            for link in self._asked:
                link.wait(end_s - time.monotonic(), link.is_delivered)
        learners.tell(state="left", step=self.step_number)
        print(f"swarm_elastic: left after step {self.step_number}, for plan {plan.number[1]}", file=sys.stderr)
        raise Left(0)

    # Steps.

    def _after_step(self, *_: Any) -> None:
        """The optimizer has stepped."""
        self._patience.stepped(time.monotonic() - self._stepped_s)
        self.step_number += 1
        self._since += 1
        if self._learners is not None:
            self._follow_plan(self._learners)
        if self.is_merging:
            if self.step_number == self._due:
                self._await_round()
            if self._is_auto:
                self.every = self._links[0][2].every or self.every
            if self.step_number >= self._round_step + self.every:
                self._round_step = self.step_number
                self._look_for_group()
                self._show_step()
                self._hear_answers()
                self._report()
                # The others had their round a moment ago.  Waiting for their next one would make it later still.
                self._is_behind = self.step_number - self._merged_step < (self.every - self.overlap) // 2
                if self._contribute():
                    self._due = self.step_number + self.overlap
                    if not self.overlap:
                        self._await_round()
            self._merge()
        self._stepped_s = time.monotonic()

    def _look_for_group(self) -> None:
        """Libraries form a group by RANK and WORLD_SIZE, and sum gradients in it at each step."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            size = torch.distributed.get_world_size()
            if 1 < size == self.learners:
                remedy = "submit with -g MIN:MAX --outer, where libraries find no ranks, or wrap the model by none"
                self._complain(f"a process group of all {size} ranks is there, which may sum gradients too: {remedy}")

    def _show_step(self) -> None:
        """Newcomers begin at the step of the others."""
        if self._learners is not None and self._learners.is_changing:
            self._learners.show("step", str(self.step_number))

    def _contribute(self) -> bool:
        """False where no shard takes anything: each is away, or has not answered to what it has."""
        began_s = time.monotonic()
        self._merge()
        now, now_s, cost = self._now(), time.monotonic(), self._patience.cost(self._cost_s)
        taking = [
            link
            for start, stop, link in self._links
            if link.contribute(now[start:stop], self._since, self._since * self.batch, cost)
        ]
        if taking:
            self._since, self._asked, self._asked_s = 0, taking, now_s
            self._given_s = time.monotonic() - began_s
        return bool(taking)

    def _hear_answers(self) -> None:
        """How late they were, be it that nobody waited for so long."""
        counted_s = [link.counted_s for link in self._asked]
        if counted_s and min(counted_s) >= self._asked_s:
            late_s = max(counted_s) - self._due_s
            if not self._is_behind:  # how soon the others come again says nothing of how long a round takes
                self._patience.answered(late_s)
                self._cost_s = max(0.0, late_s) + self._given_s
            self._asked = []

    def _report(self) -> None:
        """Tell the agent how merging stands, for people."""
        rounds = min((link.rounds for _, _, link in self._links), default=0)
        version = min((link.version.number for _, _, link in self._links), default=0)
        passed_s = max(1e-3, time.monotonic() - self._began_s)
        figures = {
            "rounds": rounds,
            "outer_version": max(0, version),
            "round_wait": min(1.0, self._waited_s / passed_s),
        }
        report_figures(figures)

    def _await_round(self) -> None:
        self._due_s = time.monotonic()
        if not self._is_behind:
            self._wait(self._asked, self._patience.limit_s(self.every))
        self._waited_s += time.monotonic() - self._due_s

    def _wait(self, links: list[ShardLink], limit_s: float) -> None:
        """Until these shards have answered, or those that have not are not worth another moment."""
        end_s = time.monotonic() + limit_s
        for link in links:
            link.wait(end_s - time.monotonic(), link.is_answered)

    def _merge(self) -> None:
        """Add what has come to the weights, in place."""
        for start, stop, link in self._links:
            moved = link.take_moved()
            if moved is not None:
                self._write(start, stop, moved, is_added=True)
                self._merged_step = self.step_number

    def _now(self) -> torch.Tensor:
        """This rank's weights, one after another, in float32 on the host."""
        with torch.no_grad():
            return torch.cat([each.detach().to("cpu", torch.float32).flatten() for each in self._parameters])

    def _write(self, start: int, stop: int, vector: torch.Tensor, *, is_added: bool) -> None:
        """Give a range of the weights these values, or add them."""
        at = 0
        with torch.no_grad():
            for each in self._parameters:
                begin, end = max(start, at), min(stop, at + each.numel())
                if begin < end:
                    part = vector[begin - start : end - start].to(each.device, each.dtype)
                    flat = each.view(-1) if each.is_contiguous() else each.flatten()
                    whole = flat[begin - at : end - at]
                    whole.copy_(whole + part if is_added else part)
                    if not each.is_contiguous():
                        each.copy_(flat.view_as(each))
                at += each.numel()

    def _complain(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warn(text)


def _asked() -> dict[str, Any]:
    """What `swarm run --outer` says of the arguments, which counts more than the script; the agent has checked it."""
    parts = [part.partition("=") for part in os.environ.get("SWARM_OUTER", "").split(",") if "=" in part]
    asked: dict[str, Any] = {name: int(text) if text.isdecimal() else text for name, _, text in parts}
    return asked | ({"quorum": 0} if asked.get("quorum") == "half" else {})


def _ranges(size: int, learners: int) -> list[tuple[int, int]]:
    """A share for each rank's node, in whole blocks; of what is small there are fewer, which begin with the first."""
    count = max(1, min(learners, size // PIECE))
    blocks = -(-size // BLOCK)
    cuts = [min(size, blocks * each // count * BLOCK) for each in range(count + 1)]
    return list(zip(cuts[:-1], cuts[1:]))  # noqa: B905, RUF007  # Python 3.9
