"""The metrics page: names, formats, and what it leaves out."""

import dataclasses
import os
import random
import re
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from swarm_agent import metrics
from swarm_agent.config import AgentConfig
from swarm_agent.faults import Faults
from swarm_agent.installed import software_version
from swarm_agent.metrics import jobs
from swarm_agent.metrics.observed import COUNTED, ROUTES_LIMIT, Observed
from swarm_agent.planner import Foreseen, Promises
from swarm_agent.readiness import Check, Readiness
from swarm_agent.task.reports import Reported
from swarm_agent.telemetry.reading import GpuProcess, GpuReading, HostReading, TelemetrySnapshot, TelemetryState
from swarm_agent.transport.arrivals import Arrivals
from swarmsched.api import JobState
from swarmsched.effects import Announce
from swarmsched.events import TimerFired
from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.gossip.record import NodeRecord, NodeStatus
from swarmsched.ids import JobId, NodeId, TaskKey, make_job_id
from swarmsched.ledger.booking import BookingState, LedgerEntry
from swarmsched.resources import GpuHealth
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import Outlook, Span
from tests.swarmsched.building import make_record
from tests.testbed.found import working

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
JOB = make_job_id(1_700_000_000.0, random.Random(1))
OTHER_JOB = make_job_id(1_700_000_001.0, random.Random(2))


@pytest.fixture(autouse=True)
def observed(monkeypatch):
    """Counts of this test alone."""
    fresh = Observed()
    for module in ("swarm_agent.metrics", "swarm_agent.metrics.exposition"):
        monkeypatch.setattr(f"{module}.OBSERVED", fresh)
    return fresh


def gpu(index, **changes):
    reading = GpuReading(
        index=index,
        uuid=f"GPU-{index}",
        model="NVIDIA H100 80GB HBM3",
        memory_total_bytes=80 * 2**30,
        health=GpuHealth.OK,
        age_s=0.5,
        memory_used_bytes=2**30,
        utilisation_ratio=0.25,
        temperature_celsius=40,
        energy_joules=12.5,
        sm_clock_hz=1_980_000_000,
        ecc_uncorrected_count=0,
    )
    return dataclasses.replace(reading, **changes)


def member(name, status):
    return MemberView(NodeId(name), ("127.0.0.1", 1), 1, 0, status, 1.0, b"", "0.1.0", 1, 1)


def job(job_id, state, holders=("n1",)):
    return make_record("n1", holders, job_id=job_id, state=state)


def booking(gpus, state=BookingState.LEASED):
    return LedgerEntry(JOB, 1, 1, "n1", state, 1, gpus, 0, 0, 0.0)


def agent(gpus=(), bookings=(), records=None, *, is_ready=True, tasks=(), **config):
    """An agent whose core and telemetry say just this."""
    readiness = Readiness()
    readiness.add("membership", lambda: Check("membership", is_ready))
    snapshot = TelemetrySnapshot(TelemetryState.OK, "", tuple(gpus), HostReading(16, 2**36, 2**35, 0.1), 0.5)
    members = (member("n1", MemberStatus.ALIVE), member("n2", MemberStatus.FAILED))
    return SimpleNamespace(
        config=AgentConfig(**{"name": NodeId("n1"), "data_dir": Path(__file__).parent, **config}),
        telemetry=SimpleNamespace(snapshot=snapshot),
        readiness=readiness,
        now_s=lambda: 100.0,
        node=SimpleNamespace(
            members=lambda _now_s: members,
            node_records=lambda _now_s: (
                NodeStatus(NodeRecord(NodeId("n1")), 3.0),
                NodeStatus(NodeRecord(NodeId("n2")), 900.0),
            ),
            records=lambda: records or {},
            is_shepherd=lambda job_id: job_id == JOB,
            tasks=lambda: tuple(tasks),
            ledger=SimpleNamespace(entries=tuple(bookings), avoided_reason="", is_draining=False),
            counters=Counter(),
            register_drops={},
            lender=SimpleNamespace(
                shards=[SimpleNamespace(load=SimpleNamespace(memory_bytes=100))] * 3,
                counters={"granted": 5, "refused": 6},
            ),
            broker=SimpleNamespace(away_count=4, counters={"moved": 7}),
        ),
        faults=Faults(),
        udp=SimpleNamespace(counters=Counter(), drops=SimpleNamespace(counters=Counter())),
        channel=SimpleNamespace(counters=Counter(), drops=SimpleNamespace(counters=Counter())),
        tasks=SimpleNamespace(
            reports=SimpleNamespace(counters=Counter()),
            warm=["one that is ready"],
            aggregation=SimpleNamespace(starts=2),
            upkeep=SimpleNamespace(held_bytes={"work": 20, "environment": 40, "checkpoint": 50}),
        ),
        arrivals=Arrivals(),
        blobs=SimpleNamespace(is_loaded=True, held_bytes=700),
        files=SimpleNamespace(held_bytes=600, incomplete_count=1),
        logs=SimpleNamespace(held_bytes=30, waiting_writers=2),
    )


