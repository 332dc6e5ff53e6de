import random

from swarmsched.api import JobSpec
from swarmsched.effects import (
    BindRendezvous,
    ExtendAttempt,
    ForgetTask,
    PublishWorld,
    ReleaseRendezvous,
    SignalTask,
    StageTask,
    StartTask,
    StopTask,
)
from swarmsched.events import (
    RankExited,
    RendezvousBound,
    TaskExited,
    TaskPhaseChanged,
    TaskStaged,
    TaskStarted,
    WorkerTold,
)
from swarmsched.ids import NodeId, make_job_id
from swarmsched.resources import Gpu, Share
from swarmsched.simulator.loop import EventLoop
from swarmsched.simulator.tasks import BUILD_S, FOR_EVER_S, ElasticAttempts, RankPlan, TaskModel, read_command
from swarmsched.task import RankExit, TaskFailure, TaskOrder, TaskStage
from swarmsched.world import WorkerState, WorldMember, WorldPlan

JOB = make_job_id(0.0, random.Random(1))
HERE, THERE = NodeId("here"), NodeId("there")
GPUS = (Gpu("u0", 0, "H100", 1), Gpu("u1", 1, "H100", 1))


def make_order(*command: str, **spec) -> TaskOrder:
    shares = (Share(THERE, 1), Share(HERE, 2))
    return TaskOrder(JOB, 1, 3, HERE, JobSpec(command=command, ranks=3, **spec), shares, "10.0.0.1", 29_500)


class Machine:
    def __init__(self, behaviour=read_command) -> None:
        self.loop = EventLoop()
        self.told = []
        self.tasks = TaskModel(self.loop, "10.0.0.2", self.told.append, behaviour)

    def after(self, duration_s: float, *effects) -> list:
        for effect in effects:
            self.tasks.perform(effect)
        self.loop.run_for(duration_s)
        told, self.told[:] = list(self.told), []
        return told


def test_a_task_starts_its_ranks_runs_and_exits():
    machine = Machine()
    (started,) = machine.after(1.0, StartTask(make_order("sleep", "5"), GPUS))
    assert isinstance(started, TaskStarted)
    assert [task.gpus for task in machine.tasks.running] == [("u0", "u1")]
    exits = (RankExit(1, 0), RankExit(2, 0))
    assert machine.after(5.0) == [
        RankExited(JOB, 3, exits[0]),
        RankExited(JOB, 3, exits[1]),
        TaskExited(JOB, 3, exits),
    ]
    assert machine.tasks.running == ()


def test_commands_say_how_ranks_end():
    order = make_order("true")
    assert read_command(order, 0) == RankPlan(0.0)
    assert read_command(make_order("false"), 0).exit_code == 1
    assert read_command(make_order("exit", "3"), 0).exit_code == 3
    assert read_command(make_order("nonsense"), 0).exit_code == 127


def test_per_node_starts_one_process():
    machine = Machine()
    told = machine.after(1.0, StartTask(make_order("true", per_node=True), GPUS))
    assert told[-1] == TaskExited(JOB, 3, (RankExit(1, 0),))


def test_stop_terminates_ranks_and_repeating_it_does_not_put_the_kill_off():
    machine = Machine(lambda order, rank: RankPlan(100.0, obeys_sigterm=rank == 1))
    machine.after(1.0, StartTask(make_order("x"), GPUS))
    assert machine.after(1.0, StopTask(JOB, 3, 5.0)) == [RankExited(JOB, 3, RankExit(1, 0, 15))]
    told = machine.after(4.1, StopTask(JOB, 3, 5.0))
    assert told == [RankExited(JOB, 3, RankExit(2, 0, 9)), TaskExited(JOB, 3, (RankExit(1, 0, 15), RankExit(2, 0, 9)))]


def test_a_shorter_grace_shortens_the_wait():
    machine = Machine(lambda order, rank: RankPlan(100.0, obeys_sigterm=False))
    machine.after(1.0, StartTask(make_order("x"), GPUS), StopTask(JOB, 3, 50.0))
    assert isinstance(machine.after(1.1, StopTask(JOB, 3, 1.0))[-1], TaskExited)


def test_stopping_what_does_not_run_ends_at_once():
    machine = Machine()
    assert machine.after(0.0, StopTask(JOB, 3, 5.0)) == [TaskExited(JOB, 3, ())]
    machine.after(0.01, StageTask(make_order("true")))
    assert machine.after(1.0, StopTask(JOB, 3, 5.0)) == [TaskExited(JOB, 3, ())]


