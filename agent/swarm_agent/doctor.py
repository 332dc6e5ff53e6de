"""What an agent can find out about its own machine and its neighbours' mistakes, each with a remedy.

These are hints for people; what decides whether work may come is `swarm_agent.readiness`.
"""

import resource
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm_agent.agent import Agent
from swarm_agent.config import AgentConfig, ephemeral_ports
from swarm_agent.eventlog import LoggedEvent
from swarm_agent.faults import Faults
from swarm_agent.staging.requirements import default_python
from swarm_agent.task.account import Account, find_account, may_reach
from swarm_agent.task.interfaces import HOSTS, loopback_of
from swarm_agent.transport.udp import RECEIVE_BUFFER_BYTES

DESCRIPTORS_WANTED = 4_096
FREE_BYTES_WANTED = 2**30
SLOW_COMMIT_S = 0.05
LAG_WORTH_A_WORD_S = 1.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`status` is ok, warning or failed."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def examine(agent: Agent) -> tuple[Diagnosis, ...]:
    """All checks; none takes longer than a few system calls."""
    return (
        _descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        _space(agent.config.data_dir),
        _work(agent),
        _commits(agent.driver.barrier.commit_elapsed_s),
        _receive_buffer(agent.udp.receive_buffer_bytes),
        _rendezvous(agent.config),
        _host_name(socket.gethostname(), agent.config),
        _strangers(agent.udp.drops.counters + agent.channel.drops.counters),
        _lag(agent.driver.lag_s_max),
        _core(agent.faults),
        _python(find_account(agent.config.job_user), [Path(sys.executable), Path(default_python())]),
        _limits(agent.tasks.limits.complaint, is_witness=agent.config.witness),
        _setting([event for event in agent.events.since() if event.kind in ("setting.refused", "setting.changed")]),
        _refused([event.text for event in agent.events.since() if event.kind == "member.refused"]),
    )


def _judged(name: str, detail: str, remedy: str, *, is_ok: bool) -> Diagnosis:
    return Diagnosis(name, "ok", detail) if is_ok else Diagnosis(name, "warning", detail, remedy)


def _refused(told: Sequence[str]) -> Diagnosis:
    remedy = "correct the clock of that node, move its agent.db aside and start its agent again"
    detail = told[-1] if told else "the claims of all members are believed"
    return _judged("refused_members", detail, remedy, is_ok=not told)


def _setting(told: Sequence[LoggedEvent]) -> Diagnosis:
    is_refused = bool(told) and told[-1].kind == "setting.refused"
    detail = f"the newest is of no use here: {told[-1].text}" if is_refused else "the newest that was heard is in force"
    remedy = "install the package that has the policy here as well, and start this agent again"
    return _judged("setting", detail, remedy, is_ok=not is_refused)


def _work(agent: Agent) -> Diagnosis:
    ledger = agent.node.ledger
    remedy = "its own fault: see its log; it is offered again when a wait is over or its disk has room"
    if ledger.is_draining:
        remedy = f"swarm drain {agent.config.name} --off, once it is done"
    return _judged("work", agent.work_sentence, remedy, is_ok=not (ledger.is_draining or ledger.avoided_reason))


def _python(account: Account, programs: Sequence[Path]) -> Diagnosis:
    """What lies below root's home, as many a Python of pyenv or uv does, is closed to the account of jobs."""
    places = dict.fromkeys(place for each in programs for place in (each, each.resolve()))
    closed = [str(place) for place in places if account.uid >= 0 and not may_reach(place, account)]
    what = "so `swarm` inside tasks and --requirements fail" if closed else "and so `swarm` inside tasks works"
    detail = f"{account.name} {'cannot' if closed else 'can'} execute {', '.join(closed) or programs[0]}, {what}"
    remedy = "install the agent with a Python that every account may execute, below /usr or /opt, or open its folders"
    return _judged("job_python", detail, remedy, is_ok=not closed)


