import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from swarmsched.api import JobSpec
from swarmsched.effects import Persist
from swarmsched.errors import StorageError
from swarmsched.ids import JobId, NodeId, TaskKey, make_job_id
from swarmsched.ledger.booking import BookingState
from swarmsched.ledger.claims import NEWEST_MAX
from swarmsched.ledger.ledger import FENCE_KEPT_S, STORED_ANSWERS_MAX, Ledger
from swarmsched.ledger.message import (
    CLAIM_TTL_S,
    ClaimRequest,
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    OwnerAnswer,
    Refusal,
    ReleaseRequest,
    SignalRequest,
    StatusRequest,
    StopRequest,
)
from swarmsched.resources import Demand, Gpu, GpuHealth, NodeResources, Share, counted
from swarmsched.task import TaskOrder
from swarmsched.wire.codec import decode_value, encode_value

NODE, SHEPHERD, HEIR = NodeId("gpu1"), NodeId("s1"), NodeId("s2")
IDS = [make_job_id(float(n), random.Random(n)) for n in range(6)]
JOB, OTHER = IDS[0], IDS[1]
GIB = 2**30


def resources(gpus: int = 4, cpus: int = 32, memory_bytes: int = 256 * GIB, model: str = "H100") -> NodeResources:
    return NodeResources(tuple(Gpu(f"gpu-{n}", n, model, 80 * GIB) for n in range(gpus)), cpus, memory_bytes)


def with_health(offered: NodeResources, index: int, health: GpuHealth) -> NodeResources:
    gpus = tuple(replace(gpu, health=health) if gpu.index == index else gpu for gpu in offered.gpus)
    return replace(offered, gpus=gpus)


class Owner:
    """A ledger with its disk; every command validates the ledger and applies the writes."""

    def __init__(self, offered: NodeResources | None = None) -> None:
        self.disk: dict[str, bytes] = {}
        self.generation = 1
        self.now_s = 100.0
        self.command_id = 0
        self.writes: list[Persist] = []
        self.offered = offered or resources()
        self.ledger = Ledger(NODE, 1)
        self.ledger.offer(self.offered, self.now_s)

    def restart(self) -> None:
        self.generation += 1
        self.ledger = Ledger(NODE, self.generation)
        self.ledger.restore(self.disk, self.now_s)
        self.ledger.validate()
        self.ledger.offer(self.offered, self.now_s)
        self.ledger.validate()

    def keep(self, result):
        answer, self.writes = result
        self.store(self.writes)
        return answer

    def store(self, writes: list[Persist]) -> None:
        for write in writes:
            assert write.room == "ledger"
            if write.value is None:
                del self.disk[write.key]
            else:
                self.disk[write.key] = write.value
        self.ledger.validate()

    def fields(self, job: JobId, attempt: int, epoch: int, shepherd: NodeId, command_id: int | None, part=0) -> dict:
        self.command_id += 1
        command = {"command_id": self.command_id if command_id is None else command_id, "part": part}
        return {"job_id": job, "epoch": epoch, "attempt": attempt, "shepherd": shepherd, **command}

    def hold(
        self, job=JOB, attempt=1, epoch=1, shepherd=SHEPHERD, command_id=None, ranks=1, demand=None, ttl_s=5.0, part=0
    ):
        request = HoldRequest(
            **self.fields(job, attempt, epoch, shepherd, command_id, part),
            ranks=ranks,
            demand=demand or Demand(gpus=1),
            policy_id="fifo",
            rank_key=(0,),
            wants_rendezvous=False,
            ttl_s=ttl_s,
        )
        return self.keep(self.ledger.hold(request, self.now_s))

    def commit(self, job=JOB, attempt=1, epoch=1, shepherd=SHEPHERD, command_id=None):
        order = TaskOrder(job, epoch, attempt, NODE, JobSpec(command=("true",)), (Share(NODE, 1),), "", 0)
        request = CommitRequest(**self.fields(job, attempt, epoch, shepherd, command_id), order=order)
        return self.keep(self.ledger.commit(request, self.now_s))

    def release(self, job=JOB, attempt=1, epoch=1, shepherd=SHEPHERD, command_id=None, part=0):
        request = ReleaseRequest(**self.fields(job, attempt, epoch, shepherd, command_id, part))
        return self.keep(self.ledger.release(request, self.now_s))

    def check(self, kind, job=JOB, attempt=1, epoch=1, shepherd=SHEPHERD, command_id=None, **more):
        command = kind(**self.fields(job, attempt, epoch, shepherd, command_id), **more)
        return self.keep(self.ledger.check(command, self.now_s))

    def end(self, job=JOB, attempt=1):
        return self.keep(self.ledger.end(TaskKey(job, attempt), self.now_s))

    def expire(self):
        return self.keep(self.ledger.expire(self.now_s))


