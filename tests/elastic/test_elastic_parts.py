"""The parts of elastic training that need no torch: plans, the way to the agent, verdicts, and the noise scale."""

import json
import queue
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_elastic._link import AgentLink
from swarm_elastic._noise import NoiseScale
from swarm_elastic._own_time import OwnTime
from swarm_elastic._plan import GangPlan, PlanInvalid, PlanMember, parse
from swarm_elastic._switch import SwitchRefused, SwitchVerdict, SwitchVote, judge
from tests.elastic.testing import DEADLINE_S, MANY_FILES, Script, ScriptedAgent

A, B, C = ({"worker": name, "address": f"127.0.0.1:{port}"} for port, name in enumerate("abc", start=9001))
GOOD = {"version": 3, "epoch": 1, "members": [A, B]}


def test_a_plan_is_read_as_it_was_sent():
    plan = parse(GOOD | {"lost": ["c"], "more": 1})
    assert plan == GangPlan(
        3, 1, (PlanMember("a", "127.0.0.1:9001"), PlanMember("b", "127.0.0.1:9002")), frozenset("c")
    )
    assert (plan.workers, plan.rank_of("b"), plan.rank_of("c")) == (("a", "b"), 1, -1)
    assert PlanMember("a", "[::1]:80").endpoint == ("::1", 80)


def test_a_plan_tells_by_their_secrets_whether_members_have_the_library_of_the_first_version():
    known = [A | {"secret": "ab01"}, {"worker": "b", "address": "cd02@127.0.0.1:9002"}]
    plan = parse(GOOD | {"members": known})
    assert plan.members == (PlanMember("a", "127.0.0.1:9001", "ab01"), PlanMember("b", "127.0.0.1:9002", "cd02"))
    assert not plan.is_former
    assert parse(GOOD | {"members": [*known, C]}).is_former


def test_of_its_own_time_a_worker_tells_what_lasts_for_some_steps_and_seconds():
    now = [0.0]
    own = OwnTime(lambda: now[0])

    def told(*steps_s):
        found = []
        for step_s in steps_s:
            now[0] += step_s
            found.append(own.news(step_s))
        return [(number, each) for number, each in enumerate(found, 1) if each]

    assert told(*[0.125] * 80) == [(80, 0.125)]
    assert told(*[1.0] * 4, *[0.125] * 48) == [], "slow for a moment"
    assert told(*[0.13] * 77) == [], "no news"
    assert told(*[0.25] * 40) == [(40, 0.25)]
    assert told(*[2.0] * 30) == [(21, 2.0)]


BAD = [
    ([], "a plan must be an object, not []"),
    (GOOD | {"version": "3"}, "version of a plan must be a whole number from 0 on, not '3'"),
    (GOOD | {"version": True}, "version of a plan must be"),
    (GOOD | {"epoch": -1}, "epoch of a plan must be a whole number from 0 on, not -1"),
    (GOOD | {"members": []}, "members of a plan must be a list that is not empty, not []"),
    (GOOD | {"members": [A, A]}, "members of a plan must differ, not ['a', 'a']"),
    (GOOD | {"members": ["a"]}, "worker of a member must be its SWARM_WORKER, not None"),
    (GOOD | {"members": [A | {"address": "nowhere"}]}, "address of a must be host:port, not 'nowhere'"),
    (GOOD | {"members": [A | {"address": "h:99999"}]}, "address of a must be host:port, not 'h:99999'"),
    (GOOD | {"members": [A | {"secret": 7}]}, "secret of a must be a text, not 7"),
    (GOOD | {"lost": "b"}, "lost must be a list of names, not 'b'"),
]


@pytest.mark.parametrize(("value", "problem"), BAD, ids=[problem[:40] for _, problem in BAD])
def test_a_malformed_plan_names_the_field_its_value_and_the_remedy(value, problem):
    with pytest.raises(PlanInvalid) as refused:
        parse(value)
    assert str(refused.value).startswith(problem)
    assert "; " in str(refused.value)