def test_space_for_data_is_told_and_left_out_where_the_folder_is_gone(tmp_path):
    text = page(agent(data_dir=tmp_path))
    disk = os.statvfs(tmp_path)
    assert samples(text, "swarm_disk_size_bytes") == {(): disk.f_blocks * disk.f_frsize}
    assert 0 < samples(text, "swarm_disk_free_bytes")[()] <= disk.f_blocks * disk.f_frsize
    assert samples(page(agent(data_dir=tmp_path / "gone")), "swarm_disk_free_bytes") == {}


def test_a_node_that_drains_and_strangers_that_were_turned_away_are_told():
    source = agent()
    assert samples(page(source), "swarm_node_draining") == {(): 0}
    source.node.ledger.is_draining = True
    source.arrivals.turned_away["late"] += 3
    assert samples(page(source), "swarm_node_draining") == {(): 1}
    assert samples(page(source), "swarm_strangers_turned_away_total") == {("late",): 3, ("crowded",): 0}


def test_what_the_stores_take_is_told_once_they_know_it():
    source = agent()
    assert samples(page(source), "swarm_blob_store_bytes") == {(): 700}
    assert samples(page(source), "swarm_warm_workers") == {(): 1}
    assert samples(page(source), "swarm_aggregation_shards") == {(): 3}
    assert samples(page(source), "swarm_aggregation_booked_bytes") == {(): 300}
    assert samples(page(source), "swarm_aggregation_shards_away") == {(): 4}
    assert samples(page(source), "swarm_aggregation_leases_total") == {("granted",): 5, ("refused",): 6}
    assert samples(page(source), "swarm_aggregation_ranges_total") == {("moved",): 7}
    assert samples(page(source), "swarm_aggregation_starts_total") == {(): 2}
    assert samples(page(source), "swarm_log_writers_waiting") == {(): 2}
    assert samples(page(source), "swarm_log_store_bytes") == {(): 30}
    assert samples(page(source), "swarm_held_files_bytes") == {(): 600}
    assert samples(page(source), "swarm_held_files_incomplete") == {(): 1}
    for store, held_bytes in source.tasks.upkeep.held_bytes.items():
        assert samples(page(source), f"swarm_{store}_store_bytes") == {(): held_bytes}
    assert samples(page(source), "swarm_store_limit_bytes")["work",] == source.config.work_cache_bytes_max
    source.tasks.upkeep.held_bytes["work"] = None
    assert samples(page(source), "swarm_work_store_bytes") == {}
    source.blobs.is_loaded, source.logs.held_bytes = False, None
    assert samples(page(source), "swarm_blob_store_bytes") == samples(page(source), "swarm_log_store_bytes") == {}


def page(source, accept=""):
    body, _ = metrics.render(source, accept)
    return body.decode()


