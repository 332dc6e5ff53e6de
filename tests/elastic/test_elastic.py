"""Jobs whose workers join, leave and die while they train: real processes and PyTorch, and the agent's own socket."""

import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.elastic.job import Job, Template, elastic_job, until
from tests.elastic.testing import TRAIN, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("elastic-elastic")]

SCRIPT = Path(__file__).with_name("train.py").read_text()
STEPS = 200
RELATIVE = 1e-5


@pytest.fixture
def job(tmp_path: Path, template: Template) -> Iterator[Job]:
    with elastic_job(tmp_path, template, SCRIPT) as job:
        yield job


@pytest.fixture(scope="module")
def make_job(tmp_path_factory: pytest.TempPathFactory, template: Template) -> Callable:
    return lambda **env: elastic_job(tmp_path_factory.mktemp("job"), template, SCRIPT, **env)


def steps_of(job: Job, name: str) -> list[dict]:
    return [line for line in job[name].lines if "loss" in line]


def digest_at_end(job: Job, name: str) -> str:
    return next(line["digest"] for line in job[name].lines if "done" in line)


def losses(job: Job) -> dict[int, set[float]]:
    """What ranks say of each step."""
    found: dict[int, set[float]] = {}
    for name in job.workers:
        for line in steps_of(job, name):
            found.setdefault(line["step"], set()).add(line["loss"])
    return found


def unscaled(make_job: Callable, steps: int, **env: str) -> list[float]:
    """The losses of one worker that is left in peace."""
    with make_job(PAUSE_MS="0", **env) as job:
        (job.folder / "stop").write_text(str(steps))
        job.start("only")
        job.publish("only")
        assert job["only"].ended() == 0
        return [line["loss"] for line in steps_of(job, "only")]


def stop(job: Job, *names: str, steps: int = 0) -> int:
    """Have all end at the same step, this one at least."""
    last = max(steps, *(job[name].step + 100 for name in names))
    (job.folder / "stop.new").write_text(str(last))
    (job.folder / "stop.new").rename(job.folder / "stop")
    for name in names:
        assert job[name].ended() == 0
    return last


class Story:
    """A job that goes through all that can happen to it; `changes` says what did."""

    def __init__(self, job: Job) -> None:
        self.changes: list[str] = []
        self._job = job
        job.start("a", "b", "c", "d", "e", "f", "g")
        self.change("begin", "a")
        self.change("join", "a", "b")
        self.change("two join", "a", "b", "c", "d")
        self.change("one leaves", "a", "c", "d")
        self.change("replace one", "a", "c", "e")
        self.die("kill the first", signal.SIGKILL, "a", "c", "e")
        self.change("join", "c", "e", "f")
        self.die("kill the middle one", signal.SIGKILL, "e", "c", "f")
        self.change("join", "c", "f", "g")
        self.die("kill the last", signal.SIGKILL, "g", "c", "f")
        job.start("h", "i", "j")
        self.change("join", "c", "f", "h")
        self.die("one hangs", signal.SIGSTOP, "f", "c", "h")
        self.change("move all, with both", "c", "h", "i", "j")
        self.change("move all, without the old", "i", "j")
        self.steps = stop(job, "i", "j", steps=STEPS)
        job["f"].signal(signal.SIGCONT)
        self.codes = {name: job[name].ended() for name in job.workers}
        self.lines = {name: job[name].lines for name in job.workers}
        self.losses = losses(job)

    def change(self, what: str, *names: str) -> None:
        self._job.switch(*names)
        self.changes.append(what)

    def die(self, what: str, number: int, victim: str, *names: str) -> None:
        self._job[victim].signal(number)
        self._job.switch(*names, lost=(victim,) if number == signal.SIGSTOP else ())
        self.changes.append(what)


@pytest.fixture(scope="module")
def story(make_job: Callable) -> Story:
    with make_job() as job:
        return Story(job)


def test_loss_of_a_job_that_changes_all_the_time_is_that_of_one_that_never_does(story: Story, make_job) -> None:
    assert len(story.changes) > 10
    assert story.steps >= STEPS
    expected = unscaled(make_job, story.steps)
    assert expected[-1] < expected[0] / 2
    found = [max(story.losses[step]) for step in range(story.steps)]
    assert found[:STEPS] == pytest.approx(expected[:STEPS], rel=RELATIVE)
    # Where a fast machine goes on until next to nothing is left of the loss, rounding counts against what it was.
    assert found == pytest.approx(expected, rel=RELATIVE, abs=RELATIVE * expected[0])