@pytest.fixture
def owner() -> Owner:
    return Owner()


# --- holds


def test_a_hold_books_the_first_suitable_gpus_and_is_on_disk_before_the_answer(owner):
    answer = owner.hold(ranks=2, demand=Demand(gpus=1, cpus=4, memory_bytes=GIB))
    assert answer.refusal is Refusal.NONE
    assert answer.owner == NODE
    assert (answer.free.gpus, answer.free.cpus, answer.free.memory_bytes) == (2, 24, 254 * GIB)
    (entry,) = owner.ledger.entries
    assert (entry.state, entry.gpus, entry.deadline_s) == (BookingState.HELD, ("gpu-0", "gpu-1"), 105.0)
    assert [write.key for write in owner.writes] == ["schema", f"fence/{JOB}", f"booking/{JOB}/1"]


def test_what_does_not_fit_is_refused_with_the_free_state_and_leaves_no_trace(owner):
    answer = owner.hold(ranks=5)
    assert answer.refusal is Refusal.DOES_NOT_FIT
    assert answer.detail == "asked for 5 GPUs of 4 free"
    assert answer.free == owner.ledger.report()
    assert (owner.writes, owner.ledger.entries, owner.ledger.epoch_of(JOB)) == ([], (), 0)


def test_cpus_and_memory_count_only_when_demanded(owner):
    assert owner.hold(demand=Demand(cpus=33)).refusal is Refusal.DOES_NOT_FIT
    assert owner.hold(demand=Demand(memory_bytes=257 * GIB)).refusal is Refusal.DOES_NOT_FIT
    assert owner.hold(demand=Demand(gpus=4)).free.cpus == 32
    assert owner.hold(OTHER, demand=Demand(), ranks=100).refusal is Refusal.NONE


def test_gpu_type_and_memory_are_honoured(owner):
    assert owner.hold(demand=Demand(gpus=1, gpu_type="A100")).refusal is Refusal.DOES_NOT_FIT
    assert owner.hold(demand=Demand(gpus=1, gpu_memory_bytes=81 * GIB)).refusal is Refusal.DOES_NOT_FIT
    assert owner.hold(demand=Demand(gpus=1, refused_gpus=("t4", "h100"))).refusal is Refusal.DOES_NOT_FIT
    assert owner.hold(demand=Demand(gpus=1, gpu_type="h100", refused_gpus=("t4",))).refusal is Refusal.NONE


def test_a_label_that_a_demand_names_must_be_here_as_it_is_or_by_its_name():
    owner = Owner(replace(resources(), labels=("nvlink", "engine=docker")))
    for number, labels in enumerate([("nvlink",), ("engine",), ("engine=docker", "nvlink")]):
        job = make_job_id(1_700_000_000.0 + number, random.Random(number))
        assert owner.hold(job, demand=Demand(gpus=1, labels=labels)).refusal is Refusal.NONE
    refused = owner.hold(OTHER, demand=Demand(gpus=1, labels=("engine=podman", "nvlink", "eng")))
    assert refused.refusal is Refusal.DOES_NOT_FIT
    told = "asked for the label engine=podman, which is not here, the label eng, which is not here, 1 GPUs of 1 free"
    assert refused.detail == told


def test_a_repeated_command_id_gets_the_stored_verdict_and_the_present_free_state(owner):
    first = owner.hold(command_id=7)
    owner.hold(OTHER)
    again = owner.hold(command_id=7)
    assert owner.writes == []
    assert replace(again, free=first.free) == first
    assert again.free.gpus == 2
    refused = owner.hold(IDS[2], ranks=3, command_id=1)
    assert refused.refusal is Refusal.DOES_NOT_FIT


