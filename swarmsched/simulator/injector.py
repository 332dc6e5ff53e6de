"""Carrying out a plan of faults on a simulated swarm, and mending everything at its end."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from swarmsched.ids import NodeId
from swarmsched.resources import GpuHealth, NodeResources
from swarmsched.simulator.fault import Fault, FaultPlan
from swarmsched.simulator.host import PLAN_S, Host
from swarmsched.simulator.network import NetworkFaults
from swarmsched.simulator.swarm import SimulatedSwarm
from swarmsched.simulator.tasks import RunningTask, TaskModel
from swarmsched.task import TaskFailure

RESTART_GAP_S = 0.05
LOOP_TURN_S = 0.01  # a slow loop runs so long between two stalls


class Injector:
    """Puts each fault into the loop; a fault that finds its machine in no state for it does nothing."""

    def __init__(self, swarm: SimulatedSwarm) -> None:
        self._swarm = swarm
        self._calm = swarm.network.faults
        self._weather: list[Fault] = []  # network-wide faults that last
        self._namesakes: dict[NodeId, Host] = {}
        self._whole: dict[NodeId, NodeResources] = {}  # what machines with a GPU in trouble have
        self.applied: list[Fault] = []
        self.is_over = False

    def schedule(self, plan: FaultPlan) -> None:
        """All of them will happen at their times."""
        for fault in plan:
            self._swarm.loop.post_at(fault.at_s, self._apply, fault)

    def heal(self) -> None:
        """Mend everything that can be mended: what remains to be scheduled does nothing, lost machines stay lost."""
        self.is_over = True
        swarm = self._swarm
        swarm.network.set_faults(self._calm)
        swarm.network.heal()
        swarm.heal_sends()
        for node in list(self._namesakes):
            self._give_back(node)
        for host in swarm.hosts.values():
            host.storage.heal()
            self._mend_planner(host)
            self._mend_gpu(host)
            self._mend_starts(host)
            host.set_clock_rate(1.0)
            host.go_on()
            host.bring_up()

    def _apply(self, fault: Fault) -> None:
        if not self.is_over:
            self.applied.append(fault)
            APPLY[fault.kind](self, fault)

    def _host(self, fault: Fault) -> Host:
        return self._swarm.hosts[fault.parameters["node"]]

    def _later(self, fault: Fault, undo: Callable[..., None], *arguments: object) -> None:
        self._swarm.loop.post_later(fault.parameters["duration_s"], self._unless_over, undo, *arguments)

    def _unless_over(self, undo: Callable[..., None], *arguments: object) -> None:
        if not self.is_over:
            undo(*arguments)

    # --- the network

    def change_weather(self, fault: Fault) -> None:
        """One more network-wide fault."""
        self._weather.append(fault)
        self._set_weather()
        self._later(fault, self._clear_weather, fault)

    def _clear_weather(self, fault: Fault) -> None:
        self._weather.remove(fault)
        self._set_weather()

    def _set_weather(self) -> None:
        faults = self._calm
        for fault in self._weather:
            faults = _worsened(faults, fault)
        self._swarm.network.set_faults(faults)

    def clog(self, fault: Fault) -> None:
        """One direction of one link."""
        where = fault.parameters
        until_s = self._swarm.loop.now_s + where["duration_s"]
        self._swarm.network.clog(where["source"], where["destination"], until_s)

    def cut(self, fault: Fault) -> None:
        """Both directions for a `side`, one for those who are `deaf`."""
        parameters = fault.parameters
        part: list[NodeId] = parameters.get("side", parameters.get("deaf"))
        others = [node for node in self._swarm.hosts if node not in part]
        links = [(other, one) for one in part for other in others]
        if "side" in parameters:
            links += [(one, other) for other, one in links]
        for link in links:
            self._swarm.network.cut(*link)
        self._later(fault, self._mend, links)

    def _mend(self, links: list[tuple[NodeId, NodeId]]) -> None:
        for link in links:
            self._swarm.network.mend(*link)

    def refuse(self, fault: Fault) -> None:
        """EPERM."""
        for other in fault.parameters["to"]:
            self._swarm.refuse_sends(fault.parameters["node"], other)
        self._later(fault, self._allow, fault)

    def _allow(self, fault: Fault) -> None:
        for other in fault.parameters["to"]:
            self._swarm.allow_sends(fault.parameters["node"], other)

    # --- machines

    def crash(self, fault: Fault) -> None:
        """The agent only."""
        host = self._host(fault)
        if host.is_up:
            host.crash()
            self._later(fault, host.bring_up)

    def restart(self, fault: Fault) -> None:
        """Down and up in the same moment, several times."""
        for number in range(fault.parameters["times"]):
            self._swarm.loop.post_later(number * RESTART_GAP_S, self._restart, self._host(fault))

    def _restart(self, host: Host) -> None:
        if host.is_up and not self.is_over:
            host.crash()
            host.start()

    def cut_power(self, fault: Fault) -> None:
        """The whole machine."""
        host = self._host(fault)
        host.cut_power()
        self._later(fault, host.bring_up)

    def lose(self, fault: Fault) -> None:
        """The whole machine, for ever."""
        host = self._host(fault)
        host.cut_power()
        host.is_lost = True

    def lose_holders(self, fault: Fault) -> None:
        """Holders that owners were told of when they were ordered to run a job; whoever has ranks of it is restarted.

        Of the jobs with the fewest ranks at their holders the one that runs longest.
        """
        running = [task for host in self._swarm.hosts.values() for task in host.tasks.running]
        if not running:
            return
        order = min(running, key=_ranks_at_holders_and_end).order
        owners = [self._swarm.hosts[share.node] for share in order.shares]
        holders = [self._swarm.hosts[holder.node] for holder in order.configuration.holders]
        lost = [host for host in holders if host not in owners]
        for number, host in enumerate(lost):
            self._swarm.loop.post_later(number * fault.parameters["gap_s"], self._unless_over, self._lose_agent, host)
        for number, host in enumerate(owners, start=len(lost)):
            self._swarm.loop.post_later(number * fault.parameters["gap_s"], self._restart, host)

    def _lose_agent(self, host: Host) -> None:
        if host.is_up:
            host.crash()

    def wipe(self, fault: Fault) -> None:
        """A new disk."""
        host = self._host(fault)
        host.wipe()
        self._later(fault, host.bring_up)

    def lose_files(self, fault: Fault) -> None:
        """A power cut that takes what was not synced."""
        host = self._host(fault)
        host.cut_power(loses_files=True)
        self._later(fault, host.bring_up)

    def lose_database(self, fault: Fault) -> None:
        """Only the agent's memory and disk."""
        host = self._host(fault)
        host.lose_database()
        self._later(fault, host.bring_up)

    def slow_planner(self, fault: Fault) -> None:
        """A planner's answers come late, or say that there is none."""
        host = self._host(fault)
        host.slow_planner(fault.parameters["plan_s"], fails=fault.parameters["fails"])
        self._later(fault, self._mend_planner, host)

    def _mend_planner(self, host: Host) -> None:
        host.slow_planner(PLAN_S, fails=False)

    def trouble_gpu(self, fault: Fault) -> None:
        """Of the machine's first GPU, if it has any."""
        host = self._host(fault)
        whole = self._whole.setdefault(host.node_id, host.resources)
        health = fault.parameters["health"]
        first = (
            () if health == "lost" else tuple(structs.replace(gpu, health=GpuHealth(health)) for gpu in whole.gpus[:1])
        )
        host.has(structs.replace(whole, gpus=(*first, *whole.gpus[1:])))
        self._later(fault, self._mend_gpu, host)

    def _mend_gpu(self, host: Host) -> None:
        host.has(self._whole.get(host.node_id, host.resources))

    def share_name(self, fault: Fault) -> None:
        """Somebody installs a machine under a name that is taken."""
        node = fault.parameters["node"]
        if node not in self._namesakes:
            self._namesakes[node] = self._swarm.add_namesake(node)
            self._namesakes[node].start()
            self._later(fault, self._give_back, node)

    def _give_back(self, node: NodeId) -> None:
        """And notices: it is switched off for ever, and the agent of the one that keeps the name is started again."""
        self._namesakes.pop(node).cut_power()
        host = self._swarm.hosts[node]
        if host.is_up:
            host.crash()
            host.start()

    def lose_connections(self, fault: Fault) -> None:
        """Between workers; agents hear one another."""
        attempts = [task.key.of_attempt for task in self._trainers()]
        if attempts:
            attempt = attempts[fault.parameters["which"] % len(attempts)]
            self._any_model.lose_connections(attempt, in_switch=fault.parameters["in_switch"])

    def kill_workers(self, fault: Fault) -> None:
        """SIGKILL, by people or by what they have installed."""
        attempts = [task.key.of_attempt for task in self._trainers()]
        if attempts:
            self._any_model.kill_workers(attempts[fault.parameters["which"] % len(attempts)])

    def _trainers(self) -> list[RunningTask]:
        running = [task for host in self._swarm.hosts.values() for task in host.tasks.running]
        return [task for task in running if task.worker.trains]

    @property
    def _any_model(self) -> TaskModel:
        return next(iter(self._swarm.hosts.values())).tasks

    def kill_shim(self, fault: Fault) -> None:
        """Of a task that is not alone, if there is one."""
        running = [(host, task) for host in self._swarm.hosts.values() for task in host.tasks.running]
        attempts = Counter((host.node_id, task.key.of_attempt) for host, task in running)
        crowded = [(host, task) for host, task in running if attempts[host.node_id, task.key.of_attempt] > 1]
        chosen = crowded or running
        if chosen:
            host, task = chosen[fault.parameters["which"] % len(chosen)]
            host.tasks.kill_shim(task)

    def pause(self, fault: Fault) -> None:
        """SIGSTOP."""
        host = self._host(fault)
        host.pause()
        self._later(fault, host.go_on)

    def slow_down(self, fault: Fault) -> None:
        """Stall after stall."""
        end_s = self._swarm.loop.now_s + fault.parameters["duration_s"]
        self._stall(self._host(fault), fault.parameters["lag_s"], end_s)

    def _stall(self, host: Host, lag_s: float, end_s: float) -> None:
        if self._swarm.loop.now_s < end_s and not self.is_over:
            host.pause()
            self._swarm.loop.post_later(lag_s, self._turn, host, lag_s, end_s)

    def _turn(self, host: Host, lag_s: float, end_s: float) -> None:
        if not self.is_over:
            host.go_on()
            self._swarm.loop.post_later(LOOP_TURN_S, self._stall, host, lag_s, end_s)

    def slow_disk(self, fault: Fault) -> None:
        """Until it is replaced."""
        storage = self._host(fault).storage
        storage.fsync_median_s = fault.parameters["fsync_median_s"]
        self._later(fault, storage.speed_up)

    def fill_disk(self, fault: Fault) -> None:
        """Nothing becomes durable."""
        storage, end_s = self._host(fault).storage, self._swarm.loop.now_s + fault.parameters["duration_s"]
        storage.full_until_s = max(storage.full_until_s, end_s)  # what waits for the longer one goes on waiting

    def fail_starts(self, fault: Fault) -> None:
        """Whatever is to start there fails so."""
        host = self._host(fault)
        host.tasks.fail_starts(TaskFailure(fault.parameters["how"]))
        self._later(fault, self._mend_starts, host)

    def shorten_disk(self, fault: Fault) -> None:
        """The machine's agent says that the disk is short, and what was under way fails."""
        host = self._host(fault)
        host.tasks.fail_starts(TaskFailure.UNREACHABLE)
        host.tell_shortage("disk nearly full")
        self._later(fault, self._mend_starts, host)

    def _mend_starts(self, host: Host) -> None:
        host.tasks.fail_starts(TaskFailure.NONE)
        host.tell_shortage("")

    def drift(self, fault: Fault) -> None:
        """The monotonic clock."""
        host = self._host(fault)
        host.set_clock_rate(fault.parameters["rate"])
        self._later(fault, host.set_clock_rate, 1.0)

    def jump(self, fault: Fault) -> None:
        """Wall clocks; they stay wrong."""
        for node in fault.parameters["nodes"]:
            self._swarm.hosts[node].clock.wall_error_s += fault.parameters["by_s"]