def _limits(complaint: str, *, is_witness: bool) -> Diagnosis:
    if is_witness or not complaint:
        detail = "a witness runs no jobs" if is_witness else "jobs are held to what they booked"
        return Diagnosis("limits", "ok", detail)
    remedy = "needs an agent that runs as root under systemd, with control groups v2, and limit_tasks"
    return Diagnosis("limits", "warning", f"what jobs ask for is booked and not enforced: {complaint}", remedy)


def _descriptors(limit: int) -> Diagnosis:
    remedy = f"set LimitNOFILE={DESCRIPTORS_WANTED} in the service unit"
    return _judged("open_files", f"at most {limit} open files", remedy, is_ok=limit >= DESCRIPTORS_WANTED)


def _space(data_dir: Path) -> Diagnosis:
    free_bytes = shutil.disk_usage(data_dir).free
    detail = f"{free_bytes / 2**30:.1f} GiB free below {data_dir}"
    remedy = "free space, or lower the cache limits of the configuration"
    return _judged("disk_space", detail, remedy, is_ok=free_bytes >= FREE_BYTES_WANTED)


def _commits(elapsed_s: float) -> Diagnosis:
    detail = f"the last durable write took {elapsed_s * 1e3:.1f} ms"
    remedy = "put data_dir on a faster disk; every submit waits for it"
    return _judged("disk_speed", detail, remedy, is_ok=elapsed_s < SLOW_COMMIT_S)


def _receive_buffer(granted_bytes: int) -> Diagnosis:
    detail = f"the gossip socket buffers {granted_bytes} bytes"
    remedy = f"run: sysctl -w net.core.rmem_max={RECEIVE_BUFFER_BYTES}; small ones lose bursts in large swarms"
    return _judged("receive_buffer", detail, remedy, is_ok=granted_bytes >= RECEIVE_BUFFER_BYTES)


def _rendezvous(config: AgentConfig) -> Diagnosis:
    (first, last), (low, high) = config.rendezvous_range, ephemeral_ports()
    detail = f"ports {first}-{last} for rank 0 of jobs"
    if last < low or first > high:
        return Diagnosis("rendezvous_ports", "ok", detail)
    remedy = "free a range: sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
    return Diagnosis("rendezvous_ports", "warning", f"{detail} overlap the ephemeral ports {low}-{high}", remedy)


def _host_name(name: str, config: AgentConfig) -> Diagnosis:
    """Programs that look up their own name would tell others to connect to themselves."""
    loopback = "" if config.witness else loopback_of(name)
    detail = f"{name} is {loopback} in {HOSTS}" if loopback else f"{HOSTS} does not call {name} loopback"
    told = "jobs of several nodes are told their interface, other programs are not"
    remedy = f"write the node's address there, {config.fabric_host} {name}; {told}"
    return _judged("host_name", detail, remedy, is_ok=not loopback)


def _strangers(drops: Counter[str]) -> Diagnosis:
    """Malformed packets come from anywhere; a wrong key or version is a neighbour that somebody wants to join."""
    told = {reason: count for reason, count in sorted(drops.items()) if reason in ("wrong_key", "foreign_version")}
    refused = "refused messages: " + ", ".join(f"{count} {reason}" for reason, count in told.items())
    detail = refused if told else "nobody knocked with a wrong key or version"
    remedy = "the log names their addresses; give them this swarm's key and label"
    return _judged("strangers", detail, remedy, is_ok=not told)


def _lag(lag_s: float) -> Diagnosis:
    detail = f"the event loop was late by {lag_s:.2f} s at most"
    remedy = "the machine is overloaded or was suspended; leave the agent a core"
    return _judged("event_loop", detail, remedy, is_ok=lag_s < LAG_WORTH_A_WORD_S)


def _core(faults: Faults) -> Diagnosis:
    steps, effects = faults.counts["steps"], faults.counts["effects"]
    if not steps and not effects:
        return Diagnosis("core", "ok", "its core has not failed")
    detail = f"its core failed {steps} times and started again from the disk, {effects} effects were left out"
    last = f"; last: {faults.last[:200]}" if faults.last else ""
    return Diagnosis("core", "failed", detail + last, "this is a bug: its log has the traceback, please report it")
