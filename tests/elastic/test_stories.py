"""Scripts as people write them, through changes at chosen moments: all is as if one process had trained, undisturbed.

Scripts and changes are drawn: schedules per step, per epoch and by a metric, averages, counters, clipping, passes, an
early stop; joins, leaves, several at once, deaths, steps that one rank has lost and others have done.
"""

import json
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.job import Job, Template, elastic_job, until
from tests.elastic.testing import TRAIN, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("elastic-stories")]

SCRIPT = Path(__file__).with_name("story.py").read_text()
ALONE = {"SWARM_TASK_SOCKET": "", "SWARM_WORKER": "", "PAUSE_S": "0"}
STEPS = 5  # of an epoch
PLAIN: dict[str, Any] = {
    "samples": 55, "epochs": 4, "form": "epochs", "schedule": "none -", "ema": "", "clip": False, "micro": 0,
    "stop": 0, "saves": [], "dies": 0, "careless": False,
}  # fmt: skip
Change = tuple[list[Any], str]  # where members hold, and what happens there


@pytest.fixture
def make_job(tmp_path_factory: pytest.TempPathFactory, template: Template) -> Callable:
    return lambda story, **env: elastic_job(
        tmp_path_factory.mktemp("story"), template, SCRIPT, STORY=json.dumps(story), **env
    )


class Told:
    """How a job ended, by one of its workers; and what all of them did."""

    def __init__(self, job: Job, *names: str) -> None:
        for name in names:
            assert job[name].ended() == 0, job.problems()
        self.ends = {name: next(line for line in job[name].lines if "end" in line) for name in names}
        self.lines = [line for worker in job.workers.values() for line in worker.lines]
        self.tails = {
            name: [line["epoch_done"] for line in job[name].lines if "epoch_done" in line] for name in job.workers
        }
        self.errors = {name: worker.err.read_text() for name, worker in job.workers.items()}

    @property
    def samples(self) -> Counter[tuple[int, int]]:
        """Epoch and index of all that counted: of each round by the plan that did it last."""
        version_of: dict[int, int] = {}
        for line in self.lines:
            if "done" in line:
                version_of[line["round"]] = max(line["version"], version_of.get(line["round"], 0))
        offered = [
            line for line in self.lines if "offered" in line and version_of.get(line["round"]) == line["version"]
        ]
        return Counter((line["epoch"], index) for line in offered for index in line["offered"])


def undisturbed(make_job: Callable, story: dict[str, Any]) -> Told:
    with make_job(story | {"saves": [], "dies": 0}, **ALONE) as job:
        job.start("alone")
        return Told(job, "alone")


class Play:
    """A job that goes through changes; its members hold for each."""

    def __init__(self, job: Job) -> None:
        self.job, self.members, self._count = job, ["a"], 0
        job.start("a")

    def _new(self, count: int) -> list[str]:
        names = [f"w{len(self.job.workers) + each}" for each in range(count)]
        self.job.start(*names)
        self.job.ready(*names)
        return names

    def begin(self, changes: list[Change]) -> None:
        for number, (place, _) in enumerate(changes):
            (self.job.folder / f"hold-{number}.new").write_text(json.dumps(place))
            (self.job.folder / f"hold-{number}.new").rename(self.job.folder / f"hold-{number}")
        self.job.publish("a")
        for number, (_, what) in enumerate(changes):
            self._change(number, what)

    def _held(self, number: int, ahead: bool = False) -> None:
        def is_so(name: str) -> bool:
            lines = [line for line in self.job[name].lines if line.get("held") == number]
            return any(line["ahead"] > 0 for line in lines) if ahead else bool(lines)

        until(lambda: all(map(is_so, self.members)), lambda: f"{self.members} hold at {number}: {self.job.problems()}")

    def _change(self, number: int, what: str) -> None:
        job, kind, count = self.job, *what.split()
        joining = self._new(int(count)) if kind in ("join", "replace", "move") else []
        self._held(number)
        before, victim = list(self.members), self.members[-1]
        lost = [victim] if kind in ("kill", "tear") and len(before) > 1 else []
        if kind == "join":
            self.members += joining
        elif kind == "move":
            self.members = [before[0], *joining]
        elif kind == "replace":
            self.members = [*before[1:], *joining]
            self.members = self.members if len(before) > 1 else [*before, *joining]
        elif kind == "leave" and len(before) > 1:
            self.members = before[1:]
        if lost:
            if kind == "kill":
                job[victim].signal(signal.SIGKILL)
                job[victim].ended()
            else:
                (job.folder / f"spoil-{victim}").touch()
            self.members = before[:-1] if kind == "kill" else before
            (job.folder / f"go-{number}").touch()
            if kind == "tear":
                until(lambda: "lost a member" in job.standings[victim].problem, job.problems)
            job.publish(*self.members, lost=tuple(lost) if kind == "kill" else ())
            return
        job.publish(*self.members)
        everybody, self.members = self.members, before
        self._held(number, ahead=True)
        self.members = everybody
        (job.folder / f"go-{number}").touch()

    def end(self) -> Told:
        return Told(self.job, *self.members)