def test_ranks_never_disagree_about_a_step_and_none_is_left_out(story: Story) -> None:
    assert sorted(story.losses) == list(range(story.steps))
    assert {step: found for step, found in story.losses.items() if len(found) > 1} == {}


def test_no_worker_does_a_step_twice_nor_goes_without_one(story: Story) -> None:
    """Only a step that a dying member took from it, and not from the others, is given to it with the next plan."""
    for lines in story.lines.values():
        done = [(line["step"], line["version"]) for line in lines if "loss" in line]
        for (step, version), (following, next_version) in pairwise(done):
            assert following - step == 1 or (following - step == 2 and next_version > version)


def test_a_newcomer_begins_with_the_state_of_those_that_train(story: Story) -> None:
    """Weights, moments, schedule and random numbers, at the step at which they are together for the first time."""
    by_switch: dict[tuple[int, int], set[str]] = {}
    for lines in story.lines.values():
        for line in lines:
            if "switched" in line:
                by_switch.setdefault((line["switched"], line["step"]), set()).add(line["digest"])
    assert len(by_switch) == len(story.changes)
    assert all(len(digests) == 1 for digests in by_switch.values())


def test_those_that_leave_end_well_and_so_does_one_that_comes_back_from_the_dead(story: Story) -> None:
    killed = {"a", "e", "g"}
    assert story.codes == {name: -signal.SIGKILL if name in killed else 0 for name in story.codes}
    assert all(story.lines[name][-1] == {"left": True} for name in ("b", "d", "f", "c", "h"))


def test_passes_of_uneven_size_make_the_same_step(make_job) -> None:
    """Thirty samples on two ranks, in passes of four: 4, 4, 4 and 3."""
    with make_job(MICRO="4") as job:
        job.start("a", "b")
        job.switch("a")
        job.switch("a", "b", past=10)
        steps = stop(job, "a", "b")
        found = losses(job)
    expected = unscaled(make_job, steps)
    assert [max(found[step]) for step in range(steps)] == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("env", [{"BF16": "1"}, {"SCALER": "1", "CLIP": "1"}, {"BUFFERS": "1"}], ids=str)
def test_training_in_other_ways_learns_and_is_passed_on(env: dict, make_job) -> None:
    """Autocast, a scaler of gradients with clipping, buffers of batch norm with dropout."""
    with make_job(**env) as job:
        job.start("a", "b")
        job.switch("a", past=20)
        job.switch("a", "b", past=20)
        steps = stop(job, "a", "b", steps=150)
        begun = {line["digest"] for name in ("a", "b") for line in job[name].lines if line.get("switched") == 2}
        found = losses(job)
    assert len(begun) == 1
    assert max(found[steps - 1]) < max(found[0]) / 2


def fixed(make_job: Callable, steps: int, **env: str) -> list[dict]:
    """The steps of two workers that are left in peace."""
    with make_job(PAUSE_MS="0", **env) as job:
        (job.folder / "stop").write_text(str(steps))
        job.start("a", "b")
        job.publish("a", "b")
        assert [job[name].ended() for name in ("a", "b")] == [0, 0]
        return steps_of(job, "a")


def test_the_noise_scale_is_that_of_gradients_without_the_scale_of_the_loss(make_job) -> None:
    """Which doubles every four steps."""
    plain, scaled = fixed(make_job, 60), fixed(make_job, 60, SCALER="1", GROWTH="4")
    assert plain[-1]["noise"] > 0
    assert scaled[-1]["noise"] == pytest.approx(plain[-1]["noise"], rel=1e-3)


def test_what_gets_no_gradient_is_passed_over_as_on_one_rank(make_job) -> None:
    """A part of the model is used on some ranks, in some steps by none; decay and momentum would move it."""
    found = [line["loss"] for line in fixed(make_job, 60, SIDED="1", DECAY="10")]
    assert found == pytest.approx(unscaled(make_job, 60, SIDED="1", DECAY="10"), rel=RELATIVE)