def test_a_stored_refusal_stays_a_refusal_when_resources_come_free(owner):
    owner.hold(ranks=3)
    assert owner.hold(attempt=2, ranks=5, command_id=50).refusal is Refusal.DOES_NOT_FIT
    owner.release(attempt=1)
    assert owner.hold(attempt=2, ranks=5, command_id=50).refusal is Refusal.DOES_NOT_FIT


def test_a_late_copy_of_a_hold_or_commit_is_not_told_yes_once_the_booking_is_gone(owner):
    owner.hold(command_id=1)
    owner.commit(command_id=2)
    owner.release(command_id=3)
    owner.end()
    assert owner.hold(command_id=1).refusal is Refusal.RELEASED_ATTEMPT
    assert owner.commit(command_id=2).refusal is Refusal.RELEASED_ATTEMPT
    assert owner.release(command_id=3).refusal is Refusal.NONE
    owner.hold(OTHER, command_id=1)
    owner.now_s += 5.0
    owner.expire()
    assert owner.hold(OTHER, command_id=1).refusal is Refusal.EXPIRED
    assert owner.ledger.entries == ()


def test_a_hold_repeated_under_a_new_id_renews_its_deadline_without_a_second_booking(owner):
    owner.hold()
    owner.now_s += 3.0
    assert owner.hold().refusal is Refusal.NONE
    (entry,) = owner.ledger.entries
    assert entry.deadline_s == 108.0
    assert owner.hold(ranks=2).refusal is Refusal.DOES_NOT_FIT


def test_a_hold_expires_at_its_deadline_and_not_before(owner):
    owner.hold()
    owner.now_s = owner.ledger.next_deadline_s - 0.001
    assert owner.expire() == []
    owner.now_s = owner.ledger.next_deadline_s
    (expired,) = owner.expire()
    assert (expired.job_id, expired.epoch, expired.attempt, expired.shepherd) == (JOB, 1, 1, SHEPHERD)
    assert owner.ledger.free.gpus == counted(owner.offered.gpus)
    assert owner.ledger.next_deadline_s == math.inf
    assert not [key for key in owner.disk if key.startswith("booking/")]


def test_a_hold_of_a_later_attempt_replaces_the_earlier_hold_of_the_same_job(owner):
    owner.hold(attempt=1, ranks=4)
    assert owner.hold(attempt=2, ranks=4).refusal is Refusal.NONE
    assert [entry.attempt for entry in owner.ledger.entries] == [2]
    assert owner.hold(attempt=1).refusal is Refusal.RELEASED_ATTEMPT


def test_an_owner_that_refuses_an_attempt_tells_up_to_which_it_has_released(owner):
    owner.hold(attempt=7, part=3)
    owner.release(attempt=7, part=3)
    for attempt in (5, 7):
        answer = owner.hold(attempt=attempt, part=3)
        assert answer.refusal is Refusal.RELEASED_ATTEMPT
        assert (answer.released_attempt, answer.released_part) == (7, 3)
    accepted = owner.hold(attempt=7, part=4)
    assert (accepted.refusal, accepted.released_attempt) == (Refusal.NONE, 0)


def test_a_later_attempt_that_would_not_fit_even_in_its_place_leaves_the_earlier_hold(owner):
    owner.hold(attempt=1, ranks=4)
    assert owner.hold(attempt=2, ranks=5).refusal is Refusal.DOES_NOT_FIT
    assert [entry.attempt for entry in owner.ledger.entries] == [1]


# --- commit


def test_a_commit_makes_a_lease_without_deadline(owner):
    owner.hold()
    owner.now_s += 4.9
    assert owner.commit().free.running_ranks == 1
    (entry,) = owner.ledger.entries
    assert (entry.state, entry.deadline_s) == (BookingState.LEASED, math.inf)
    owner.now_s += 1e6
    assert owner.expire() == []


def test_a_commit_of_an_expired_or_unknown_hold_is_refused(owner):
    assert owner.commit().refusal is Refusal.EXPIRED
    owner.hold()
    owner.now_s += 5.0
    assert owner.commit().refusal is Refusal.EXPIRED
    owner.expire()
    assert owner.commit().refusal is Refusal.EXPIRED


def test_a_commit_under_a_higher_epoch_takes_the_hold_over(owner):
    owner.hold()
    assert owner.commit(epoch=2, shepherd=HEIR).refusal is Refusal.NONE
    (entry,) = owner.ledger.entries
    assert (entry.epoch, entry.shepherd, entry.state) == (2, HEIR, BookingState.LEASED)
    assert owner.commit(epoch=1).refusal is Refusal.STALE_EPOCH


