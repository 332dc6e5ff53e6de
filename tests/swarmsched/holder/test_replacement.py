"""New holders are heard before the exchange: with one that cannot answer it would never be decided."""

import random

import pytest

from swarmsched.cluster import Candidate
from swarmsched.holder.machine import Answered
from swarmsched.holder.replacement import Replacement
from swarmsched.holders import Holder
from swarmsched.jobs.update import ReadDecided, UpdateUncertain
from swarmsched.negotiation.record_writer import ReadRecord, WriteRecord
from tests.swarmsched.negotiation.placement.scene import ME, A, Scene, node, running_elastic


@pytest.mark.parametrize("is_answered", [True, False])
def test_holders_are_exchanged_once_the_new_ones_have_answered(is_answered):
    scene = Scene([node(A, 2)])
    job = running_elastic(scene)
    newcomer = Candidate(Holder(A, 5))
    replacement = Replacement(Candidate(Holder(ME, 1)), scene.placement.shepherds, random.Random(1))
    effects = replacement.mend(set(), {}, [newcomer], scene.clock)
    (asked,) = [each.read for each in effects if isinstance(each, ReadRecord) and each.read.job_id == job.job_id]
    assert asked.configuration.holders == (newcomer.holder,)
    assert replacement.mend(set(), {}, [newcomer], scene.clock) == [], "they are asked once"
    assert not job.is_writing
    number = asked.update_id
    result = ReadDecided(number, None) if is_answered else UpdateUncertain(number, "no majority")
    effects = replacement.probed(Answered(asked, result), scene.clock)
    written = [effect.update.value.holders for effect in effects if isinstance(effect, WriteRecord)]
    assert [newcomer.holder in holders for holders in written] == ([True] if is_answered else [])