def test_another_model_is_refused_with_both_hashes_and_the_others_go_on(job: Job) -> None:
    job.start("a", "b")
    job.switch("a", "b")
    job.start("other", WIDTH="33")
    version = job.publish("a", "b", "other")
    assert job["other"].ended() == 1
    hashes = [job.standings[name].layout for name in ("other", "a")]
    problem = f"model or optimizer differs: other has {hashes[0]}, a has {hashes[1]}; start the same script"
    assert problem in job["other"].err.read_text()
    assert (job.standings["other"].state, len(set(hashes))) == ("refused", 2)
    until(lambda: problem in job.standings["a"].problem, job.problems)
    before = job["a"].step
    until(lambda: job["a"].step > before + 5, job.problems)
    assert job["a"].lines[-1]["version"] == version - 1
    job.start("c")
    job.switch("a", "b", "c")


def test_another_model_ends_a_job_outside_of_a_swarm_with_both_hashes(make_job) -> None:
    with make_job(SWARM_TASK_SOCKET="", SWARM_WORKER="", MASTER_ADDR="127.0.0.1", WORLD_SIZE="2") as job:
        port = str(job.free_port())
        job.start("a", RANK="0", MASTER_PORT=port)
        job.start("b", RANK="1", MASTER_PORT=port, WIDTH="33")
        assert [job[name].ended() for name in ("a", "b")] == [1, 1]
        for name in ("a", "b"):
            assert "model or optimizer differs: rank-1 has " in job[name].err.read_text()


def test_a_plan_that_keeps_no_member_is_refused_by_all(job: Job) -> None:
    job.start("a", "b")
    job.switch("a")
    version = job.publish("b")
    assert job["b"].ended() == 1
    assert "keeps no member that has trained" in job["b"].err.read_text()
    until(lambda: f"plan {version} keeps no member" in job.standings["a"].problem, job.problems)
    before = job["a"].step
    until(lambda: job["a"].step > before + 5, job.problems)


def test_a_newcomer_that_never_comes_holds_nobody_up(job: Job) -> None:
    """One raises before it is ready, one hangs after its plan was published; the next plan is without it."""
    job.start("a", "b")
    job.switch("a", "b")
    job.start("bad", RAISES="1")
    assert job["bad"].ended() == 1
    assert set(job.standings) == {"a", "b"}
    job.start("late")
    job.ready("late")
    job["late"].signal(signal.SIGSTOP)
    job.publish("a", "b", "late")
    before = job["a"].step
    until(lambda: job["a"].step > before + 20, job.problems)
    job.start("c")
    job.switch("a", "b", "c", lost=("late",))


def test_a_newcomer_that_has_its_state_and_trained_in_nothing_overrules_nobody(make_job) -> None:
    """Of two newcomers one dies while it is given a large state: the others go on as before or wait, and so does it."""
    with make_job(WIDTH="300000") as job:
        job.start("a", "b", "c")
        job.switch("a", "b")
        job.start("bad", DIES="1")
        job.publish("a", "b", "c", "bad")
        assert job["bad"].ended() == 9
        job.switch("a", "b", "c", lost=("bad",))


def test_a_rank_that_did_the_last_step_stays_for_those_that_lost_it(job: Job) -> None:
    """One dies just after it, and takes it from another; the third has it to give."""
    (job.folder / "stop").write_text("40")
    job.start("a")
    job.start("b", LOSES="39")
    job.start("c", LOSES="39", ENDS="1")
    job.publish("a", "b", "c")
    assert job["c"].ended() == 9
    job.publish("a", "b", lost=("c",))
    assert [job[name].ended() for name in ("a", "b")] == [0, 0]
    assert (steps_of(job, "a")[-1]["step"], steps_of(job, "b")[-1]["step"]) == (39, 38)
    assert digest_at_end(job, "a") == digest_at_end(job, "b")