def test_a_commit_of_another_attempt_does_not_touch_the_hold(owner):
    owner.hold(attempt=2)
    assert owner.commit(attempt=1).refusal is Refusal.RELEASED_ATTEMPT
    assert owner.commit(attempt=3).refusal is Refusal.EXPIRED
    assert [entry.state for entry in owner.ledger.entries] == [BookingState.HELD]


# --- fences


@pytest.mark.parametrize("name", ["hold", "commit", "release", "launch", "stop", "signal", "status"])
def test_every_command_of_a_lower_epoch_is_refused_and_changes_nothing(owner, name):
    owner.hold(epoch=3)
    owner.commit(epoch=3)
    before, disk = owner.ledger.entries, dict(owner.disk)
    commands = {
        "hold": lambda: owner.hold(epoch=2, attempt=9),
        "commit": lambda: owner.commit(epoch=2),
        "release": lambda: owner.release(epoch=2),
        "launch": lambda: owner.check(LaunchRequest, epoch=2),
        "stop": lambda: owner.check(StopRequest, epoch=2, grace_s=1.0),
        "signal": lambda: owner.check(SignalRequest, epoch=2, signal=15),
        "status": lambda: owner.check(StatusRequest, epoch=2),
    }
    answer = commands[name]()
    assert (answer.refusal, answer.epoch) == (Refusal.STALE_EPOCH, 3)
    assert (owner.ledger.entries, owner.disk) == (before, disk)


def test_a_stored_yes_of_an_earlier_epoch_is_not_repeated(owner):
    owner.hold(command_id=1)
    owner.check(StatusRequest, epoch=2, shepherd=HEIR)
    assert owner.hold(command_id=1).refusal is Refusal.STALE_EPOCH


def test_the_fence_survives_the_end_of_the_lease_and_a_restart(owner):
    owner.hold(epoch=4)
    owner.commit(epoch=4)
    owner.end()
    owner.restart()
    assert owner.hold(epoch=3, attempt=2).refusal is Refusal.STALE_EPOCH
    assert owner.hold(epoch=4, attempt=1).refusal is Refusal.RELEASED_ATTEMPT
    assert owner.hold(epoch=4, attempt=2).refusal is Refusal.NONE


def test_a_release_that_overtakes_its_hold_wins(owner):
    assert owner.release(attempt=2).refusal is Refusal.NONE
    assert owner.hold(attempt=2).refusal is Refusal.RELEASED_ATTEMPT
    assert owner.hold(attempt=1).refusal is Refusal.RELEASED_ATTEMPT
    owner.restart()
    assert owner.hold(attempt=2).refusal is Refusal.RELEASED_ATTEMPT
    assert owner.hold(attempt=3).refusal is Refusal.NONE


def test_a_late_release_cannot_hurt_a_newer_attempt(owner):
    owner.hold(attempt=2)
    owner.release(attempt=1)
    assert [entry.attempt for entry in owner.ledger.entries] == [2]


def test_fences_of_idle_jobs_are_dropped_after_an_hour(owner):
    owner.hold()
    owner.hold(OTHER)
    owner.release(OTHER)
    owner.now_s += FENCE_KEPT_S + 1.0
    owner.expire()
    assert owner.ledger.epoch_of(OTHER) == 0
    assert owner.ledger.epoch_of(JOB) == 1
    assert f"fence/{OTHER}" not in owner.disk
    owner.now_s += FENCE_KEPT_S + 1.0
    owner.expire()
    assert sorted(owner.disk) == ["schema"]


def test_stored_answers_per_job_are_bounded(owner):
    for _ in range(3 * STORED_ANSWERS_MAX):
        owner.hold()


# --- release, end, checks


def test_releasing_a_hold_frees_it_at_once(owner):
    owner.hold()
    assert owner.release().free.gpus == 4
    assert owner.ledger.entries == ()


def test_releasing_a_lease_drains_until_no_process_is_left(owner):
    owner.hold()
    owner.commit()
    assert owner.release().free.gpus == 3
    assert [entry.state for entry in owner.ledger.entries] == [BookingState.DRAINING]
    assert owner.commit().refusal is Refusal.RELEASED_ATTEMPT
    assert owner.check(LaunchRequest).refusal is Refusal.RELEASED_ATTEMPT
    assert owner.check(StopRequest, grace_s=0.0).refusal is Refusal.NONE
    assert owner.release().refusal is Refusal.NONE
    assert owner.end() is True
    assert owner.end() is False
    assert owner.ledger.report().gpus == 4


