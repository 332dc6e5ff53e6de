"""What the API takes, the codec packs, the disk gives back and every agent restarts with; the rest is refused whole."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmsched.api import WORK_LIMITS, WORK_NEEDED, JobSpec, JobState, told
from swarmsched.commands import CancelJob, CreateTicket, Refused, SubmitJob, TicketIssued
from swarmsched.errors import JobError, JobRejected
from swarmsched.fields import cleaned, is_text
from swarmsched.resources import Demand
from swarmsched.simulator import swarm as simulated
from swarmsched.specification import BY_GPU, FIELDS
from swarmsched.wire.codec import encode_value
from tests.swarmsched.simulator.testing import Watched

BATCH_KEYS = [row.key for row in FIELDS if row.place.startswith("batches.") and row.key != BY_GPU]
ANYTHING = st.text(st.characters(exclude_categories=()), max_size=70)  # lone surrogates and controls included
WORDS = st.lists(ANYTHING, min_size=1, max_size=3)
NODES = st.lists(st.sampled_from(["n000", "n001", "n002", "b/d", ""]), max_size=3)
LINE = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=63)
VALUE = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
HOSTILE = {
    "command": WORDS | st.integers(4_090, 4_100).map(lambda count: ["a"] * count) | st.just(["a" * 40_000]),
    "name": ANYTHING,
    "user": ANYTHING,
    "workdir": ANYTHING | st.just("a" * 1_025),
    "venv": ANYTHING,
    "env": st.dictionaries(ANYTHING, ANYTHING, max_size=3)
    | st.integers(1_020, 1_030).map(lambda count: {str(n): "" for n in range(count)})
    | st.integers(250, 260).map(lambda length: {"x" * length: ""}),
    "nodes": NODES | st.integers(510, 514).map(lambda count: [f"n{n}" for n in range(count)]),
    "exclude": NODES | st.integers(510, 514).map(lambda count: [f"n{n}" for n in range(count)]),
    "blob_sources": NODES | st.integers(14, 18).map(lambda count: [f"n{n}" for n in range(count)]),
    "priority": st.integers(),
    "ranks": st.integers(-1, 3) | st.integers(),
    **dict.fromkeys(BATCH_KEYS, st.integers(-1, 4) | st.integers()),
    BY_GPU: ANYTHING | st.dictionaries(ANYTHING, st.integers(-1, 4) | st.integers() | ANYTHING, max_size=9),
    "work": ANYTHING
    | st.dictionaries(st.sampled_from([*WORK_LIMITS, "bytes"]), st.floats() | st.integers() | ANYTHING),
    "gpus_per_rank": st.integers(0, 1) | st.integers(),
    "cpus_per_rank": st.integers(0, 1) | st.integers(),
    "gpu_type": ANYTHING,
    "time_limit_seconds": st.floats() | st.integers(),
    "grace_seconds": st.floats(),
    "tree_bytes": st.integers(),
    "max_restarts": st.integers(),
    "umask": st.integers(),
    "tree": ANYTHING,
}
ADMISSIBLE = st.fixed_dictionaries(
    {"command": st.lists(VALUE, min_size=1, max_size=3)},
    optional={
        "name": LINE,
        "user": LINE,
        "workdir": LINE,
        "venv": LINE,
        "env": st.dictionaries(VALUE | st.just("x" * 256), VALUE, max_size=3),
        "ranks": st.integers(1, 3),
        "gpus_per_rank": st.integers(0, 2),
        "work": st.none()
        | st.fixed_dictionaries(
            {
                "local_batch": st.integers(1, 2**31),
                "sample_flops": st.floats(1, 1e18),
                "parameter_bytes": st.integers(1, 10**18),
            },
            optional={"decode_core_s": st.floats(0, 10), "optimizer_slots": st.integers(0, 255)},
        ),
        "priority": st.integers(-1_000, 1_000),
        "time_limit_seconds": st.floats(0, 1e6),
        "nodes": st.lists(st.sampled_from(["n000", "n001", "n002"]), unique=True, max_size=3),
        "tree_bytes": st.integers(0, 2**50),
    },
)


@pytest.mark.parametrize(
    ("work", "pointers"),
    [
        ([], ["/work"]),
        ({"local_batch": 32, "sample_flops": 1e9}, ["/work/parameter_bytes"]),
        ({"local_batch": 0, "sample_flops": 1e9, "parameter_bytes": 1e6}, ["/work/local_batch"]),
        ({"local_batch": 1.5, "sample_flops": -1, "parameter_bytes": "97M"}, [f"/work/{key}" for key in WORK_NEEDED]),
        ({"local_batch": 1, "sample_flops": float("nan"), "parameter_bytes": True, "sample_flop": 1}, [
            "/work/sample_flops", "/work/parameter_bytes", "/work/sample_flop",
        ]),
    ],
)  # fmt: skip
def test_figures_that_no_model_has_are_refused_each_by_its_name(work, pointers):
    with pytest.raises(JobRejected) as refused:
        JobSpec.from_json({"command": ["x"], "work": work})
    assert [problem.pointer for problem in refused.value.problems] == pointers


@pytest.mark.parametrize(
    ("batches", "pointers"),
    [
        ({"ranks": 4, "global_batch": 4}, []),
        ({"ranks": 4, "global_batch": 3}, ["/global_batch"]),
        ({"ranks": 4, "global_batch": 3, "global_batch_most": 64}, ["/global_batch"]),
        ({"ranks": 4, "global_batch": 64, "local_batch_least": 17}, ["/global_batch"]),
        ({"ranks": 4, "global_batch": 64, "local_batch_most": 3}, []),  # in several passes
        ({"ranks": 2, "ranks_most": 8, "global_batch": 4, "global_batch_most": 8}, []),
        ({"ranks": 2, "ranks_most": 9, "global_batch": 4, "global_batch_most": 8}, ["/ranks_most"]),
        ({"global_batch": 4, "global_batch_most": 2}, ["/global_batch_most"]),
        ({"global_batch": 8, "local_batch_least": 4, "local_batch_most": 2}, ["/local_batch_most"]),
        ({"global_batch_most": 8, "local_batch_most": 2}, ["/global_batch_most"]),
        ({"ranks": 10**30, "global_batch": 4}, ["/ranks"]),
        ({"global_batch": 8, "local_batch_most": 4, BY_GPU: {"a100": 8, "GPU to come": 1}}, []),
        ({"global_batch": 8, BY_GPU: {"a100": 8}}, ["/local_batch_most"]),
        ({BY_GPU: {"a100": 8}}, [f"/{BY_GPU}"]),
        ({"global_batch": 8, "local_batch_most": 4, BY_GPU: {"a/b": 0, " ": 1}}, [f"/{BY_GPU}/a~1b", f"/{BY_GPU}"]),
        ({"global_batch": 8, "local_batch_most": 4, BY_GPU: {str(n): 1 for n in range(9)}}, [f"/{BY_GPU}"]),
        ({"global_batch": 8, "local_batch_most": 4, BY_GPU: ["a100"]}, [f"/{BY_GPU}"]),
    ],
)
def test_batches_that_cannot_be_dealt_to_all_ranks_are_refused(batches, pointers):
    found = []
    try:
        JobSpec.from_json({"command": ["x"], **batches})
    except JobRejected as refused:
        found = [problem.pointer for problem in refused.problems]
    assert found == pointers


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"elastic": "yes"}, "'yes' is not true or false"),
        ({"elastic": True, "per_node": True}, "cannot be had with per_node"),
        ({"elastic": True, "ranks": 513}, "513 ranks are more than 512"),
        ({"elastic": True, "ranks": 2, "ranks_most": 600}, "600 ranks are more than 512"),
    ],
)
def test_an_elastic_job_has_at_most_512_ranks_each_of_which_is_a_worker(document, told):
    with pytest.raises(JobRejected) as rejected:
        JobSpec.from_json({"command": ["x"], **document})
    (problem,) = rejected.value.problems
    assert (problem.pointer, problem.problem) == ("/elastic", told)


def test_whether_a_job_is_elastic_is_told_as_it_was_asked():
    asked = {"command": ["x"], "ranks": 2, "ranks_most": 512, "elastic": True}
    assert JobSpec.from_json(JobSpec.from_json(asked).to_json()).elastic is True
    assert JobSpec.from_json({"command": ["x"], "per_node": True}).to_json()["elastic"] is False


def test_all_parameters_are_moved_unless_a_model_says_how_many():
    figures = {"local_batch": 32, "sample_flops": 1e9, "parameter_bytes": 1e6}
    spec = JobSpec.from_json({"command": ["x"], "work": figures})
    assert spec.work.moved_bytes == 1e6
    assert JobSpec.from_json(spec.to_json()) == spec


@given(st.fixed_dictionaries({}, optional=HOSTILE))
@settings(max_examples=400, deadline=None)
def test_a_specification_is_encodable_or_refused_with_pointers(document):
    try:
        spec = JobSpec.from_json(document)
    except JobRejected as rejected:
        problems = rejected.problems
    else:
        encode_value(JobSpec, spec)
        assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
        return
    assert problems
    assert all(is_text(each.problem) and len(each.problem) < 400 for each in problems)


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ({"command": ["a"] * 4_097}, "/command"),
        ({"command": ["echo", "\udcff"]}, "/command/1"),
        ({"command": ["a"], "name": "\udcff"}, "/name"),
        ({"command": ["a"], "user": "\udcff"}, "/user"),
        ({"command": ["a"], "workdir": "/caf\udce9"}, "/workdir"),
        ({"command": ["a"], "venv": "/caf\udce9"}, "/venv"),
        ({"command": ["a"], "env": {"A/B": "\udcff"}}, "/env/A~1B"),
        ({"command": ["a"], "env": {"x" * 257: ""}}, "/env"),
        ({"command": ["a"], "env": {str(n): "" for n in range(1_025)}}, "/env"),
        ({"command": ["a"], "nodes": [f"n{n}" for n in range(513)]}, "/nodes"),
        ({"command": ["a"], "nodes": ["n1", "n2", "n1"]}, "/nodes/2"),
        ({"command": ["a"], "blob_sources": [f"n{n}" for n in range(17)]}, "/blob_sources"),
    ],
)
def test_what_the_codec_would_refuse_is_refused_by_its_field(document, pointer):
    with pytest.raises(JobRejected) as rejected:
        JobSpec.from_json(document)
    assert [each.pointer for each in rejected.value.problems] == [pointer]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"ranks": "two"}, "'two' is no whole number"),
        ({"ranks": 1.5}, "1.5 is no whole number"),
        ({"ranks": True}, "True is no whole number"),
        ({"ranks": 0}, "0 is out of range"),
        ({"time_limit_seconds": "1h"}, "'1h' is no number"),
        ({"time_limit_seconds": -1}, "-1 is out of range"),
    ],
)
def test_a_number_that_is_none_is_told_from_one_that_is_too_large(document, told):
    with pytest.raises(JobRejected) as rejected:
        JobSpec.from_json({"command": ["a"], **document})
    (problem,) = rejected.value.problems
    assert problem.problem == told


def test_a_choice_of_nodes_that_leaves_too_few_is_told_as_that():
    watched = Watched(2, 2, seed=5)
    watched.swarm.run_for(10.0)
    ticket = watched.swarm.ask(watched.nodes[0], CreateTicket())
    assert isinstance(ticket, TicketIssued)
    spec = JobSpec(("a",), demand=Demand(gpus=3), nodes=(watched.nodes[0],))
    refused = watched.swarm.ask(ticket.holders[0].node, SubmitJob(ticket.job_id, ticket.holders, spec))
    assert isinstance(refused, Refused)
    assert [(each.pointer, each.remedy) for each in refused.fields] == [
        ("/nodes", "allow other nodes, or ask for less")
    ]


def test_many_mistakes_are_told_as_twenty():
    with pytest.raises(JobRejected) as rejected:
        JobSpec.from_json({f"key{n}": n for n in range(1_000)})
    assert len(rejected.value.problems) == 20


@pytest.fixture(scope="module")
def watched():
    """Three agents whose every message goes through the wire's form."""
    period, simulated.CODED_PERIOD = simulated.CODED_PERIOD, 1
    yield Watched(3, 2, seed=5)
    simulated.CODED_PERIOD = period