APPLY: dict[str, Callable[[Injector, Fault], None]] = {
    "loss": Injector.change_weather,
    "duplicate": Injector.change_weather,
    "replay": Injector.change_weather,
    "delay": Injector.change_weather,
    "clog": Injector.clog,
    "partition": Injector.cut,
    "one-way-partition": Injector.cut,
    "crash": Injector.crash,
    "restart": Injector.restart,
    "power-cut": Injector.cut_power,
    "lost-host": Injector.lose,
    "lost-holders": Injector.lose_holders,
    "wipe": Injector.wipe,
    "pause": Injector.pause,
    "slow-loop": Injector.slow_down,
    "slow-disk": Injector.slow_disk,
    "full-disk": Injector.fill_disk,
    "clock-drift": Injector.drift,
    "clock-jump": Injector.jump,
    "send-error": Injector.refuse,
    "slow-planner": Injector.slow_planner,
    "gpu-trouble": Injector.trouble_gpu,
    "failing-starts": Injector.fail_starts,
    "short-disk": Injector.shorten_disk,
    "lost-files": Injector.lose_files,
    "lost-database": Injector.lose_database,
    "same-name": Injector.share_name,
    "lost-connection": Injector.lose_connections,
    "killed-workers": Injector.kill_workers,
    "killed-shim": Injector.kill_shim,
}


def _ranks_at_holders_and_end(task: RunningTask) -> tuple[int, float]:
    holders = {holder.node for holder in task.order.configuration.holders}
    ends_s = max((end_s for end_s, _, _ in task.ends.values()), default=0.0)
    return sum([share.ranks for share in task.order.shares if share.node in holders]), -ends_s


def _worsened(faults: NetworkFaults, fault: Fault) -> NetworkFaults:
    parameters = fault.parameters
    match fault.kind:
        case "loss":
            return replace(faults, loss_ratio=max(faults.loss_ratio, parameters["ratio"]))
        case "duplicate":
            return replace(faults, duplicate_ratio=max(faults.duplicate_ratio, parameters["ratio"]))
        case "replay":
            return replace(faults, replay_ratio=max(faults.replay_ratio, parameters["ratio"]))
        case _:
            return replace(faults, delay_median_s=parameters["median_s"], delay_sigma=parameters["sigma"])