def test_an_ended_attempt_cannot_be_held_again(owner):
    owner.hold()
    owner.commit()
    assert owner.end() is True
    assert owner.hold().refusal is Refusal.RELEASED_ATTEMPT


def test_the_end_of_processes_does_not_touch_a_mere_hold(owner):
    owner.hold()
    assert owner.end() is False
    assert len(owner.ledger.entries) == 1


def test_launch_stop_and_signal_need_a_lease_and_status_only_a_booking(owner):
    assert owner.check(LaunchRequest).refusal is Refusal.UNKNOWN
    assert owner.check(StatusRequest).refusal is Refusal.UNKNOWN
    owner.hold()
    assert owner.check(LaunchRequest).refusal is Refusal.NOT_COMMITTED
    assert owner.check(SignalRequest, signal=10).refusal is Refusal.NOT_COMMITTED
    assert owner.check(StopRequest, grace_s=1.0).refusal is Refusal.NOT_COMMITTED
    assert owner.check(StatusRequest).refusal is Refusal.NONE
    owner.commit()
    assert owner.check(LaunchRequest).refusal is Refusal.NONE
    assert owner.check(SignalRequest, signal=10).refusal is Refusal.NONE


def test_a_status_request_of_a_higher_epoch_takes_the_reports_over(owner):
    owner.hold()
    owner.commit()
    assert owner.check(StatusRequest, epoch=2, shepherd=HEIR).refusal is Refusal.NONE
    assert owner.ledger.entries[0].shepherd == HEIR
    owner.restart()
    assert (owner.ledger.entries[0].shepherd, owner.ledger.entries[0].epoch) == (HEIR, 2)


def test_repeated_tells_a_second_signal_from_a_first(owner):
    owner.hold()
    owner.commit()
    first = SignalRequest(JOB, 1, 1, 99, SHEPHERD, 10)
    assert owner.ledger.repeated(first) is None
    owner.keep(owner.ledger.check(first, owner.now_s))
    again = owner.ledger.repeated(first)
    assert again is not None
    assert again.refusal is Refusal.NONE


def test_an_amended_answer_is_what_a_repeated_hold_gets(owner):
    answer = owner.hold(command_id=5)
    owner.ledger.amend(replace(answer, rendezvous_host="10.0.0.1", rendezvous_port=29_500))
    again = owner.hold(command_id=5)
    assert (again.rendezvous_host, again.rendezvous_port) == ("10.0.0.1", 29_500)


def test_forgetting_a_closed_job_frees_holds_but_not_leases(owner):
    owner.hold()
    assert owner.keep(owner.ledger.forget(JOB, owner.now_s)) is True
    assert owner.ledger.entries == ()
    owner.hold(OTHER)
    owner.commit(OTHER)
    assert owner.keep(owner.ledger.forget(OTHER, owner.now_s)) is False
    assert len(owner.ledger.entries) == 1


# --- telemetry, draining, version


def test_only_healthy_gpus_are_offered(owner):
    for health in (GpuHealth.FOREIGN, GpuHealth.UNHEALTHY, GpuHealth.STALE):
        owner.ledger.offer(with_health(owner.offered, 0, health), owner.now_s)
        assert [gpu.index for gpu in owner.ledger._free_devices(())] == [1, 2, 3]
        assert owner.ledger.free == owner.ledger.capacity
        assert owner.ledger.capacity.gpu_count == 3


def test_a_booked_gpu_stays_booked_whatever_becomes_of_it(owner):
    owner.hold()
    owner.ledger.offer(with_health(owner.offered, 0, GpuHealth.UNHEALTHY), owner.now_s)
    owner.ledger.validate()
    assert owner.commit().free.gpus == 3
    owner.ledger.offer(replace(owner.offered, gpus=owner.offered.gpus[1:]), owner.now_s)
    owner.ledger.validate()
    assert owner.ledger.gpus_of(TaskKey(JOB, 1)) == ()
    owner.ledger.offer(owner.offered, owner.now_s)
    assert owner.ledger.report().gpus == 3
    assert [gpu.uuid for gpu in owner.ledger.gpus_of(TaskKey(JOB, 1))] == ["gpu-0"]