def test_staging_tells_its_phases():
    machine = Machine()
    order = make_order("true", tree="0" * 64, requirements="1" * 64)
    assert machine.after(1.0, StageTask(order)) == [
        TaskPhaseChanged(JOB, 3, "sync"),
        TaskPhaseChanged(JOB, 3, "environment"),
        TaskStaged(JOB, 3),
    ]


def test_a_port_is_bound_until_it_is_released_or_the_task_starts():
    machine = Machine()
    (bound,) = machine.after(0.1, BindRendezvous(JOB, 3))
    assert isinstance(bound, RendezvousBound)
    assert machine.after(0.1, BindRendezvous(JOB, 3)) == [bound]
    machine.after(0.0, ReleaseRendezvous(JOB, 3))
    assert machine.tasks.bound_ports == 0
    machine.after(0.1, BindRendezvous(JOB, 3))
    machine.after(0.0, StartTask(make_order("true"), GPUS))
    assert machine.tasks.bound_ports == 0


def test_tasks_outlive_the_agent_and_are_found_again():
    machine = Machine()
    machine.after(1.0, StartTask(make_order("sleep", "5"), GPUS), BindRendezvous(JOB, 4))
    machine.tasks.agent_died()
    assert machine.tasks.bound_ports == 0
    assert [found.status.stage for found in machine.tasks.found()] == [TaskStage.STARTED]
    machine.after(5.0)
    (status,) = (found.status for found in machine.tasks.found())
    assert (status.stage, status.exits) == (TaskStage.EXITED, (RankExit(1, 0), RankExit(2, 0)))
    machine.after(0.0, ForgetTask(JOB, 3))
    assert machine.tasks.found() == ()


def test_a_signal_other_than_a_deadly_one_changes_nothing():
    machine = Machine()
    machine.after(1.0, StartTask(make_order("sleep", "5"), GPUS))
    assert machine.after(1.0, SignalTask(JOB, 3, 10)) == []
    assert isinstance(machine.after(1.0, SignalTask(JOB, 3, 9))[-1], TaskExited)


def test_after_healing_no_rank_has_long_to_run_whether_it_runs_stands_still_or_starts_later():
    machine = Machine()
    machine.after(1.0, StartTask(make_order("sleep", "50"), GPUS, until_s=10.0))
    machine.tasks.hurry(3.0)
    assert machine.after(3.0)[-1] == TaskExited(JOB, 3, (RankExit(1, 0), RankExit(2, 0)))
    machine.after(0.0, ForgetTask(JOB, 3))
    assert machine.after(3.1, StartTask(make_order("sleep", "50"), GPUS))[-1].exits
    frozen = Machine()
    frozen.after(20.0, StartTask(make_order("sleep", "50"), GPUS, until_s=10.0))
    frozen.tasks.hurry(3.0)
    assert frozen.after(20.0) == []
    assert frozen.after(3.1, ExtendAttempt(JOB, 3, 99.0))[-1].exits


def test_what_only_a_stop_ends_is_not_hurried():
    machine = Machine(lambda order, rank: RankPlan(FOR_EVER_S))
    machine.after(1.0, StartTask(make_order("sleep"), GPUS))
    machine.tasks.hurry(3.0)
    machine.after(10.0)
    assert machine.tasks.running


def test_a_rank_may_outlive_sigkill():
    machine = Machine(lambda order, rank: RankPlan(FOR_EVER_S, obeys_sigterm=False, outlives_kill_s=4.0))
    machine.after(1.0, StartTask(make_order("sleep"), GPUS))
    assert machine.after(3.9, StopTask(JOB, 3, 0.0)) == []
    assert machine.after(0.2)[-1] == TaskExited(JOB, 3, (RankExit(1, 0, 9), RankExit(2, 0, 9)))


def test_a_power_cut_may_take_the_files_of_young_tasks_with_it():
    for age_s, is_found in ((10.0, False), (40.0, True)):
        machine = Machine()
        machine.after(age_s, StartTask(make_order("sleep", "99"), GPUS))
        machine.tasks.power_cut(loses_files=True)
        assert machine.tasks.running == ()
        assert bool(machine.tasks.found()) == is_found


