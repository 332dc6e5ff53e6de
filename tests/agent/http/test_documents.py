"""Documents of the API know the words and limits of the core, and readers of one version read those of another."""

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import fields

from swarm_agent.http.components import ANSWERS, WORDS, schemas
from swarmsched import documents
from swarmsched.api import JobState
from swarmsched.documents import LiveCountsDocument, MemberCountsDocument
from swarmsched.gossip.member import MemberStatus
from swarmsched.holders import HOLDERS_MAX


def test_counts_have_a_key_for_each_state_and_each_status():
    states = [state.value for state in JobState if state is not JobState.ENDED]
    assert [each.name for each in fields(LiveCountsDocument)] == states
    assert [each.name for each in fields(MemberCountsDocument)] == [status.value for status in MemberStatus]
    assert documents.HOLDERS_MOST == HOLDERS_MAX


def test_each_document_and_each_of_its_keys_is_published():
    published = schemas()
    for kind in ANSWERS:
        schema = published[kind.__name__.removesuffix("Document")]
        assert list(schema["properties"]) == schema["required"] == [each.name for each in fields(kind)]
        assert schema["description"]
    assert "x-enumeration" not in str(published)
    assert all(WORDS.values())


def holds(read, told):
    """True where all that was told is in what was read, which may have more keys."""
    if isinstance(told, dict):
        return all(key in read and holds(read[key], value) for key, value in told.items())
    if isinstance(told, list):
        return len(read) == len(told) and all(map(holds, read, told))
    return read == told


RELEASED = [line.split(" ", 1) for line in Path(__file__).with_name("answers-0.1.0.txt").read_text().splitlines()]


@pytest.mark.parametrize(("kind", "answer"), RELEASED)
def test_what_agents_of_the_released_version_answer_is_read(kind, answer):
    read = msgspec.json.decode(answer, type=getattr(documents, kind))
    told = json.loads(answer)
    assert holds(msgspec.to_builtins(read), told)


def test_what_an_agent_of_a_later_version_adds_is_left_out_and_a_new_word_is_taken():
    answer = next(json.loads(answer) for kind, answer in RELEASED if kind == "JobDocument")
    read = msgspec.convert({**answer, "later": 1, "state": "held"}, documents.JobDocument)
    assert (read.state, hasattr(read, "later")) == ("held", False)