def test_the_version_grows_exactly_when_the_free_state_changes(owner):
    version = owner.ledger.version
    owner.ledger.offer(owner.offered, owner.now_s)
    assert owner.ledger.version == version
    owner.ledger.offer(with_health(owner.offered, 0, GpuHealth.FOREIGN), owner.now_s)
    assert owner.ledger.version == version + 1
    assert owner.hold().free.version > version + 1


def test_a_draining_node_refuses_holds_but_keeps_its_word(owner):
    owner.hold()
    owner.store(owner.ledger.set_draining("new disk"))
    refused = owner.hold(OTHER)
    assert (refused.refusal, refused.detail) == (Refusal.DRAINING, "draining: new disk")
    assert owner.hold(OTHER, demand=Demand()).refusal is Refusal.DRAINING
    assert owner.ledger.report().gpus == 0
    assert owner.commit().refusal is Refusal.NONE
    owner.restart()
    assert (owner.ledger.is_draining, owner.ledger.drain_reason) == (True, "new disk")
    owner.store(owner.ledger.set_draining(None))
    assert owner.hold(OTHER).refusal is Refusal.NONE


# --- restarts


def test_leases_survive_a_restart_and_holds_get_their_full_time_again(owner):
    owner.hold()
    owner.commit()
    owner.hold(OTHER, ttl_s=5.0)
    owner.now_s += 4.0
    owner.restart()
    lease, hold = owner.ledger.entries
    assert (lease.job_id, lease.state) == (JOB, BookingState.LEASED)
    assert (hold.job_id, hold.deadline_s) == (OTHER, owner.now_s + 5.0)
    assert owner.ledger.report().gpus == 2
    assert owner.commit(OTHER).refusal is Refusal.NONE


def test_no_hold_runs_out_and_no_fence_goes_before_the_restarted_node_has_read_its_resources(owner):
    owner.hold()
    owner.release(OTHER, attempt=3)
    ledger = Ledger(NODE, 2)
    ledger.restore(owner.disk, 0.0)
    owner.now_s += 2 * FENCE_KEPT_S
    assert ledger.next_deadline_s == math.inf
    assert ledger.expire(owner.now_s) == ([], [])
    ledger.offer(owner.offered, owner.now_s)
    assert ledger.next_deadline_s == owner.now_s + 5.0
    assert ledger.expire(owner.now_s) == ([], [])
    assert ledger.epoch_of(OTHER) == 1
    ledger.validate()


def test_commands_are_harmless_when_repeated_after_a_restart(owner):
    owner.hold(command_id=1)
    owner.restart()
    assert owner.hold(command_id=1).refusal is Refusal.NONE
    owner.commit(command_id=2)
    owner.restart()
    assert owner.commit(command_id=2).refusal is Refusal.NONE
    assert owner.hold(command_id=1).refusal is Refusal.NONE
    assert len(owner.ledger.entries) == 1


def test_a_store_whose_schema_entry_alone_is_missing_is_read_and_gets_it_back(owner):
    owner.hold()
    del owner.disk["schema"]
    owner.restart()
    assert len(owner.ledger.entries) == 1
    owner.commit()
    assert "schema" in owner.disk


@pytest.mark.parametrize("schema", [b"2", b""])
def test_a_store_of_another_schema_version_is_refused(owner, schema):
    owner.hold()
    owner.disk["schema"] = schema
    with pytest.raises(StorageError, match="ledger/schema: unknown schema version") as caught:
        Ledger(NODE, 2).restore(owner.disk, 0.0)
    assert "reads version 1" in caught.value.remedy


def test_a_corrupt_or_contradicting_store_is_refused_by_entry(owner):
    owner.hold()
    broken = {**owner.disk, f"booking/{JOB}/1": b"\xc1"}
    with pytest.raises(StorageError, match=f"booking/{JOB}/1"):
        Ledger(NODE, 2).restore(broken, 0.0)
    rival = Owner()
    rival.hold(OTHER)
    with pytest.raises(StorageError, match="GPU gpu-0 is booked for"):
        Ledger(NODE, 2).restore({**owner.disk, **rival.disk}, 0.0)


# --- any order of anything