def test_ranks_that_live_and_lose_one_another_tell_so_and_go_on_in_the_next_plan_of_the_same(job: Job) -> None:
    """Of one of them the sum had succeeded."""
    job.start("a")
    job.start("b", LOSES="20")
    assert job.switch("a", "b") == 1
    until(lambda: [job.standings[name].failed for name in ("a", "b")] == [1, 1], job.problems)
    assert {job.standings[name].state for name in ("a", "b")} == {"training"}
    job.switch("a", "b")
    stop(job, "a", "b")
    assert digest_at_end(job, "a") == digest_at_end(job, "b")
    assert [len(found) for found in losses(job).values()] == [1] * len(losses(job))


def test_a_plan_that_came_to_nothing_is_told_by_those_that_train_on(job: Job) -> None:
    job.start("a", "b")
    job.switch("a", "b")
    job.start("dying", DIES="1")
    version = job.publish("a", "b", "dying")
    until(lambda: [job.standings[name].failed for name in ("a", "b")] == [version] * 2, job.problems)
    before = job["a"].step
    until(lambda: job["a"].step > before + 5, job.problems)


def test_what_a_worker_does_behind_its_steps_is_its_own_part_of_them_and_not_that_of_those_who_wait(job: Job) -> None:
    job.start("a", "b", PAUSE_MS="2")
    job.start("slow", PAUSE_MS="100")
    job.switch("a", "b", "slow")
    busy_s = lambda: {name: standing.busy_s for name, standing in job.standings.items()}  # noqa: E731
    until(lambda: busy_s()["slow"] > 0.1 > 2 * max(busy_s()["a"], busy_s()["b"]) > 0, lambda: f"{busy_s()}")


def test_who_joins_in_the_last_step_gets_the_state_of_the_end_from_all_that_hold_it(job: Job) -> None:
    """One gives late, and the others do not go before."""
    (job.folder / "stop").write_text("40")
    job.start("a", HOLD="39")
    job.start("b", HOLD="39", LATE="1")
    job.switch("a", "b")
    until(lambda: all({"ahead": 0} in job[name].lines for name in ("a", "b")), job.problems)
    job.start("c")
    job.publish("a", "b", "c")
    until(lambda: all({"ahead": 1} in job[name].lines for name in ("a", "b")), job.problems)
    (job.folder / "go").touch()
    assert [job[name].ended() for name in ("a", "b", "c")] == [0, 0, 0]
    assert len({digest_at_end(job, name) for name in ("a", "b", "c")}) == 1
    assert steps_of(job, "c") == []


def test_a_newcomer_without_memory_for_the_state_leaves_the_others_at_once(job: Job) -> None:
    """Although it does not end."""
    job.start("a", "b")
    job.switch("a", "b")
    job.start("poor", POOR="1", LINGERS="600")
    version = job.publish("a", "b", "poor")
    problem = f"plan {version} came to nothing: DefaultCPUAllocator: can't allocate memory"
    until(lambda: (job.standings["poor"].state, job.standings["poor"].problem) == ("refused", problem), job.problems)
    before = job["a"].step
    until(lambda: job["a"].step > before + 5, job.problems)
    job.start("c")
    job.switch("a", "b", "c")


def test_a_rank_that_does_not_step_is_told_as_a_stall_by_those_that_wait(job: Job) -> None:
    """In a step, and before it joins, since members switch in steps."""
    job.start("a", STALL_S="1", TIMEOUT_S="3")
    job.start("b", HOLD="20")
    job.publish("a", "b")
    until(lambda: "for all ranks to call step(), in round 20" in job.standings["a"].problem, job.problems)
    assert "has waited for 1 s for all ranks to call step(), in round 20" in job["a"].err.read_text()
    assert not job.standings["a"].has_timed_out
    until(lambda: job.standings["a"].has_timed_out, job.problems)
    assert "has waited for 3 s for all ranks" in job.standings["a"].problem
    (job.folder / "go").touch()
    until(lambda: not job.standings["a"].problem, job.problems)
    assert not job.standings["a"].has_timed_out


def test_a_newcomer_tells_that_those_who_train_do_not_step(job: Job) -> None:
    job.start("a", HOLD="20")
    job.publish("a")
    until(lambda: job["a"].step == 19, job.problems)
    job.start("b", STALL_S="1")
    version = job.publish("a", "b")
    what = f"for the members of plan {version}, who switch to it in step()"
    until(lambda: what in job.standings["b"].problem, job.problems)
    assert (job.standings["a"].version, job.standings["a"].trains) == (version, version - 1)
    (job.folder / "go").touch()
    job.trains("b", version)