@settings(max_examples=40, deadline=None)
@given(document=ADMISSIBLE, reason=ANYTHING, at=st.integers(0, 2))
def test_what_is_admitted_is_run_kept_and_found_again_by_a_restarted_agent(watched, document, reason, at):
    try:
        spec = JobSpec.from_json(document)
    except JobRejected:
        return
    swarm, node = watched.swarm, watched.nodes[at]
    swarm.run_until(lambda: all(host.node.is_awake for host in swarm.up), 10.0)
    try:
        job_id = swarm.submit(node, spec)
    except JobError as error:
        assert "impossible" in str(error)  # noqa: PT017  # more than this swarm has
        return
    swarm.run_for(0.5)
    host = swarm.hosts[node]
    host.crash()
    host.start()
    assert swarm.run_until(lambda: host.node.is_awake and host.node.record(job_id) is not None, 30.0)
    assert host.node.record(job_id).spec == spec

    def is_cancelled():
        shepherd = swarm.hosts[swarm.record(job_id).shepherd]
        if swarm.record(job_id).state is not JobState.ENDED:
            swarm.begin(shepherd.node_id, CancelJob(job_id, 0.1, reason))
        return swarm.record(job_id).state is JobState.ENDED

    assert swarm.run_until(is_cancelled, 60.0)


@given(ANYTHING, st.integers(1, 60))
def test_cleaned_text_is_one_short_encodable_line(text, limit):
    made = cleaned(text, limit)
    assert len(made) <= limit
    assert made.encode().decode() == made
    assert made.isprintable()
    assert cleaned(made, limit) == made


def test_a_job_refuses_gpus_that_do_not_hold_its_least_local_batch():
    document = {"command": ["x"], "global_batch": 64, "local_batch_least": 8, "local_batch_most": 32}
    spec = JobSpec.from_json(document | {BY_GPU: {"t4": 4, "a100": 128}})
    assert spec.demand.refused_gpus == ("t4",)
    assert JobSpec.from_json(told(spec)) == spec
    assert told(spec)[BY_GPU] == {"t4": 4, "a100": 128}
    assert BY_GPU not in told(JobSpec.from_json(document)), "an agent of an earlier release refuses it"
