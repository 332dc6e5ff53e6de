"""Every door to a job's specification is made from one table: a new field is a row there and a line of `JobSpec`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_client import job_key
from swarmsched.api import JobSpec, told
from swarmsched.errors import JobRejected
from swarmsched.specification import FIELDS
from tests.docs import reference

ROOT = Path(__file__).resolve().parents[2]
ROWS = """
    SpecField("niceness", "whole", "--niceness", "N", "how much it gives way", low=-20, high=19, since="9.9.9"),
    SpecField("is_spot", "flag", "--spot", "", "its nodes may go away", since="9.9.9"),
    SpecField("near", "nodes", "--near", "NAMES", "best beside these nodes", high=4, since="9.9.9"),
"""
LINES = """
    niceness: I32 = 0
    is_spot: bool = False
    near: Annotated[tuple[NodeName, ...], Meta(max_length=4)] = ()
"""
DOORS = r"""
import importlib.util, json, sys
rows, lines, folder = sys.argv[1:]

def load(name, before, added):
    spec = importlib.util.find_spec(name)
    source = open(spec.origin).read()
    assert source.count(before) == 1
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(before, added + before), spec.origin, "exec"), vars(module))

load("swarmsched.specification", "\n)\n# fmt: on\n", rows)
load("swarmsched.api", "\n    @property\n    def is_resizable", lines)

from swarm_agent.http.spec_schema import asked_spec, shown_spec
from swarm_client import job_key
from swarm_client.cli import completion, load_command
from swarm_client.config import load as load_config
from swarm_client.job_key import option_of
from swarm_client.job_request import build
from swarm_client.options import help_text, parse
from swarmsched.api import JobSpec, told
from swarmsched.errors import JobRejected
from swarmsched.wire.codec import decode_value, encode_value
from tests.docs import reference

def asked(*words, **environment):
    arguments = parse([*words, "--", "true"], job_key.OPTIONS, takes_command=True)
    return build(arguments, load_config({"LOGNAME": "me", "HOME": folder, **environment}, {}, folder), folder).spec

def refused(**fields):
    try:
        JobSpec.from_json({"command": ["true"], **fields})
    except JobRejected as rejected:
        return [(each.pointer, each.problem, each.remedy) for each in rejected.problems]

with open(f"{folder}/job.toml", "w") as file:
    file.write("niceness = 3\nspot = true\nnear = ['n1,n2', 'n3']\n")
spec = JobSpec.from_json({"command": ["true"], "niceness": 5, "is_spot": True})
print(json.dumps({
    "read": told(decode_value(JobSpec, encode_value(JobSpec, spec))),
    "refused": refused(niceness=20, is_spot=1),
    "asked": asked_spec()["properties"], "shown": shown_spec()["properties"],
    "options": asked("--niceness=7", "--spot"), "job file": asked("-f", "job.toml"),
    "variables": asked(SWARM_RUN_NICENESS="-1", SWARM_RUN_SPOT="1"), "blamed": option_of("is_spot"),
    "help": help_text(load_command("submit"), ()), "completion": completion.bash(), "docs": list(reference.fields()),
}))
"""


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    """What each door makes of two fields that were added to a copy of the table."""
    words = [sys.executable, "-c", DOORS, ROWS.rstrip("\n"), LINES, str(tmp_path_factory.mktemp("job"))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_row_and_a_line_make_a_field_that_is_read_checked_and_kept(doors):
    assert doors["read"] == {"command": ["true"], "niceness": 5, "is_spot": True}
    assert doors["refused"] == [
        ["/niceness", "20 is out of range", "a whole number from -20 to 19"],
        ["/is_spot", "1 is not true or false", "use true or false"],
    ]


def test_a_row_makes_the_schema_of_a_field(doors):
    assert doors["asked"]["niceness"] == {"type": "integer", "minimum": -20, "maximum": 19}
    assert doors["asked"]["is_spot"] == doors["shown"]["is_spot"] == {"type": "boolean"}


def test_a_row_makes_the_option_of_a_field_and_its_completion(doors):
    assert (doors["options"]["niceness"], doors["options"]["is_spot"]) == (7, True)
    assert "  --niceness N" in doors["help"]
    assert "  --spot" in doors["help"]
    assert "how much it gives way" in doors["help"]
    assert " --niceness " in doors["completion"]
    assert "|submit:--niceness|" in doors["completion"], "it takes a value"
    assert any("*:--near|" in line and "swarm nodes" in line for line in doors["completion"].splitlines())
    assert doors["blamed"] == "--spot"


@pytest.mark.parametrize(
    "labels", ["nvlink", [""], ["NVLINK"], ["a=b=c"], ["a="], ["x" * 25], ["a b"], [7], ["a"] * 9, {}]
)
def test_what_is_no_label_is_refused_by_name(labels):
    with pytest.raises(JobRejected) as refused:
        JobSpec.from_json({"command": ["true"], "require": labels})
    assert refused.value.problems[0].pointer.startswith("/require")


def test_labels_are_kept_once_and_in_order():
    spec = JobSpec.from_json({"command": ["true"], "require": ["nvlink", "engine=docker", "nvlink"]})
    assert spec.demand.labels == ("nvlink", "engine=docker")
    assert JobSpec.from_json(told(spec)) == spec


def test_a_client_lets_agents_say_which_queues_there_are():
    assert job_key.BY_NAME["queue"].choices == ()


@pytest.mark.parametrize(("source", "niceness"), [("job file", 3), ("variables", -1)])
def test_a_row_makes_the_key_of_a_field_in_job_files_and_variables(doors, source, niceness):
    assert (doors[source]["niceness"], doors[source]["is_spot"]) == (niceness, True)
    assert doors["job file"]["near"] == ["n1", "n2", "n3"]


def test_a_row_makes_the_line_of_a_field_in_its_reference(doors):
    assert (
        "| `niceness` | `niceness` | `--niceness N` | whole number, -20 to 19 | `0` | how much it gives way | 9.9.9 |"
        in doors["docs"]
    )


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_reference_page_says_what_the_tables_of_the_code_say(page):
    text = reference.path_of(page).read_text()
    assert text == reference.generated(page, text), "write it again: python -m tests.docs.reference"


LARGEST = {
    "text": lambda row: ["x" * row.high],
    "path": lambda row: ["x" * row.high],
    "digest": lambda row: ["a" * row.high],
    "nodes": lambda row: [[f"n{number}" for number in range(row.high)]],
    "words": lambda row: [["x"] * row.high],
    "variables": lambda row: [{str(number): "" for number in range(row.high)}],
    "queue": lambda row: row.choices,
    "choice": lambda row: row.choices,
}


@pytest.mark.parametrize("row", [each for each in FIELDS if each.kind in LARGEST], ids=lambda row: row.key)
def test_a_field_can_store_what_its_row_allows(row):
    for value in LARGEST[row.kind](row):
        assert JobSpec.from_json({"command": ["x"], row.key: value}).to_json()[row.key] == value