class Gang:
    """Two parts of an elastic gang on one machine, a third on another; `told` is each worker's last word."""

    def __init__(self, **plan) -> None:
        self.loop, attempts, self.told, self.exits = EventLoop(), ElasticAttempts(), {}, {}
        shares = (Share(HERE, 1, part=1), Share(HERE, 1, part=2), Share(THERE, 1, part=3))
        self.models = {
            name: TaskModel(self.loop, name, self.hear, lambda order, rank: RankPlan(100.0, **plan), attempts=attempts)
            for name in (HERE, THERE)
        }
        self.orders = {}
        for share in shares:
            spec = JobSpec(command=("x",), ranks=3, elastic=True)
            order = TaskOrder(JOB, 1, 3, share.node, spec, shares, "10.0.0.1", 29_500, part=share.part)
            self.orders[share.part] = order
            self.models[share.node].perform(StartTask(order, ()))
        self.loop.run_for(1.0)

    def hear(self, event) -> None:
        if isinstance(event, WorkerTold):
            self.told[event.part] = event.worker
        elif isinstance(event, TaskExited):
            self.exits[event.part] = (event.exits, event.failure)

    def publish(self, version: int, *parts: int, may_start=False) -> None:
        plan = WorldPlan(version, 1, tuple(WorldMember(part, f"10.0.0.{part}:7") for part in parts), (), may_start)
        for part, order in self.orders.items():
            self.models[order.node].perform(PublishWorld(JOB, 3, plan, part=part))
        self.loop.run_for(1.0)

    @property
    def trains(self) -> list[int]:
        return [self.told[part].trains for part in self.orders]

    @property
    def failed(self) -> list[int]:
        return [self.told[part].failed for part in self.orders]

    def task(self, part: int):
        running = self.models[self.orders[part].node].running
        return next(task for task in running if task.order.part == part)


def test_members_that_lose_one_another_say_so_and_stand_until_the_next_world():
    gang = Gang()
    gang.publish(1, 1, 2, 3, may_start=True)
    gang.models[THERE].lose_connections(gang.orders[1].key.of_attempt, in_switch=False)
    gang.loop.run_for(200.0)
    assert (gang.trains, gang.failed, gang.exits) == ([1, 1, 1], [1, 1, 1], {}), "they would have ended long ago"
    gang.publish(2, 1, 2, 3)
    assert (gang.trains, [worker.problem for worker in gang.told.values()]) == ([2, 2, 2], ["", "", ""])
    gang.loop.run_for(200.0)
    assert sorted(gang.exits) == [1, 2, 3]


def test_a_switch_that_succeeds_on_one_part_came_to_nothing_for_all():
    gang = Gang()
    gang.publish(1, 1, 2, 3, may_start=True)
    gang.models[HERE].lose_connections(gang.orders[1].key.of_attempt, in_switch=True)
    gang.publish(2, 1, 2, 3)
    assert (sorted(gang.trains), gang.failed) == ([1, 1, 2], [2, 2, 2])
    gang.publish(3, 1, 2, 3)
    assert gang.trains == [3, 3, 3]


def test_whoever_dies_costs_the_others_their_world_and_a_world_with_it_is_never_built():
    gang = Gang()
    gang.publish(1, 1, 2, 3, may_start=True)
    gang.models[THERE].strike(gang.task(3))
    gang.loop.run_for(0.1)
    assert gang.failed[:2] == [1, 1]
    gang.publish(2, 1, 2, 3)
    assert gang.trains[:2] == [1, 1]
    gang.loop.run_for(BUILD_S)
    assert gang.failed[:2] == [2, 2]
    gang.publish(3, 1, 2)
    assert gang.trains[:2] == [3, 3]


def test_the_death_of_a_shim_is_told_as_a_loss_and_costs_no_other_task():
    gang = Gang()
    gang.publish(1, 1, 2, 3, may_start=True)
    gang.models[HERE].kill_shim(gang.task(2))
    gang.loop.run_for(1.0)
    assert gang.exits == {2: ((), TaskFailure.LOST)}
    assert [task.order.part for task in gang.models[HERE].running] == [1]


def test_a_worker_that_hears_late_of_a_world_never_does_when_its_agent_dies_meanwhile():
    gang = Gang(hears_s=1.5)
    gang.publish(1, 1, 2, 3, may_start=True)
    gang.models[HERE].agent_died()
    gang.loop.run_for(5.0)
    assert [gang.told[part].heard for part in (1, 2, 3)] == [0, 0, 1]
    gang.publish(1, 1, 2, 3, may_start=True)
    gang.loop.run_for(2.0)
    assert gang.trains == [1, 1, 1]


def test_a_worker_that_stays_has_left_and_ends_when_it_is_stopped():
    gang = Gang(stays=True)
    gang.publish(1, 1, 2, 3, may_start=True)
    gang.publish(2, 1, 2)
    gang.loop.run_for(60.0)
    assert (gang.told[3].state, gang.exits) == (WorkerState.LEFT, {})
    gang.models[THERE].perform(StopTask(JOB, 3, 5.0, part=3))
    gang.loop.run_for(1.0)
    assert gang.exits == {3: ((RankExit(2, 0, 15),), TaskFailure.NONE)}