class Asked:
    """A link to a scripted agent, which answers each request with the next of its answers and then with silence."""

    def __init__(self, folder: Path, *answers: object) -> None:
        self.plans: queue.Queue[GangPlan] = queue.Queue()
        self._answers, self._silence = list(answers), threading.Event()
        self.agent = ScriptedAgent(folder / "s", self._answer)
        self.link = AgentLink(str(folder / "s"), "secret", "a", "127.0.0.1:1", self.plans.put)
        self.link.tell(state="ready", layout="abc")

    def _answer(self, request: dict) -> object:
        return self._answers.pop(0) if self._answers else {"ok": True, "plan": None}

    def request(self) -> dict:
        return self.agent.requests.get(timeout=DEADLINE_S)

    def request_with(self, **expected) -> dict:
        while True:
            request = self.request()
            if all(request[key] == value for key, value in expected.items()):
                return request


@pytest.fixture
def asked(tmp_path):
    links = []

    def ask(*answers: object) -> Asked:
        links.append(Asked(tmp_path, *answers))
        return links[-1]

    yield ask
    for each in links:
        each.link.close()
        each.agent.__exit__()


def test_a_worker_tells_how_it_stands_and_hears_of_plans(asked):
    there = asked({"ok": True, "plan": GOOD})
    first = there.request()
    who = {"v": 1, "type": "member", "token": "secret", "worker": "a", "address": "127.0.0.1:1", "version": 0}
    standing = {"state": "ready", "trains": 0, "step": -1, "layout": "abc", "problem": ""}
    assert first == who | standing | {"pause_s": 0.0, "busy_s": 0.0, "has_timed_out": False, "failed": 0}
    assert there.plans.get(timeout=DEADLINE_S) == parse(GOOD)
    there.link.tell(state="training", trains=3, step=7)
    told = there.request_with(state="training")
    assert (told["version"], told["trains"], told["step"]) == (3, 3, 7)


def test_plans_are_heard_of_by_a_script_with_many_files_open(tmp_path):
    text = f"""{MANY_FILES}
import queue
from swarm_elastic._link import AgentLink
plans = queue.Queue()
AgentLink(os.environ["SWARM_TASK_SOCKET"], "secret", "a", "127.0.0.1:1", plans.put).tell(state="ready")
print(plans.get(timeout=20).version)
"""
    with ScriptedAgent(tmp_path / "s", lambda asked: {"ok": True, "plan": None if asked["version"] else GOOD}):
        assert Script(tmp_path, text).finish() == (0, "3\n", "")


@pytest.mark.filterwarnings("ignore:swarm_elastic")
def test_a_plan_whose_version_goes_backward_is_not_obeyed_and_the_agent_is_told(asked):
    there = asked({"ok": True, "plan": GOOD}, {"ok": True, "plan": GOOD | {"version": 2}})
    assert there.plans.get(timeout=DEADLINE_S).version == 3
    told = there.request_with(problem="version of a plan must grow, not go from 3 to 2; count up")
    assert told["version"] == 3
    assert there.plans.empty()


@pytest.mark.filterwarnings("ignore:swarm_elastic")
@pytest.mark.parametrize(
    "answer", [None, [], 7, {}, {"ok": False, "problem": "no"}, {"ok": True, "plan": {"version": 9}}]
)
def test_an_answer_that_makes_no_sense_is_survived(asked, answer):
    there = asked(answer, {"ok": True, "plan": GOOD})
    assert there.plans.get(timeout=DEADLINE_S) == parse(GOOD)


@pytest.mark.filterwarnings("ignore:swarm_elastic")
def test_whatever_goes_wrong_with_a_plan_is_told_and_it_is_asked_for_again(asked, monkeypatch):
    """An error that nobody thought of: the thread that asks for plans lives on."""
    wrong = [KeyError("what"), RecursionError("too deep")]

    def parse_in_the_end(value: object) -> GangPlan:
        if wrong:
            raise wrong.pop(0)
        return parse(value)

    monkeypatch.setattr("swarm_elastic._link.parse", parse_in_the_end)
    there = asked(*[{"ok": True, "plan": GOOD}] * 3)
    there.request_with(problem="plans are asked for again, after KeyError: 'what'")
    there.request_with(problem="plans are asked for again, after RecursionError: too deep")
    assert there.plans.get(timeout=DEADLINE_S) == parse(GOOD)


PLAN = parse({"version": 5, "epoch": 1, "members": [A, B, C]})
NEW = SwitchVote(0, -1, -1, 7)


def test_those_that_are_ahead_give_to_those_that_are_behind():
    assert judge(PLAN, [SwitchVote(4, 9, -1, 7), SwitchVote(4, 9, -1, 7), NEW]) == SwitchVerdict(9, (0, 1), (2,))
    assert judge(PLAN, [SwitchVote(4, 8, -1, 7), SwitchVote(4, 9, -1, 7), NEW]) == SwitchVerdict(9, (1,), (0, 2))