def samples(text, name):
    """Values by their labels' values, the labels in alphabetical order."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in parse_text(text)
        for sample in family.samples
        if sample.name == name
    }


def test_content_type_follows_the_accept_header():
    assert metrics.render(agent(), "")[1].startswith("text/plain; version=0.0.4")
    assert metrics.render(agent(), OPENMETRICS)[1].startswith("application/openmetrics-text; version=1.0.0")


def test_both_formats_parse_and_tell_the_same_numbers(observed):
    observed.observe_announce(Announce("job.ended", "", JOB, NodeId("n1"), {"end_reason": "completed"}))
    observed.observe_http("GET", "/v1/jobs", 200, 0.01)
    source = agent([gpu(0, xid_counts={31: 2}, xid_last=31)], dcgm_metrics=True)
    plain = {s.name: s.value for f in parse_text(page(source)) for s in f.samples if s.name.startswith("swarm_")}
    strict = {s.name: s.value for f in parse_openmetrics(page(source, OPENMETRICS)) for s in f.samples}
    assert plain.keys() <= strict.keys()
    del plain["swarm_disk_free_bytes"]  # others write to this disk meanwhile
    assert {name: strict[name] for name in plain} == plain


def test_members_and_jobs_have_a_series_for_every_state():
    records = {JOB: job(JOB, JobState.RUNNING), OTHER_JOB: job(OTHER_JOB, JobState.RUNNING)}
    text = page(agent(records=records))
    assert samples(text, "swarm_members") == {
        ("alive",): 1, ("suspect",): 0, ("failed",): 1, ("left",): 0, ("conflict",): 0
    }  # fmt: skip
    assert samples(text, "swarm_jobs") == {("queued",): 0, ("starting",): 0, ("running",): 1, ("stopping",): 0}


def test_jobs_of_other_shepherds_are_not_counted_so_that_sums_over_agents_are_right():
    assert samples(page(agent(records={OTHER_JOB: job(OTHER_JOB, JobState.QUEUED)})), "swarm_jobs")[("queued",)] == 0


def test_jobs_are_counted_by_the_deaths_that_they_survive():
    """Of the members n1 is alive and n2 has failed; n3 is not known."""
    records = {
        JOB: job(JOB, JobState.RUNNING, ("n1",)),
        OTHER_JOB: job(OTHER_JOB, JobState.QUEUED, ("n1", "n2", "n3")),
        JobId("0" * 26): job(JobId("0" * 26), JobState.ENDED, ("n2",)),
    }
    text = page(agent(records=records))
    assert samples(text, "swarm_jobs_surviving") == {("0",): 1, ("1",): 0, ("2",): 0}
    assert samples(text, "swarm_jobs_held") == {(): 2}
    assert samples(text, "swarm_jobs_without_majority") == {(): 1}


def test_paused_tasks_are_counted():
    task = TaskStatus(JOB, 1, 1, NodeId("n1"), TaskStage.STARTED)
    text = page(agent(tasks=[task, replace(task, is_frozen=True)]))
    assert samples(text, "swarm_tasks_paused") == {(): 1}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (name, _) in COUNTED.items()])
def test_what_failover_does_is_counted_by_name(observed, kind, name):
    assert samples(page(agent()), f"{name}_total") == {(): 0}
    observed.observe_announce(Announce(kind, "", JOB, NodeId("n1"), {}))
    assert samples(page(agent()), f"{name}_total") == {(): 1}


def test_conflicts_of_the_register_are_those_that_the_core_counts():
    source = agent()
    source.node.counters["register_conflicts"] += 3
    assert samples(page(source), "swarm_register_conflicts_total") == {(): 3}


def test_faults_of_the_core_are_counted_from_zero():
    source = agent()
    names = ("swarm_step_errors_total", "swarm_effect_errors_total", "swarm_step_events_refused_total")
    assert [samples(page(source), name) for name in names] == [{(): 0}] * 3
    source.faults.note(TimerFired(), ValueError("x"))
    assert [samples(page(source), name) for name in names] == [{(): 1}, {(): 0}, {(): 0}]


def test_register_messages_without_an_answer_are_counted_by_reason():
    source = agent()
    source.node.register_drops = {"nonsense": 2}
    counted = samples(page(source), "swarm_register_messages_dropped_total")
    assert counted == {("nonsense",): 2, ("no_room",): 0, ("wrong_store",): 0}


def test_staleness_is_that_of_living_nodes():
    assert samples(page(agent()), "swarm_gossip_staleness_seconds") == {(): 3.0}


def test_node_is_up_only_when_it_is_ready():
    assert samples(page(agent(is_ready=True)), "swarm_node_up") == {(): 1.0}
    assert samples(page(agent(is_ready=False)), "swarm_node_up") == {(): 0.0}


def test_each_gpu_is_counted_once_and_a_booking_comes_before_health():
    gpus = [gpu(0), gpu(1), gpu(2, health=GpuHealth.STALE), gpu(3, health=GpuHealth.UNHEALTHY), gpu(4)]
    text = page(agent(gpus, [booking(("GPU-1", "GPU-3")), booking(("GPU-4",), BookingState.HELD)]))
    expected = {"free": 1, "held": 1, "leased": 2, "draining": 0, "foreign": 0, "unhealthy": 0, "stale": 1}
    assert samples(text, "swarm_gpus") == {(state,): count for state, count in expected.items()}


def test_unsupported_values_are_left_out_and_never_zero():
    text = page(agent([gpu(0, temperature_celsius=None, power_watts=None), gpu(1)]))
    assert samples(text, "swarm_gpu_temperature_celsius") == {("1", "GPU-1"): 40.0}
    assert "swarm_gpu_power_watts" not in text
    assert "nan" not in text.lower().replace("nanosecond", "")


def test_a_gpu_that_was_never_read_has_no_infinite_age():
    text = page(agent([gpu(0, health=GpuHealth.STALE, age_s=float("inf"))]))
    assert "swarm_gpu_reading_age_seconds" not in text
    assert samples(text, "swarm_gpu_health")[("0", "stale", "GPU-0")] == 1.0


def test_simulated_gpus_are_labelled_so():
    assert 'simulated="true"' in page(agent([gpu(0, is_simulated=True)]))


def test_foreign_processes_are_counted_but_not_named():
    alice = GpuProcess(4242, 2**30, "alice", "secret-project", is_own=False)
    text = page(agent([gpu(0, health=GpuHealth.FOREIGN, note=str(alice), processes=(alice,))]))
    assert samples(text, "swarm_gpu_foreign_processes") == {("0", "GPU-0"): 1.0}
    assert "alice" not in text
    assert "secret-project" not in text


def test_dcgm_names_come_only_when_asked_for_and_in_their_own_units():
    assert "DCGM" not in page(agent([gpu(0)]))
    text = page(agent([gpu(0, xid_last=79)], dcgm_metrics=True))
    values = {name: value for f in parse_text(text) for name, _, value, *_ in f.samples if name.startswith("DCGM")}
    assert values["DCGM_FI_DEV_GPU_UTIL"] == 25.0
    assert values["DCGM_FI_DEV_FB_USED"] == 1024.0
    assert values["DCGM_FI_DEV_FB_FREE"] == 79 * 1024.0
    assert values["DCGM_FI_DEV_SM_CLOCK"] == 1980.0
    assert values["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"] == 12_500.0
    assert values["DCGM_FI_DEV_XID_ERRORS"] == 79.0
    assert re.search(r'DCGM_FI_DEV_GPU_UTIL\{.*Hostname="n1".*UUID="GPU-0".*\}', text)


def test_events_of_the_core_become_histograms_and_counts(observed):
    told: list[tuple[str, dict[str, object]]] = [
        ("job.started", {"queue_wait_s": 2.0, "start_s": 0.3}),
        ("job.placed", {}),
        ("job.resumed", {"pause_s": 3.5}),
        ("negotiation.round", {"result": "aborted"}),
        ("job.ended", {"end_reason": "node_lost"}),
    ]
    for kind, fields in told:
        observed.observe_announce(Announce(kind, "", JobId(JOB), NodeId("n1"), fields))
    text = page(agent())
    assert samples(text, "swarm_queue_wait_seconds_sum") == {(): 2.0}
    assert samples(text, "swarm_job_start_seconds_bucket")[("0.5",)] == 1.0
    assert samples(text, "swarm_job_start_seconds_bucket")[("0.2",)] == 0.0
    assert samples(text, "swarm_rescale_pause_seconds_sum") == {(): 3.5}
    assert samples(text, "swarm_jobs_total")[("node_lost",)] == 1.0
    assert samples(text, "swarm_jobs_total")[("completed",)] == 0.0
    assert samples(text, "swarm_negotiation_rounds_total") == {("placed",): 1.0, ("aborted",): 1.0}


def test_lag_and_commits_become_histograms(observed):
    told = []
    driver = SimpleNamespace(tell_lag=told.append, barrier=SimpleNamespace(tell_commits=told.append))
    observed.watch_driver(driver)
    observe_lag, observe_commit = told
    observe_lag(0.3)
    observe_commit(0.02)
    text = page(agent())
    assert samples(text, "swarm_loop_lag_seconds_sum") == {(): 0.3}
    assert samples(text, "swarm_commit_seconds_bucket")[("0.025",)] == 1.0
    assert samples(text, "swarm_commit_seconds_bucket")[("0.01",)] == 0.0


def test_plans_and_what_models_were_off_by_become_histograms(observed):
    told = []
    observed.watch_planner(SimpleNamespace(promises=Promises(), tell_plans=told.append))
    (observe_plan,) = told
    observe_plan("swarm", "planned", 0.02)
    observe_plan("swarm", "fell_back", 0.3)
    observed.observe_announce(Announce("model.checked", "", JobId(JOB), None, {"error_ratio": 0.08}))
    text = page(agent())
    assert samples(text, "swarm_plan_seconds_sum") == {("swarm",): 0.02}
    assert samples(text, "swarm_plans_total") == {
        ("swarm", "planned"): 1.0,
        ("swarm", "fell_back"): 1.0,
        ("swarm", "failed"): 0.0,
    }
    assert samples(text, "swarm_model_error_ratio_bucket")[("0.1",)] == 1.0
    assert samples(text, "swarm_model_error_ratio_bucket")[("0.05",)] == 0.0


@pytest.mark.parametrize(
    ("waited_s", "direction", "error_s", "result"),
    [(95.0, "earlier", 5.0, "within"), (40.0, "earlier", 60.0, "earlier"), (250.0, "later", 150.0, "later")],
)
def test_when_jobs_start_is_held_against_what_was_predicted_first(
    observed, monkeypatch, waited_s, direction, error_s, result
):
    job_id, planner = JobId(JOB), SimpleNamespace(promises=Promises(), tell_plans=lambda _: None)
    observed.watch_planner(planner)

    def hear(seen_s, start):
        planner.promises.hear(Foreseen(seen_s, 0.0, {job_id: Outlook(job_id, start)}), {job_id})

    hear(1_000.0, Span(100.0, 50.0, 200.0))
    hear(1_010.0, Span(1.0, 1.0, 1.0))
    monkeypatch.setattr("swarm_agent.metrics.observed.now", lambda: 1_000.0 + waited_s)
    for _ in range(2):  # that it is started again was not predicted
        observed.observe_announce(Announce("job.started", "", job_id, NodeId("n1"), {}))
    text = page(agent())
    sums = samples(text, "swarm_start_prediction_error_seconds_sum")
    assert sums == {("earlier",): 0.0, ("later",): 0.0, (direction,): error_s}
    assert samples(text, "swarm_start_predictions_total")[(result,)] == 1.0
    assert sum(samples(text, "swarm_start_predictions_total").values()) == 1.0


def test_that_a_job_starts_at_once_is_no_prediction_and_none_is_kept_of_who_waits_no_more():
    job_id, promises = JobId(JOB), Promises()
    promises.hear(Foreseen(0.0, 0.0, {job_id: Outlook(job_id, Span(0.0, 0.0, 0.0))}), {job_id})
    assert promises.kept(job_id, 9.0) is None
    promises.hear(Foreseen(0.0, 0.0, {job_id: Outlook(job_id, Span(5.0, 5.0))}), {job_id})
    promises.hear(Foreseen(0.0, 0.0, {}), ())
    assert promises.kept(job_id, 9.0) is None


def test_hostile_methods_and_too_many_routes_do_not_grow_the_page(observed):
    for number in range(ROUTES_LIMIT * 2):
        observed.observe_http(f"M{number}", f"/v1/{number}", 200, 0.0)
    series = samples(page(agent()), "swarm_http_requests_total")
    assert len(series) <= ROUTES_LIMIT + 1
    assert sum(series.values()) == ROUTES_LIMIT * 2
    assert {method for _, method, _ in series} == {"other"}


def test_refused_messages_are_counted_by_channel_and_reason(observed):
    source = agent()
    source.udp.drops.counters["replayed"] += 3
    families = {family.name: family for family in observed.families(source, is_openmetrics=False)}
    samples = {(s.labels["channel"], s.labels["reason"]): s.value for s in families["swarm_messages_dropped"].samples}
    assert samples["gossip", "replayed"] == 3
    assert samples["peer", "wrong_key"] == 0


def test_traffic_is_read_from_the_live_counters():
    source = agent()
    source.udp.counters["sent_bytes"] += 1_200
    assert samples(page(source), "swarm_gossip_message_bytes_total") == {("received",): 0.0, ("sent",): 1200.0}


def test_process_metrics_are_there():
    assert samples(page(agent()), "process_resident_memory_bytes")[()] > 2**20


def test_requests_that_the_api_tells_of_are_on_the_page():
    metrics.OBSERVED.observe_http("GET", "/v1/jobs", 200, 0.01)
    assert samples(page(agent()), "swarm_http_requests_total") == {("200", "GET", "/v1/jobs"): 1.0}


@pytest.mark.skipif(not working("promtool"), reason="promtool is not installed (Debian package prometheus)")
def test_promtool_finds_nothing_to_complain_about(observed):
    observed.observe_http("GET", "/v1/jobs", 200, 0.01)
    full = gpu(
        0,
        xid_counts={79: 1},
        power_watts=70.0,
        power_limit_watts=700.0,
        memory_utilisation_ratio=0.1,
        memory_clock_hz=1,
        pcie_replay_count=0,
        ecc_corrected_count=1,
    )
    text = page(agent([full], [booking(("GPU-0",))]))
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_version_label_is_the_installed_distribution():
    assert samples(page(agent()), "swarm_build_info") == {(software_version(),): 1.0}


def test_reports_are_counted_by_what_became_of_them():
    source = agent()
    source.tasks.reports.counters.update(taken=3, not_finite=1)
    assert samples(page(source), "swarm_reports_total") == {("taken",): 3, ("not_finite",): 1}


def test_the_page_of_jobs_has_a_series_for_each_attempt_and_leaves_out_what_is_not_known():
    told, quiet = Reported(), Reported()
    for second in range(3):
        told.progress.take(0, {"step": 2 * second, "total_steps": 40, "loss": -1.5}, float(second))
    quiet.progress.take(0, {"samples": 1}, 0.0)
    reported = {TaskKey(JOB, 1): told, TaskKey(OTHER_JOB, 2): quiet}
    body, content_type = metrics.render_jobs(reported)
    text = body.decode()
    assert content_type.startswith("text/plain; version=0.0.4")
    values = {name: samples(text, name) for name in jobs.GAUGES}
    key = ("1", JOB)
    assert values == {
        "swarm_job_progress_ratio": {key: 0.1},
        "swarm_job_remaining_seconds": {key: 18.0},
        "swarm_job_step_seconds": {key: 0.5},
        "swarm_job_samples_per_second": {},
        "swarm_job_step": {key: 4.0},
        "swarm_job_loss": {key: -1.5},
    }
    assert metrics.render_jobs(reported, OPENMETRICS)[0].endswith(b"# EOF\n")


def test_of_workers_of_one_job_that_were_the_first_one_after_another_the_last_word_counts():
    before, now, silent = Reported(reported_utc_s=1.0), Reported(reported_utc_s=2.0), Reported()
    before.progress.take(0, {"step": 5, "loss": 0.5}, 0.0)
    now.progress.take(0, {"step": 9}, 0.0)
    reported = {TaskKey(JOB, 1, 3): now, TaskKey(JOB, 1, 1): before, TaskKey(JOB, 1, 2): silent}
    text = metrics.render_jobs(reported)[0].decode()
    assert text.count("swarm_job_step{") == 1
    assert samples(text, "swarm_job_step") == {("1", JOB): 9.0}
    assert samples(text, "swarm_job_loss") == {("1", JOB): 0.5}
