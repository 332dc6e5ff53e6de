"""Loops of other libraries whose workers join, leave and die: real processes, and the agent's own socket."""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.job import Job, Template, elastic_job
from tests.elastic.testing import INTEGRATIONS, needs

pytestmark = [*needs(INTEGRATIONS), pytest.mark.xdist_group("elastic")]

SCRIPT = Path(__file__).with_name("trainers.py").read_text()
SAMPLES, EPOCHS, STEPS = 480, 6, 180


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    template = Template(INTEGRATIONS, "transformers.trainer, accelerate, lightning.pytorch")
    yield template
    template.close()


def lines(job: Job, kind: str) -> list[dict]:
    return [line for worker in job.workers.values() for line in worker.lines if kind in line]


def used(job: Job) -> Counter[tuple[int, int]]:
    """Epoch and index of all that the weights were trained on: of each round by the plan that did it last."""
    version_of: dict[int, int] = {}
    for line in lines(job, "done"):
        version_of[line["round"]] = max(line["version"], version_of.get(line["round"], 0))
    offered = [line for line in lines(job, "offered") if version_of.get(line["round"]) == line["version"]]
    return Counter((line["epoch"], index) for line in offered for index in line["offered"])


def told(job: Job, what: str) -> dict[int, set[float]]:
    """What all workers said of each step."""
    found: dict[int, set[float]] = {}
    for line in lines(job, "done"):
        found.setdefault(line["step"], set()).add(line[what])
    return found


@pytest.mark.parametrize("kind", ["hugging_face", "lightning", "accelerate"])
def test_a_loop_of_another_library_trains_on_whatever_its_members_do(
    kind: str, tmp_path: Path, template: Template
) -> None:
    env = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with elastic_job(tmp_path / "job", template, SCRIPT, KIND=kind, **env) as job:
        job.start("a", "b", "c", "d")
        job.switch("a")
        job.switch("a", "b")
        job["b"].signal(signal.SIGKILL)
        job.switch("a", "c", lost=("b",))
        job.switch("c", "d")
        (job.folder / "fast").touch()
        codes = {name: job[name].ended() for name in job.workers}
        assert codes == {"a": 0, "b": -signal.SIGKILL, "c": 0, "d": 0}
        assert [line["end"] for line in lines(job, "end")] == [STEPS, STEPS]
        assert used(job) == Counter({(epoch, index): 1 for epoch in range(EPOCHS) for index in range(SAMPLES)})
        loss, rate = told(job, "loss"), told(job, "rate")
        assert sorted(loss) == list(range(1, STEPS + 1))
        assert {step: found for step, found in loss.items() if len(found) > 1} == {}
        assert {step: found for step, found in rate.items() if len(found) > 1} == {}
        assert max(loss[STEPS]) < max(loss[1]) / 10