def test_one_that_missed_a_plan_is_behind_however_long_it_slept():
    assert judge(PLAN, [SwitchVote(4, 90, -1, 7), SwitchVote(2, 9, -1, 7), NEW]) == SwitchVerdict(90, (0,), (1, 2))


def test_a_job_begins_with_the_weights_of_one():
    assert judge(PLAN, [SwitchVote(0, -1, 0, 7)] * 3) == SwitchVerdict(0, (0,), (1, 2))
    assert judge(PLAN, [SwitchVote(0, -1, 0, 7), SwitchVote(0, -1, 20, 7), NEW]) == SwitchVerdict(20, (1,), (0, 2))


LIES = [
    ([SwitchVote(4, 9, -1, 7), SwitchVote(3, 12, -1, 7), NEW], {1}, "b says step 12"),
    ([SwitchVote(4, 9, -1, 7), SwitchVote(4, 9, -1, 7), SwitchVote(4, 99, -1, 7)], {2}, "c says step 99"),
    ([SwitchVote(4, 9, -1, 7), SwitchVote(4, 9, -1, 7), SwitchVote(4, 2, -1, 7)], {2}, "c says step 2"),
    ([SwitchVote(4, 9, -1, 7), SwitchVote(4, 99, -1, 7), NEW], {0, 1}, "a says step 9"),
]


@pytest.mark.parametrize(("claims", "culprits", "told"), LIES)
def test_who_lies_about_its_step_is_refused_and_of_two_that_contradict_both(claims, culprits, told):
    with pytest.raises(SwitchRefused, match="contradict") as refused:
        judge(PLAN, claims)
    assert refused.value.culprits == culprits
    assert told in str(refused.value)


def test_a_plan_of_newcomers_is_refused_by_all_of_them():
    with pytest.raises(SwitchRefused, match="keeps no member") as refused:
        judge(PLAN, [NEW] * 3)
    assert refused.value.culprits == {0, 1, 2}


def test_another_layout_is_the_fault_of_those_that_do_not_train():
    with pytest.raises(SwitchRefused, match="b has 000000000000008, a has 000000000000007") as refused:
        judge(PLAN, [SwitchVote(4, 9, -1, 7), SwitchVote(0, -1, -1, 8), NEW])
    assert refused.value.culprits == {1}


def said(samples: int, norm: float) -> Any:
    return SimpleNamespace(samples=samples, norm=norm)


def test_the_noise_scale_of_known_gradients_is_found():
    """Two hundred numbers make a gradient; each sample's differs from the true one by a normal error of 0.5."""
    draw, true, deviation, counts = random.Random(3), 0.2, 0.5, (8, 24)
    noise = NoiseScale(first_batch=16)
    assert noise.value is None
    for _ in range(200):
        own = [[draw.gauss(true, deviation / count**0.5) for _ in range(200)] for count in counts]
        mean = [sum(n * g for n, g in zip(counts, each, strict=True)) / sum(counts) for each in zip(*own, strict=True)]
        words = [said(count, sum(g * g for g in gradient)) for count, gradient in zip(counts, own, strict=True)]
        noise.measure(words, sum(g * g for g in mean))
    assert noise.value == pytest.approx(deviation**2 / 16 / true**2, rel=0.15)
    known = noise.value
    noise.measure([said(8, float("inf")), said(24, 1.0)], 1.0)  # as a scaled gradient that overflows
    noise.measure([said(8, 1.0), said(24, 1.0)], float("nan"))
    assert noise.value == known
    kept = NoiseScale(1)
    kept.load_state_dict(json.loads(json.dumps(noise.state_dict())))
    assert kept.value == noise.value
    noise.measure([said(8, 1.0)], 1.0)
    assert kept.value == noise.value


ENDS_LATE = """
from swarm_elastic import _background
def late():
    time.sleep(0.2)
    _background.start("late", print, "late")
threading.Thread(target=late, daemon=True).start()
_background.start("long", lambda: (time.sleep(0.6), print("was waited for")))
"""


def test_nothing_is_begun_in_a_process_that_ends(tmp_path: Path) -> None:
    script = Script(tmp_path, "import threading, time\n" + ENDS_LATE)
    out, err = script.process.communicate(timeout=DEADLINE_S)
    assert (script.process.returncode, out, err) == (0, "was waited for\n", "")