def test_a_worker_that_is_silent_is_given_up_for_a_newer_plan(job: Job) -> None:
    """No word of who is lost: the wait is ended because the new group stands while the old one does not move."""
    job.start("a", "b", "c")
    job.switch("a", "b", "c")
    job["b"].signal(signal.SIGSTOP)
    job.switch("a", "c")


def test_all_die_and_training_goes_on_from_the_checkpoint_of_the_first(job: Job) -> None:
    """A new attempt, with a plan that keeps nobody: its workers name a checkpoint."""
    job.start("a", "b", CHECKPOINT="20", SWARM_CHECKPOINT_DIR=str(job.folder))
    job.switch("a", "b", past=25)
    for name in ("a", "b"):
        job[name].signal(signal.SIGKILL)
        job[name].ended()
    job.start("c", "d", SWARM_RESUME_FROM=str(job.folder / "all"))
    job.switch("c", "d")
    before = {line["step"]: line["loss"] for line in steps_of(job, "a")}
    again = steps_of(job, "c")[0]
    assert (again["step"], again["loss"]) == (20, pytest.approx(before[20], rel=RELATIVE))


def test_another_global_batch_changes_the_learning_rate_by_its_rule_on_all_ranks(job: Job) -> None:
    job.env.update(LR_RULE="sqrt", PAUSE_MS="20")
    job.start("a", "b")
    job.switch("a", "b")
    job.set_batch(120)
    until(lambda: steps_of(job, "b")[-1]["batch"] == 120, job.problems)
    lines = steps_of(job, "b")
    at = next(index for index, line in enumerate(lines) if line["batch"] == 120)
    assert lines[at]["rate"] / lines[at - 1]["rate"] == pytest.approx(2.0, rel=1e-3)
    until(lambda: "global batch 30 -> 120" in job["a"].err.read_text(), job.problems)
    assert "learning rates x 2 (sqrt)" in job["a"].err.read_text()
    job.start("c")
    job.switch("a", "b", "c")
    newest = [steps_of(job, name)[-1] for name in ("a", "c")]
    assert newest[0]["batch"] == newest[1]["batch"] == 120
    assert newest[0]["rate"] == pytest.approx(newest[1]["rate"], rel=1e-3)
    assert newest[0]["noise"] is None or newest[0]["noise"] > 0


def test_a_batch_that_the_swarm_chose_outlives_the_rank_that_was_told_of_it(job: Job) -> None:
    """The one that comes first after it was told another one when it was started."""
    job.env.update(SWARM_GLOBAL_BATCH="60")
    job.start("a", "b")
    job.switch("a", "b")
    job.set_batch(120)
    until(lambda: steps_of(job, "b")[-1]["batch"] == 120, job.problems)
    job.start("c")
    job.switch("a", "c")
    job.switch("c", past=20)
    batches = [line["batch"] for line in steps_of(job, "c")]
    assert set(batches) == {120}


def test_a_group_that_is_closed_while_an_operation_begins_does_not_end_in_the_training_thread(
    tmp_path: Path, template: Template
) -> None:
    """Its end waits for the peers, of which one may hang."""
    script = """
import json, threading, time
from swarm_elastic._group import GlooGroup
ended = []
class Torch:
    def allreduce(self, tensors):
        begun.set()
        closed.wait()
    def __del__(self):
        ended.append(threading.current_thread().name)
begun, closed = threading.Event(), threading.Event()
group = object.__new__(GlooGroup)
group._closing, group._beginning, group._group = threading.Lock(), threading.Lock(), Torch()
group._listener, group._peers = ("127.0.0.1", 1), set()
def close():
    begun.wait()
    group.close()
    time.sleep(0.2)
    closed.set()
threading.Thread(target=close).start()
group.all_reduce(None)
while not ended:
    time.sleep(0.01)
print(json.dumps({"ended": ended}), flush=True)
"""
    with elastic_job(tmp_path, template, script) as job:
        job.start("a")
        assert job["a"].ended() == 0
        assert job["a"].lines == [{"ended": ["swarm-drop"]}]


