"""Documents of the API know the words and limits of the core, and readers of one version read those of another."""

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