def check(found: Told, expected: Told, story: dict[str, Any]) -> None:
    alone = expected.ends["alone"]
    assert found.samples == expected.samples
    for name, end in found.ends.items():
        told = (name, found.errors[name])
        assert end["end"] == alone["end"], told
        assert end["count"] == alone["count"], told
        assert end["noted"] == alone["noted"], told
        assert end["rate"] == pytest.approx(alone["rate"], rel=1e-9), told
        assert end["schedule"] == pytest.approx(alone["schedule"], rel=1e-4), told
        for what in ("weights", "ema"):
            assert end[what].keys() == alone[what].keys()
            for key, values in end[what].items():
                assert values == pytest.approx(alone[what][key], rel=1e-3, abs=1e-4), (what, key, told)
    assert len({json.dumps({key: end[key] for key in end}) for end in found.ends.values()}) == 1
    if story["form"] == "epochs":
        for tails in found.tails.values():
            assert tails == list(range(tails[0], tails[0] + len(tails))) if tails else True


def played(make_job: Callable, story: dict[str, Any], changes: list[Change]) -> None:
    with make_job(story) as job:
        play = Play(job)
        play.begin(changes)
        found = play.end()
    check(found, undisturbed(make_job, story), story)


def drawn(seed: int) -> tuple[dict[str, Any], list[Change]]:
    draw = random.Random(seed)
    form = draw.choice(["epochs", "epochs", "range", "one"])
    per = "step" if form == "one" else draw.choice(["step", "epoch"])
    story = PLAIN | {
        "form": form,
        "schedule": f"{draw.choice(['none', 'given', 'own', 'own', 'plateau', 'plateau'])} {per}",
        "ema": draw.choice(["", "step", per]),
        "clip": draw.random() < 0.5,
        "micro": draw.choice([0, 0, 4]),
        "stop": draw.choice([0, 0, 17]),
        "careless": draw.random() < 0.5,
        "epochs": 4,
    }
    places: list[list[Any]] = [["step", step] for step in range(1, 16)]
    places += [[what, epoch] for what in ("tail", "end") for epoch in range(3)] if form != "one" else []
    chosen: list[list[Any]] = []  # in order and two steps apart: members change, or get one of the others, in between
    for place in sorted(draw.sample(places, 8), key=order_of):
        if not chosen or order_of(place) >= order_of(chosen[-1]) + 2:
            chosen.append(place)
    chosen = chosen[:5]
    kinds = ["join 1", "join 2", "leave 1", "replace 1", "move 2", "kill 1", "tear 1"]
    changes = [(chosen[0], "join 2")] + [
        (place, draw.choice(kinds if place[0] == "step" else kinds[:5])) for place in chosen[1:]
    ]
    return story, changes


def order_of(place: list[Any]) -> float:
    """Steps that are done there."""
    what, number = place
    return number if what == "step" else (number + 1) * STEPS - 0.5 - (what == "tail") * 0.1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.acceptance) for seed in (1, 2))])
def test_a_drawn_script_is_through_drawn_changes_as_one_undisturbed_process(seed: int, make_job: Callable) -> None:
    played(make_job, *drawn(seed))


@pytest.mark.acceptance
@pytest.mark.parametrize("seed", range(100, 160))
def test_more_of_them(seed: int, make_job: Callable) -> None:
    played(make_job, *drawn(seed))


PLACES, FORMS = (["did", 7], ["tail", 1], ["end", 1]), ("epochs", "range")
OF_BOTH = [
    pytest.param(place, form, marks=[] if at % 2 == number else pytest.mark.acceptance, id=f"{place}-{form}")
    for at, place in enumerate(PLACES)
    for number, form in enumerate(FORMS)
]


@pytest.mark.parametrize(("place", "form"), OF_BOTH)
def test_a_job_goes_on_from_a_checkpoint_as_if_nothing_had_been(
    place: list[Any], form: str, make_job: Callable
) -> None:
    """Also from one that was taken before the script did what it does behind a step, or behind an epoch."""
    story = PLAIN | {"form": form, "schedule": "own epoch", "ema": "step", "saves": place, "dies": 12}
    with make_job(story, **ALONE) as job:
        job.env["SWARM_CHECKPOINT_DIR"] = str(job.folder)
        job.start("a")
        assert job["a"].ended() == 3
        job.start("b", SWARM_RESUME_FROM=str(job.folder / "saved"))
        found, errors = Told(job, "b"), job["a"].err.read_text()
    expected = undisturbed(make_job, story)
    end, alone = found.ends["b"], expected.ends["alone"]
    for what in ("end", "rate", "count", "schedule", "noted", "weights", "ema"):
        assert end[what] == pytest.approx(alone[what]) if what == "rate" else end[what] == alone[what], what
    tails = found.tails["b"]
    assert tails == ([0, 1, 2, 3] if form == "range" else [1, 2, 3] if place[0] == "did" else [2, 3])
    assert ("is written again, as the script changed what it holds" in errors) == (place[0] != "end")