def test_outside_of_a_swarm_it_trains_by_the_environment_of_torchrun(make_job) -> None:
    with make_job(SWARM_TASK_SOCKET="", SWARM_WORKER="", MASTER_ADDR="127.0.0.1", WORLD_SIZE="2", PAUSE_MS="0") as job:
        (job.folder / "stop").write_text("30")
        port = str(job.free_port())
        job.start("a", RANK="0", MASTER_PORT=port)
        job.start("b", RANK="1", MASTER_PORT=port)
        assert (job["a"].ended(), job["b"].ended()) == (0, 0)
        found = losses(job)
        worlds = {line["world"] for line in steps_of(job, "a")}
    assert worlds == {2}
    assert [max(found[step]) for step in range(30)] == pytest.approx(unscaled(make_job, 30), rel=RELATIVE)


def test_a_dead_rank_outside_of_a_swarm_ends_the_others(make_job) -> None:
    with make_job(SWARM_TASK_SOCKET="", SWARM_WORKER="", MASTER_ADDR="127.0.0.1", WORLD_SIZE="2") as job:
        port = str(job.free_port())
        job.start("a", RANK="0", MASTER_PORT=port)
        job.start("b", RANK="1", MASTER_PORT=port)
        until(lambda: job["a"].step > 3, job.problems)
        job["b"].signal(signal.SIGKILL)
        assert job["a"].ended() == 1
        assert "a rank was lost, and outside of a swarm the others cannot go on" in job["a"].err.read_text()


TWICE = """
import json, os, torch, swarm_elastic
def train(batch, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = swarm_elastic.Elastic(model, optimizer, global_batch=batch)
    for x, in training.batches(torch.utils.data.TensorDataset(torch.ones(12, 4))):
        loss = model(x).mean()
        loss.backward()
        training.step(loss)
    print(json.dumps([training.world_size, training.step_number]), flush=True)
model = torch.nn.Linear(4, 2)
train(6, model)
train(2, model)
train(3, torch.nn.Linear(4, 2))
"""


def test_outside_of_a_swarm_trainings_may_follow_one_another_in_a_process(tmp_path: Path, template: Template) -> None:
    world = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "MASTER_PORT": str(Job.free_port())}
    with elastic_job(tmp_path, template, TWICE, SWARM_TASK_SOCKET="", SWARM_WORKER="", **world) as job:
        job.start("a", RANK="0")
        job.start("b", RANK="1")
        assert (job["a"].ended(), job["b"].ended()) == (0, 0)
        assert [job[name].lines for name in "ab"] == [[[2, 2], [2, 6], [2, 4]]] * 2


def test_in_a_swarm_a_second_training_of_a_process_is_refused(tmp_path: Path, template: Template) -> None:
    with elastic_job(tmp_path, template, TWICE) as job:
        job.start("a")
        job.publish("a")
        assert job["a"].ended() == 1
        problem = "worker a of this job has an Elastic already, and can train with one only; put all that is trained"
        assert problem in job["a"].err.read_text()
        assert job.standings["a"].trains == 1


def test_alone_it_trains_without_any_group(make_job) -> None:
    with make_job(SWARM_TASK_SOCKET="", SWARM_WORKER="", PAUSE_MS="0") as job:
        (job.folder / "stop").write_text("20")
        job.start("a")
        assert job["a"].ended() == 0
        assert [line["world"] for line in steps_of(job, "a")] == [1] * 20


def test_the_template_answers_nonsense_and_tells_how_workers_ended(template: Template, tmp_path: Path) -> None:
    count = len(template.errors)
    for line in ("{", "[]", '{"script": 3}'):
        template.send(line)
    until(lambda: len(template.errors) == count + 3, lambda: template.errors)
    assert "script must be a str, not 3" in template.errors[-1]
    script = tmp_path / "ends.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.environ['MARK'], os.getcwd())\nsys.exit(5)\n")
    out = tmp_path / "out"
    request = {"script": str(script), "argv": ["x"], "env": {"MARK": "m"}, "cwd": str(tmp_path)}
    pid = template.start(**request, out=str(out), err=str(tmp_path / "err"))
    until(lambda: pid in template.codes, (tmp_path / "err").read_text)
    assert (template.codes[pid], out.read_text()) == (5, f"['x'] m {tmp_path}\n")