class LedgerMachine(RuleBasedStateMachine):
    """Commands, repeats, restarts and telemetry in any order; a plain model knows who must still have what."""

    jobs = st.sampled_from(IDS)
    attempts = st.integers(0, 4)
    epochs = st.integers(1, 3)

    def __init__(self) -> None:
        super().__init__()
        self.owner = Owner(resources(gpus=3, cpus=8))
        self.epochs_seen: dict[JobId, int] = {}
        self.promised: dict[tuple[JobId, int], float] = {}  # holds that must stay until then

    def note(self, job: JobId, answer) -> None:
        if answer.refusal is Refusal.STALE_EPOCH:
            assert answer.epoch >= self.epochs_seen.get(job, 0)
        elif answer.refusal is Refusal.NONE:
            assert answer.epoch >= self.epochs_seen.get(job, 0)
            self.epochs_seen[job] = answer.epoch

    @rule(job=jobs, attempt=attempts, epoch=epochs, ranks=st.integers(1, 3), cpus=st.integers(0, 4))
    def hold(self, job, attempt, epoch, ranks, cpus):
        answer = self.owner.hold(job, attempt, epoch, ranks=ranks, demand=Demand(gpus=1, cpus=cpus))
        self.note(job, answer)
        if answer.refusal is Refusal.NONE:
            self.promised = {k: v for k, v in self.promised.items() if k[0] != job or k[1] >= attempt}
            self.promised[job, attempt] = self.owner.now_s + 5.0

    @rule(job=jobs, attempt=attempts, epoch=epochs)
    def commit(self, job, attempt, epoch):
        answer = self.owner.commit(job, attempt, epoch)
        self.note(job, answer)
        if answer.refusal is Refusal.NONE:
            self.promised[job, attempt] = math.inf

    @rule(job=jobs, attempt=attempts, epoch=epochs)
    def release(self, job, attempt, epoch):
        answer = self.owner.release(job, attempt, epoch)
        self.note(job, answer)
        if answer.refusal is Refusal.NONE:
            self.promised.pop((job, attempt), None)

    @rule(job=jobs, attempt=attempts)
    def end(self, job, attempt):
        if self.owner.end(job, attempt):
            self.promised.pop((job, attempt), None)

    @rule(job=jobs, attempt=attempts, epoch=epochs)
    def status(self, job, attempt, epoch):
        self.note(job, self.owner.check(StatusRequest, job, attempt, epoch))

    @rule(elapsed_s=st.floats(0.0, 8.0))
    def expire(self, elapsed_s):
        self.owner.now_s += elapsed_s
        for expired in self.owner.expire():
            assert self.promised.pop((expired.job_id, expired.attempt)) <= self.owner.now_s

    @rule()
    def restart(self):
        self.owner.restart()
        for key, deadline_s in self.promised.items():
            if deadline_s < math.inf:
                self.promised[key] = self.owner.now_s + 5.0

    @rule(index=st.integers(0, 2), health=st.sampled_from(GpuHealth))
    def read_telemetry(self, index, health):
        self.owner.offered = with_health(self.owner.offered, index, health)
        self.owner.ledger.offer(self.owner.offered, self.owner.now_s)

    @invariant()
    def every_promise_is_kept(self):
        booked = {(entry.job_id, entry.attempt) for entry in self.owner.ledger.entries}
        assert set(self.promised) <= booked

    @invariant()
    def nothing_is_booked_twice(self):
        self.owner.ledger.validate()
        uuids = [uuid for entry in self.owner.ledger.entries for uuid in entry.gpus]
        assert len(uuids) == len(set(uuids)) <= 3
        assert sum(entry.cpus for entry in self.owner.ledger.entries) <= 8


TestAnyOrder = LedgerMachine.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def keep_claim(owner, number=1, ranks=4, command_id=None):
    fields = owner.fields(make_job_id(float(number), random.Random(number)), 1, 1, SHEPHERD, command_id)
    claim = ClaimRequest(
        **fields, ranks=ranks, demand=Demand(gpus=1), policy_id="fifo", rank_key=(0,),
        submitted_utc_s=0.0, starts_within_s=0.0,
    )  # fmt: skip
    owner.keep(owner.ledger.claim(claim, owner.now_s))


