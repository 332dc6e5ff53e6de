"""What a request does while agents are down, late, busy or gone: decisions alone, without a socket or a clock."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_client.conversation import (
    ANSWER_LIMIT_S,
    BUSY_LIMIT_S,
    BUSY_PAUSE_S,
    CONNECT_LIMIT_S,
    ONCE,
    ONCE_TO_SHEPHERD,
    PATIENCE_S,
    PLAIN,
    SHEPHERD_LIMIT_S,
    STREAM,
    SUBMISSION,
    SUBMIT_LIMIT_S,
    TO_SHEPHERD,
    Answer,
    Ask,
    Broken,
    Contact,
    Conversation,
    ErrorAnswer,
    Lost,
    RequestTerms,
    Silent,
    Sleep,
    Success,
    Unreached,
    Unusable,
    live_addresses,
)  # fmt: skip

A, B, C = (("10.0.0.1", 7433), ("10.0.0.2", 7433), ("10.0.0.3", 7433))
AGENT = {"x-swarm-node": "gpu1"}


def answer(address=A, status=200, headers=AGENT, **document):
    return Answer(address, status, headers, json.dumps(document).encode())


def busy(address=A, code="not_ready", status=503, **more):
    return answer(address, status, code=code, **more)


def told(conversation, *events, now_s=0.0):
    """The last effect after these events, the first of which is the beginning."""
    effects = [conversation.step(event, now_s) for event in (None, *events)]
    return effects[-1]


@pytest.fixture
def three():
    return lambda terms=PLAIN: Conversation([A, B, C], terms, 0.0)


def test_the_first_agents_are_given_little_time_and_the_last_one_all(three):
    ask = three()
    assert told(ask) == Ask(A, PATIENCE_S, PATIENCE_S, may_reuse=True)
    assert ask.step(Unreached(A, "refused"), 0.0) == Ask(B, PATIENCE_S, PATIENCE_S, may_reuse=True)
    assert ask.step(Broken(B, "late"), 0.0) == Ask(C, CONNECT_LIMIT_S, ANSWER_LIMIT_S, may_reuse=True)
    assert ask.step(answer(C, x=1), 0.0).document == {"x": 1}


def test_who_had_too_little_time_is_asked_once_more_with_all_of_it(three):
    effect = told(three(), Broken(A, "late"), Broken(B, "late"), Broken(C, "late"))
    assert effect == Ask(A, CONNECT_LIMIT_S, ANSWER_LIMIT_S, may_reuse=True)


def test_nobody_is_asked_twice_where_nobody_could_be_reached(three):
    end = told(three(), *[Unreached(each, "refused") for each in (A, B, C)])
    assert end == Silent({A: "refused", B: "refused", C: "refused"})
    assert end.cause == "10.0.0.1:7433: refused; 10.0.0.2:7433: refused; 10.0.0.3:7433: refused"


def test_an_agent_that_takes_no_connection_at_once_is_given_more_time_when_all_have_been_asked(three):
    ask = three()
    refused = [Unreached(each, "refused") for each in (B, C)]
    assert told(ask, Unreached(A, "no answer", is_late=True), *refused).connect_s == CONNECT_LIMIT_S


def test_of_each_agent_the_newest_cause_is_told(three):
    late = [Broken(each, "late") for each in (A, B, C)]
    assert told(three(), *late, *late[1:], Broken(A, "hung up")).cause.count("10.0.0.1") == 1


def test_a_kept_connection_that_breaks_says_nothing_of_its_agent(three):
    assert told(three(), Broken(A, "closed", is_kept=True)).address == A


@pytest.mark.parametrize("status", [429, 503])
def test_an_agent_that_is_too_busy_is_passed_over_and_all_of_them_are_asked_again_later(three, status):
    ask = three()
    later = {"status": status, "retry_after_seconds": 0.5}
    assert told(ask, busy(A, **later), busy(B, **later), busy(C, **later)) == Sleep(0.5)
    assert ask.step(None, 0.5).address == A


def test_a_swarm_that_stays_busy_is_asked_three_times_more(three):
    ask, round_of_all = three(), [busy(each, retry_after_seconds=1) for each in (A, B, C)]
    for _ in range(3):
        assert told(ask, *round_of_all) == Sleep(1.0)
    end = told(ask, *round_of_all)
    assert (end.address, end.status, end.code) == (C, 503, "not_ready")


@pytest.mark.parametrize(
    ("asked_for", "pause"),
    [
        ({"retry_after_seconds": 9000}, BUSY_PAUSE_S),
        ({"retry-after": "1"}, 1.0),
        ({"retry-after": "Fri, 31 Dec"}, None),
    ],
)
def test_the_pause_is_what_an_agent_asks_for_and_never_long(asked_for, pause):
    header = {key: value for key, value in asked_for.items() if "-" in key}
    refused = answer(A, 503, {**AGENT, **header}, code="not_ready", **{**asked_for, **header})
    effect = told(Conversation([A], PLAIN, 0.0), refused)
    assert effect == Sleep(pause) if pause else isinstance(effect, ErrorAnswer)


def test_a_refusal_ends_it_at_the_first_agent(three):
    end = told(three(), answer(A, 404, code="unknown_job"))
    assert (end.address, end.status, end.problem) == (A, 404, {"code": "unknown_job"})


def test_what_one_agent_says_tells_more_than_that_others_are_silent(three):
    assert told(three(), busy(A), Unreached(B, "refused"), Unreached(C, "refused")).code == "not_ready"


@pytest.mark.parametrize("terms", [ONCE, ONCE_TO_SHEPHERD])
def test_what_may_not_be_repeated_is_sent_again_only_where_nothing_was_done(three, terms):
    first = told(three(terms))
    assert (first.address, first.limit_s >= SHEPHERD_LIMIT_S, first.may_reuse) == (A, True, False)
    assert told(three(terms), Unreached(A, "refused")).address == B
    assert told(three(terms), busy(A, "not_ready")).address == B
    assert told(three(terms), busy(A, "unavailable", retry_after_seconds=1)).code == "unavailable"
    assert told(three(terms), Broken(A, "late")) == Lost(A, "late")


def test_an_agent_that_has_waited_for_a_shepherd_is_the_last_one_asked(three):
    nobody_acts = busy(A, "shepherd_unreachable", retry_after_seconds=1)
    assert told(three(TO_SHEPHERD), nobody_acts).code == "shepherd_unreachable"
    assert told(three(PLAIN), nobody_acts).address == B


def test_a_wait_for_a_shepherd_begins_nowhere_when_its_time_is_nearly_over(three):
    ask = three(TO_SHEPHERD)
    assert told(ask).limit_s == PATIENCE_S
    last = ask.step(Broken(A, "late"), 2.0)
    assert (last.address, last.limit_s) == (B, SHEPHERD_LIMIT_S - 2.0)
    assert isinstance(ask.step(Broken(B, "late"), SHEPHERD_LIMIT_S), Silent)


def test_agents_that_took_no_connection_leave_time_to_ask_the_others_for_a_shepherd(three):
    ask = three(TO_SHEPHERD)
    ask.step(None, 0.0)
    assert ask.step(Unreached(A, "no answer"), 5.0).address == B


@pytest.mark.parametrize("odd", [answer(A, headers={"server": "nginx"}), answer(A, 307), answer(A, 404, headers={})])
def test_what_is_not_an_agent_is_passed_over_and_told_of_when_nobody_else_answers(three, odd):
    assert told(three(), odd).address == B
    assert told(three(ONCE), odd).address == B
    assert isinstance(told(three(), odd, answer(B)), Success)
    end = told(three(), odd, Unreached(B, "refused"), Unreached(C, "refused"))
    assert isinstance(end, Unusable)
    assert (end.address, end.is_stranger) == (A, True)


def test_an_answer_that_cannot_be_read_is_no_success(three):
    end = told(three(), Answer(A, 200, AGENT, b"<html>"))
    assert isinstance(end, Unusable)
    assert "not JSON: b'<html>'" in end.cause
    assert told(three(), Answer(A, 500, AGENT, b"<html>")) == ErrorAnswer(A, 500, {}, 0.0)


@pytest.mark.parametrize("body", [b"[]", b"null", b'"text"', b"7"])
def test_a_problem_that_is_no_object_is_a_refusal_without_words(three, body):
    assert told(three(), Answer(A, 409, AGENT, body)) == ErrorAnswer(A, 409, {}, 0.0)


def test_a_stream_is_handed_on_unread(three):
    opened = Answer(A, 200, {}, b"", object())
    assert told(three(STREAM), opened) == Success(opened, None)


def test_contact_is_kept_up_with_growing_pauses_until_its_time_is_over():
    contact = Contact(5.0)
    assert [contact.pause_s(0.0), contact.pause_s(0.1), contact.pause_s(4.9)] == [0.05, 0.1, 0.2]
    assert contact.pause_s(5.0) is None
    contact.found()
    assert contact.pause_s(9.0) == 0.05


@pytest.mark.parametrize("members", [None, {}, [None], [{"status": "failed", "address": "a"}], [{"status": "alive"}]])
def test_a_list_of_members_without_any_that_may_answer_is_empty(members):
    assert live_addresses(members) == []


# --- Drawn swarms: each agent does one of these each time that it is asked; the last one for ever.

TROUBLES = ("refuses", "dead", "hangs", "lost before", "lost after", "busy", "busy for long", "unsure", "307", "proxy")
END_OF_IT = ("answers", "rejects", *TROUBLES)
agents = st.lists(
    st.tuples(st.lists(st.sampled_from(TROUBLES), max_size=4), st.sampled_from(END_OF_IT)), min_size=1, max_size=5
)
kinds = st.sampled_from([PLAIN, ONCE, TO_SHEPHERD, ONCE_TO_SHEPHERD, SUBMISSION, STREAM, RequestTerms(False, 0.3, 5.0)])


class DrawnSwarm:
    """Agents in virtual time, and a driver of one request to them; counts what may have been carried out."""

    def __init__(self, scripts, terms):
        self.scripts = {("h", port): [*troubles, last] for port, (troubles, last) in enumerate(scripts, 1)}
        self.terms = terms
        self.now_s, self.carried_out, self.asked = 0.0, 0, set()

    def does(self, address):
        script = self.scripts[address]
        return script.pop(0) if len(script) > 1 else script[0]

    def end(self):
        conversation = Conversation(self.scripts, self.terms, 0.0)
        event = None
        for _ in range(5_000):
            effect = conversation.step(event, self.now_s)
            event = None
            if isinstance(effect, Sleep):
                assert effect.seconds <= BUSY_PAUSE_S
                self.now_s += effect.seconds
            elif isinstance(effect, Ask):
                event = self.ask(effect)
            else:
                return effect
        raise AssertionError("it never ends")

    def ask(self, ask):
        self.asked.add(ask.address)
        does = self.does(ask.address)
        if does == "dead":
            self.now_s += ask.connect_s
        if does in ("refuses", "dead"):
            return Unreached(ask.address, does, is_late=does == "dead")
        return self.sent(ask.address, does, ask.limit_s)

    def sent(self, address, does, limit_s):
        if does in ("hangs", "lost after", "lost before"):
            self.carried_out += does != "lost before"
            self.now_s += limit_s if does == "hangs" else 0.01
            return Broken(address, does)
        self.now_s += 0.01
        self.carried_out += does in ("answers", "unsure")
        if does == "proxy":
            return answer(address, 200, {"server": "nginx"})
        if does in ("307", "rejects", "answers"):
            return answer(address, {"307": 307, "rejects": 409, "answers": 200}[does])
        pause_s = {"busy": 1.0, "busy for long": 100.0, "unsure": 1.5}[does]
        return busy(address, "unavailable" if does == "unsure" else "not_ready", retry_after_seconds=pause_s)


@settings(max_examples=200, deadline=None)
@given(agents, kinds)
def test_whatever_agents_do_nothing_is_done_twice_and_the_wait_is_bounded(scripts, terms):
    swarm = DrawnSwarm(scripts, terms)
    end = swarm.end()
    is_long = terms.needs_shepherd
    assert terms.repeatable or swarm.carried_out <= 1
    assert terms.repeatable or not swarm.carried_out or isinstance(end, Success | Lost | ErrorAnswer)
    assert not (isinstance(end, Lost) and terms.repeatable)
    assert isinstance(end, Success) <= (swarm.carried_out > 0)
    if isinstance(end, Silent | Unusable) and not is_long:
        assert swarm.asked == set(swarm.scripts)
    assert swarm.now_s <= bound_s(len(scripts), terms)


def bound_s(agents, terms):
    """One round of all, and a last one; where a swarm is busy again and again, another such pair at the very end."""
    connecting_s = agents * (CONNECT_LIMIT_S + 0.02)
    if terms.needs_shepherd:
        return SHEPHERD_LIMIT_S + 2 * connecting_s + 0.2
    pair_s = agents * terms.patience_s + 4 * terms.limit_s + 2 * connecting_s
    until_s = {None: BUSY_LIMIT_S, SUBMIT_LIMIT_S: SUBMIT_LIMIT_S}.get(terms.busy_limit_s, 0.0)
    return until_s + BUSY_PAUSE_S + pair_s


@settings(max_examples=200, deadline=None)
@given(agents, st.integers(0, 5), st.sampled_from([PLAIN, SUBMISSION, STREAM]))
def test_one_agent_that_is_well_is_always_found(scripts, place, terms):
    rest = [(troubles, last if last != "rejects" else "refuses") for troubles, last in scripts]
    rest.insert(place, ([], "answers"))
    assert isinstance(DrawnSwarm(rest, terms).end(), Success)


def wrong_door(address):
    return answer(address, 421, code="wrong_door", detail="the API is at 10.0.0.1:7434")


@pytest.mark.parametrize("terms", [PLAIN, ONCE, ONCE_TO_SHEPHERD, STREAM, SUBMISSION])
def test_an_agent_that_serves_people_elsewhere_is_passed_over_and_told_of_where_nobody_does(three, terms):
    assert told(three(terms), wrong_door(A)).address == B
    assert told(three(terms), wrong_door(A), answer(B, x=1)).document == {"x": 1}
    last = told(three(terms), wrong_door(A), wrong_door(B), wrong_door(C))
    assert (last.status, last.code) == (421, "wrong_door")