def test_a_claim_that_is_not_renewed_lapses_and_keeps_nothing_awake(owner):
    keep_claim(owner)
    assert owner.hold(make_job_id(99.0, random.Random(99))).refusal is Refusal.CLAIMED
    due_s = owner.ledger.next_deadline_s
    owner.now_s = due_s
    owner.ledger.expire(due_s)
    assert owner.ledger.next_deadline_s == float("inf")
    assert owner.hold(make_job_id(98.0, random.Random(98))).refusal is Refusal.NONE


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_is_kept_is_what_the_newest_command_says_in_whatever_order_and_however_often_they_come(data):
    """A network may deliver late and twice.  A withdrawal, or a hold, ends all claims that were sent before it."""
    owner, sent = Owner(), data.draw(st.lists(st.sampled_from(["claim", "withdrawal", "hold"]), min_size=1, max_size=5))
    newest = -1
    for number in data.draw(st.lists(st.integers(0, len(sent) - 1), max_size=12)):
        newest = max(newest, number)
        if sent[number] == "hold":
            owner.hold(OTHER, attempt=1 + number, command_id=1 + number)
        else:
            ranks = 4 if sent[number] == "claim" else 0
            keep_claim(owner, 1, ranks=ranks, command_id=1 + number)
        owner.now_s += 1.0
        assert (OTHER in owner.ledger.claims) == (sent[newest] == "claim"), (sent, number)


def test_only_so_many_commands_about_claims_are_remembered_and_for_as_long_as_a_claim_lasts(owner):
    for number in range(2, NEWEST_MAX + 10):
        keep_claim(owner, number, ranks=0)
    assert len(owner.ledger._claims._newest) == NEWEST_MAX
    owner.now_s += CLAIM_TTL_S
    keep_claim(owner, 1, ranks=0)
    assert len(owner.ledger._claims._newest) == 1


def test_a_refusal_that_names_many_claims_can_still_be_told(owner):
    for number in range(60):
        keep_claim(owner, number)
    answer = owner.hold(make_job_id(99.0, random.Random(99)))
    assert (answer.refusal, len(answer.detail)) == (Refusal.CLAIMED, 1_024)
    assert decode_value(OwnerAnswer, encode_value(OwnerAnswer, answer)) == answer


def claim_free(owner, job, ranks, key=(0,)):
    """A running job asks for the place where it would go on."""
    claim = ClaimRequest(
        **owner.fields(job, 1, 1, SHEPHERD, None), ranks=ranks, demand=Demand(gpus=1), policy_id="fifo", rank_key=key,
        submitted_utc_s=0.0, starts_within_s=0.0, must_be_free=True,
    )  # fmt: skip
    answer = owner.keep(owner.ledger.claim(claim, owner.now_s))
    assert decode_value(ClaimRequest, encode_value(ClaimRequest, claim)) == claim
    return answer


def test_a_claim_that_must_be_free_counts_what_its_own_job_has(owner):
    owner.hold(JOB, ranks=3)
    owner.commit(JOB)
    assert claim_free(owner, JOB, 4).refusal is Refusal.NONE
    owner.hold(OTHER)
    assert owner.hold(OTHER).refusal is Refusal.CLAIMED
    assert claim_free(owner, JOB, 5).refusal is Refusal.DOES_NOT_FIT
    assert claim_free(owner, JOB, 0).refusal is Refusal.NONE  # given up
    assert owner.hold(OTHER).refusal is Refusal.NONE
    refused = claim_free(owner, JOB, 4)
    assert (refused.refusal, refused.detail) == (Refusal.DOES_NOT_FIT, "asked for 4 GPUs of 3 free")


def test_two_running_jobs_are_not_promised_the_same_place_whatever_their_ranks(owner):
    assert claim_free(owner, OTHER, 3, key=(5,)).refusal is Refusal.NONE
    assert claim_free(owner, JOB, 2, key=(0,)).refusal is Refusal.DOES_NOT_FIT
    assert claim_free(owner, JOB, 1, key=(0,)).refusal is Refusal.NONE
    owner.now_s += CLAIM_TTL_S
    assert claim_free(owner, JOB, 4, key=(0,)).refusal is Refusal.NONE


def test_a_waiting_job_that_ranks_higher_takes_what_a_running_one_was_promised(owner):
    assert claim_free(owner, OTHER, 4, key=(5,)).refusal is Refusal.NONE
    assert owner.hold(JOB, ranks=4).refusal is Refusal.NONE
